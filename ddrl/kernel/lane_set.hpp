// Many rings drained by one consumer into one block of rows, fairly and without mixing the order within a ring.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
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

    // Move at most `count` rows to `out`; returns how many. Rings that hold rows share the space equally, what some
    // leave free goes to the others, and the ring that is first changes with each call. O(rings + bytes): each
    // round fills `out` or empties a ring.
    size_t drain(std::byte* out, size_t count) {
        if (rings_.empty() || count == 0) return 0;
        const size_t row_bytes = rings_[0]->row_bytes();
        holding_.clear();
        for (size_t turn = 0; turn < rings_.size(); ++turn) {
            Ring* ring = rings_[(first_ + turn) % rings_.size()];
            if (ring->filled(count) > 0) holding_.push_back(ring);
        }
        first_ = (first_ + 1) % rings_.size();
        size_t moved = 0;
        while (!holding_.empty() && moved < count) {
            const size_t share = std::max<size_t>(1, (count - moved) / holding_.size());
            size_t remaining = 0;
            for (Ring* ring : holding_) {
                const size_t wanted = std::min(share, count - moved);
                const size_t taken = ring->pop(out + moved * row_bytes, wanted);
                moved += taken;
                if (taken == wanted) holding_[remaining++] = ring;
            }
            holding_.resize(remaining);
        }
        return moved;
    }

private:
    std::vector<Ring*> rings_;
    std::vector<Ring*> holding_;  // rings with rows left, within one drain
    size_t first_ = 0;  // the ring that comes first
};

}  // namespace ddrl
