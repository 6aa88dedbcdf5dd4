// Which of a host's ready messages goes next: the one that stands earliest, old versions before new ones.
//
// Only a window of bytes is handed to MPI and not yet taken, so that precedence is ours and not the socket's, and only
// a share of it to one target, so that a slow target holds up only its own. MPI calls a small message sent when it has
// copied it: so now and then one is sent that ends only when it has been taken, and with it all before. Half of a
// share, and of the window over all targets, may be under way without such an end: where a host serves very many, a
// little to each would else be all of it at once.
//
// A receiver takes messages in the plan's order. One that became ready late may stand before all that is under way, and
// these may wait for it to be taken first: so it goes although nothing has room.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ddrl {

class Outbox {
public:
    using Entry = std::pair<int64_t, int>;  // (sequence, place among the host's own messages): the smaller goes first

    // Bytes under way from this host, and of these to one target, from which on no more go.
    Outbox(int64_t window, int64_t share) : window_(window), share_(share) {}

    // A message may go.
    void add(Entry entry, int target) { ready_.emplace(entry, target); }

    // The next message that has room.
    std::optional<Entry> take() {
        while (!ready_.empty()) {
            const auto [entry, target] = ready_.top();
            const bool first = before_all(entry);
            if (under_way_ + unasked_ >= window_ && !first) break;
            ready_.pop();
            Target& to = targets_[target];
            if (to.under_way < share_ || first) return entry;
            to.waits.insert(entry);
        }
        return std::nullopt;
    }

    // Whether this message must end only when it has been taken.
    bool asks(int target, int64_t bytes) {
        return 2 * (targets_[target].unasked + bytes) > share_ || 2 * (unasked_ + bytes) > window_;
    }

    // A message has gone, and nothing will say when it has been taken.
    void copied(int target, int64_t bytes) {
        targets_[target].under_way += bytes;
        targets_[target].unasked += bytes;
        unasked_ += bytes;
    }

    // A message has gone whose end will be known; the bytes that will have been taken then.
    int64_t sent(Entry entry, int target, int64_t bytes) {
        Target& to = targets_[target];
        to.under_way += bytes;
        unasked_ -= to.unasked;
        bytes += std::exchange(to.unasked, 0);
        under_way_ += bytes;
        gone_.insert(entry);
        return bytes;
    }

    // It has been taken, and those bytes with it.
    void taken(Entry entry, int target, int64_t bytes) {
        under_way_ -= bytes;
        targets_[target].under_way -= bytes;
        gone_.erase(entry);
        for (auto& [each, to] : targets_) {
            if (to.waits.empty() || (each != target && !before_all(*to.waits.begin()))) continue;
            for (const Entry& waiting : std::exchange(to.waits, {})) ready_.emplace(waiting, each);
        }
    }

private:
    struct Target {
        int64_t under_way = 0;
        int64_t unasked = 0;  // of these, those of which nothing says when they are taken
        std::set<Entry> waits;  // ready too, but the target has its share
    };
    using Ready = std::pair<Entry, int>;  // with the target

    bool before_all(const Entry& entry) const { return gone_.empty() || entry < *gone_.begin(); }

    int64_t window_, share_;
    int64_t under_way_ = 0;  // of which something says when they are taken
    int64_t unasked_ = 0;  // and of which nothing does, over all targets
    std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready_;
    std::unordered_map<int, Target> targets_;
    std::set<Entry> gone_;  // whose end will be known
};

}  // namespace ddrl
