// The table of episodes: by index (used again once an episode was removed), by handle (never used again), and in order
// of handles.
//
// Not thread-safe: the layer above locks. Everything is O(1) but save, load and check.
#pragma once

#include <vector>

#include "flat_map.hpp"
#include "tracked.hpp"

namespace ddrl::replay {

enum class Ending : u8 { LIVE = 0, TERMINATED = 1, TRUNCATED = 2, CUT = 3 };  // CUT: closed without a final state

struct Episode {
    u64 handle = 0;
    u32 first_chunk = NONE, last_chunk = NONE;
    u32 records = 0;  // T
    u32 picks = 0;  // positions 0 .. picks - 1 can be drawn
    u32 older = NONE, newer = NONE;  // neighbors in order of handles
    Ending ending = Ending::LIVE;
    u8 used = false;  // a bool, but of any value where a snapshot was made by malice
    u32 states() const { return records + (ending == Ending::TERMINATED || ending == Ending::TRUNCATED); }
};

// What a draw needs of an episode, in a quarter of a cache line.
struct EpisodeView {
    static constexpr u32 TERMINAL = 0x80000000u;
    u64 handle;
    u32 records, states;  // TERMINAL set in records: the last state is terminal
};

class Episodes {
public:
    const Episode& operator[](u32 index) const { return table_[index]; }
    // To write to; refresh follows once records or ending have changed.
    Episode& change(u32 index) { return table_.change(index); }
    void refresh(u32 index) {
        const Episode& episode = table_[index];
        views_[index] = {episode.handle,
                         episode.records | (episode.ending == Ending::TERMINATED ? EpisodeView::TERMINAL : 0),
                         episode.states()};
    }
    const EpisodeView* views() const { return views_.data(); }
    std::size_t count() const { return by_handle_.size(); }
    std::size_t table_size() const { return table_.size(); }
    u32 oldest() const { return oldest_; }
    u64 next_handle() const { return next_handle_; }
    u32 find(u64 handle) const {
        const u32* index = by_handle_.find(handle);
        return index ? *index : NONE;
    }
    // Whether episode `index` is the one with `handle` still.
    bool holds(u32 index, u64 handle) const {
        return index < table_.size() && table_[index].used && table_[index].handle == handle;
    }

    u32 begin() {
        u32 index;
        if (unused_.empty()) {
            index = static_cast<u32>(table_.size());
            table_.resize(index + std::size_t{1});
            views_.emplace_back();
        } else {
            index = unused_.back();
            unused_.pop_back();
        }
        Episode& episode = change(index) = Episode{};
        episode.used = true;
        episode.handle = next_handle_++;
        episode.older = newest_;
        if (newest_ != NONE) change(newest_).newer = index;
        newest_ = index;
        if (oldest_ == NONE) oldest_ = index;
        by_handle_.at(episode.handle) = index;
        refresh(index);
        return index;
    }
    void remove(u32 index) {
        Episode& episode = change(index);
        (episode.older == NONE ? oldest_ : change(episode.older).newer) = episode.newer;
        (episode.newer == NONE ? newest_ : change(episode.newer).older) = episode.older;
        by_handle_.erase(episode.handle);
        episode.used = false;
        unused_.push_back(index);
    }

    std::size_t nbytes() const {
        return table_.nbytes() + views_.capacity() * sizeof(EpisodeView) + by_handle_.nbytes() +
               unused_.capacity() * sizeof(u32);
    }
    // All episodes, or those that changed since mark_saved.
    void save(Writer& out, bool whole) const {
        out.value(next_handle_), out.value(oldest_), out.value(newest_);
        table_.save(out, whole);
    }
    void mark_saved() { table_.clear_written(); }
    void load(Reader& in) {
        next_handle_ = in.value<u64>(), oldest_ = in.value<u32>(), newest_ = in.value<u32>();
        table_.load(in);
        views_.resize(table_.size());
        by_handle_.clear();
        unused_.clear();
        for (u32 i = 0; i < table_.size(); ++i) {
            const Episode& episode = table_[i];
            refresh(i);
            if (!episode.used)
                unused_.push_back(i);
            else if (episode.handle >= next_handle_ || episode.records >= EpisodeView::TERMINAL ||
                     episode.ending > Ending::CUT)
                throw std::runtime_error("it holds an episode that cannot be");
            else
                by_handle_.at(episode.handle) = i;
        }
        if (std::string wrong = check(); !wrong.empty()) throw std::runtime_error(wrong);
    }
    // What is wrong with the order of episodes, or nothing.
    std::string check() const {
        std::size_t count = 0;
        u32 before = NONE;
        for (u32 i = oldest_; i != NONE; before = i, i = table_[i].newer, ++count) {
            if (i >= table_.size()) return "an episode is not in the table";
            const Episode& episode = table_[i];
            if (!episode.used || find(episode.handle) != i) return "an episode does not stand under its handle";
            if (episode.older != before || (before != NONE && table_[before].handle >= episode.handle))
                return "the order of handles is broken";
            if (views_[i].handle != episode.handle || views_[i].states != episode.states())
                return "an episode's view is stale";
        }
        if (before != newest_) return "the newest episode is wrong";
        if (count != by_handle_.size() || count + unused_.size() != table_.size()) return "episodes are lost";
        return "";
    }

private:
    TrackedVector<Episode> table_;
    std::vector<EpisodeView> views_;
    std::vector<u32> unused_;
    FlatMap<u32> by_handle_;
    u64 next_handle_ = 0;
    u32 oldest_ = NONE, newest_ = NONE;
};

}  // namespace ddrl::replay
