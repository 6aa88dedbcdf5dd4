// Headers of a model's chunks: sealed by the root, verified by every receiver. What they mean, and what stands before
// that of the first chunk, ddrl.distribution.transport.shards says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "checksum.hpp"

namespace ddrl {

struct ChunkHeader {
    uint32_t sequence, index, length;
    uint16_t epoch, back;
    uint64_t checksum;  // of the chunk, and of all that stands before in its header
};
static_assert(sizeof(ChunkHeader) == 24);

// Headers and chunks of one model; chunk i stands at `edges[i]` .. `edges[i + 1]` of `data`. `first_bytes`: of what
// stands before the first header, and belongs to it.
struct Chunks {
    std::byte* headers;
    size_t first_bytes;
    const std::byte* data;
    const int64_t* edges;

    ChunkHeader header(size_t index) const {
        ChunkHeader found;
        std::memcpy(&found, place(index), sizeof found);
        return found;
    }
    uint64_t checksum_of(size_t index) const {
        const size_t own = sizeof(ChunkHeader) - sizeof(uint64_t), before = index ? 0 : first_bytes;
        return checksum(data + edges[index], static_cast<size_t>(edges[index + 1] - edges[index])) ^
               checksum(place(index) - before, before + own);
    }
    // Length and checksum; the rest of the header stands.
    void seal(size_t index) {
        ChunkHeader made = header(index);
        made.length = static_cast<uint32_t>(edges[index + 1] - edges[index]);
        std::memcpy(place(index), &made, sizeof made);
        made.checksum = checksum_of(index);
        std::memcpy(place(index), &made, sizeof made);
    }
    // Whether it is this chunk of that model, as the root sealed it.
    bool sound(size_t index, uint16_t epoch, uint32_t sequence) const {
        const ChunkHeader found = header(index);
        return found.epoch == epoch && found.sequence == sequence && found.index == index &&
               found.length == static_cast<uint64_t>(edges[index + 1] - edges[index]) &&
               found.checksum == checksum_of(index);
    }

private:
    std::byte* place(size_t index) const { return headers + first_bytes + index * sizeof(ChunkHeader); }
};

}  // namespace ddrl
