// What the kernel's tests need: an expectation that names itself, and zeroed memory aligned as shared memory is.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#define EXPECT(condition)                                                                 \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: expected %s\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1);                                                                \
        }                                                                                 \
    } while (false)

#define RUN(test)                            \
    do {                                     \
        std::fprintf(stderr, "%s\n", #test); \
        test();                              \
    } while (false)

struct FreeMemory {
    void operator()(std::byte* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<std::byte, FreeMemory>;

// `bytes` of poison, 64-byte aligned.
inline Memory poisoned(size_t bytes) {
    const size_t rounded = (bytes + 63) / 64 * 64;
    Memory memory(static_cast<std::byte*>(std::aligned_alloc(64, rounded)));
    std::memset(memory.get(), 0xA5, rounded);
    return memory;
}
