// A 64-bit checksum of bytes at the speed of memory, alone or fused with a copy.
//
// Four independent lanes each fold 16 bytes by a 64 x 64 -> 128 bit multiplication (the mixing step of wyhash, Wang Yi 2019), so that four
// multiplications are in flight at once. It finds corruption and mixed versions; it is no defence against an adversary. The value depends
// on the length, and is the same on every little-endian machine.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ddrl {

static_assert(std::endian::native == std::endian::little, "layouts in shared memory and on the wire are little-endian");

namespace checksum_detail {

__extension__ using Wide = unsigned __int128;

inline constexpr uint64_t secret[5] = {0xa0761d6478bd642full, 0xe7037ed1a0b428dbull, 0x8ebc6af09c88c6e3ull, 0x589965cc75374cc3ull,
                                       0x1d8e4e27c47d124full};

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
    uint64_t lane[4] = {secret[1], secret[2], secret[3], secret[4]};

    void block(const std::byte* from) {  // 64 bytes
        for (size_t i = 0; i < 4; ++i) lane[i] = fold(lane[i] ^ word(from + 16 * i), secret[i] ^ word(from + 16 * i + 8)) + lane[i];
    }

    uint64_t finish(const std::byte* rest, size_t rest_bytes, size_t total) {  // rest_bytes < 64
        if (rest_bytes) {
            std::byte last[64] = {};
            std::memcpy(last, rest, rest_bytes);
            block(last);
        }
        return fold(fold(lane[0] ^ secret[0], lane[1] ^ secret[1]) ^ total, fold(lane[2] ^ secret[2], lane[3] ^ secret[3]) ^ secret[4]);
    }
};

}  // namespace checksum_detail

inline uint64_t checksum(const std::byte* data, size_t bytes) {
    checksum_detail::Lanes lanes;
    size_t done = 0;
    for (; done + 64 <= bytes; done += 64) lanes.block(data + done);
    return lanes.finish(data + done, bytes - done, bytes);
}

// Copy and return the checksum of what was copied, in one pass over memory: each piece is summed while it is in the first cache.
inline uint64_t copy_with_checksum(std::byte* out, const std::byte* data, size_t bytes) {
    constexpr size_t piece = 8192;
    checksum_detail::Lanes lanes;
    size_t done = 0;
    while (bytes - done >= 64) {
        const size_t whole = (bytes - done) / 64 * 64;
        const size_t length = whole < piece ? whole : piece;
        std::memcpy(out + done, data + done, length);
        for (size_t offset = 0; offset < length; offset += 64) lanes.block(out + done + offset);
        done += length;
    }
    std::memcpy(out + done, data + done, bytes - done);
    return lanes.finish(out + done, bytes - done, bytes);
}

}  // namespace ddrl
