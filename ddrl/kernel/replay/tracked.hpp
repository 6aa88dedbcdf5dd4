// Arrays that mark which of their blocks were written since the last snapshot, so that an incremental snapshot holds
// those alone.
//
// Tracked<T>: a fixed array (memory.hpp) that never moves. TrackedVector<T>: one that grows.
#pragma once

#include <vector>

#include "archive.hpp"
#include "memory.hpp"

namespace ddrl::replay {

inline constexpr u64 END_OF_BLOCKS = ~u64{0};

// The first `size` items: all of them, or the blocks of `block` items that `written` names.
template <class T>
void save_blocks(Writer& out, const T* items, std::size_t size, const u8* written, std::size_t block, bool whole) {
    out.value<u64>(size);
    for (std::size_t at = 0; at * block < size; ++at) {
        if (!whole && !written[at]) continue;
        std::size_t end = at + 1;  // neighbors go together
        while (end * block < size && (whole || written[end])) ++end;
        const std::size_t last = std::min(end * block, size);
        out.value<u64>(at * block);
        out.array(items + at * block, last - at * block);
        at = end;
    }
    out.value<u64>(END_OF_BLOCKS);
}
// Reads what save_blocks wrote, behind its size, over what is there.
template <class T>
void load_blocks(Reader& in, T* items, std::size_t size) {
    for (u64 first = in.value<u64>(); first != END_OF_BLOCKS; first = in.value<u64>()) {
        if (first > size) throw std::runtime_error("it is inconsistent");
        in.array(items + first, size - first);
    }
}

template <class T>
class Tracked {
public:
    Tracked() = default;
    explicit Tracked(std::size_t capacity) : items_(capacity), written_(capacity / BLOCK + 1) {}

    const T& operator[](std::size_t index) const { return items_[index]; }
    const T* data() const { return items_.data(); }
    std::size_t capacity() const { return items_.capacity(); }
    void set(std::size_t index, const T& item) { change(index) = item; }
    T& change(std::size_t index) {
        written_[index / BLOCK] = 1;
        return items_[index];
    }
    void save(Writer& out, std::size_t size, bool whole) const {
        save_blocks(out, items_.data(), size, written_.data(), BLOCK, whole);
    }
    // Reads what save wrote over what is there; returns the size.
    std::size_t load(Reader& in) {
        const u64 size = in.value<u64>();
        if (size > items_.capacity()) throw std::runtime_error("it holds more than this replay can");
        load_blocks(in, items_.data(), size);
        return size;
    }
    // From here on, writes count as new.
    void clear_written() { written_.clear(); }

private:
    static constexpr std::size_t BLOCK = 256;
    Reserved<T> items_;
    Reserved<u8> written_;
};

template <class T>
class TrackedVector {
public:
    const T& operator[](std::size_t index) const { return items_[index]; }
    const T* data() const { return items_.data(); }
    std::size_t size() const { return items_.size(); }
    std::size_t nbytes() const { return items_.capacity() * sizeof(T) + written_.capacity(); }
    void set(std::size_t index, const T& item) { change(index) = item; }
    T& change(std::size_t index) {
        written_[index / BLOCK] = 1;
        return items_[index];
    }
    // New items are T{} and count as written.
    void resize(std::size_t size) {
        const std::size_t before = items_.size();
        items_.resize(size);
        written_.resize(size / BLOCK + 1);
        for (std::size_t at = before; at < size; at += BLOCK) written_[at / BLOCK] = 1;
        if (size > before) written_[(size - 1) / BLOCK] = 1;
    }
    void save(Writer& out, bool whole) const {
        save_blocks(out, items_.data(), items_.size(), written_.data(), BLOCK, whole);
    }
    void load(Reader& in) {
        const u64 size = in.value<u64>();
        if (size > items_.size() + in.left() / sizeof(T))  // what is new stands in the snapshot
            throw std::runtime_error("it is inconsistent");
        resize(size);
        load_blocks(in, items_.data(), size);
    }
    void clear_written() { std::fill(written_.begin(), written_.end(), u8{0}); }

private:
    static constexpr std::size_t BLOCK = 32;
    std::vector<T> items_;
    std::vector<u8> written_ = std::vector<u8>(1);
};

}  // namespace ddrl::replay
