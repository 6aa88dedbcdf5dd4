// Fewer bytes for a model's float32 values on their way: halves (bf16), bytes with a scale a block (int8), and the
// difference from another version, byte plane by byte plane, for a general compressor to shorten.
//
// Every function reads and writes each byte once and needs no alignment. Decoding uses one multiplication or a shift,
// nothing that compilers or machines may round differently, so the same bytes give the same values everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace ddrl {

namespace codec_detail {

template <class T>
inline T load(const std::byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class T>
inline void store(std::byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

inline constexpr uint32_t magnitude = 0x7fffffff, infinity = 0x7f800000;

}  // namespace codec_detail

// bfloat16: the upper half of a float32, rounded to nearest, ties to even. A number that is none stays one.
inline void encode_bf16(std::byte* out, const std::byte* in, size_t values) {
    using namespace codec_detail;
    for (size_t i = 0; i < values; ++i) {
        const uint32_t bits = load<uint32_t>(in + 4 * i);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const uint32_t nan = (bits >> 16) | 0x40;
        store(out + 2 * i, static_cast<uint16_t>((bits & magnitude) > infinity ? nan : rounded));
    }
}

inline void decode_bf16(std::byte* out, const std::byte* in, size_t values) {
    using namespace codec_detail;
    for (size_t i = 0; i < values; ++i) store(out + 4 * i, static_cast<uint32_t>(load<uint16_t>(in + 2 * i)) << 16);
}

// int8: blocks of 256 values of a tensor share one float32 scale, the largest magnitude / 127; value = scale * byte,
// off by half a scale at most. Any stretch of a tensor can be coded by itself, and decodes to the same values as the
// whole: blocks count from the tensor's first value, and one that reaches beyond the stretch keeps its scale. Bytes:
// the scales of all blocks touched, then the values. A block with a number that is not finite decodes to NaN
// throughout; below 1e-35 everything is 0.
inline constexpr size_t int8_block = 256;

inline size_t int8_blocks(size_t first, size_t count) {  // touched by values [first, first + count)
    return count ? (first + count - 1) / int8_block - first / int8_block + 1 : 0;
}
inline size_t int8_bytes(size_t first, size_t count) { return count + 4 * int8_blocks(first, count); }

// Values [first, first + count) of `tensor`, which has `values` of them.
inline void encode_int8(std::byte* out, const std::byte* tensor, size_t values, size_t first, size_t count) {
    using namespace codec_detail;
    constexpr float round_to_integer =
        12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    constexpr int32_t its_bits = 0x4b400000;
    const size_t blocks = int8_blocks(first, count);
    std::byte* bytes = out + 4 * blocks;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t begin = (first / int8_block + block) * int8_block,
                     end = values - begin < int8_block ? values : begin + int8_block;
        int32_t largest = 0;  // magnitudes of floats are ordered like their bits
        for (size_t i = begin; i < end; ++i) {
            const auto bits = static_cast<int32_t>(load<uint32_t>(tensor + 4 * i) & magnitude);
            largest = bits > largest ? bits : largest;
        }
        float top;
        std::memcpy(&top, &largest, 4);
        const bool finite = largest < static_cast<int32_t>(infinity), small = top < 1e-35f;
        store(out + 4 * block, finite ? (small ? 0.0f : top / 127.0f) : std::numeric_limits<float>::quiet_NaN());
        const float factor = finite && !small ? 127.0f / top : 0.0f;
        const size_t from = begin < first ? first : begin, to = end < first + count ? end : first + count;
        std::byte* put = bytes + (from - first);
        for (size_t i = 0; i < to - from; ++i) {
            const float shifted = load<float>(tensor + 4 * (from + i)) * factor + round_to_integer;
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            put[i] = static_cast<std::byte>(bits - its_bits);
        }
    }
}

inline void decode_int8(std::byte* out, const std::byte* in, size_t first, size_t count) {
    using namespace codec_detail;
    const size_t blocks = int8_blocks(first, count);
    const std::byte* bytes = in + 4 * blocks;
    size_t done = 0;
    for (size_t block = 0; block < blocks; ++block) {
        const size_t end = (first / int8_block + block + 1) * int8_block,
                     stop = end < first + count ? end - first : count;
        const float scale = load<float>(in + 4 * block);
        for (size_t i = done; i < stop; ++i)
            store(out + 4 * i, scale * static_cast<float>(static_cast<int8_t>(bytes[i])));
        done = stop;
    }
}

// The words of `in` XOR those of `base` (null: as they are), lowest bytes of all words first, highest last; up to 3
// bytes that make no word follow. What is alike in two versions, signs and exponents above all, becomes long runs of
// zeros.
inline void split_planes(std::byte* out, const std::byte* in, const std::byte* base, size_t bytes) {
    using namespace codec_detail;
    const size_t words = bytes / 4;
    std::byte *plane0 = out, *plane1 = out + words, *plane2 = out + 2 * words, *plane3 = out + 3 * words;
    const auto put = [&](size_t i, uint32_t word) {
        plane0[i] = static_cast<std::byte>(word);
        plane1[i] = static_cast<std::byte>(word >> 8);
        plane2[i] = static_cast<std::byte>(word >> 16);
        plane3[i] = static_cast<std::byte>(word >> 24);
    };
    if (base) {
        for (size_t i = 0; i < words; ++i) put(i, load<uint32_t>(in + 4 * i) ^ load<uint32_t>(base + 4 * i));
    } else {
        for (size_t i = 0; i < words; ++i) put(i, load<uint32_t>(in + 4 * i));
    }
    for (size_t i = 4 * words; i < bytes; ++i) out[i] = in[i] ^ (base ? base[i] : std::byte{0});
}

inline void join_planes(std::byte* out, const std::byte* in, const std::byte* base, size_t bytes) {
    using namespace codec_detail;
    const size_t words = bytes / 4;
    const std::byte *plane0 = in, *plane1 = in + words, *plane2 = in + 2 * words, *plane3 = in + 3 * words;
    const auto word = [&](size_t i) {
        return static_cast<uint32_t>(plane0[i]) | static_cast<uint32_t>(plane1[i]) << 8 |
               static_cast<uint32_t>(plane2[i]) << 16 | static_cast<uint32_t>(plane3[i]) << 24;
    };
    if (base) {
        for (size_t i = 0; i < words; ++i) store(out + 4 * i, word(i) ^ load<uint32_t>(base + 4 * i));
    } else {
        for (size_t i = 0; i < words; ++i) store(out + 4 * i, word(i));
    }
    for (size_t i = 4 * words; i < bytes; ++i) out[i] = in[i] ^ (base ? base[i] : std::byte{0});
}

}  // namespace ddrl
