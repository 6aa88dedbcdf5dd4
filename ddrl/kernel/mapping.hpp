// Memory that processes share: a file mapped whole, or anonymous pages that forks share. Holds no file descriptor.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <system_error>

namespace ddrl {

// Map `bytes` of the file `descriptor` (-1: anonymous, zeroed). Throws std::system_error.
inline void* map_shared(int descriptor, size_t bytes) {
    const int flags = descriptor < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    return memory;
}

// A mapping that unmaps itself.
struct Mapping {
    void* memory;
    size_t bytes;

    Mapping(int descriptor, size_t size) : memory(map_shared(descriptor, size)), bytes(size) {}
    ~Mapping() { munmap(memory, bytes); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
};

}  // namespace ddrl
