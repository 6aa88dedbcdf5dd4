// A 64-bit checksum of a stream of bytes: eight independent multiply-xor lanes over 64-byte blocks, so it runs at
// several GB/s. It finds corruption, not malice.
#pragma once

#include "memory.hpp"

namespace ddrl::replay {

class Checksum {
public:
    void add(const void* data, std::size_t bytes) {
        const auto* from = static_cast<const byte*>(data);
        total_ += bytes;
        if (held_) {
            const std::size_t part = std::min(bytes, sizeof block_ - held_);
            std::memcpy(block_ + held_, from, part);
            held_ += part, from += part, bytes -= part;
            if (held_ < sizeof block_) return;
            mix(block_);
            held_ = 0;
        }
        for (; bytes >= sizeof block_; from += sizeof block_, bytes -= sizeof block_) mix(from);
        if (bytes) std::memcpy(block_, from, bytes);
        held_ = bytes;
    }
    u64 value() const {
        Checksum end = *this;
        std::memset(end.block_ + held_, 0, sizeof block_ - held_);
        end.mix(end.block_);
        u64 all = total_ * 0x9E3779B97F4A7C15ULL;
        for (const u64 lane : end.lanes_) all = (all ^ (lane ^ (lane >> 29))) * 0xBF58476D1CE4E5B9ULL, all ^= all >> 32;
        return all;
    }

private:
    void mix(const byte* block) {
        for (int i = 0; i < 8; ++i) {
            u64 word;
            std::memcpy(&word, block + 8 * i, 8);
            lanes_[i] = (lanes_[i] ^ word) * 0x9FB21C651E98DF25ULL;
            lanes_[i] ^= lanes_[i] >> 31;
        }
    }
    u64 lanes_[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    byte block_[64];
    std::size_t held_ = 0;
    u64 total_ = 0;
};

}  // namespace ddrl::replay
