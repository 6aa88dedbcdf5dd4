// Bytes of a snapshot's structure: what is written in one order is read in the same order, and reading past the end
// throws.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "memory.hpp"

namespace ddrl::replay {

class Writer {
public:
    template <class T>
    void value(const T& item) {
        static_assert(std::is_trivially_copyable_v<T>);
        raw(&item, sizeof item);
    }
    template <class T>
    void array(const T* items, std::size_t count) {
        value<u64>(count);
        raw(items, count * sizeof(T));
    }
    void raw(const void* data, std::size_t bytes) {
        const auto* begin = static_cast<const byte*>(data);
        bytes_.insert(bytes_.end(), begin, begin + bytes);
    }
    std::vector<byte>& bytes() { return bytes_; }

private:
    std::vector<byte> bytes_;
};

class Reader {
public:
    Reader(const byte* data, std::size_t bytes) : at_(data), end_(data + bytes) {}
    template <class T>
    T value() {
        T item;
        std::memcpy(&item, take(sizeof item), sizeof item);
        return item;
    }
    // An array written by Writer::array into `items`, which holds at most `most`; returns its count.
    template <class T>
    std::size_t array(T* items, std::size_t most) {
        const u64 count = value<u64>();
        if (count > most) throw std::runtime_error("the snapshot holds more than this replay can");
        const byte* from = take(count * sizeof(T));
        if (count) std::memcpy(items, from, count * sizeof(T));
        return count;
    }
    const byte* take(std::size_t bytes) {
        if (bytes > left()) throw std::runtime_error("the snapshot ends too early");
        const byte* begin = at_;
        at_ += bytes;
        return begin;
    }
    // A count of items of `bytes` each that follow, refused where the snapshot is too short for them.
    std::size_t count(std::size_t bytes) {
        const u64 count = value<u64>();
        if (count > left() / bytes) throw std::runtime_error("the snapshot ends too early");
        return count;
    }
    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }

private:
    const byte *at_, *end_;
};

}  // namespace ddrl::replay
