// Many rings drained by one consumer into one block of rows, fairly and without mixing the order within a ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ring.hpp"

namespace ddrl {

class LaneSet {
public:
    explicit LaneSet(std::vector<Ring*> rings) : rings_(std::move(rings)) {}

    // Rows that stand in all rings together.
    size_t pending() const {
        size_t rows = 0;
        for (const Ring* ring : rings_) rows += ring->size();
        return rows;
    }

    // Move at most `count` rows to `out`; returns how many. Every ring gets an equal share of the space; what some leave free goes to the
    // others, and the ring that is asked first changes with each call. O(rings + bytes).
    size_t drain(std::byte* out, size_t count) {
        if (rings_.empty() || count == 0) return 0;
        size_t moved = 0;
        const size_t first = cursor_;
        cursor_ = (cursor_ + 1) % rings_.size();
        const size_t row_bytes = rings_[0]->row_bytes();
        for (bool any = true; any && moved < count;) {
            any = false;
            const size_t share = std::max<size_t>(1, (count - moved) / rings_.size());
            for (size_t turn = 0; turn < rings_.size() && moved < count; ++turn) {
                Ring* ring = rings_[(first + turn) % rings_.size()];
                const size_t taken = ring->pop(out + moved * row_bytes, std::min(share, count - moved));
                moved += taken;
                any = any || taken > 0;
            }
        }
        return moved;
    }

private:
    std::vector<Ring*> rings_;
    size_t cursor_ = 0;
};

}  // namespace ddrl
