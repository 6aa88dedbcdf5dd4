// How a model travels: codecs that make its float32 values smaller, and the headers of its chunks.
//
// Codecs: halves (bf16), bytes with a scale a block (int8), and the difference from another version, byte plane by byte
// plane, for a general compressor to shorten. Every function reads and writes each byte once and needs no alignment.
// Decoding uses one multiplication or a shift, which no compiler or machine rounds differently, so the same bytes give
// the same values everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "checksum.hpp"

namespace ddrl {

namespace codec_detail {

template <class T>
inline T load(const byte* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <class T>
inline void store(byte* to, T value) {
    std::memcpy(to, &value, sizeof value);
}

inline constexpr uint32_t magnitude = 0x7fffffff, infinity = 0x7f800000;

}  // namespace codec_detail

// bfloat16: the upper half of a float32, rounded to nearest, ties to even. NaN stays NaN.
inline void encode_bf16(byte* out, const byte* in, size_t values) {
    using namespace codec_detail;
    for (size_t i = 0; i < values; ++i) {
        const uint32_t bits = load<uint32_t>(in + 4 * i);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const uint32_t nan = (bits >> 16) | 0x40;
        store(out + 2 * i, static_cast<uint16_t>((bits & magnitude) > infinity ? nan : rounded));
    }
}

inline void decode_bf16(byte* out, const byte* in, size_t values) {
    using namespace codec_detail;
    for (size_t i = 0; i < values; ++i) store(out + 4 * i, static_cast<uint32_t>(load<uint16_t>(in + 2 * i)) << 16);
}

// int8: blocks of 256 values of a tensor share one float32 scale, the largest magnitude / 127; value = scale * byte,
// with an error of half a scale at most. Any range of a tensor can be encoded by itself, and decodes to the same values
// as the whole: blocks count from the tensor's first value, and the scale of a block that the range covers in part is
// that of the whole block. Bytes: the scales of all blocks touched, then the values. A block with a number that is not
// finite decodes to NaN throughout; magnitudes below 1e-35 decode to 0.
inline constexpr size_t int8_block = 256;

inline size_t int8_blocks(size_t first, size_t count) {  // touched by values [first, first + count)
    return count ? (first + count - 1) / int8_block - first / int8_block + 1 : 0;
}
inline size_t int8_bytes(size_t first, size_t count) { return count + 4 * int8_blocks(first, count); }

// Values [first, first + count) of `tensor`, which has `values` of them.
inline void encode_int8(byte* out, const byte* tensor, size_t values, size_t first, size_t count) {
    using namespace codec_detail;
    constexpr float round_to_integer =
        12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
    constexpr int32_t its_bits = 0x4b400000;
    const size_t blocks = int8_blocks(first, count);
    byte* bytes = out + 4 * blocks;
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
        byte* put = bytes + (from - first);
        for (size_t i = 0; i < to - from; ++i) {
            const float shifted = load<float>(tensor + 4 * (from + i)) * factor + round_to_integer;
            int32_t bits;
            std::memcpy(&bits, &shifted, 4);
            put[i] = static_cast<byte>(bits - its_bits);
        }
    }
}

inline void decode_int8(byte* out, const byte* in, size_t first, size_t count) {
    using namespace codec_detail;
    const size_t blocks = int8_blocks(first, count);
    const byte* bytes = in + 4 * blocks;
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

// The 32-bit words of `in` XOR those of `base` (null: unchanged), the lowest bytes of all words first, the highest
// last; up to 3 bytes that make no word follow. Bits that are alike in two versions, above all signs and exponents,
// become long runs of zeros.
inline void split_planes(byte* out, const byte* in, const byte* base, size_t bytes) {
    using namespace codec_detail;
    const size_t words = bytes / 4;
    byte *plane0 = out, *plane1 = out + words, *plane2 = out + 2 * words, *plane3 = out + 3 * words;
    const auto put = [&](size_t i, uint32_t word) {
        plane0[i] = static_cast<byte>(word);
        plane1[i] = static_cast<byte>(word >> 8);
        plane2[i] = static_cast<byte>(word >> 16);
        plane3[i] = static_cast<byte>(word >> 24);
    };
    if (base) {
        for (size_t i = 0; i < words; ++i) put(i, load<uint32_t>(in + 4 * i) ^ load<uint32_t>(base + 4 * i));
    } else {
        for (size_t i = 0; i < words; ++i) put(i, load<uint32_t>(in + 4 * i));
    }
    for (size_t i = 4 * words; i < bytes; ++i) out[i] = in[i] ^ (base ? base[i] : byte{0});
}

inline void join_planes(byte* out, const byte* in, const byte* base, size_t bytes) {
    using namespace codec_detail;
    const size_t words = bytes / 4;
    const byte *plane0 = in, *plane1 = in + words, *plane2 = in + 2 * words, *plane3 = in + 3 * words;
    const auto word = [&](size_t i) {
        return static_cast<uint32_t>(plane0[i]) | static_cast<uint32_t>(plane1[i]) << 8 |
               static_cast<uint32_t>(plane2[i]) << 16 | static_cast<uint32_t>(plane3[i]) << 24;
    };
    if (base) {
        for (size_t i = 0; i < words; ++i) store(out + 4 * i, word(i) ^ load<uint32_t>(base + 4 * i));
    } else {
        for (size_t i = 0; i < words; ++i) store(out + 4 * i, word(i));
    }
    for (size_t i = 4 * words; i < bytes; ++i) out[i] = in[i] ^ (base ? base[i] : byte{0});
}

// Headers of a model's chunks, written by the root and verified by every receiver; ddrl/distribution/chunks.py explains
// the fields and the bytes before the first header.
struct ChunkHeader {
    uint32_t sequence, index, length;
    uint16_t epoch, back;
    uint64_t checksum;  // of the chunk, and of the fields before this one
};
static_assert(sizeof(ChunkHeader) == 24);

// Headers and chunks of one model; chunk i is data[edges[i] .. edges[i + 1]]. `first_bytes`: bytes before the first
// header, which its checksum covers.
struct Chunks {
    byte* headers;
    size_t first_bytes;
    const byte* data;
    const int64_t* edges;

    ChunkHeader header(size_t index) const {
        ChunkHeader found;
        std::memcpy(&found, place(index), sizeof found);
        return found;
    }
    uint64_t checksum_of(size_t index) const {
        const size_t own = sizeof(ChunkHeader) - sizeof(uint64_t), before = index ? 0 : first_bytes;
        return checksum(data + edges[index], edges[index + 1] - edges[index]) ^
               checksum(place(index) - before, before + own);
    }
    // Fills in length and checksum; the other fields are kept.
    void seal(size_t index) {
        ChunkHeader made = header(index);
        made.length = static_cast<uint32_t>(edges[index + 1] - edges[index]);
        std::memcpy(place(index), &made, sizeof made);
        made.checksum = checksum_of(index);
        std::memcpy(place(index), &made, sizeof made);
    }
    // Whether it is this chunk of that model, as the root sent it.
    bool sound(size_t index, uint16_t epoch, uint32_t sequence) const {
        const ChunkHeader found = header(index);
        return found.epoch == epoch && found.sequence == sequence && found.index == index &&
               found.length == static_cast<uint64_t>(edges[index + 1] - edges[index]) &&
               found.checksum == checksum_of(index);
    }

private:
    byte* place(size_t index) const { return headers + first_bytes + index * sizeof(ChunkHeader); }
};

}  // namespace ddrl
