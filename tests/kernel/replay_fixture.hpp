// A replay whose records tell where they belong: state = {episode's tag, position}, action = tag * 1000 + position,
// reward = position.
#pragma once

#include <vector>

#include "expect.hpp"
#include "replay/evictions.hpp"
#include "replay/gather.hpp"
#include "replay/selectors.hpp"

namespace fixture {

using namespace ddrl::replay;

inline u32 below(Random& random, u32 bound) {
    u32 number;
    random.below(bound, {&number, 1});
    return number;
}

inline Options options(u64 capacity, u32 pick_len = 1, u32 n_step = 1, u32 shift = 2) {
    Options chosen;
    chosen.columns = {{8, Role::STATE}, {8}, {4, Role::REWARD}, {8}};  // state, action, reward, version
    chosen.capacity = capacity, chosen.pick_len = pick_len, chosen.n_step = n_step, chosen.shift = shift;
    return chosen;
}

inline Parameters exponents(double priority, double importance) {
    return {{"priority_exponent", priority}, {"importance_exponent", importance}, {"stratified", 0}};
}

struct Records {
    std::vector<float> state, reward;
    std::vector<u64> action, version;
    const byte* data[4];
    std::size_t stride[4] = {8, 8, 4, 8};

    Records(u32 tag, u32 first, u32 count) {
        for (u32 i = first; i <= first + count; ++i) {
            state.push_back(static_cast<float>(tag)), state.push_back(static_cast<float>(i));
            action.push_back(u64{tag} * 1000 + i), reward.push_back(static_cast<float>(i)), version.push_back(tag);
        }
        data[0] = bytes(state), data[1] = bytes(action), data[2] = bytes(reward), data[3] = bytes(version);
    }
    Rows rows() const { return {data, stride, static_cast<u32>(reward.size() - 1)}; }
    const byte* final_state() const { return data[0] + 8 * (reward.size() - 1); }

private:
    template <class T>
    static const byte* bytes(const std::vector<T>& items) {
        return reinterpret_cast<const byte*>(items.data());
    }
};

// A row as lanes carry it.
struct Row {
    u64 version;
    u32 stream, step;
    float reward;
    u32 kind;
    u64 action;
    float state[2];
};
inline RowLayout row_layout() { return {sizeof(Row), 8, 12, 20, {32, 24, 16, 0}}; }

inline u64 add_episode(Replay& replay, u32 tag, u32 count, Ending ending = Ending::TERMINATED) {
    const Records records(tag, 0, count);
    const byte* last = records.final_state();
    const bool with_state = ending == Ending::TERMINATED || ending == Ending::TRUNCATED;
    const u64 handle = replay.record(replay.new_episode(), records.rows(), with_state ? ending : Ending::LIVE,
                                     with_state ? &last : nullptr);
    if (ending == Ending::CUT) replay.cut(handle);
    return handle;
}

inline void expect_sound(Replay& replay) {
    try {
        replay.check();
    } catch (const std::runtime_error& wrong) {
        std::fprintf(stderr, "%s\n", wrong.what());
        EXPECT(false);
    }
}

// Draws windows and checks that each holds consecutive records of one episode. (An episode that was evicted while it
// was written goes on under a new handle, so its positions are not those of its records: `shifted` allows any start.)
struct Batch {
    std::vector<u64> handle, action;
    std::vector<u32> position, length, next_length;
    std::vector<float> state, next, reward, weight;

    bool draw(Replay& replay, u32 selector, u32 size, bool shifted = false) {
        const std::size_t most = replay.options().pick_len, all = size * most;
        handle.resize(size), position.resize(size), length.resize(size), next_length.resize(size), weight.resize(size);
        state.assign(2 * all, -1), next.assign(2 * all, -1), action.assign(all, ~u64{0}), reward.assign(all, -1);
        byte *state_to = reinterpret_cast<byte*>(state.data()), *next_to = reinterpret_cast<byte*>(next.data());
        byte* const column[] = {state_to, reinterpret_cast<byte*>(action.data()),
                                reinterpret_cast<byte*>(reward.data()), nullptr};
        const WindowOutputs outputs{column, &next_to, length.data(), next_length.data()};
        if (!replay.draw(selector, size, handle.data(), position.data(), weight.data(),
                         [&](std::span<const Window> windows) {
                             gather(replay, windows, [&](const auto& loops) { loops.windows(outputs); });
                         }))
            return false;
        for (std::size_t i = 0; i < size; ++i) {
            EXPECT(length[i] >= 1 && length[i] <= most && next_length[i] <= length[i]);
            const float tag = state[2 * i * most],
                        first = shifted ? state[2 * i * most + 1] : static_cast<float>(position[i]);
            for (std::size_t t = 0; t < most; ++t) {
                const std::size_t at = i * most + t;
                const float wanted = first + static_cast<float>(t);
                EXPECT(state[2 * at] == (t < length[i] ? tag : 0) && state[2 * at + 1] == (t < length[i] ? wanted : 0));
                EXPECT(action[at] == (t < length[i] ? static_cast<u64>(tag) * 1000 + static_cast<u64>(wanted) : 0));
                EXPECT(reward[at] == (t < length[i] ? wanted : 0));
                EXPECT(next[2 * at] == (t < next_length[i] ? tag : 0) &&
                       next[2 * at + 1] == (t < next_length[i] ? wanted + 1 : 0));
            }
        }
        return true;
    }
};

}  // namespace fixture
