// Included by gather.hpp alone, once for each instruction set, inside a namespace of its own: copies of runs of
// records, sums of rewards, and the loops over windows.

// Copies `W` bytes, any alignment, as one vector of this instruction set.
template <size_t W>
__attribute__((always_inline)) inline void copy_lane(byte* to, const byte* from) {
    typedef u8 Lane __attribute__((vector_size(W), aligned(1), may_alias));
    *reinterpret_cast<Lane*>(to) = *reinterpret_cast<const Lane*>(from);
}

// Copies fewer than 2 W bytes, in two vectors that may overlap.
template <size_t W>
__attribute__((always_inline)) inline void copy_few(byte* to, const byte* from, size_t bytes) {
    if (bytes >= W) {
        copy_lane<W>(to, from);
        if (bytes > W) copy_lane<W>(to + bytes - W, from + bytes - W);
    } else if constexpr (W > 4) {
        copy_few<W / 2>(to, from, bytes);
    } else {
        for (size_t i = 0; i < bytes; ++i) to[i] = from[i];
    }
}

// Copies of a few hundred bytes, whose sizes repeat: branches are predicted, and a call to memcpy would cost more.
__attribute__((always_inline)) inline void copy_bytes(byte* to, const byte* from, size_t bytes) {
    constexpr size_t W = DDRL_REPLAY_LANE;
    if (bytes > 1024) {
        std::memcpy(to, from, bytes);
    } else if (bytes >= W) {
        size_t at = 0;
        do {
            copy_lane<W>(to + at, from + at);
            at += W;
        } while (at + W <= bytes);
        if (at < bytes) copy_lane<W>(to + bytes - W, from + bytes - W);
    } else {
        copy_few<W / 2>(to, from, bytes);
    }
}

// Reads runs of consecutive records of a column, across chunks.
class Runs {
protected:
    explicit Runs(const Store& store)
        : store_(store),
          shift_(store.shift()),
          mask_(store.chunk_records() - 1),
          states_(store.state_count()),
          columns_(store.column_count()) {}

    struct Summed {  // a column of rewards: how many numbers a record has, and where the sums [B, floats] go
        u32 column, floats;
        byte* to;
        size_t offset;  // of the column in a chunk
    };
    size_t stacked(u32 column) const { return size_t{store_.column_bytes(column)} * store_.column_stack(column); }
    u32 most_stacked() const {
        u32 most = 1;
        for (u32 c = 0; c < states_; ++c) most = std::max(most, store_.column_stack(c));
        return most;
    }

    size_t most_reward_floats() const {
        size_t most = 0;
        for (u32 c = 0; c < columns_; ++c)
            if (store_.column_role(c) == Role::REWARD)
                most = std::max<size_t>(most, store_.column_bytes(c) / sizeof(float));
        return most;
    }

    // The chunk that holds `position`, from one of the same episode near it.
    u32 seek(u32 chunk, u32 position) const {
        while (store_.head(chunk).base > position) chunk = store_.head(chunk).previous;
        while (store_.head(chunk).base + mask_ < position) chunk = store_.head(chunk).next;
        return chunk;
    }
    // `count` consecutive records of a column from `position` on.
    void run(u32 column, u32 chunk, u32 position, u32 count, byte* to) const {
        if (!count) return;
        const size_t bytes = store_.column_bytes(column);
        chunk = seek(chunk, position);
        for (u32 offset = position & mask_;;) {
            const u32 here = mask_ + 1 - offset, part = count < here ? count : here;
            copy_bytes(to, store_.column(chunk, column) + offset * bytes, part * bytes);
            if (!(count -= part)) return;
            to += part * bytes, offset = 0, chunk = store_.head(chunk).next;
        }
    }
    void padded(u32 column, u32 chunk, u32 position, u32 count, u32 most, byte* to) const {
        const size_t bytes = store_.column_bytes(column);
        run(column, chunk, position, count, to);
        if (count < most) std::memset(to + count * bytes, 0, (most - count) * bytes);
    }
    void observation(u32 column, u32 chunk, u32 position, byte* to) const {
        const u32 bytes = store_.column_bytes(column), stack = store_.column_stack(column);
        u32 first = position + 1 - stack;
        if (position + 1 < stack) {
            first = 0;
            for (u32 repeated = stack - 1 - position; repeated--; to += bytes) run(column, chunk, 0, 1, to);
        }
        run(column, chunk, first, position + 1 - first, to);
    }
    void observations(u32 column, u32 chunk, u32 position, u32 count, u32 most, byte* to) const {
        if (store_.column_stack(column) == 1) return padded(column, chunk, position, count, most, to);
        for (u32 i = 0; i < count; ++i) observation(column, chunk, position + i, to + i * stacked(column));
        std::memset(to + count * stacked(column), 0, (most - count) * stacked(column));
    }
    // Writes the n-step sums of a column from `position` on to its place `at`; returns the discount of the bootstrap.
    float n_step(u32 chunk, const Window& window, u32 position, u32 steps, float discount, const Summed& summed,
                 size_t at) const {
        double factor = 1.0;
        float* const sums = reinterpret_cast<float*>(summed.to) + at * summed.floats;
        for (u32 k = 0; k < summed.floats; ++k)
            factor = sum(chunk, position, steps, discount, summed.column, summed.floats, k, sums[k]);
        return bootstrap(window, position + steps, factor);
    }
    // The discount of the state at `position`: 0 where it is terminal.
    static float bootstrap(const Window& window, u32 position, double factor) {
        return window.terminal_end() && position + 1 == window.states() ? 0.0f : static_cast<float>(factor);
    }
    // The n-step sum of number k of the `floats` that a record has in a column of rewards; returns the discount after
    // it.
    __attribute__((always_inline)) double sum(u32 chunk, u32 position, u32 steps, float discount, u32 column,
                                              size_t floats, size_t k, float& out) const {
        double total = 0.0, factor = 1.0;
        const byte* rewards = store_.column(chunk, column);
        for (u32 j = 0; j < steps; ++j, factor *= discount) {
            const u32 offset = (position + j) & mask_;
            if (j && offset == 0) rewards = store_.column(chunk = store_.head(chunk).next, column);
            float reward;
            std::memcpy(&reward, rewards + (offset * floats + k) * sizeof(float), sizeof reward);
            total += factor * reward;
        }
        out = static_cast<float>(total);
        return factor;
    }

    const Store& store_;
    u32 shift_, mask_, states_, columns_;
};

class Gather : Runs {
public:
    Gather(const Options& options, const Store& store, std::span<const Window> windows)
        : Runs(store), options_(options), windows_(windows) {}

    // Windows of L records. The sizes of the commonest shapes (windows of 8, actions of 8 bytes, small states) are
    // known to the compiler.
    void windows(const WindowOutputs& outputs) const {
        const size_t most = options_.pick_len, state = most * store_.column_bytes(0);
        if (most > mask_ + 1 || most_stacked() != 1) return copy_edges(outputs);
        u32 wanted[MAX_COLUMNS], count = 0;  // beside the states
        bool plain = states_ == 1;
        for (u32 c = states_; c < columns_; ++c) {
            if (!outputs.column[c]) continue;
            plain = plain && store_.column_role(c) != Role::MEMORY;
            wanted[count++] = c;
        }
        if (plain && most == 8 && count == 2 && store_.column_bytes(wanted[0]) == 8 &&
            store_.column_bytes(wanted[1]) == 4) {
            if (state == 64) return copy_windows<64, 64, 32>(outputs, wanted, count);
            if (state == 128) return copy_windows<128, 64, 32>(outputs, wanted, count);
            if (state == 256) return copy_windows<256, 64, 32>(outputs, wanted, count);
        }
        copy_windows<0, 0, 0>(outputs, wanted, count);
    }

    // n-step transitions: rewards are sums of discount^j r_{t+j} over the window, discount_t = discount^k (0 where it
    // ends in a terminal state), the next state is that k steps on; k = n, less at an episode's end.
    void transitions(float discount, const TransitionOutputs& outputs) const {
        const u32 n = options_.n_step, mask = mask_, shift = shift_, stack = most_stacked();
        Copied copied[MAX_COLUMNS];
        Summed summed[MAX_COLUMNS];
        u32 columns = 0, rewards = 0;
        for (u32 c = 0; c < columns_; ++c) {
            if (!outputs.column[c]) continue;
            const bool is_state = c < states_;
            if (store_.column_role(c) == Role::REWARD)
                summed[rewards++] = {c, store_.column_bytes(c) / u32{sizeof(float)}, outputs.column[c],
                                     store_.column_offset(c)};
            else
                copied[columns++] = {store_.column_offset(c),
                                     store_.column_bytes(c),
                                     is_state ? stacked(c) : store_.column_bytes(c),
                                     outputs.column[c],
                                     is_state ? outputs.next[c] : nullptr,
                                     c};
        }
        const Chunks chunks = store_.chunks();
        const Window* const windows = windows_.data();
        const size_t count = windows_.size();
        float* const left = outputs.discount;
        // One reward a record: what the loop needs of it is kept in locals.
        const Summed only = summed[0];
        const bool scalar = rewards == 1 && only.floats == 1;
        float* const sums = reinterpret_cast<float*>(only.to);
        for (size_t i = 0; i < count; ++i) {
            if (i + AHEAD < count) {
                const u32 slot = windows[i + AHEAD].slot, offset = slot & mask;
                const byte* chunk = chunks[slot >> shift];
                for (u32 c = 0; c < columns; ++c)
                    prefetch(chunk + copied[c].offset + offset * copied[c].bytes,
                             copied[c].bytes * (copied[c].next ? n + 1 : 1));
                for (u32 r = 0; r < rewards; ++r) {
                    const size_t bytes = summed[r].floats * sizeof(float);
                    prefetch(chunk + summed[r].offset + offset * bytes, n * bytes);
                }
            }
            const Window& window = windows[i];
            const u32 number = window.slot >> shift, offset = window.slot & mask;
            const u32 after = window.states() - 1 - window.position, steps = after < n ? after : n;
            const byte* chunk = chunks[number];
            if (scalar) [[likely]]
                left[i] = bootstrap(window, window.position + steps,
                                    sum(number, window.position, steps, discount, only.column, 1, 0, sums[i]));
            else
                for (u32 r = 0; r < rewards; ++r)
                    left[i] = n_step(number, window, window.position, steps, discount, summed[r], i);
            const bool whole = offset + steps <= mask && offset + 1 >= stack &&
                               window.position + 1 >= stack;  // in one chunk, no repeated frames
            for (u32 c = 0; c < columns; ++c) {
                const Copied& column = copied[c];
                const byte* from = chunk + column.offset + offset * column.bytes;
                if (!column.next) {
                    copy_bytes(column.to + i * column.window, from, column.window);
                } else if (whole) {
                    from -= column.window - column.bytes;
                    copy_bytes(column.to + i * column.window, from, column.window);
                    copy_bytes(column.next + i * column.window, from + steps * column.bytes, column.window);
                } else {
                    observation(column.column, number, window.position, column.to + i * column.window);
                    observation(column.column, number, window.position + steps, column.next + i * column.window);
                }
            }
        }
    }

    // Sequences for recurrent learners: states from burn[i] <= burn_in records before the pick on, columns of role STEP
    // alike; rewards, discount and ahead [B, L] by position of the pick: n-step sums, discounts, and how many states
    // further the bootstrap state is. length [B] counts the positions in use.
    void sequences(float discount, const SequenceOutputs& out) const {
        const u32 most = options_.pick_len, n = options_.n_step, room = options_.burn_in + most;
        std::vector<float> rewards((most + n - 1) * most_reward_floats());
        for (size_t i = 0; i < windows_.size(); ++i) {
            const Window& window = windows_[i];
            const u32 before = window.position < options_.burn_in ? window.position : options_.burn_in,
                      first = window.position - before;
            const u32 left = window.states() - 1 - window.position, count = left < most ? left : most;
            const u32 states_left = window.states() - first,
                      states = before + count + n < states_left ? before + count + n : states_left;
            const u32 chunk = seek(window.slot >> shift_, first);
            out.burn[i] = before, out.length[i] = count;
            for (u32 c = 0; c < columns_; ++c) {
                const size_t bytes = store_.column_bytes(c);
                if (out.at_pick[c]) run(c, chunk, window.position, 1, out.at_pick[c] + i * bytes);
                byte* to = out.column[c];
                if (!to) continue;
                switch (store_.column_role(c)) {
                    case Role::STATE:
                        observations(c, chunk, first, states, room + n, to + i * (room + n) * stacked(c));
                        break;
                    case Role::STEP: padded(c, chunk, first, before + count, room, to + i * room * bytes); break;
                    case Role::MEMORY: run(c, chunk, first, 1, to + i * bytes); break;
                    case Role::REWARD: sums(c, chunk, window, count, discount, rewards.data(), out, i); break;
                }
            }
        }
    }

private:
    static constexpr size_t AHEAD = 20;  // windows ahead of the copy whose memory is prefetched
    struct Copied {  // a column: its offset in a chunk, bytes of a record and of what a window takes of it, and
                     // where that goes
        size_t offset, bytes, window;
        byte *to, *next;  // next: the same, a state (or n) later; null but for states
        u32 column;
        const byte* at(const byte* chunk, u32 record) const { return chunk + offset + record * bytes; }
    };
    void copy_edges(const WindowOutputs& outputs) const {
        for (size_t i = 0; i < windows_.size(); ++i) edge_window(windows_[i], i, outputs);
    }
    // S, A, R: bytes of a window's (only) state and of the two other columns that are wanted, or 0: known when it runs.
    template <size_t S, size_t A, size_t R>
    void copy_windows(const WindowOutputs& outputs, const u32* wanted, u32 wanted_count) const {
        // What the loop reads is kept in locals: bytes written to an output could be anything else, as far as the
        // compiler knows.
        const u32 most = options_.pick_len, states = S ? 1 : states_, mask = mask_, shift = shift_;
        const u32 others = S ? 2 : wanted_count;
        Copied state[S ? 1 : MAX_COLUMNS], other[S ? 2 : MAX_COLUMNS];
        for (u32 c = 0; c < states; ++c)
            state[c] = {store_.column_offset(c), store_.column_bytes(c), most * size_t{store_.column_bytes(c)},
                        outputs.column[c],       outputs.next[c],        c};
        for (u32 k = 0; k < others; ++k) {
            const u32 c = wanted[k];
            const size_t bytes = store_.column_bytes(c);
            other[k] = {store_.column_offset(c), bytes,   store_.column_role(c) == Role::MEMORY ? bytes : most * bytes,
                        outputs.column[c],       nullptr, c};
        }
        if constexpr (S != 0) {
            state[0].window = S, state[0].bytes = S / (R / 4);
            other[0].window = A, other[0].bytes = A / (R / 4);
            other[1].window = R, other[1].bytes = 4;
        }
        const Chunks chunks = store_.chunks();
        const Window* const windows = windows_.data();
        const size_t count = windows_.size();
        u32 *const length = outputs.length, *const next_length = outputs.next_length;
        for (size_t i = 0; i < count; ++i) {
            if (i + AHEAD < count) {
                const u32 slot = windows[i + AHEAD].slot, offset = slot & mask;
                const byte* chunk = chunks[slot >> shift];
                for (u32 c = 0; c < states; ++c) prefetch(state[c].at(chunk, offset), state[c].window + state[c].bytes);
                for (u32 k = 0; k < others; ++k) prefetch(other[k].at(chunk, offset), other[k].window);
                if (offset + most > mask) [[unlikely]] {
                    const u32 after = store_.head(slot >> shift).next;
                    chunk = chunks[after == NONE ? 0 : after];
                    for (u32 c = 0; c < states; ++c) __builtin_prefetch(state[c].at(chunk, 0));
                    for (u32 k = 0; k < others; ++k) __builtin_prefetch(other[k].at(chunk, 0));
                }
            }
            const Window& window = windows[i];
            const u32 offset = window.slot & mask;
            if (window.position + most >= window.states()) [[unlikely]] {
                edge_window(window, i, outputs);
                continue;
            }
            length[i] = next_length[i] = most;
            const byte* chunk = chunks[window.slot >> shift];
            if (offset + most <= mask) [[likely]] {
                for (u32 c = 0; c < states; ++c) {
                    const byte* from = state[c].at(chunk, offset);
                    copy_bytes(state[c].to + i * state[c].window, from, state[c].window);
                    copy_bytes(state[c].next + i * state[c].window, from + state[c].bytes, state[c].window);
                }
                for (u32 k = 0; k < others; ++k)
                    copy_bytes(other[k].to + i * other[k].window, other[k].at(chunk, offset), other[k].window);
                continue;
            }
            const byte* after = chunks[store_.head(window.slot >> shift).next];
            const u32 here = mask + 1 - offset;
            for (u32 c = 0; c < states; ++c) {
                copy_split(state[c].to + i * state[c].window, state[c].at(chunk, offset), here * state[c].bytes,
                           after + state[c].offset, state[c].window);
                copy_split(state[c].next + i * state[c].window, state[c].at(chunk, offset + 1),
                           (here - 1) * state[c].bytes, after + state[c].offset, state[c].window);
            }
            for (u32 k = 0; k < others; ++k)
                copy_split(other[k].to + i * other[k].window, other[k].at(chunk, offset), here * other[k].bytes,
                           after + other[k].offset, other[k].window);
        }
    }
    // `bytes` in all: up to `here` of them from `from`, the others from `rest`.
    static void copy_split(byte* to, const byte* from, size_t here, const byte* rest, size_t bytes) {
        const size_t first = here < bytes ? here : bytes;
        copy_bytes(to, from, first);
        copy_bytes(to + first, rest, bytes - first);
    }
    // The first lines of `bytes` from `from` on; the processor fetches the rest of a long run by itself.
    __attribute__((always_inline)) static void prefetch(const byte* from, size_t bytes) {
        const byte* last = from + std::min<size_t>(bytes, 320) - 1;
        for (; from < last; from += 64) __builtin_prefetch(from);
        __builtin_prefetch(last);
    }
    // A window that meets a chunk's border or an episode's end, or whose frames are stacked.
    __attribute__((noinline)) void edge_window(const Window& window, size_t i, const WindowOutputs& out) const {
        const u32 most = options_.pick_len, chunk = window.slot >> shift_;
        const u32 left = window.records() - window.position, count = left < most ? left : most;
        const u32 after = window.states() - 1 - window.position, next_count = after < count ? after : count;
        out.length[i] = count, out.next_length[i] = next_count;
        for (u32 c = 0; c < columns_; ++c) {
            byte* to = out.column[c];
            const size_t bytes = store_.column_bytes(c);
            if (!to) continue;
            if (c < states_) {
                observations(c, chunk, window.position, count, most, to + i * most * stacked(c));
                observations(c, chunk, window.position + 1, next_count, most, out.next[c] + i * most * stacked(c));
            } else if (store_.column_role(c) == Role::MEMORY) {
                run(c, chunk, window.position, 1, to + i * bytes);
            } else {
                padded(c, chunk, window.position, count, most, to + i * most * bytes);
            }
        }
    }
    // The n-step sums of a column of rewards at each position of a sequence, with discount and ahead. `rewards` has
    // room for the rewards of pick_len + n_step - 1 records, which are copied there once: each of them is in up to
    // n_step sums.
    void sums(u32 column, u32 chunk, const Window& window, u32 count, float discount, float* rewards,
              const SequenceOutputs& out, size_t i) const {
        const u32 most = options_.pick_len, n = options_.n_step, after = window.states() - 1 - window.position;
        const size_t floats = store_.column_bytes(column) / sizeof(float);
        run(column, chunk, window.position, std::min(after, count + n - 1), reinterpret_cast<byte*>(rewards));
        float* const sum = reinterpret_cast<float*>(out.column[column]) + i * most * floats;
        float* const left = out.discount + i * most;
        u32* const ahead = out.ahead + i * most;
        for (u32 t = 0; t < count; ++t) {
            const u32 steps = std::min(n, after - t);
            double factor = 1.0;
            for (size_t k = 0; k < floats; ++k) {
                double total = 0.0;
                factor = 1.0;
                for (u32 j = 0; j < steps; ++j, factor *= discount) total += factor * rewards[(t + j) * floats + k];
                sum[t * floats + k] = static_cast<float>(total);
            }
            ahead[t] = steps;
            left[t] = bootstrap(window, window.position + t + steps, factor);
        }
        std::fill(sum + count * floats, sum + most * floats, 0.0f);
        std::fill(left + count, left + most, 0.0f);
        std::fill(ahead + count, ahead + most, 0);
    }
    const Options& options_;
    std::span<const Window> windows_;
};
