// From drawn picks to windows: what a copy needs of each, read under the replay's lock so that the copy itself
// needs none.
#pragma once

#include <span>
#include <utility>
#include <vector>

#include "eviction.hpp"
#include "options.hpp"
#include "picks.hpp"

namespace ddrl::replay {

class Resolver {
public:
    // The window of each pick of `index` (indices in the pick table); its episode's handle and its position stand in
    // `handles` and `positions`.
    std::vector<Window> resolve(std::span<const u32> index, const Store& store, const PickTable& picks,
                                Eviction& eviction, u64* handles, u32* positions) {
        const std::size_t count = index.size();
        std::vector<Window> windows = take();
        windows.resize(count);
        const bool notify = eviction.wants_draws();
        if (notify) drawn_.resize(count);
        // Passes, so that each finds its memory prefetched by the one before: pick table, heads of chunks,
        // episodes. What they read stands in locals: a number written to an output could be any other, as far as the
        // compiler knows.
        const u32 *const slots = picks.slots(), shift = store.shift(), mask = store.chunk_records() - 1;
        const u32* const wanted = index.data();
        slots_.resize(count);
        u32* const drawn_slots = slots_.data();
        const ChunkHead* const heads = store.heads();
        const EpisodeView* const views = store.episodes().views();
        Window* const out = windows.data();
        u32* const drawn = drawn_.data();
        for (std::size_t i = 0; i < count; ++i) {
            if (i + AHEAD < count) __builtin_prefetch(slots + wanted[i + AHEAD]);
            const u32 slot = slots[wanted[i]];
            drawn_slots[i] = slot;
            __builtin_prefetch(heads + (slot >> shift));
        }
        for (std::size_t i = 0; i < count; ++i) {
            const u32 slot = drawn_slots[i];
            const ChunkHead head = heads[slot >> shift];
            const u32 position = head.base + (slot & mask);
            const EpisodeView view = views[head.episode];
            out[i] = {slot, position, view.records, view.states};
            handles[i] = view.handle;
            positions[i] = position;
            if (notify) drawn[i] = head.episode;
        }
        if (notify) eviction.drawn(drawn_);
        return windows;
    }
    // Takes windows back that have been copied, to use their memory again.
    void recycle(std::vector<Window> windows) { scratch_.push_back(std::move(windows)); }

    std::size_t nbytes() const {
        std::size_t bytes = (slots_.capacity() + drawn_.capacity()) * sizeof(u32);
        for (const auto& windows : scratch_) bytes += windows.capacity() * sizeof(Window);
        return bytes;
    }

private:
    static constexpr std::size_t AHEAD = 32;  // picks whose entry is prefetched

    std::vector<Window> take() {
        if (scratch_.empty()) return {};
        std::vector<Window> windows = std::move(scratch_.back());
        scratch_.pop_back();
        return windows;
    }

    std::vector<u32> slots_, drawn_;
    std::vector<std::vector<Window>> scratch_;  // of draws before, one for each that went on at once
};

}  // namespace ddrl::replay
