// Copies drawn windows out of the store, outside the lock: windows of records, n-step transitions, and sequences with burn-in.
//
// Every output is an array of whole windows [B, L, ..] that the caller supplies; what lies past a window's length is set to zero.
// An observation is `frame_stack` states: that of position p is the states p - k + 1 .. p, where positions before 0 repeat state 0.
#pragma once

#include <cmath>

#include "replay.hpp"

namespace ddrl::replay {

inline constexpr std::size_t AHEAD = 12;  // windows whose memory is asked for before it is used

// A few hundred bytes at most, so common that a call to memcpy would be felt.
inline void copy_bytes(byte* to, const byte* from, std::size_t bytes) {
    struct Lane {
        u64 low, high;
    };
    if (bytes > 512 || bytes < 16) {
        if (bytes == 4 || bytes == 8) return copy_record(to, from, bytes);
        std::memcpy(to, from, bytes);
        return;
    }
    Lane lane;
    for (std::size_t at = 0; at + 16 <= bytes; at += 16) {
        std::memcpy(&lane, from + at, 16);
        std::memcpy(to + at, &lane, 16);
    }
    std::memcpy(&lane, from + bytes - 16, 16);
    std::memcpy(to + bytes - 16, &lane, 16);
}

class Gather {
  public:
    Gather(const Replay& replay, std::span<const Window> windows)
        : options_(replay.options()), store_(replay.store()), windows_(windows), mask_(store_.chunk_records() - 1),
          action_(store_.column_count() - 3), reward_(action_ + 1), version_(action_ + 2) {}

    // R12: state and next [B, L, stack, ..] for each state column, action [B, L, ..], reward [B, L], lengths [B].
    void windows(byte* const* state, byte* const* next, byte* action, byte* reward, u32* length, u32* next_length) const {
        const u32 most = options_.pick_len;
        for (std::size_t i = 0; i < windows_.size(); ++i) {
            if (i + AHEAD < windows_.size()) prefetch(windows_[i + AHEAD].slot, most);
            const Window& window = windows_[i];
            const u32 left = window.records - window.position, count = left < most ? left : most;
            const u32 after = window.states - 1 - window.position, next_count = after < count ? after : count;
            length[i] = count, next_length[i] = next_count;
            const u32 chunk = window.slot >> store_.shift();
            for (u32 c = 0; c < store_.state_count(); ++c) {
                observations(c, chunk, window.position, count, most, state[c] + i * most * stacked(c));
                observations(c, chunk, window.position + 1, next_count, most, next[c] + i * most * stacked(c));
            }
            padded(action_, chunk, window.position, count, most, action + i * most * store_.column_bytes(action_));
            padded(reward_, chunk, window.position, count, most, reward + i * most * sizeof(float));
        }
    }

    // n-step transitions: r_t = sum of discount^j r_{t+j} over the window, discount_t = discount^k (0 where it ends in a terminal state),
    // s_t the state k steps on; k = n, less at an episode's end.
    void transitions(float discount, byte* const* s_tm1, byte* action, float* reward, float* discounts, byte* const* s_t, byte* version,
                     byte* memory) const {
        for (std::size_t i = 0; i < windows_.size(); ++i) {
            if (i + AHEAD < windows_.size()) prefetch(windows_[i + AHEAD].slot, options_.n_step + 1);
            const Window& window = windows_[i];
            const u32 chunk = window.slot >> store_.shift();
            const u32 after = window.states - 1 - window.position, steps = after < options_.n_step ? after : options_.n_step;
            n_step(chunk, window, window.position, steps, discount, reward[i], discounts[i]);
            for (u32 c = 0; c < store_.state_count(); ++c) {
                observation(c, chunk, window.position, s_tm1[c] + i * stacked(c));
                observation(c, chunk, window.position + steps, s_t[c] + i * stacked(c));
            }
            run(action_, chunk, window.position, 1, action + i * store_.column_bytes(action_));
            run(version_, chunk, window.position, 1, version + i * sizeof(u64));
            if (memory) run(store_.state_count(), chunk, window.position, 1, memory + i * store_.column_bytes(store_.state_count()));
        }
    }

    // Sequences for recurrent learners: states [B, burn_in + L + n, stack, ..] from burn[i] <= burn_in records before the pick on, actions
    // [B, burn_in + L, ..] alike; reward, discounts and ahead [B, L] by position of the pick: n-step sums, discounts, and how many states
    // further the bootstrap state stands. length [B] counts the positions in use, memory [B, ..] is stored beside the first state.
    void sequences(float discount, byte* const* state, byte* action, float* reward, float* discounts, u32* ahead, u32* burn, u32* length,
                   byte* version, byte* memory) const {
        const u32 most = options_.pick_len, n = options_.n_step, room = options_.burn_in + most;
        for (std::size_t i = 0; i < windows_.size(); ++i) {
            if (i + AHEAD < windows_.size()) prefetch(windows_[i + AHEAD].slot, most + n);
            const Window& window = windows_[i];
            const u32 before = window.position < options_.burn_in ? window.position : options_.burn_in, first = window.position - before;
            const u32 left = window.states - 1 - window.position, count = left < most ? left : most;
            const u32 states_left = window.states - first, states = before + count + n < states_left ? before + count + n : states_left;
            const u32 chunk = seek(window.slot >> store_.shift(), first);
            burn[i] = before, length[i] = count;
            for (u32 c = 0; c < store_.state_count(); ++c)
                observations(c, chunk, first, states, room + n, state[c] + i * (room + n) * stacked(c));
            padded(action_, chunk, first, before + count, room, action + i * room * store_.column_bytes(action_));
            for (u32 t = 0; t < most; ++t) {
                const std::size_t at = i * most + t;
                reward[at] = discounts[at] = 0.0f, ahead[at] = 0;
                if (t >= count) continue;
                const u32 position = window.position + t, after = window.states - 1 - position, steps = after < n ? after : n;
                ahead[at] = steps;
                n_step(seek(chunk, position), window, position, steps, discount, reward[at], discounts[at]);
            }
            run(version_, chunk, window.position, 1, version + i * sizeof(u64));
            if (memory) run(store_.state_count(), chunk, first, 1, memory + i * store_.column_bytes(store_.state_count()));
        }
    }

  private:
    std::size_t stacked(u32 column) const { return std::size_t{store_.column_bytes(column)} * options_.frame_stack; }

    // The chunk that holds `position`, from one of the same episode near it.
    u32 seek(u32 chunk, u32 position) const {
        while (store_.head(chunk).base > position) chunk = store_.head(chunk).previous;
        while (store_.head(chunk).base + mask_ < position) chunk = store_.head(chunk).next;
        return chunk;
    }

    // `count` consecutive records of a column from `position` on.
    void run(u32 column, u32 chunk, u32 position, u32 count, byte* to) const {
        if (!count) return;
        const std::size_t bytes = store_.column_bytes(column);
        chunk = seek(chunk, position);
        for (u32 offset = position & mask_;;) {
            const u32 here = mask_ + 1 - offset, part = count < here ? count : here;
            copy_bytes(to, store_.column(chunk, column) + offset * bytes, part * bytes);
            if (!(count -= part)) return;
            to += part * bytes, offset = 0, chunk = store_.head(chunk).next;
        }
    }
    void padded(u32 column, u32 chunk, u32 position, u32 count, u32 most, byte* to) const {
        run(column, chunk, position, count, to);
        if (count < most) std::memset(to + count * std::size_t{store_.column_bytes(column)}, 0, (most - count) * std::size_t{store_.column_bytes(column)});
    }
    void observation(u32 column, u32 chunk, u32 position, byte* to) const {
        const u32 stack = options_.frame_stack, bytes = store_.column_bytes(column);
        u32 first = position + 1 - stack;
        if (position + 1 < stack) {
            first = 0;
            for (u32 repeated = stack - 1 - position; repeated--; to += bytes) run(column, chunk, 0, 1, to);
        }
        run(column, chunk, first, position + 1 - first, to);
    }
    void observations(u32 column, u32 chunk, u32 position, u32 count, u32 most, byte* to) const {
        if (options_.frame_stack == 1) return padded(column, chunk, position, count, most, to);
        for (u32 i = 0; i < count; ++i) observation(column, chunk, position + i, to + i * stacked(column));
        std::memset(to + count * stacked(column), 0, (most - count) * stacked(column));
    }
    void n_step(u32 chunk, const Window& window, u32 position, u32 steps, float discount, float& sum, float& left) const {
        double total = 0.0, factor = 1.0;
        chunk = seek(chunk, position);
        for (u32 j = 0; j < steps; ++j, factor *= discount) {
            const u32 at = position + j;
            if (j && (at & mask_) == 0) chunk = store_.head(chunk).next;
            float reward;
            std::memcpy(&reward, store_.column(chunk, reward_) + (at & mask_) * sizeof(float), sizeof reward);
            total += factor * reward;
        }
        sum = static_cast<float>(total);
        left = window.terminal_end && position + steps + 1 == window.states ? 0.0f : static_cast<float>(factor);
    }
    void prefetch(u32 slot, u32 records) const {
        const u32 chunk = slot >> store_.shift(), offset = slot & mask_;
        for (u32 c = 0; c < store_.column_count(); ++c) {
            const std::size_t bytes = store_.column_bytes(c);
            const byte* from = store_.column(chunk, c) + offset * bytes;
            const std::size_t span = std::min<std::size_t>(records * bytes, 256);
            for (std::size_t at = 0; at < span + 63; at += 64) __builtin_prefetch(from + std::min(at, span - 1));
        }
    }

    const Options& options_;
    const Store& store_;
    std::span<const Window> windows_;
    u32 mask_, action_, reward_, version_;
};

}  // namespace ddrl::replay
