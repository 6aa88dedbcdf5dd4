// The physical limit of replay: loops that do nothing but the random reads and copies, with indices known beforehand,
// contiguous columns, and outputs used again. Built with -O3 -march=native by benchmarks.replay.limit, apart from ddrl.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

extern "C" {

// Single transitions: observations of `stack` frames that end at each index, actions, rewards, and observations one
// step on.
void transitions(const u8* state, const u64* action, const float* reward, u32 state_bytes, u32 stack, const u32* index,
                 u32 count, u32 ahead, u8* s, u64* a, float* r, u8* n) {
    const u64 S = state_bytes, O = S * stack;
    for (u32 i = 0; i < count; ++i) {
        if (ahead && i + ahead < count) {
            const u64 at = index[i + ahead];
            for (u64 line = 0; line < std::min<u64>(S * 2, 128); line += 64) __builtin_prefetch(state + at * S + line);
            __builtin_prefetch(action + at), __builtin_prefetch(reward + at);
        }
        const u64 at = index[i];
        std::memcpy(s + i * O, state + (at + 1 - stack) * S, O);
        std::memcpy(n + i * O, state + (at + 2 - stack) * S, O);
        a[i] = action[at];
        r[i] = reward[at];
    }
}

// A binary sum tree in one array (leaf i at capacity + i, capacity a power of two): `count` draws, then `count` updates
// of what was drawn.
void tree_draw(const double* tree, u32 capacity, const double* unit, u32 count, u32* index) {
    for (u32 i = 0; i < count; ++i) {
        double rest = unit[i] * tree[1];
        u32 node = 1;
        while (node < capacity) {
            node *= 2;
            if (rest >= tree[node]) rest -= tree[node++];
        }
        index[i] = node - capacity;
    }
}
void tree_update(double* tree, u32 capacity, const u32* index, const float* priority, float alpha, u32 count) {
    for (u32 i = 0; i < count; ++i) {
        u32 node = index[i] + capacity;
        tree[node] = std::pow(priority[i], alpha);
        while (node /= 2) tree[node] = tree[2 * node] + tree[2 * node + 1];
    }
}

// Appends `count` records to ring columns at `at`, wrapping at `size`.
void append(u8* state, u64* action, float* reward, u32 state_bytes, u64 at, u64 size, const u8* s, const u64* a,
            const float* r, u32 count) {
    const u64 S = state_bytes;
    for (u32 i = 0; i < count; ++i, at = at + 1 == size ? 0 : at + 1) {
        std::memcpy(state + at * S, s + i * S, S);
        action[at] = a[i];
        reward[at] = r[i];
    }
}

}  // extern "C"
