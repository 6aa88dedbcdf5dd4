// Random numbers of the selectors, and the vector width of the processor.
#pragma once

#include <span>

#include "memory.hpp"

// Whether the compiler can make code for several vector widths in one file.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DDRL_REPLAY_WIDE 1
#else
#define DDRL_REPLAY_WIDE 0
#endif

namespace ddrl::replay {

// Bytes of the widest vectors: 64 (AVX-512), 32 (AVX2) or 16.
inline int lane_bytes() {
#if DDRL_REPLAY_WIDE
    static const int lane =
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
            ? 64
        : __builtin_cpu_supports("avx2") ? 32
                                         : 16;
    return lane;
#else
    return 16;
#endif
}

// SplitMix64 (Steele, Lea and Flood 2014) as a counter: number i of a selector is a hash of (key, i). Numbers do not
// depend on each other, so a batch of draws runs as fast as the processor multiplies, and the state in a snapshot is
// two words.
class Random {
public:
    // Distinct (seed, stream) give unrelated sequences: the key is hashed, and each stream steps by an odd number of
    // its own.
    explicit Random(u64 seed = 0, u64 stream = 0)
        : counter_(mix(mix(seed + GAMMA) ^ (stream * 0xD1342543DE82EF95ULL))), step_(mix(stream + 1) | 1) {
        if (__builtin_popcountll(step_ ^ (step_ >> 1)) < 24) step_ ^= 0xAAAAAAAAAAAAAAAAULL;
    }
    u64 next() { return mix(counter_ += step_); }
    // Integers below `bound` (Lemire's multiplication; the bias is below bound / 2^64), in the widest vectors at hand:
    // number i needs none of those before it.
    void below(u32 bound, std::span<u32> out) {
#if DDRL_REPLAY_WIDE
        if (lane_bytes() == 64)
            below_wide(counter_, step_, bound, out.data(), out.size());
        else
#endif
            below_plain(counter_, step_, bound, out.data(), out.size());
        counter_ += step_ * out.size();
    }
    // A number in [0, 1) with 53 random bits.
    double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

private:
    static constexpr u64 GAMMA = 0x9E3779B97F4A7C15ULL;
    __attribute__((always_inline)) static inline void below_plain(u64 counter, u64 step, u32 bound, u32* out,
                                                                  size_t count) {
        for (size_t i = 0; i < count; ++i) {
            const u64 z = mix(counter + step * (i + 1));
            out[i] = static_cast<u32>(((z >> 32) * bound + ((z & 0xFFFFFFFFu) * bound >> 32)) >> 32);
        }
    }
#if DDRL_REPLAY_WIDE
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512"))) static void below_wide(
        u64 counter, u64 step, u32 bound, u32* out, size_t count) {
        below_plain(counter, step, bound, out, count);
    }
#endif
    __attribute__((always_inline)) static inline u64 mix(u64 z) {
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
        return z ^ (z >> 31);
    }
    u64 counter_, step_;
};

}  // namespace ddrl::replay
