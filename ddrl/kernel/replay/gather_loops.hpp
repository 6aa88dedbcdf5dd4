// Included by gather.hpp alone, once for each instruction set, inside a namespace of its own.

// Copies `W` bytes, any alignment, as one vector of this instruction set.
template <std::size_t W>
__attribute__((always_inline)) inline void copy_lane(byte* to, const byte* from) {
    typedef u8 Lane __attribute__((vector_size(W), aligned(1), may_alias));
    *reinterpret_cast<Lane*>(to) = *reinterpret_cast<const Lane*>(from);
}

// Copies of a few hundred bytes, whose sizes repeat: branches are foreseen, and a call to memcpy would be felt.
__attribute__((always_inline)) inline void copy_bytes(byte* to, const byte* from, std::size_t bytes) {
    constexpr std::size_t W = DDRL_REPLAY_LANE;
    if (bytes > 1024) {
        std::memcpy(to, from, bytes);
    } else if (bytes >= W) {
        std::size_t at = 0;
        do {
            copy_lane<W>(to + at, from + at);
            at += W;
        } while (at + W <= bytes);
        if (at < bytes) copy_lane<W>(to + bytes - W, from + bytes - W);
    } else if (W > 32 && bytes >= 32) {
        copy_lane<32>(to, from);
        if (bytes > 32) copy_lane<32>(to + bytes - 32, from + bytes - 32);
    } else if (W > 16 && bytes >= 16) {
        copy_lane<16>(to, from);
        if (bytes > 16) copy_lane<16>(to + bytes - 16, from + bytes - 16);
    } else if (bytes >= 8) {
        copy_lane<8>(to, from);
        if (bytes > 8) copy_lane<8>(to + bytes - 8, from + bytes - 8);
    } else if (bytes >= 4) {
        copy_lane<4>(to, from);
        if (bytes > 4) copy_lane<4>(to + bytes - 4, from + bytes - 4);
    } else {
        for (std::size_t i = 0; i < bytes; ++i) to[i] = from[i];
    }
}

class Gather {
public:
    Gather(const Options& options, const Store& store, std::span<const Window> windows)
        : options_(options),
          store_(store),
          windows_(windows),
          shift_(store.shift()),
          mask_(store.chunk_records() - 1),
          states_(store.state_count()),
          action_(store.column_count() - 3),
          reward_(action_ + 1),
          version_(action_ + 2),
          stack_(options.frame_stack) {}

    // Windows of L records. The sizes of the commonest shapes (windows of 8, actions of 8 bytes, small states) are
    // known to the compiler.
    void windows(const WindowOutputs& outputs) const {
        const std::size_t most = options_.pick_len, action = most * store_.column_bytes(action_),
                          state = most * store_.column_bytes(0);
        if (stack_ != 1 || most > mask_ + 1) return copy_edges(outputs);
        if (states_ == 1 && most == 8 && action == 64) {
            if (state == 64) return copy_windows<64, 64, 32>(outputs);
            if (state == 128) return copy_windows<128, 64, 32>(outputs);
            if (state == 256) return copy_windows<256, 64, 32>(outputs);
        }
        copy_windows<0, 0, 0>(outputs);
    }

    // n-step transitions: r_t = sum of discount^j r_{t+j} over the window, discount_t = discount^k (0 where it ends in
    // a terminal state), s_t the state k steps on; k = n, less at an episode's end.
    void transitions(float discount, const TransitionOutputs& outputs) const {
        const u32 n = options_.n_step, columns = states_ + 2, mask = mask_, shift = shift_, stack = stack_;
        Copied copied[MOST_STATES + 2];
        for (u32 c = 0; c < states_; ++c)
            copied[c] = {store_.column_offset(c), store_.column_bytes(c), stacked(c), outputs.s_tm1[c], outputs.s_t[c]};
        for (u32 c = states_; c < columns; ++c) {
            const u32 column = c == states_ ? action_ : version_;
            copied[c] = {store_.column_offset(column), store_.column_bytes(column), store_.column_bytes(column),
                         c == states_ ? outputs.action : outputs.version, nullptr};
        }
        const Chunks chunks = store_.chunks();
        const Window* const windows = windows_.data();
        const std::size_t count = windows_.size(), reward_offset = store_.column_offset(reward_);
        float *const reward = outputs.reward, *const left = outputs.discount;
        for (std::size_t i = 0; i < count; ++i) {
            if (i + AHEAD < count) {
                const u32 slot = windows[i + AHEAD].slot, offset = slot & mask;
                const byte* chunk = chunks[slot >> shift];
                for (u32 c = 0; c < columns; ++c)
                    ask(chunk + copied[c].offset + offset * copied[c].bytes,
                        copied[c].bytes * (copied[c].next ? n + 1 : 1));
                ask(chunk + reward_offset + offset * sizeof(float), n * sizeof(float));
            }
            const Window& window = windows[i];
            const u32 number = window.slot >> shift, offset = window.slot & mask;
            const u32 after = window.states() - 1 - window.position, steps = after < n ? after : n;
            const byte* chunk = chunks[number];
            n_step(number, window, window.position, steps, discount, reward[i], left[i]);
            const bool whole = offset + steps <= mask && offset + 1 >= stack &&
                               window.position + 1 >= stack;  // in one chunk, no repeated frames
            for (u32 c = 0; c < columns; ++c) {
                const Copied& column = copied[c];
                const byte* from = chunk + column.offset + offset * column.bytes;
                if (!column.next) {
                    copy_bytes(column.to + i * column.window, from, column.window);
                } else if (whole) {
                    from -= (stack - 1) * column.bytes;
                    copy_bytes(column.to + i * column.window, from, column.window);
                    copy_bytes(column.next + i * column.window, from + steps * column.bytes, column.window);
                } else {
                    observation(c, number, window.position, column.to + i * column.window);
                    observation(c, number, window.position + steps, column.next + i * column.window);
                }
            }
        }
    }

    // Sequences for recurrent learners: states [B, burn_in + L + n, stack, ..] from burn[i] <= burn_in records before
    // the pick on, actions [B, burn_in + L, ..] alike; reward, discount and ahead [B, L] by position of the pick:
    // n-step sums, discounts, and how many states further the bootstrap state stands. length [B] counts the positions
    // in use, memory [B, ..] is stored beside the first state.
    void sequences(float discount, const SequenceOutputs& out) const {
        const u32 most = options_.pick_len, n = options_.n_step, room = options_.burn_in + most;
        for (std::size_t i = 0; i < windows_.size(); ++i) {
            const Window& window = windows_[i];
            const u32 before = window.position < options_.burn_in ? window.position : options_.burn_in,
                      first = window.position - before;
            const u32 left = window.states() - 1 - window.position, count = left < most ? left : most;
            const u32 states_left = window.states() - first,
                      states = before + count + n < states_left ? before + count + n : states_left;
            const u32 chunk = seek(window.slot >> shift_, first);
            out.burn[i] = before, out.length[i] = count;
            for (u32 c = 0; c < states_; ++c)
                observations(c, chunk, first, states, room + n, out.state[c] + i * (room + n) * stacked(c));
            padded(action_, chunk, first, before + count, room, out.action + i * room * store_.column_bytes(action_));
            for (u32 t = 0; t < most; ++t) {
                const std::size_t at = i * most + t;
                out.reward[at] = out.discount[at] = 0.0f, out.ahead[at] = 0;
                if (t >= count) continue;
                const u32 position = window.position + t, after = window.states() - 1 - position,
                          steps = after < n ? after : n;
                out.ahead[at] = steps;
                n_step(seek(chunk, position), window, position, steps, discount, out.reward[at], out.discount[at]);
            }
            run(version_, chunk, window.position, 1, out.version + i * sizeof(u64));
            if (out.memory) run(states_, chunk, first, 1, out.memory + i * store_.column_bytes(states_));
        }
    }

private:
    static constexpr std::size_t AHEAD = 20;  // windows whose memory is asked for before it is used
    static constexpr u32 MOST_STATES = 16;
    void copy_edges(const WindowOutputs& outputs) const {
        for (std::size_t i = 0; i < windows_.size(); ++i) edge_window(windows_[i], i, outputs);
    }
    // S, A, R: bytes of a window's (only) state, action and reward, or 0: known when it runs.
    template <std::size_t S, std::size_t A, std::size_t R>
    void copy_windows(const WindowOutputs& outputs) const {
        // What the loop reads stands in locals: bytes written to an output could be anything else, as far as the
        // compiler knows.
        const u32 most = options_.pick_len, states = S ? 1 : states_, mask = mask_, shift = shift_;
        Copied state[MOST_STATES];
        for (u32 c = 0; c < states; ++c)
            state[c] = {store_.column_offset(c), store_.column_bytes(c), most * std::size_t{store_.column_bytes(c)},
                        outputs.state[c], outputs.next[c]};
        Copied action{store_.column_offset(action_), store_.column_bytes(action_),
                      most * std::size_t{store_.column_bytes(action_)}, outputs.action, nullptr};
        Copied reward{store_.column_offset(reward_), sizeof(float), most * sizeof(float), outputs.reward, nullptr};
        if (S)
            state[0].window = S, state[0].bytes = S / (R / 4), action.window = A, action.bytes = A / (R / 4),
            reward.window = R;
        const Chunks chunks = store_.chunks();
        const Window* const windows = windows_.data();
        const std::size_t count = windows_.size();
        u32 *const length = outputs.length, *const next_length = outputs.next_length;
        for (std::size_t i = 0; i < count; ++i) {
            if (i + AHEAD < count) {
                const u32 slot = windows[i + AHEAD].slot, offset = slot & mask;
                const byte* chunk = chunks[slot >> shift];
                for (u32 c = 0; c < states; ++c) ask(state[c].at(chunk, offset), state[c].window + state[c].bytes);
                ask(action.at(chunk, offset), action.window);
                ask(reward.at(chunk, offset), reward.window);
                if (offset + most > mask) [[unlikely]] {
                    const u32 after = store_.head(slot >> shift).next;
                    chunk = chunks[after == NONE ? 0 : after];
                    for (u32 c = 0; c < states; ++c) __builtin_prefetch(state[c].at(chunk, 0));
                    __builtin_prefetch(action.at(chunk, 0));
                    __builtin_prefetch(reward.at(chunk, 0));
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
                copy_bytes(action.to + i * action.window, action.at(chunk, offset), action.window);
                copy_bytes(reward.to + i * reward.window, reward.at(chunk, offset), reward.window);
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
            copy_split(action.to + i * action.window, action.at(chunk, offset), here * action.bytes,
                       after + action.offset, action.window);
            copy_split(reward.to + i * reward.window, reward.at(chunk, offset), here * reward.bytes,
                       after + reward.offset, reward.window);
        }
    }
    // `bytes` in all: up to `here` of them from `from`, the others from `rest`.
    static void copy_split(byte* to, const byte* from, std::size_t here, const byte* rest, std::size_t bytes) {
        const std::size_t first = here < bytes ? here : bytes;
        copy_bytes(to, from, first);
        copy_bytes(to + first, rest, bytes - first);
    }
    struct Copied {  // a column: where it stands in a chunk, bytes of a record and of what a window takes of it, and
                     // where that goes
        std::size_t offset, bytes, window;
        byte *to, *next;  // next: the same, a state (or n) later; null but for states
        const byte* at(const byte* chunk, u32 record) const { return chunk + offset + record * bytes; }
    };
    // The first lines of `bytes` from `from` on; the processor fetches the rest of a long run by itself.
    __attribute__((always_inline)) static void ask(const byte* from, std::size_t bytes) {
        const byte* last = from + std::min<std::size_t>(bytes, 320) - 1;
        for (; from < last; from += 64) __builtin_prefetch(from);
        __builtin_prefetch(last);
    }
    std::size_t stacked(u32 column) const { return std::size_t{store_.column_bytes(column)} * stack_; }

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
        const std::size_t bytes = store_.column_bytes(column);
        run(column, chunk, position, count, to);
        if (count < most) std::memset(to + count * bytes, 0, (most - count) * bytes);
    }
    void observation(u32 column, u32 chunk, u32 position, byte* to) const {
        const u32 bytes = store_.column_bytes(column);
        u32 first = position + 1 - stack_;
        if (position + 1 < stack_) {
            first = 0;
            for (u32 repeated = stack_ - 1 - position; repeated--; to += bytes) run(column, chunk, 0, 1, to);
        }
        run(column, chunk, first, position + 1 - first, to);
    }
    void observations(u32 column, u32 chunk, u32 position, u32 count, u32 most, byte* to) const {
        if (stack_ == 1) return padded(column, chunk, position, count, most, to);
        for (u32 i = 0; i < count; ++i) observation(column, chunk, position + i, to + i * stacked(column));
        std::memset(to + count * stacked(column), 0, (most - count) * stacked(column));
    }
    // A window that meets a chunk's border or an episode's end, or whose frames are stacked.
    __attribute__((noinline)) void edge_window(const Window& window, std::size_t i, const WindowOutputs& out) const {
        const u32 most = options_.pick_len, chunk = window.slot >> shift_;
        const u32 left = window.records() - window.position, count = left < most ? left : most;
        const u32 after = window.states() - 1 - window.position, next_count = after < count ? after : count;
        out.length[i] = count, out.next_length[i] = next_count;
        for (u32 c = 0; c < states_; ++c) {
            observations(c, chunk, window.position, count, most, out.state[c] + i * most * stacked(c));
            observations(c, chunk, window.position + 1, next_count, most, out.next[c] + i * most * stacked(c));
        }
        padded(action_, chunk, window.position, count, most, out.action + i * most * store_.column_bytes(action_));
        padded(reward_, chunk, window.position, count, most, out.reward + i * most * sizeof(float));
    }
    void n_step(u32 chunk, const Window& window, u32 position, u32 steps, float discount, float& sum,
                float& left) const {
        double total = 0.0, factor = 1.0;
        const byte* rewards = store_.column(chunk, reward_);
        for (u32 j = 0; j < steps; ++j, factor *= discount) {
            const u32 offset = (position + j) & mask_;
            if (j && offset == 0) rewards = store_.column(chunk = store_.head(chunk).next, reward_);
            float reward;
            std::memcpy(&reward, rewards + offset * sizeof(float), sizeof reward);
            total += factor * reward;
        }
        sum = static_cast<float>(total);
        left = window.terminal_end() && position + steps + 1 == window.states() ? 0.0f : static_cast<float>(factor);
    }

    const Options& options_;
    const Store& store_;
    std::span<const Window> windows_;
    u32 shift_, mask_, states_, action_, reward_, version_, stack_;
};
