// Options of a replay, and its picks: which positions of an episode can be drawn (docs/replay.md has the rules), and
// the table of them. All calls are made under the replay's lock.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "store.hpp"

namespace ddrl::replay {

struct Options {
    Columns columns;
    u64 capacity = 0;  // [records]
    u32 pick_len = 1;  // L [records]
    u32 n_step = 1;  // n; 0: a pick needs no state after its last record
    u32 burn_in = 0;  // [records] before a pick that sequences() adds
    bool short_picks = false;
    u32 shift = 6;  // log2 of the records in a chunk
    std::string file;  // the buffer's file, or empty: RAM
};

// A drawn pick: its first record, and how much of the episode the window sees.
struct Window {
    u32 slot, position;
    u32 records_, states_;  // of the episode, as in EpisodeView
    u32 records() const { return records_ & ~EpisodeView::TERMINAL; }
    u32 states() const { return states_; }
    bool terminal_end() const { return records_ & EpisodeView::TERMINAL; }
};

// Offsets within a row of many interleaved streams (ddrl.core.rows.RowSchema): what the recording reads, and each
// column of the store.
struct RowLayout {
    size_t row_bytes, stream, step, kind;
    std::vector<size_t> columns;
};

// The pick table: every pick that can be drawn, at a dense index, so that a uniform draw is one random number.
//
//   table[index] = slot of the pick's first record        index_of[slot] = its index, or NONE
//
// Both directions are O(1). Removing an episode moves the last picks to the indices that it leaves free: O(its picks).

struct Move {
    u32 from, to;  // indices in the pick table; applied in order
};

class PickTable {
public:
    PickTable(size_t most, size_t max_slots) : table_(most), index_of_(max_slots) {}

    u32 size() const { return size_; }
    u32 slot(u32 index) const { return table_[index]; }
    const u32* slots() const { return table_.data(); }
    // Index of the pick that begins at `slot`, which must belong to a pick (its position is below the episode's picks).
    u32 index_of(u32 slot) const { return index_of_[slot]; }

    void add(u32 slot) {
        table_.set(size_, slot);
        index_of_[slot] = size_++;
    }

    // Removes every pick of episode `index`; appends the moves it made to `moves`.
    void remove(const Store& store, u32 index, std::vector<Move>& moves) {
        const Episode& episode = store.episode(index);
        u32 left = episode.picks;
        for (u32 chunk = episode.first_chunk; left; chunk = store.head(chunk).next) {
            const u32 first = chunk << store.shift(),
                      count = left < store.chunk_records() ? left : store.chunk_records();
            for (u32 slot = first; slot < first + count; ++slot) {
                while (size_ && store.episode_of(table_[size_ - 1]) == index) index_of_[table_[--size_]] = NONE;
                const u32 hole = index_of_[slot];
                if (hole == NONE) continue;
                const u32 moved = table_[--size_];
                table_.set(hole, moved);
                index_of_[moved] = hole;
                moves.push_back({size_, hole});
            }
            left -= count;
        }
    }

    size_t nbytes(u32 chunks, u32 shift) const {
        return (size_t{high_water()} + (size_t{chunks} << shift)) * sizeof(u32);
    }
    u32 high_water() const { return most_ > size_ ? most_ : size_; }
    void note_high_water() { most_ = high_water(); }

    void save(Writer& out, bool whole) const { table_.save(out, size_, whole); }
    void mark_saved() { table_.clear_written(); }
    void load(Reader& in, const Store& store) {
        size_ = static_cast<u32>(table_.load(in));
        for (u32 i = 0; i < size_; ++i) {
            fail_if(!store.in_use(table_[i] >> store.shift()), "a pick is of no episode");
            index_of_[table_[i]] = i;
        }
    }

    void check(const Store& store) const {
        u64 picks = 0;
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer) picks += store.episode(i).picks;
        fail_if(picks != size_, "picks are lost");
        for (u32 index = 0; index < size_; ++index) {
            const u32 slot = table_[index];
            fail_if(index_of_[slot] != index, "pick table and pick index disagree");
            fail_if(store.position(slot) >= store.episode(store.episode_of(slot)).picks,
                    "a pick is past its episode's picks");
        }
    }

private:
    Tracked<u32> table_;
    Reserved<u32> index_of_;
    u32 size_ = 0, most_ = 0;
};

// How many positions from 0 on can be drawn, by the length and ending of an episode.
inline u32 picks_of(const Options& options, const Episode& episode) {
    const u32 n = options.n_step, length = options.pick_len;
    const u32 ends = n ? episode.states() - (episode.states() > 0) : episode.records;  // records a window may use
    if (episode.ending == Ending::LIVE) {
        const u32 needed = length + (n ? n - 1 : 0);
        return ends >= needed ? ends - needed + 1 : 0;
    }
    if (options.short_picks || length == 1) return ends;
    return ends >= length ? ends - length + 1 : 0;
}

// Enters the picks that an episode has grown by.
inline void make_picks(const Options& options, Store& store, PickTable& picks, u32 index) {
    const Episode& episode = store.episode(index);
    const u32 wanted = picks_of(options, episode), made = episode.picks;
    if (wanted <= made) return;
    const u32 mask = store.chunk_records() - 1;
    u32 chunk = episode.last_chunk;
    if (made < store.head(chunk).base) chunk = store.chunk_at(index, made);
    for (u32 position = made; position < wanted; ++position) {
        if (position != made && (position & mask) == 0) chunk = store.head(chunk).next;
        picks.add((chunk << store.shift()) | (position & mask));
    }
    store.set_picks(index, wanted);
}

// Index of a pick by its episode's handle and its position; NONE where the episode was evicted or that position is no
// pick.
inline u32 find_pick(const Store& store, const PickTable& picks, u64 handle, u32 position) {
    const u32 index = store.find(handle);
    if (index == NONE || position >= store.episode(index).picks) return NONE;
    return picks.index_of((store.chunk_at(index, position) << store.shift()) |
                          (position & (store.chunk_records() - 1)));
}

}  // namespace ddrl::replay
