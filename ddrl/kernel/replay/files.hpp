// Files of snapshots: written through a buffer and brought to the disk before they count, read as memory.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace ddrl::replay {

// A snapshot's way into a file, through a buffer.
class FileSink {
public:
    explicit FileSink(const std::string& path)
        : file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)) {
        if (file_ < 0) fail();
        held_.reserve(LIMIT);
    }
    ~FileSink() {
        if (file_ >= 0) ::close(file_);
    }
    void begin(std::size_t) {}
    void put(const void* data, std::size_t bytes) {
        const auto* from = static_cast<const char*>(data);
        if (held_.size() + bytes > LIMIT) flush();
        if (bytes > LIMIT)
            send(from, bytes);
        else
            held_.insert(held_.end(), from, from + bytes);
    }
    void finish() {
        flush();
        if (fsync(file_) != 0 || ::close(std::exchange(file_, -1)) != 0) fail();
    }

private:
    static constexpr std::size_t LIMIT = std::size_t{1} << 20;
    [[noreturn]] static void fail() {
        throw std::runtime_error("it cannot be written (" + std::string(std::strerror(errno)) + ")");
    }
    void flush() { send(held_.data(), held_.size()), held_.clear(); }
    void send(const char* from, std::size_t bytes) {
        while (bytes) {
            const ssize_t sent = ::write(file_, from, bytes);
            if (sent < 0 && errno == EINTR) continue;
            if (sent < 0) fail();
            from += sent, bytes -= static_cast<std::size_t>(sent);
        }
    }
    int file_;
    std::vector<char> held_;
};

// A file as memory, to read a snapshot from.
class MappedFile {
public:
    explicit MappedFile(const std::string& path) {
        const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat info{};
        if (file < 0 || fstat(file, &info) != 0) {
            const std::string reason = std::strerror(errno);
            if (file >= 0) close(file);
            throw std::runtime_error(path + " cannot be read (" + reason + ")");
        }
        bytes_ = static_cast<std::size_t>(info.st_size);
        data_ = bytes_ ? mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
        close(file);
        if (data_ == MAP_FAILED) throw std::runtime_error(path + " is empty or cannot be mapped");
        madvise(data_, bytes_, MADV_SEQUENTIAL);
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    ~MappedFile() {
        if (data_ != MAP_FAILED) munmap(data_, bytes_);
    }
    std::span<const byte> bytes() const { return {static_cast<const byte*>(data_), bytes_}; }

private:
    void* data_ = MAP_FAILED;
    std::size_t bytes_ = 0;
};

}  // namespace ddrl::replay
