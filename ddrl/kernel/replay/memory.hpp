// Flat memory whose pages are committed as they are touched, so that nothing ever moves: readers keep plain pointers
// while writers grow it.
//
// Reserved<T>: one array in RAM. Arena: fixed-size chunks in RAM or in a file (a buffer larger than RAM). Independent
// of Python and of the replay.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

namespace ddrl::replay {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using std::byte;

inline constexpr u32 NONE = 0xFFFFFFFFu;
inline constexpr std::size_t HUGE_PAGE = std::size_t{2} << 20;

inline std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }

// Address space of `bytes`, aligned to a huge page where it is large; zero until touched.
inline byte* reserve_pages(std::size_t bytes, int protection) {
    const bool large = bytes >= 2 * HUGE_PAGE;
    const std::size_t length = large ? bytes + HUGE_PAGE : bytes;
    void* raw = mmap(nullptr, length, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED)
        throw std::runtime_error("replay cannot reserve " + std::to_string(length) + " bytes of address space (" +
                                 std::strerror(errno) + "): lower replay.capacity, or raise the limit (ulimit -v)");
    auto* begin = static_cast<byte*>(raw);
    if (!large) return begin;
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const std::size_t lead = round_up(address, HUGE_PAGE) - address;
    if (lead) munmap(begin, lead);
    if (HUGE_PAGE - lead) munmap(begin + lead + bytes, HUGE_PAGE - lead);
    madvise(begin + lead, bytes, MADV_HUGEPAGE);
    return begin + lead;
}

inline constexpr std::size_t PAGE = 4096;

// An array of `capacity` elements of a trivial type, zero at first, at an address that never changes.
template <class T>
class Reserved {
    static_assert(std::is_trivially_copyable_v<T>);

public:
    Reserved() = default;
    explicit Reserved(std::size_t capacity) : capacity_(capacity), bytes_(round_up(capacity * sizeof(T) + 1, PAGE)) {
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
    T& operator[](std::size_t index) { return data_[index]; }
    const T& operator[](std::size_t index) const { return data_[index]; }
    T* data() { return data_; }
    const T* data() const { return data_; }
    std::size_t capacity() const { return capacity_; }
    // Back to zeros, and the pages back to the system.
    void clear() {
        if (data_) madvise(data_, bytes_, MADV_DONTNEED);
    }

private:
    T* data_ = nullptr;
    std::size_t capacity_ = 0, bytes_ = 0;
};

// `max_chunks` chunks of `chunk_bytes`, committed in order of their number; in RAM, or in the file `path` (created,
// unlinked with the arena).
class Arena {
public:
    Arena(std::size_t chunk_bytes, std::size_t max_chunks, std::string path)
        : chunk_bytes_(chunk_bytes),
          max_chunks_(max_chunks),
          reserved_(round_up(chunk_bytes * max_chunks, PAGE)),
          path_(std::move(path)) {
        if (!path_.empty()) {
            file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
            if (file_ < 0)
                throw std::runtime_error("replay cannot create the buffer file " + path_ + " (" + std::strerror(errno) +
                                         "): name a new file on a disk with room");
        }
        base_ = reserve_pages(reserved_, file_ < 0 ? PROT_READ | PROT_WRITE : PROT_NONE);
    }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    ~Arena() {
        munmap(base_, reserved_);
        if (file_ >= 0) close(file_), unlink(path_.c_str());
    }
    byte* chunk(std::size_t number) { return base_ + number * chunk_bytes_; }
    const byte* chunk(std::size_t number) const { return base_ + number * chunk_bytes_; }
    const byte* base() const { return base_; }
    std::size_t chunk_bytes() const { return chunk_bytes_; }
    std::size_t max_chunks() const { return max_chunks_; }
    bool in_file() const { return file_ >= 0; }

    // Makes chunks 0 .. count - 1 usable; in a file it takes the room on disk now, so that a full disk is an error here
    // and not a SIGBUS later.
    void commit(std::size_t count) {
        const std::size_t wanted = round_up(count * chunk_bytes_, PAGE);
        if (file_ < 0 || wanted <= committed_) return;
        std::size_t target = round_up(wanted, EXTENT);
        if (target > reserved_) target = reserved_;
        const std::size_t extra = target - committed_;
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
    static constexpr std::size_t EXTENT = std::size_t{32} << 20;
    std::size_t chunk_bytes_, max_chunks_, reserved_, committed_ = 0;
    std::string path_;
    int file_ = -1;
    byte* base_ = nullptr;
};

}  // namespace ddrl::replay
