// Experience replay: episodes, picks, selectors and one eviction, tied together behind one lock.
//
// Who may call: any thread, any method. A drawing method resolves its picks under the lock and copies after it: until
// the copy ends, chunks of evicted episodes stay in limbo instead of being written again, so a batch never holds a torn
// or foreign record, and writers go on. Amortized O(1) a record, eviction included; a draw's cost does not depend on
// the number of records (beyond what the caches do).
#pragma once

#include <algorithm>
#include <memory>
#include <mutex>
#include <span>

#include "eviction.hpp"
#include "options.hpp"
#include "pick_rules.hpp"
#include "picks.hpp"
#include "readers.hpp"
#include "resolver.hpp"
#include "selector.hpp"
#include "streams.hpp"

namespace ddrl::replay {

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
    // Takes back selectors made since there were `count`, for a snapshot that was refused.
    void keep_selectors(u32 count) {
        std::lock_guard lock(mutex_);
        selectors_.resize(count);
    }
    u32 selector_count() const { return static_cast<u32>(selectors_.size()); }
    PickSelector& selector(u32 handle) {
        if (handle >= selectors_.size())
            throw std::invalid_argument("there is no pick selector " + std::to_string(handle) +
                                        ": take the handle from new_pick_selector");
        return *selectors_[handle];
    }

    // Appends records to a live episode, evicting others as needed, and ends it unless `ending` is LIVE. An episode
    // that was evicted meanwhile goes on under a new handle; returns the handle in force.
    u64 record(u64 handle, const Rows& rows, Ending ending, const byte* const* final_state) {
        std::lock_guard lock(mutex_);
        u32 episode = live_episode(handle);
        for (u32 done = 0; done < rows.count;) episode = append(episode, rows, done);
        const u64 in_force =
            ending == Ending::LIVE ? store_.episode(episode).handle : end(episode, ending, final_state);
        announce_picks();
        return in_force;
    }

    // Ends a live episode without a final state.
    void cut(u64 handle) {
        std::lock_guard lock(mutex_);
        end(live_episode(handle), Ending::CUT, nullptr);
        announce_picks();
    }

    // Records rows of many streams in their order; returns how many were records (not final states). See streams.hpp.
    u32 record_rows(const byte* rows, u32 count, const RowLayout& layout) {
        std::lock_guard lock(mutex_);
        Recorder recorder{*this};
        const u32 recorded = streams_.record(recorder, store_, rows, count, layout);
        announce_picks();
        return recorded;
    }

    // Ends every live episode of record_rows' streams without a final state, in order of handles.
    void cut_streams() {
        std::lock_guard lock(mutex_);
        Recorder recorder{*this};
        streams_.cut(recorder, store_);
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
        for (std::size_t i = 0; i < episode.size(); ++i) {
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
    std::size_t nbytes() const {
        std::lock_guard lock(mutex_);
        std::size_t bytes = store_.nbytes() + picks_.nbytes(store_.chunks_touched(), store_.shift()) +
                            eviction_->nbytes() + streams_.nbytes() + index_.capacity() * sizeof(u32) +
                            resolver_.nbytes() + readers_.nbytes() + moves_.capacity() * sizeof(Move);
        for (const auto& chosen : selectors_) bytes += chosen->nbytes();
        return bytes;
    }
    // Every pick in table order, for tests and plots: handle and position.
    void list_picks(u64* handles, u32* positions, u32 most) const {
        std::lock_guard lock(mutex_);
        for (u32 i = 0; i < std::min(most, picks_.size()); ++i) {
            handles[i] = store_.episode(store_.episode_of(picks_.slot(i))).handle;
            positions[i] = store_.position(picks_.slot(i));
        }
    }
    void law(u32 selector_handle, std::span<double> probability) {
        std::lock_guard lock(mutex_);
        announce_picks();
        selector(selector_handle).law(probability);
    }
    // What is wrong with the structure, or nothing. O(everything).
    std::string check() {
        std::lock_guard lock(mutex_);
        announce_picks();
        return check_structure();
    }
    // The same, where the caller holds the lock.
    std::string check_structure() {
        if (std::string wrong = store_.check(); !wrong.empty()) return wrong;
        if (std::string wrong = picks_.check(store_); !wrong.empty()) return wrong;
        if (store_.records() > options_.capacity) return "more records than the capacity";
        for (u32 i = store_.oldest(); i != NONE; i = store_.episode(i).newer)
            if (store_.episode(i).picks != picks_of(options_, store_.episode(i)))
                return "an episode has the wrong number of picks";
        if (std::string wrong = eviction_->check(store_); !wrong.empty()) return wrong;
        if (std::string wrong = streams_.check(store_); !wrong.empty()) return wrong;
        for (const auto& chosen : selectors_)
            if (std::string wrong = chosen->check(picks_.size()); !wrong.empty()) return wrong;
        return "";
    }

    // The structure (not the records) as bytes, all of it or what changed since mark_saved; and back. The caller holds
    // the lock.
    void save_structure(Writer& out, bool whole) {
        announce_picks();
        store_.save(out, whole), picks_.save(out, whole), eviction_->save(out, whole), streams_.save(out);
        out.value<u64>(selectors_.size());
        for (const auto& chosen : selectors_) chosen->save(out, whole);
    }
    // Everything there is counts as saved: the next snapshot but a whole one holds what changes from here on.
    void mark_saved() {
        store_.mark_saved(), picks_.mark_saved(), eviction_->mark_saved();
        for (const auto& chosen : selectors_) chosen->mark_saved();
    }
    void load_structure(Reader& in) {
        store_.load(in), picks_.load(in, store_), eviction_->load(in), streams_.load(in);
        announced_ = picks_.size();
        if (in.value<u64>() != selectors_.size()) throw std::runtime_error("the snapshot holds other selectors");
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
    // What record_rows' streams may do with the replay.
    struct Recorder {
        Replay& replay;
        u32 append(u32 episode, const Rows& rows) {
            u32 done = 0;
            return replay.append(episode == NONE ? replay.store_.begin_episode() : episode, rows, done);
        }
        void end(u32 episode, Ending ending, const byte* const* final_state) {
            replay.end(episode, ending, final_state);
        }
    };

    u32 live_episode(u64 handle) {
        const u32 episode = store_.find(handle);
        if (episode == NONE) {
            if (handle >= store_.episodes().next_handle())
                throw std::invalid_argument("there is no episode " + std::to_string(handle) +
                                            ": take the handle from new_episode or record");
            return store_.begin_episode();  // evicted: it goes on under a new handle
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

    // Evicts until `records` more fit and a chunk is to be had; the episode itself may go, then a new one takes its
    // place.
    u32 make_room(u32 episode, u32 records) {
        while (store_.records() + records > options_.capacity || !store_.has_room()) {
            if (!store_.has_room() &&
                readers_.chunks_waiting()) {  // the chunks are there, once readers have done with them
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

    // Releases the lock, which the caller holds, until a leaving reader made `ready` true.
    template <class Ready>
    void wait(Ready ready) {
        announce_picks();  // a snapshot or a check may take the lock meanwhile: selectors and pick table must agree
        readers_.wait(mutex_, ready);
    }

    void evict(u32 victim) {
        announce_picks();
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

    // Announces to the selectors the picks made since the last call: once for a batch of records.
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
};

}  // namespace ddrl::replay
