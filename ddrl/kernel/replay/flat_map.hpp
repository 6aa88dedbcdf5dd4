// A small open-addressing map from integer keys to a trivial value: linear probing, deletion by shifting back, load at
// most one half. Lookup, insertion and deletion are O(1) expected. Keys are never the reserved EMPTY.
#pragma once

#include <vector>

#include "memory.hpp"

namespace ddrl::replay {

template <class Value>
class FlatMap {
public:
    static constexpr u64 EMPTY = ~u64{0};

    Value* find(u64 key) {
        for (std::size_t at = home(key);; at = (at + 1) & mask_) {
            if (cells_[at].key == key) return &cells_[at].value;
            if (cells_[at].key == EMPTY) return nullptr;
        }
    }
    const Value* find(u64 key) const { return const_cast<FlatMap*>(this)->find(key); }
    // The value under `key`, made from Value{} where there was none.
    Value& at(u64 key) {
        if (Value* value = find(key)) return *value;
        if (2 * (size_ + 1) > cells_.size()) grow();
        std::size_t spot = home(key);
        while (cells_[spot].key != EMPTY) spot = (spot + 1) & mask_;
        cells_[spot] = {key, Value{}};
        ++size_;
        return cells_[spot].value;
    }
    void erase(u64 key) {
        std::size_t hole = home(key);
        while (cells_[hole].key != key) {
            if (cells_[hole].key == EMPTY) return;
            hole = (hole + 1) & mask_;
        }
        for (std::size_t next = (hole + 1) & mask_; cells_[next].key != EMPTY; next = (next + 1) & mask_) {
            if (((next - home(cells_[next].key)) & mask_) >= ((next - hole) & mask_)) {
                cells_[hole] = cells_[next];
                hole = next;
            }
        }
        cells_[hole].key = EMPTY;
        --size_;
    }
    void clear() { *this = FlatMap(); }
    std::size_t size() const { return size_; }
    std::size_t nbytes() const { return cells_.size() * sizeof(Cell); }
    template <class Visit>
    void each(Visit visit) const {
        for (const Cell& cell : cells_)
            if (cell.key != EMPTY) visit(cell.key, cell.value);
    }

private:
    struct Cell {
        u64 key = EMPTY;
        Value value{};
    };
    std::size_t home(u64 key) const { return static_cast<std::size_t>((key * 0x9E3779B97F4A7C15ULL) >> shift_); }
    void grow() {
        std::vector<Cell> old(cells_.size() * 2);
        old.swap(cells_);
        mask_ = cells_.size() - 1;
        --shift_;
        for (const Cell& cell : old) {
            if (cell.key == EMPTY) continue;
            std::size_t spot = home(cell.key);
            while (cells_[spot].key != EMPTY) spot = (spot + 1) & mask_;
            cells_[spot] = cell;
        }
    }
    std::vector<Cell> cells_ = std::vector<Cell>(16);
    std::size_t mask_ = 15, size_ = 0;
    unsigned shift_ = 60;
};

}  // namespace ddrl::replay
