// Which positions of an episode can be drawn, and the picks that stand for them (docs/replay.md has the rules). All
// calls come under the replay's lock.
#pragma once

#include "options.hpp"
#include "picks.hpp"

namespace ddrl::replay {

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
