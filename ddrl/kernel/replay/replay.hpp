// Experience replay: episodes, picks, selectors and one eviction behind one lock.
//
// Any thread may call any method. A draw resolves its picks under the lock and copies after it: until the copy ends,
// chunks of evicted episodes are held back instead of being written again, so a batch never holds a torn or foreign
// record, and writers continue. Amortized O(1) a record, eviction included; the cost of a draw does not depend on the
// number of records (beyond what the caches do).
#pragma once

#include <tsl/robin_map.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "evictions.hpp"
#include "picks.hpp"
#include "selectors.hpp"
#include "store.hpp"

namespace ddrl::replay {

// Turns drawn picks into windows: reads under the replay's lock what a copy needs, so that the copy needs no lock.
class Resolver {
public:
    // The window of each pick of `index` (indices in the pick table). Writes the picks' episode handles and positions.
    std::vector<Window> resolve(std::span<const u32> index, Store& store, const PickTable& picks, Eviction& eviction,
                                u64* handles, u32* positions) {
        const size_t count = index.size();
        std::vector<Window> windows = take();
        windows.resize(count);
        const bool notify = eviction.wants_draws();
        if (notify) drawn_.resize(count);
        // Two passes, so that each finds its memory prefetched by the one before: pick table and heads of chunks, then
        // episodes. The pointers are copied to locals because, for all the compiler knows, writing an output could
        // change them.
        const u32 *const slots = picks.slots(), shift = store.shift(), mask = store.chunk_records() - 1;
        const u32* const wanted = index.data();
        slots_.resize(count);
        u32* const drawn_slots = slots_.data();
        const ChunkHead* const heads = store.heads();
        EpisodeView* const views = store.episode_views();
        Window* const out = windows.data();
        u32* const drawn = drawn_.data();
        for (size_t i = 0; i < count; ++i) {
            if (i + AHEAD < count) __builtin_prefetch(slots + wanted[i + AHEAD]);
            const u32 slot = slots[wanted[i]];
            drawn_slots[i] = slot;
            __builtin_prefetch(heads + (slot >> shift));
        }
        for (size_t i = 0; i < count; ++i) {
            const u32 slot = drawn_slots[i];
            const ChunkHead head = heads[slot >> shift];
            const u32 position = head.base + (slot & mask);
            const EpisodeView view = views[head.episode];
            if (!(view.states & EpisodeView::DRAWN)) views[head.episode].states |= EpisodeView::DRAWN;
            out[i] = {slot, position, view.records, view.states & ~EpisodeView::DRAWN};
            handles[i] = view.handle;
            positions[i] = position;
            if (notify) drawn[i] = head.episode;
        }
        if (notify) eviction.drawn(drawn_);
        return windows;
    }
    // Takes back windows that have been copied, to reuse their memory.
    void recycle(std::vector<Window> windows) { scratch_.push_back(std::move(windows)); }

    size_t nbytes() const {
        size_t bytes = (slots_.capacity() + drawn_.capacity()) * sizeof(u32);
        for (const auto& windows : scratch_) bytes += windows.capacity() * sizeof(Window);
        return bytes;
    }

private:
    static constexpr size_t AHEAD = 32;  // picks whose entry is prefetched

    std::vector<Window> take() {
        if (scratch_.empty()) return {};
        std::vector<Window> windows = std::move(scratch_.back());
        scratch_.pop_back();
        return windows;
    }

    std::vector<u32> slots_, drawn_;
    std::vector<std::vector<Window>> scratch_;  // of earlier draws, one for each that ran at once
};

// Readers of chunk memory outside the lock, and the chunks that wait for them: a chunk of an evicted episode is in
// limbo, unwritten, until every reader that may use it has left.
//
// All calls are made under the replay's lock. A reader notes the epoch in which it enters; an eviction during a read
// ends the epoch; a chunk in limbo is free once no reader of its epoch or an earlier one is left.
class Readers {
public:
    // Returns the ticket to leave with.
    u64 enter() {
        inside_.push_back(epoch_);
        return epoch_;
    }
    // Gives back to the store the chunks that no reader can use any more.
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

    // Removes an episode; its chunks are free at once, or in limbo while there are readers.
    void remove(u32 episode, Store& store) {
        if (none()) return store.remove(episode, [&](u32 chunk) { store.give_back(chunk); });
        store.remove(episode, [&](u32 chunk) { limbo_.push_back({chunk, epoch_}); });
        ++epoch_;
    }
    // Releases `mutex`, which the caller holds, until a leaving reader makes `ready` true.
    template <class Ready>
    void wait(std::mutex& mutex, Ready ready) {
        std::unique_lock lock(mutex, std::adopt_lock);
        left_.wait(lock, ready);
        lock.release();
    }
    size_t nbytes() const { return limbo_.size() * sizeof(Waiting); }

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

// The episode that each stream (one environment of one rollout) is in.
class Streams {
public:
    struct Stream {
        u64 handle = NO_HANDLE;
        u32 next_step = 0, episode = 0;  // episode: its index, valid while an episode of that handle has it
        bool running() const { return handle != NO_HANDLE; }
        // The index of its episode, or NONE where there is none or it was evicted.
        u32 episode_in(const Store& store) const {
            return running() && store.episodes().holds(episode, handle) ? episode : NONE;
        }
    };
    // Inserting may move the entries of other streams: look one up again after that.
    Stream& operator[](u32 stream) { return streams_[stream]; }
    void clear() { streams_.clear(); }
    // Handles of the episodes that streams are in, sorted.
    std::vector<u64> handles() const {
        std::vector<u64> handles;
        for (const auto& [key, stream] : streams_)
            if (stream.running()) handles.push_back(stream.handle);
        std::sort(handles.begin(), handles.end());
        return handles;
    }
    size_t nbytes() const { return map_bytes(streams_); }
    void save(Writer& out) const {
        out.value<u64>(streams_.size());
        for (const auto& [key, stream] : streams_)
            out.value(key), out.value(stream.handle), out.value(stream.next_step), out.value(stream.episode);
    }
    void load(Reader& in) {
        streams_.clear();
        for (u64 left = in.value<u64>(); left--;) {
            const u32 key = in.value<u32>();
            const u64 handle = in.value<u64>();
            const u32 next_step = in.value<u32>();
            streams_[key] = {handle, next_step, in.value<u32>()};
        }
    }
    // Throws where the episode of a stream has ended.
    void check(const Store& store) const {
        for (const auto& [key, stream] : streams_)
            if (const u32 episode = stream.episode_in(store); episode != NONE)
                fail_if(store.episode(episode).ending != Ending::LIVE, "a stream is in an episode that has ended");
    }

private:
    static constexpr u64 NO_HANDLE = ~u64{0};
    tsl::robin_map<u32, Stream, MixedHash> streams_;
};

class Replay {
public:
    Replay(Options options, std::unique_ptr<Eviction> eviction)
        : options_(std::move(options)),
          store_(options_.columns, options_.capacity, options_.shift, options_.file),
          picks_(options_.capacity + 1, store_.max_slots()),
          eviction_(std::move(eviction)) {}

    const Options& options() const { return options_; }
    const Store& store() const { return store_; }
    std::mutex& mutex() { return mutex_; }

    u64 new_episode() {
        std::lock_guard lock(mutex_);
        return store_.episode(store_.begin_episode()).handle;
    }

    // A selector sees all picks, those made before it too. Returns its handle.
    u32 add_selector(std::unique_ptr<PickSelector> selector) {
        std::lock_guard lock(mutex_);
        announce_picks();
        if (picks_.size()) selector->picks_added(0, picks_.size());
        selectors_.push_back(std::move(selector));
        return static_cast<u32>(selectors_.size() - 1);
    }
    // Removes the selectors after the first `count`, where a snapshot that described them was refused.
    void keep_selectors(u32 count) {
        std::lock_guard lock(mutex_);
        selectors_.resize(count);
    }
    u32 selector_count() const { return static_cast<u32>(selectors_.size()); }
    void set_importance_exponent(u32 selector_handle, double exponent) {
        std::lock_guard lock(mutex_);
        selector(selector_handle).set_importance_exponent(exponent);
    }

    // Appends records to a live episode, evicting others as needed, and ends it unless `ending` is LIVE. An episode
    // that was evicted meanwhile continues under a new handle; returns the handle to use next.
    u64 record(u64 handle, const Rows& rows, Ending ending, const byte* const* final_state) {
        std::lock_guard lock(mutex_);
        u32 episode = live_episode(handle);
        for (u32 done = 0; done < rows.count;) episode = append(episode, rows, done);
        const u64 next = ending == Ending::LIVE ? store_.episode(episode).handle : end(episode, ending, final_state);
        announce_picks();
        return next;
    }

    // Ends a live episode without a final state.
    void cut(u64 handle) {
        std::lock_guard lock(mutex_);
        end(live_episode(handle), Ending::CUT, nullptr);
        announce_picks();
    }

    // Records rows of many streams in their order; returns how many were records (not final states). Step 0 of a stream
    // begins an episode; so does a step that does not follow the last one, which ends the old episode without a final
    // state.
    u32 record_rows(const byte* rows, u32 count, const RowLayout& layout) {
        const auto word = [&](u32 row, size_t offset) {
            u32 value;
            std::memcpy(&value, rows + row * layout.row_bytes + offset, sizeof value);
            return value;
        };
        for (u32 i = 0; i < count; ++i)
            if (const u32 kind = word(i, layout.kind); kind > 2)
                throw std::invalid_argument("a row of kind " + std::to_string(kind) +
                                            " is no row of experience: it is torn or foreign");
        std::lock_guard lock(mutex_);
        const size_t* const offsets = layout.columns.data();
        const u32 columns = store_.column_count();
        const byte* data[MAX_COLUMNS];
        const size_t stride[MAX_COLUMNS] = {};
        u32 recorded = 0;
        for (u32 i = 0; i < count; ++i) {
            const u32 key = word(i, layout.stream), step = word(i, layout.step), kind = word(i, layout.kind);
            Streams::Stream& stream = streams_[key];
            u32 episode = stream.episode_in(store_);
            if (stream.running() && step != stream.next_step) {
                if (episode != NONE) end(episode, Ending::CUT, nullptr);
                stream = {}, episode = NONE;
            }
            for (u32 c = 0; c < columns; ++c) data[c] = rows + i * layout.row_bytes + offsets[c];
            if (kind != 0) {
                if (episode != NONE) end(episode, kind == 1 ? Ending::TERMINATED : Ending::TRUNCATED, data);
                streams_[key] = {};
                continue;
            }
            u32 done = 0;
            episode = append(episode == NONE ? store_.begin_episode() : episode, {data, stride, 1}, done);
            // `append` and `end` may release the lock for a while, so the stream is looked up again after them.
            streams_[key] = {store_.episode(episode).handle, step + 1, episode};
            ++recorded;
        }
        announce_picks();
        return recorded;
    }

    // Ends every live episode of record_rows' streams without a final state, in order of handles.
    void cut_streams() {
        std::lock_guard lock(mutex_);
        for (const u64 handle : streams_.handles())
            if (const u32 episode = store_.find(handle); episode != NONE) end(episode, Ending::CUT, nullptr);
        streams_.clear();
        announce_picks();
    }

    // Priorities of picks; one whose episode was evicted, or that never was, is passed over. Returns how many were set.
    u32 set_priority(u32 selector_handle, std::span<const u64> episode, std::span<const u32> position,
                     std::span<const float> priority) {
        for (const float p : priority)
            if (!(p >= 0.0f && p <= 3.4028234e38f))
                throw std::invalid_argument("a priority of " + std::to_string(p) +
                                            " cannot be used: priorities are finite and at least 0");
        std::lock_guard lock(mutex_);
        PickSelector& chosen = selector(selector_handle);
        announce_picks();
        index_.resize(episode.size());
        u32 set = 0;
        for (size_t i = 0; i < episode.size(); ++i) {
            index_[i] = find_pick(store_, picks_, episode[i], position[i]);
            set += index_[i] != NONE;
        }
        chosen.set_priority(index_, priority);
        return set;
    }

    // Draws picks and resolves them, then calls copy(windows) outside the lock while their memory is held. False:
    // nothing to draw.
    template <class Copy>
    bool draw(u32 selector_handle, u32 count, u64* handles, u32* positions, float* weights, Copy copy) {
        std::vector<Window> windows;
        u64 ticket;
        {
            std::lock_guard lock(mutex_);
            PickSelector& chosen = selector(selector_handle);
            announce_picks();  // all are announced already, unless recording failed halfway
            if (!picks_.size()) return false;
            index_.resize(count);
            if (!chosen.draw(index_, weights ? std::span<float>(weights, count) : std::span<float>())) return false;
            windows = resolver_.resolve(index_, store_, picks_, *eviction_, handles, positions);
            ticket = readers_.enter();
        }
        copy(std::span<const Window>(windows));
        std::lock_guard lock(mutex_);
        readers_.leave(ticket, store_);
        resolver_.recycle(std::move(windows));
        return true;
    }

    u64 records() const {
        std::lock_guard lock(mutex_);
        return store_.records();
    }
    u64 episodes() const {
        std::lock_guard lock(mutex_);
        return store_.episodes().count();
    }
    u64 pick_count() const {
        std::lock_guard lock(mutex_);
        return picks_.size();
    }
    // Records evicted so far, and those of them with episodes of which no pick was ever drawn.
    u64 evicted() const {
        std::lock_guard lock(mutex_);
        return evicted_;
    }
    u64 evicted_unseen() const {
        std::lock_guard lock(mutex_);
        return evicted_unseen_;
    }
    size_t nbytes() const {
        std::lock_guard lock(mutex_);
        size_t bytes = store_.nbytes() + picks_.nbytes(store_.chunks_touched(), store_.shift()) + eviction_->nbytes() +
                       streams_.nbytes() + index_.capacity() * sizeof(u32) + resolver_.nbytes() + readers_.nbytes() +
                       moves_.capacity() * sizeof(Move);
        for (const auto& chosen : selectors_) bytes += chosen->nbytes();
        return bytes;
    }
    // Every pick in table order, for tests and plots: handles and positions.
    std::pair<std::vector<u64>, std::vector<u32>> list_picks() const {
        std::lock_guard lock(mutex_);
        std::pair<std::vector<u64>, std::vector<u32>> listed;
        for (u32 i = 0; i < picks_.size(); ++i) {
            listed.first.push_back(store_.episode(store_.episode_of(picks_.slot(i))).handle);
            listed.second.push_back(store_.position(picks_.slot(i)));
        }
        return listed;
    }
    // The probability with which the selector's next draw takes each pick, in table order.
    std::vector<double> probabilities(u32 selector_handle) {
        std::lock_guard lock(mutex_);
        announce_picks();
        std::vector<double> probability(picks_.size());
        selector(selector_handle).probabilities(probability);
        return probability;
    }
    // Throws what is wrong with the structure. O(everything).
    void check() {
        std::lock_guard lock(mutex_);
        announce_picks();
        check_structure();
    }
    // The same, where the caller holds the lock.
    void check_structure() {
        store_.check();
        picks_.check(store_);
        fail_if(store_.records() > options_.capacity, "more records than the capacity");
        for (u32 i = store_.oldest(); i != NONE; i = store_.episode(i).newer)
            fail_if(store_.episode(i).picks != picks_of(options_, store_.episode(i)),
                    "an episode has the wrong number of picks");
        eviction_->check(store_);
        streams_.check(store_);
        for (const auto& chosen : selectors_) chosen->check(picks_.size());
    }

    // The structure (not the records) as bytes, all of it or what changed since mark_saved; and back. The caller holds
    // the lock.
    void save_structure(Writer& out, bool whole) {
        announce_picks();
        store_.save(out, whole), picks_.save(out, whole), eviction_->save(out, whole), streams_.save(out);
        out.value<u64>(selectors_.size());
        for (const auto& chosen : selectors_) chosen->save(out, whole);
    }
    // Everything counts as saved: the next increment holds what changes from here on.
    void mark_saved() {
        store_.mark_saved(), picks_.mark_saved(), eviction_->mark_saved();
        for (const auto& chosen : selectors_) chosen->mark_saved();
    }
    void load_structure(Reader& in) {
        store_.load(in), picks_.load(in, store_), eviction_->load(in), streams_.load(in);
        announced_ = picks_.size();
        fail_if(in.value<u64>() != selectors_.size(), "the snapshot holds other selectors");
        for (const auto& chosen : selectors_) chosen->load(in);
    }
    Store& writable_store() { return store_; }
    u64 last_snapshot = 0;  // id of the snapshot that an increment builds on; 0: none. Under the lock.
    // Readers of chunk memory outside the lock, for snapshots; the caller holds the lock.
    u64 enter() { return readers_.enter(); }
    void leave(u64 ticket) { readers_.leave(ticket, store_); }
    void wait_for_readers() {
        wait([&] { return readers_.none(); });
    }

private:
    PickSelector& selector(u32 handle) {
        if (handle >= selectors_.size())
            throw std::invalid_argument("there is no pick selector " + std::to_string(handle) +
                                        ": take the handle from new_pick_selector");
        return *selectors_[handle];
    }

    u32 live_episode(u64 handle) {
        const u32 episode = store_.find(handle);
        if (episode == NONE) {
            if (handle >= store_.episodes().next_handle())
                throw std::invalid_argument("there is no episode " + std::to_string(handle) +
                                            ": take the handle from new_episode or record");
            return store_.begin_episode();  // evicted: it continues under a new handle
        }
        if (store_.episode(episode).ending != Ending::LIVE)
            throw std::invalid_argument("episode " + std::to_string(handle) +
                                        " has ended: begin another with new_episode");
        return episode;
    }

    // Appends some of rows[done ..] and advances `done`; returns the episode, a new one where eviction took it.
    u32 append(u32 episode, const Rows& rows, u32& done) {
        episode = make_room(episode, 1);
        const u64 room = options_.capacity - store_.records();
        const u32 wanted = rows.count - done;
        const Rows part{rows.data, rows.stride, wanted <= room ? rows.count : done + static_cast<u32>(room)};
        const bool first = store_.episode(episode).records == 0;
        done += store_.append(episode, part, done);
        if (first) eviction_->added(episode, store_);
        make_picks(options_, store_, picks_, episode);
        return episode;
    }

    // Ends an episode; returns its handle. One without records is forgotten.
    u64 end(u32 episode, Ending ending, const byte* const* final_state) {
        if (final_state) episode = make_room(episode, 0);
        const u64 handle = store_.episode(episode).handle;
        if (store_.episode(episode).records == 0) {
            eviction_->removed(episode, store_);
            store_.remove(episode, [](u32) {});
            return handle;
        }
        store_.finish(episode, ending, final_state);
        eviction_->ended(episode);
        make_picks(options_, store_, picks_, episode);
        return handle;
    }

    // Evicts until `records` more fit and a chunk is free. The episode itself may be evicted: returns it, or the new
    // one that replaces it.
    u32 make_room(u32 episode, u32 records) {
        while (store_.records() + records > options_.capacity || !store_.has_room()) {
            if (!store_.has_room() && readers_.chunks_waiting()) {  // chunks become free when their readers leave
                const u64 handle = store_.episode(episode).handle;
                wait([&] { return store_.has_room(); });
                episode = store_.find(handle);
                if (episode == NONE || store_.episode(episode).ending != Ending::LIVE) episode = store_.begin_episode();
                continue;
            }
            const u32 victim = eviction_->victim(store_);
            evict(victim);
            if (victim == episode) episode = store_.begin_episode();
        }
        return episode;
    }

    // Releases the lock, which the caller holds, until a leaving reader makes `ready` true.
    template <class Ready>
    void wait(Ready ready) {
        announce_picks();  // a snapshot or a check may take the lock meanwhile: selectors and pick table must agree
        readers_.wait(mutex_, ready);
    }

    void evict(u32 victim) {
        announce_picks();
        evicted_ += store_.episode(victim).records;
        if (!store_.episodes().drawn(victim)) evicted_unseen_ += store_.episode(victim).records;
        moves_.clear();
        picks_.note_high_water();
        const u32 before = picks_.size();
        picks_.remove(store_, victim, moves_);
        if (picks_.size() != before)
            for (const auto& chosen : selectors_) {
                if (!moves_.empty()) chosen->picks_moved(moves_);
                chosen->picks_dropped(picks_.size());
            }
        announced_ = picks_.size();
        eviction_->removed(victim, store_);
        readers_.remove(victim, store_);
    }

    // Tells the selectors the picks made since the last call: once for a batch of records.
    void announce_picks() {
        const u32 size = picks_.size();
        if (size != announced_)
            for (const auto& chosen : selectors_) chosen->picks_added(announced_, size - announced_);
        announced_ = size;
    }

    Options options_;
    mutable std::mutex mutex_;
    Store store_;
    PickTable picks_;
    std::unique_ptr<Eviction> eviction_;
    std::vector<std::unique_ptr<PickSelector>> selectors_;
    Streams streams_;
    Readers readers_;
    std::vector<Move> moves_;
    std::vector<u32> index_;
    Resolver resolver_;
    u32 announced_ = 0;  // picks announced to the selectors
    u64 evicted_ = 0;
    u64 evicted_unseen_ = 0;
};

}  // namespace ddrl::replay
