// Readers of chunk memory outside the lock, and the chunks that wait for them: a chunk of an evicted episode stays in
// limbo, unwritten, until every reader that may hold it has left.
//
// All calls come under the replay's lock. A reader notes the epoch it enters in; an eviction during a read ends the
// epoch; a chunk in limbo is free once no reader of its epoch or before is left.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "store.hpp"

namespace ddrl::replay {

class Readers {
public:
    // A ticket to leave with.
    u64 enter() {
        inside_.push_back(epoch_);
        return epoch_;
    }
    // Gives back to the store what nobody can hold any more.
    void leave(u64 ticket, Store& store) {
        inside_.erase(std::find(inside_.begin(), inside_.end(), ticket));
        u64 oldest = epoch_ + 1;
        for (const u64 reader : inside_) oldest = std::min(oldest, reader);
        while (!limbo_.empty() && limbo_.front().epoch < oldest)
            store.give_back(limbo_.front().chunk), limbo_.pop_front();
        left_.notify_all();
    }
    bool none() const { return inside_.empty(); }
    bool chunks_waiting() const { return !limbo_.empty(); }

    // Removes an episode; its chunks go back at once, or into limbo.
    void remove(u32 episode, Store& store) {
        if (none()) return store.remove(episode, [&](u32 chunk) { store.give_back(chunk); });
        store.remove(episode, [&](u32 chunk) { limbo_.push_back({chunk, epoch_}); });
        ++epoch_;
    }
    // Lets go of `mutex`, which the caller holds, until a leaving reader made `ready` true.
    template <class Ready>
    void wait(std::mutex& mutex, Ready ready) {
        std::unique_lock lock(mutex, std::adopt_lock);
        left_.wait(lock, ready);
        lock.release();
    }
    std::size_t nbytes() const { return limbo_.size() * sizeof(Waiting); }

private:
    struct Waiting {
        u32 chunk;
        u64 epoch;  // of the eviction
    };
    std::vector<u64> inside_;  // epochs in which readers entered
    std::deque<Waiting> limbo_;
    u64 epoch_ = 0;
    std::condition_variable left_;
};

}  // namespace ddrl::replay
