// Included by gather.hpp alone, once for each instruction set, inside a namespace of its own: copies of runs of
// records, and sums of rewards.

// Copies `W` bytes, any alignment, as one vector of this instruction set.
template <std::size_t W>
__attribute__((always_inline)) inline void copy_lane(byte* to, const byte* from) {
    typedef u8 Lane __attribute__((vector_size(W), aligned(1), may_alias));
    *reinterpret_cast<Lane*>(to) = *reinterpret_cast<const Lane*>(from);
}

// Copies of a few hundred bytes, whose sizes repeat: branches are predicted, and a call to memcpy would cost more.
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
        std::size_t offset;  // of the column in a chunk
    };
    std::size_t stacked(u32 column) const {
        return std::size_t{store_.column_bytes(column)} * store_.column_stack(column);
    }
    u32 most_stacked() const {
        u32 most = 1;
        for (u32 c = 0; c < states_; ++c) most = std::max(most, store_.column_stack(c));
        return most;
    }

    std::size_t most_reward_floats() const {
        std::size_t most = 0;
        for (u32 c = 0; c < columns_; ++c)
            if (store_.column_role(c) == Role::REWARD)
                most = std::max<std::size_t>(most, store_.column_bytes(c) / sizeof(float));
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
                 std::size_t at) const {
        const double factor = summed.floats == 1 ? scalar_sum(chunk, position, steps, discount, summed.column,
                                                              reinterpret_cast<float*>(summed.to)[at])
                                                 : vector_sums(chunk, position, steps, discount, summed, at);
        return bootstrap(window, position + steps, factor);
    }
    // The discount of the state at `position`: 0 where it is terminal.
    static float bootstrap(const Window& window, u32 position, double factor) {
        return window.terminal_end() && position + 1 == window.states() ? 0.0f : static_cast<float>(factor);
    }
    double scalar_sum(u32 chunk, u32 position, u32 steps, float discount, u32 column, float& sum) const {
        double total = 0.0, factor = 1.0;
        const byte* rewards = store_.column(chunk, column);
        for (u32 j = 0; j < steps; ++j, factor *= discount) {
            const u32 offset = (position + j) & mask_;
            if (j && offset == 0) rewards = store_.column(chunk = store_.head(chunk).next, column);
            float reward;
            std::memcpy(&reward, rewards + offset * sizeof(float), sizeof reward);
            total += factor * reward;
        }
        sum = static_cast<float>(total);
        return factor;
    }
    __attribute__((noinline)) double vector_sums(u32 chunk, u32 position, u32 steps, float discount,
                                                 const Summed& summed, std::size_t at) const {
        const std::size_t bytes = summed.floats * sizeof(float);
        double factor = 1.0;
        for (u32 k = 0; k < summed.floats; ++k) {
            double total = 0.0;
            factor = 1.0;
            for (u32 j = 0; j < steps; ++j, factor *= discount) {
                float reward;
                std::memcpy(&reward,
                            store_.column(seek(chunk, position + j), summed.column) + ((position + j) & mask_) * bytes +
                                k * sizeof(float),
                            sizeof reward);
                total += factor * reward;
            }
            const float sum = static_cast<float>(total);
            std::memcpy(summed.to + at * bytes + k * sizeof(float), &sum, sizeof sum);
        }
        return factor;
    }

    const Store& store_;
    u32 shift_, mask_, states_, columns_;
};
