// xoshiro256++ (Blackman and Vigna 2019): the random numbers of a selector. Small, fast, and its state is four words of a snapshot.
#pragma once

#include <array>

#include "memory.hpp"

namespace ddrl::replay {

class Random {
  public:
    // Distinct (seed, stream) give unrelated sequences (splitmix64, as the authors advise).
    explicit Random(u64 seed = 0, u64 stream = 0) {
        u64 x = seed ^ (stream * 0xD1342543DE82EF95ULL);
        for (u64& word : state_) {
            x += 0x9E3779B97F4A7C15ULL;
            u64 z = x;
            z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
            z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
            word = z ^ (z >> 31);
        }
    }
    u64 next() {
        const u64 result = rotate(state_[0] + state_[3], 23) + state_[0];
        const u64 shifted = state_[1] << 17;
        state_[2] ^= state_[0], state_[3] ^= state_[1], state_[1] ^= state_[2], state_[0] ^= state_[3];
        state_[2] ^= shifted;
        state_[3] = rotate(state_[3], 45);
        return result;
    }
    // An integer below `bound` (Lemire's multiplication; the bias is below bound / 2^64).
    u32 below(u32 bound) { return static_cast<u32>((static_cast<unsigned __int128>(next()) * bound) >> 64); }
    // A number in [0, 1) with 53 random bits.
    double unit() { return static_cast<double>(next() >> 11) * 0x1.0p-53; }
    std::array<u64, 4>& state() { return state_; }
    const std::array<u64, 4>& state() const { return state_; }

  private:
    static u64 rotate(u64 x, int k) { return (x << k) | (x >> (64 - k)); }
    std::array<u64, 4> state_{};
};

}  // namespace ddrl::replay
