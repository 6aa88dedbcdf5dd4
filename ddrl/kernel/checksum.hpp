// A 64-bit checksum of bytes at the speed of memory: of a whole, fused with a copy, or of bytes that come in parts.
//
// Eight lanes take 64 bytes at a time by the step of XXH3 (Yann Collet 2019): a 32 x 32 -> 64 bit multiplication, which
// every vector unit has, and the bytes themselves added to the lane beside it. Keys differ by place within a block of 1
// KiB, a block ends in a scramble, and the end folds the lanes by 64 x 64 -> 128 bit multiplications (wyhash, Wang Yi
// 2019). It finds corruption and mixed versions; it is no defence against an adversary. The value depends on the
// length, and is the same on every little-endian machine and with every vector unit.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ddrl {

using std::byte;

static_assert(std::endian::native == std::endian::little, "layouts in shared memory and on the wire are little-endian");

namespace checksum_detail {

__extension__ using Wide = unsigned __int128;

inline constexpr size_t num_lanes = 8, stripe_bytes = 8 * num_lanes, num_stripes = 16,
                        block_bytes = num_stripes * stripe_bytes;
inline constexpr uint64_t prime = 0x9E3779B1;  // of the scramble, 32 bits

// Stripe i of a block takes keys[i .. i + 8), the scramble keys[16 .. 24), the end both.
inline constexpr auto keys = [] {
    std::array<uint64_t, num_stripes + num_lanes> made{};
    uint64_t state = 0;
    for (auto& key : made) {  // splitmix64, Steele et al. 2014
        uint64_t x = state += 0x9E3779B97F4A7C15ull;
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
        x = (x ^ x >> 27) * 0x94D049BB133111EBull;
        key = x ^ x >> 31;
    }
    return made;
}();

inline uint64_t fold(uint64_t a, uint64_t b) {
    const Wide product = static_cast<Wide>(a) * b;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

struct alignas(64) Lanes {
    uint64_t lane[num_lanes];

    Lanes() {
        for (size_t i = 0; i < num_lanes; ++i) lane[i] = ~keys[i];
    }

    void stripe(const byte* from, size_t place) {
        uint64_t data[num_lanes];
        std::memcpy(data, from, sizeof data);
        for (size_t i = 0; i < num_lanes; ++i) {
            const uint64_t mixed = data[i] ^ keys[place + i];
            lane[i] += (mixed & 0xFFFFFFFF) * (mixed >> 32) + data[i ^ 1];
        }
    }

    void scramble() {
        for (size_t i = 0; i < num_lanes; ++i) lane[i] = (lane[i] ^ lane[i] >> 47 ^ keys[num_stripes + i]) * prime;
    }

    // The checksum, given what is left after whole blocks; zeros fill the last stripe, and `total` distinguishes them
    // from zeros of the data.
    uint64_t finish(const byte* rest, size_t rest_bytes, size_t total) {
        size_t place = 0;
        for (; rest_bytes >= stripe_bytes; rest_bytes -= stripe_bytes, rest += stripe_bytes) stripe(rest, place++);
        if (rest_bytes) {
            byte last[stripe_bytes] = {};
            std::memcpy(last, rest, rest_bytes);
            stripe(last, place);
        }
        uint64_t sum = total;
        for (size_t i = 0; i < num_lanes; ++i) sum = fold(sum ^ keys[i], lane[i] ^ keys[num_stripes + i]) + sum;
        return sum;
    }
};

// What is done with the bytes besides. `stream`: stores that bypass the caches and read nothing from the destination
// first (it must be aligned to 64 bytes).
enum class To { nothing, copy, stream };
inline constexpr size_t ahead =
    2048;  // [bytes] a stream prefetches; the processor by itself stops at the end of a page

template <To to>
void blocks_plain(Lanes& lanes, byte* out, const byte* data, size_t blocks) {
    for (; blocks; --blocks) {
        for (size_t i = 0; i < num_stripes; ++i, data += stripe_bytes) {
            if constexpr (to != To::nothing) {
                std::memcpy(out, data, stripe_bytes);
                out += stripe_bytes;
            }
            lanes.stripe(data, i);
        }
        lanes.scramble();
    }
}

#if defined(__x86_64__)

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpsabi"  // everything that has these types is inlined
typedef uint64_t Numbers64 __attribute__((vector_size(64)));
typedef uint64_t Numbers32 __attribute__((vector_size(32)));
typedef int Words64 __attribute__((vector_size(64)));
typedef int Words32 __attribute__((vector_size(32)));

// The same in registers of one type, of the instruction set of the function that this is inlined into. Lanes are
// exchanged with those beside them once a block, for all its bytes together.
template <class Numbers, class Words, To to>
__attribute__((always_inline)) inline void blocks_by(Lanes& lanes, byte* out, const byte* data, size_t blocks) {
    constexpr size_t width = sizeof(Numbers), parts = stripe_bytes / width;
    Numbers lane[parts];
    std::memcpy(lane, lanes.lane, stripe_bytes);
    for (; blocks; --blocks) {
        Numbers sum[parts] = {};
        for (size_t i = 0; i < num_stripes; ++i) {
            if constexpr (to == To::stream) _mm_prefetch(reinterpret_cast<const char*>(data) + ahead, _MM_HINT_NTA);
            for (size_t part = 0; part < parts; ++part, data += width) {
                Numbers bytes, key;
                std::memcpy(&bytes, data, width);
                std::memcpy(&key, &keys[i + part * width / 8], width);
                if constexpr (to == To::copy) std::memcpy(out, &bytes, width);
                for (size_t at = 0; to == To::stream && at < width; at += 16)
                    _mm_stream_si128(
                        reinterpret_cast<__m128i*>(out + at),
                        __m128i{static_cast<long long>(bytes[at / 8]), static_cast<long long>(bytes[at / 8 + 1])});
                if constexpr (to != To::nothing) out += width;
                const Numbers mixed = bytes ^ key, high = mixed >> 32;
#if defined(__clang__)
                lane[part] += (mixed & 0xFFFFFFFF) * high;
#else  // GCC does not find the instruction
                if constexpr (width == 64)
                    lane[part] += (Numbers)__builtin_ia32_pmuludq512_mask((Words)mixed, (Words)high, __m512i{}, 0xFF);
                else
                    lane[part] += (Numbers)__builtin_ia32_pmuludq256((Words)mixed, (Words)high);
#endif
                sum[part] += bytes;
            }
        }
        uint64_t beside[num_lanes];
        for (size_t k = 0; k < num_lanes; ++k) beside[k] = sum[(k ^ 1) * 8 / width][(k ^ 1) % (width / 8)];
        for (size_t part = 0; part < parts; ++part) {
            Numbers key, other;
            std::memcpy(&key, &keys[num_stripes + part * width / 8], width);
            std::memcpy(&other, beside + part * width / 8, width);
            lane[part] += other;
            lane[part] = (lane[part] ^ lane[part] >> 47 ^ key) * prime;
        }
    }
    std::memcpy(lanes.lane, lane, stripe_bytes);
    if constexpr (to == To::stream) _mm_sfence();  // in memory before the version is sealed
}

template <To to>
__attribute__((target("avx512f"))) void blocks_avx512(Lanes& lanes, byte* out, const byte* data, size_t blocks) {
    blocks_by<Numbers64, Words64, to>(lanes, out, data, blocks);
}

template <To to>
__attribute__((target("avx2"))) void blocks_avx2(Lanes& lanes, byte* out, const byte* data, size_t blocks) {
    blocks_by<Numbers32, Words32, to>(lanes, out, data, blocks);
}
#pragma GCC diagnostic pop

#endif

using Blocks = void (*)(Lanes&, byte*, const byte*, size_t);

template <To to>
Blocks fastest_blocks() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) return blocks_avx512<to>;
    if (__builtin_cpu_supports("avx2")) return blocks_avx2<to>;
#endif
    return blocks_plain<to>;
}

inline uint64_t whole(Blocks blocks, byte* out, const byte* data, size_t bytes) {
    Lanes lanes;
    const size_t before = bytes - bytes % block_bytes;
    blocks(lanes, out, data, before / block_bytes);
    if (out && before < bytes) std::memcpy(out + before, data + before, bytes - before);
    return lanes.finish(data + before, bytes - before, bytes);
}

}  // namespace checksum_detail

inline constexpr size_t stream_bytes =
    4 << 20;  // from here on a copy is no longer in a core's own cache when it is read

inline uint64_t checksum(const byte* data, size_t bytes) {
    static const checksum_detail::Blocks blocks = checksum_detail::fastest_blocks<checksum_detail::To::nothing>();
    return checksum_detail::whole(blocks, nullptr, data, bytes);
}

// Copies and returns the checksum of what was read, in one pass over memory. `out` and `data` must not overlap. Large
// copies to aligned memory (a mailbox's slots) bypass the caches: nothing is read from `out` first, so it takes less
// time than memcpy.
inline uint64_t copy_with_checksum(byte* out, const byte* data, size_t bytes) {
    using checksum_detail::To;
    static const checksum_detail::Blocks copy = checksum_detail::fastest_blocks<To::copy>();
    static const checksum_detail::Blocks stream = checksum_detail::fastest_blocks<To::stream>();
    const bool past = bytes >= stream_bytes && reinterpret_cast<uintptr_t>(out) % 64 == 0;
    return checksum_detail::whole(past ? stream : copy, out, data, bytes);
}

// The checksum of bytes that come in parts of any sizes.
class Checksum {
public:
    void add(const void* data, size_t bytes) {
        using namespace checksum_detail;
        static const Blocks blocks = fastest_blocks<To::nothing>();
        const auto* from = static_cast<const byte*>(data);
        total_ += bytes;
        if (held_bytes_) {
            const size_t part = std::min(bytes, block_bytes - held_bytes_);
            std::memcpy(held_ + held_bytes_, from, part);
            held_bytes_ += part;
            from += part;
            bytes -= part;
            if (held_bytes_ < block_bytes) return;
            blocks(lanes_, nullptr, held_, 1);
        }
        const size_t whole = bytes - bytes % block_bytes;
        blocks(lanes_, nullptr, from, whole / block_bytes);
        held_bytes_ = bytes - whole;
        if (held_bytes_) std::memcpy(held_, from + whole, held_bytes_);
    }
    uint64_t value() const { return checksum_detail::Lanes(lanes_).finish(held_, held_bytes_, total_); }

private:
    checksum_detail::Lanes lanes_;
    byte held_[checksum_detail::block_bytes];
    size_t held_bytes_ = 0, total_ = 0;
};

}  // namespace ddrl
