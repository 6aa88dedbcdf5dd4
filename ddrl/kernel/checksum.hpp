// A 64-bit checksum of bytes at the speed of memory, alone or fused with a copy.
//
// Eight independent lanes each fold 16 bytes by a 64 x 64 -> 128 bit multiplication (the mixing step of wyhash, Wang Yi 2019), so that the
// multiplier, not its latency, sets the pace. It finds corruption and mixed versions; it is no defence against an adversary. The value
// depends on the length, and is the same on every little-endian machine.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ddrl {

static_assert(std::endian::native == std::endian::little, "layouts in shared memory and on the wire are little-endian");

namespace checksum_detail {

__extension__ using Wide = unsigned __int128;

inline constexpr size_t num_lanes = 8;
inline constexpr size_t block_bytes = 16 * num_lanes;
inline constexpr uint64_t secret[num_lanes] = {0xa0761d6478bd642full, 0xe7037ed1a0b428dbull, 0x8ebc6af09c88c6e3ull, 0x589965cc75374cc3ull,
                                               0x1d8e4e27c47d124full, 0xeb44accab455d165ull, 0x2127599bf4325c37ull, 0x880355f21e6d1965ull};

inline uint64_t fold(uint64_t a, uint64_t b) {
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

inline uint64_t word(const std::byte* from) {
    uint64_t value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

struct Lanes {
    uint64_t lane[num_lanes];

    Lanes() {
        for (size_t i = 0; i < num_lanes; ++i) lane[i] = ~secret[i];
    }

    void block(const std::byte* from) {
        for (size_t i = 0; i < num_lanes; ++i) lane[i] = fold(lane[i] ^ word(from + 16 * i), secret[i] ^ word(from + 16 * i + 8)) + lane[i];
    }

    uint64_t finish(const std::byte* rest, size_t rest_bytes, size_t total) {  // rest_bytes < block_bytes; zeros fill the last block
        if (rest_bytes) {
            std::byte last[block_bytes] = {};
            std::memcpy(last, rest, rest_bytes);
            block(last);
        }
        uint64_t sum = total;
        for (size_t i = 0; i < num_lanes; ++i) sum = fold(sum ^ secret[i], lane[i] ^ secret[num_lanes - 1 - i]) + sum;
        return sum;
    }
};

}  // namespace checksum_detail

inline uint64_t checksum(const std::byte* data, size_t bytes) {
    checksum_detail::Lanes lanes;
    const size_t whole = bytes - bytes % checksum_detail::block_bytes;
    for (size_t done = 0; done < whole; done += checksum_detail::block_bytes) lanes.block(data + done);
    return lanes.finish(data + whole, bytes - whole, bytes);
}

namespace checksum_detail {

#if defined(__x86_64__)
// Moves of 32 bytes in place of 16: the multiplications then hide behind the copy.
__attribute__((target("avx2"))) inline uint64_t copy_wide(std::byte* out, const std::byte* data, size_t bytes) {
    typedef long long Bytes32 __attribute__((vector_size(32), aligned(1), may_alias));
    Lanes lanes;
    const size_t whole = bytes - bytes % block_bytes;
    for (size_t done = 0; done < whole; done += block_bytes) {
        for (size_t i = 0; i < block_bytes; i += 32)
            *reinterpret_cast<Bytes32*>(out + done + i) = *reinterpret_cast<const Bytes32*>(data + done + i);
        lanes.block(data + done);
    }
    if (whole < bytes) std::memcpy(out + whole, data + whole, bytes - whole);
    return lanes.finish(data + whole, bytes - whole, bytes);
}
#endif

inline uint64_t copy_narrow(std::byte* out, const std::byte* data, size_t bytes) {
    Lanes lanes;
    const size_t whole = bytes - bytes % block_bytes;
    for (size_t done = 0; done < whole; done += block_bytes) {
        std::memcpy(out + done, data + done, block_bytes);
        lanes.block(data + done);
    }
    if (whole < bytes) std::memcpy(out + whole, data + whole, bytes - whole);
    return lanes.finish(data + whole, bytes - whole, bytes);
}

}  // namespace checksum_detail

// Copy and return the checksum of what was read, in one pass over memory. `out` and `data` must not overlap.
inline uint64_t copy_with_checksum(std::byte* out, const std::byte* data, size_t bytes) {
#if defined(__x86_64__)
    static const bool wide = __builtin_cpu_supports("avx2");
    if (wide) return checksum_detail::copy_wide(out, data, bytes);
#endif
    return checksum_detail::copy_narrow(out, data, bytes);
}

}  // namespace ddrl
