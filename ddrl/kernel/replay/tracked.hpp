// An array that knows which of its blocks were written since the last snapshot, so that an incremental snapshot holds those alone.
#pragma once

#include "archive.hpp"
#include "memory.hpp"

namespace ddrl::replay {

template <class T>
class Tracked {
  public:
    Tracked() = default;
    explicit Tracked(std::size_t capacity) : items_(capacity), written_(capacity / BLOCK + 1) {}

    const T& operator[](std::size_t index) const { return items_[index]; }
    const T* data() const { return items_.data(); }
    std::size_t capacity() const { return items_.capacity(); }
    void set(std::size_t index, const T& item) {
        items_[index] = item;
        written_[index / BLOCK] = 1;
    }
    T& change(std::size_t index) {
        written_[index / BLOCK] = 1;
        return items_[index];
    }

    // The first `size` items: all of them, or the blocks written since the last snapshot.
    void save(Writer& out, std::size_t size, bool whole) const {
        out.value<u64>(size);
        for (std::size_t block = 0; block * BLOCK < size; ++block) {
            if (!whole && !written_[block]) continue;
            std::size_t end = block + 1;  // neighbors go together
            while (end * BLOCK < size && (whole || written_[end])) ++end;
            const std::size_t last = std::min(end * BLOCK, size);
            out.value<u64>(block * BLOCK);
            out.array(items_.data() + block * BLOCK, last - block * BLOCK);
            block = end;
        }
        out.value<u64>(END);
    }
    // Reads what save wrote over what is there; returns the size.
    std::size_t load(Reader& in) {
        const u64 size = in.value<u64>();
        if (size > items_.capacity()) throw std::runtime_error("it holds more than this replay can");
        for (u64 first = in.value<u64>(); first != END; first = in.value<u64>()) {
            if (first > size) throw std::runtime_error("it is inconsistent");
            in.array(items_.data() + first, size - first);
        }
        return size;
    }
    // From here on, writes count as new.
    void forget() { written_.clear(); }

  private:
    static constexpr std::size_t BLOCK = 1024;
    static constexpr u64 END = ~u64{0};
    Reserved<T> items_;
    Reserved<u8> written_;
};

}  // namespace ddrl::replay
