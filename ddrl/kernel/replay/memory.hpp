// Memory of the replay, independent of Python and of what it holds: flat arrays that never move, bytes of a snapshot,
// and arrays that know which of their blocks changed since the last snapshot.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ddrl::replay {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using std::byte;

inline constexpr u32 NONE = 0xFFFFFFFFu;
inline constexpr size_t HUGE_PAGE = size_t{2} << 20;

// What is found wrong with a structure, or with a snapshot.
inline void fail_if(bool wrong, const char* words) {
    if (wrong) throw std::runtime_error(words);
}

inline size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// For maps of integer keys: distributes keys that are multiples of one number too.
struct MixedHash {
    size_t operator()(u64 key) const { return (key * 0x9E3779B97F4A7C15ull) >> 32; }
};
template <class Map>
size_t map_bytes(const Map& map) {
    return map.bucket_count() * (sizeof(typename Map::value_type) + sizeof(u64));
}

// Address space of `bytes`, aligned to a huge page where it is large; zero until touched.
inline byte* reserve_pages(size_t bytes, int protection) {
    const bool large = bytes >= 2 * HUGE_PAGE;
    const size_t length = large ? bytes + HUGE_PAGE : bytes;
    void* raw = mmap(nullptr, length, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        throw std::runtime_error("replay cannot reserve " + std::to_string(length) + " bytes of address space (" +
                                 std::strerror(errno) + "): lower replay.capacity, or raise the limit (ulimit -v)");
    auto* begin = static_cast<byte*>(raw);
    if (!large) return begin;
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const size_t lead = round_up(address, HUGE_PAGE) - address;
    if (lead) munmap(begin, lead);
    if (HUGE_PAGE - lead) munmap(begin + lead + bytes, HUGE_PAGE - lead);
    madvise(begin + lead, bytes, MADV_HUGEPAGE);
    return begin + lead;
}

inline constexpr size_t PAGE = 4096;

// An array of `capacity` elements of a trivial type, zero at first, at an address that never changes: pages are
// committed when they are touched, and readers keep plain pointers while writers fill it.
template <class T>
class Reserved {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    Reserved() = default;
    explicit Reserved(size_t capacity) : capacity_(capacity), bytes_(round_up(capacity * sizeof(T) + 1, PAGE)) {
        data_ = reinterpret_cast<T*>(reserve_pages(bytes_, PROT_READ | PROT_WRITE));
    }
    Reserved(Reserved&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)),
          capacity_(std::exchange(other.capacity_, 0)),
          bytes_(std::exchange(other.bytes_, 0)) {}
    Reserved& operator=(Reserved&& other) noexcept {
        std::swap(data_, other.data_), std::swap(capacity_, other.capacity_), std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Reserved() {
        if (data_) munmap(data_, bytes_);
    }
    T& operator[](size_t index) { return data_[index]; }
    const T& operator[](size_t index) const { return data_[index]; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    size_t capacity() const { return capacity_; }
    // Back to zeros, and the pages back to the system.
    void clear() {
        if (data_) madvise(data_, bytes_, MADV_DONTNEED);
    }

private:
    T* data_ = nullptr;
    size_t capacity_ = 0, bytes_ = 0;
};

// `max_chunks` chunks of `chunk_bytes`, committed in order of their number; in RAM, or in the file `path`, which loses
// its name as soon as it is made: its room is free again however the process ends.
class Arena {
public:
    Arena(size_t chunk_bytes, size_t max_chunks, std::string path)
        : chunk_bytes_(chunk_bytes),
          max_chunks_(max_chunks),
          reserved_(round_up(chunk_bytes * max_chunks, PAGE)),
          path_(std::move(path)) {
        if (!path_.empty()) {
            file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
            if (file_ < 0)
                throw std::runtime_error("replay cannot create the buffer file " + path_ + " (" + std::strerror(errno) +
                                         "): name a new file on a disk with room");
            unlink(path_.c_str());
        }
        base_ = reserve_pages(reserved_, file_ < 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        munmap(base_, reserved_);
        if (file_ >= 0) close(file_);
    }
    byte* chunk(size_t number) { return base_ + number * chunk_bytes_; }
    const byte* chunk(size_t number) const { return base_ + number * chunk_bytes_; }
    const byte* base() const { return base_; }
    size_t chunk_bytes() const { return chunk_bytes_; }
    size_t max_chunks() const { return max_chunks_; }
    bool in_file() const { return file_ >= 0; }

    // Makes chunks 0 .. count - 1 usable; in a file it takes the room on disk now, so that a full disk is an error here
    // and not a SIGBUS later.
    void commit(size_t count) {
        const size_t wanted = round_up(count * chunk_bytes_, PAGE);
        if (file_ < 0 || wanted <= committed_) return;
        size_t target = round_up(wanted, EXTENT);
        if (target > reserved_) target = reserved_;
        const size_t extra = target - committed_;
        if (const int error = posix_fallocate(file_, static_cast<off_t>(committed_), static_cast<off_t>(extra)))
            throw std::runtime_error("replay cannot grow its buffer file " + path_ + " by " + std::to_string(extra) +
                                     " bytes (" + std::strerror(error) +
                                     "): free room on that disk or lower replay.capacity");
        if (mmap(base_ + committed_, extra, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file_,
                 static_cast<off_t>(committed_)) == MAP_FAILED)
            throw std::runtime_error("replay cannot map its buffer file " + path_ + " (" + std::strerror(errno) + ")");
        committed_ = target;
    }

private:
    static constexpr size_t EXTENT = size_t{32} << 20;
    size_t chunk_bytes_, max_chunks_, reserved_, committed_ = 0;
    std::string path_;
    int file_ = -1;
    byte* base_ = nullptr;
};

// Bytes of a snapshot's structure: values are read in the order in which they were written, and reading past the end
// throws.
class Writer {
public:
    template <class T>
    void value(const T& item) {
        static_assert(std::is_trivially_copyable_v<T>);
        raw(&item, sizeof item);
    }
    template <class T>
    void array(const T* items, size_t count) {
        value<u64>(count);
        raw(items, count * sizeof(T));
    }
    void raw(const void* data, size_t bytes) {
        const auto* begin = static_cast<const byte*>(data);
        bytes_.insert(bytes_.end(), begin, begin + bytes);
    }
    std::vector<byte>& bytes() { return bytes_; }

private:
    std::vector<byte> bytes_;
};

class Reader {
public:
    Reader(const byte* data, size_t bytes) : at_(data), end_(data + bytes) {}
    template <class T>
    T value() {
        T item;
        std::memcpy(&item, take(sizeof item), sizeof item);
        return item;
    }
    // An array written by Writer::array into `items`, which holds at most `most`; returns its count.
    template <class T>
    size_t array(T* items, size_t most) {
        const u64 count = value<u64>();
        fail_if(count > most, "the snapshot holds more than this replay can");
        const byte* from = take(count * sizeof(T));
        if (count) std::memcpy(items, from, count * sizeof(T));
        return count;
    }
    const byte* take(size_t bytes) {
        fail_if(bytes > left(), "the snapshot ends too early");
        const byte* begin = at_;
        at_ += bytes;
        return begin;
    }
    // A count of items of `bytes` each that follow, refused where the snapshot is too short for them.
    size_t count(size_t bytes) {
        const u64 count = value<u64>();
        fail_if(count > left() / bytes, "the snapshot ends too early");
        return count;
    }
    size_t left() const { return end_ - at_; }

private:
    const byte *at_, *end_;
};

// Arrays that mark which of their blocks were written since the last snapshot, so that an incremental snapshot holds
// only those. Tracked<T> is a fixed array that never moves, TrackedVector<T> one that grows.
inline constexpr u64 END_OF_BLOCKS = ~u64{0};

// The first `size` items: all of them, or the blocks of `block` items that `written` names.
template <class T>
void save_blocks(Writer& out, const T* items, size_t size, const u8* written, size_t block, bool whole) {
    out.value<u64>(size);
    for (size_t at = 0; at * block < size; ++at) {
        if (!whole && !written[at]) continue;
        size_t end = at + 1;  // neighbors go together
        while (end * block < size && (whole || written[end])) ++end;
        const size_t last = std::min(end * block, size);
        out.value<u64>(at * block);
        out.array(items + at * block, last - at * block);
        at = end;
    }
    out.value<u64>(END_OF_BLOCKS);
}
// Reads what save_blocks wrote after the size, over the present items.
template <class T>
void load_blocks(Reader& in, T* items, size_t size) {
    for (u64 first = in.value<u64>(); first != END_OF_BLOCKS; first = in.value<u64>()) {
        fail_if(first > size, "it is inconsistent");
        in.array(items + first, size - first);
    }
}

template <class T>
class Tracked {
public:
    Tracked() = default;
    explicit Tracked(size_t capacity) : items_(capacity), written_(capacity / BLOCK + 1) {}

    const T& operator[](size_t index) const { return items_[index]; }
    const T* data() const { return items_.data(); }
    size_t capacity() const { return items_.capacity(); }
    void set(size_t index, const T& item) { change(index) = item; }
    T& change(size_t index) {
        written_[index / BLOCK] = 1;
        return items_[index];
    }
    void save(Writer& out, size_t size, bool whole) const {
        save_blocks(out, items_.data(), size, written_.data(), BLOCK, whole);
    }
    // Reads what save wrote over the present items; returns the size.
    size_t load(Reader& in) {
        const u64 size = in.value<u64>();
        fail_if(size > items_.capacity(), "it holds more than this replay can");
        load_blocks(in, items_.data(), size);
        return size;
    }
    // From here on, writes count as new.
    void clear_written() { written_.clear(); }

private:
    static constexpr size_t BLOCK = 256;
    Reserved<T> items_;
    Reserved<u8> written_;
};

template <class T>
class TrackedVector {
public:
    const T& operator[](size_t index) const { return items_[index]; }
    const T* data() const { return items_.data(); }
    size_t size() const { return items_.size(); }
    size_t nbytes() const { return items_.capacity() * sizeof(T) + written_.capacity(); }
    void set(size_t index, const T& item) { change(index) = item; }
    T& change(size_t index) {
        written_[index / BLOCK] = 1;
        return items_[index];
    }
    // New items are T{} and count as written.
    void resize(size_t size) {
        const size_t before = items_.size();
        items_.resize(size);
        written_.resize(size / BLOCK + 1);
        for (size_t at = before; at < size; at += BLOCK) written_[at / BLOCK] = 1;
        if (size > before) written_[(size - 1) / BLOCK] = 1;
    }
    void save(Writer& out, bool whole) const {
        save_blocks(out, items_.data(), items_.size(), written_.data(), BLOCK, whole);
    }
    void load(Reader& in) {
        const u64 size = in.value<u64>();
        fail_if(size > items_.size() + in.left() / sizeof(T), "it is inconsistent");  // new items are in the snapshot
        resize(size);
        load_blocks(in, items_.data(), size);
    }
    void clear_written() { std::fill(written_.begin(), written_.end(), u8{0}); }

private:
    static constexpr size_t BLOCK = 32;
    std::vector<T> items_;
    std::vector<u8> written_ = std::vector<u8>(1);
};

}  // namespace ddrl::replay
