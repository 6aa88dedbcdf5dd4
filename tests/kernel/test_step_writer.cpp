#include "step_writer.hpp"

#include <vector>

#include "expect.hpp"

using ddrl::Ring;
using ddrl::RowFormat;
using ddrl::StepWriter;

struct Row {
    uint64_t policy_version;
    uint32_t stream, step;
    float reward;
    uint32_t kind;
    int64_t action;
    float state[2];
};
static const RowFormat format{sizeof(Row),
                              offsetof(Row, policy_version),
                              offsetof(Row, stream),
                              offsetof(Row, step),
                              offsetof(Row, reward),
                              offsetof(Row, kind),
                              offsetof(Row, action),
                              offsetof(Row, state),
                              8,
                              8,
                              16};  // two frames of two floats

struct Fixture {
    Memory memory;
    Ring ring, consumer;
    StepWriter writer;
    float state[2][4] = {}, next[2][4] = {};
    int64_t action[2] = {1, 2};
    float reward[2] = {0.5f, 1.5f};
    bool terminated[2] = {}, truncated[2] = {};
    uint64_t version = 0;

    Fixture(size_t capacity, bool drop)
        : memory(prepare(capacity, drop)), ring(memory.get()), consumer(memory.get()), writer(&ring, format, 10) {
        writer.start(2);
    }
    static Memory prepare(size_t capacity, bool drop) {
        Memory memory = poisoned(Ring::bytes(capacity, sizeof(Row)));
        Ring::initialize(memory.get(), capacity, sizeof(Row), drop);
        return memory;
    }
    size_t write() {
        ++version;
        for (int env = 0; env < 2; ++env) {
            for (int i = 0; i < 4; ++i) {
                state[env][i] =
                    static_cast<float>(version) + 0.1f * static_cast<float>(env) + 10.0f * static_cast<float>(i);
                next[env][i] = state[env][i] + 1.0f;
            }
        }
        return writer.write(reinterpret_cast<std::byte*>(state), reinterpret_cast<std::byte*>(action), reward,
                            terminated, truncated, reinterpret_cast<std::byte*>(next), version);
    }
    std::vector<Row> pop() {
        std::vector<Row> rows(64);
        rows.resize(consumer.pop(reinterpret_cast<std::byte*>(rows.data()), rows.size()));
        return rows;
    }
};

static void a_step_writes_one_row_an_environment_with_its_newest_frame() {
    Fixture f(16, false);
    EXPECT(f.write() == 2 && f.write() == 2);
    const auto rows = f.pop();
    EXPECT(rows.size() == 4);
    for (size_t i = 0; i < 4; ++i) {
        EXPECT(rows[i].stream == 10 + i % 2 && rows[i].step == i / 2 && rows[i].kind == 0 &&
               rows[i].policy_version == 1 + i / 2);
        EXPECT(rows[i].action == static_cast<int64_t>(1 + i % 2) && rows[i].reward == (i % 2 ? 1.5f : 0.5f));
    }
    EXPECT(rows[3].state[0] == f.state[1][2] && rows[3].state[1] == f.state[1][3]);
}

static void an_end_writes_the_final_state_and_the_reset_step_writes_nothing() {
    Fixture f(16, false);
    f.write();
    f.terminated[0] = true;
    f.truncated[0] = true;
    f.truncated[1] = true;
    EXPECT(f.write() == 4);
    f.terminated[0] = f.truncated[0] = f.truncated[1] = false;
    EXPECT(f.write() == 0);
    EXPECT(f.write() == 2);
    const auto rows = f.pop();
    EXPECT(rows.size() == 8);
    EXPECT(rows[3].kind == 1 && rows[3].step == 2 && rows[3].reward == 0 && rows[3].action == 0);
    EXPECT(rows[5].kind == 2 && rows[5].step == 2 && rows[5].stream == 11);
    EXPECT(rows[6].step == 0 && rows[7].step == 0 && rows[6].policy_version == 4);
}

static void rows_that_find_no_room_wait_and_arrive_in_order() {
    Fixture f(3, false);
    EXPECT(f.write() == 2 && f.writer.pending() == 0);
    EXPECT(f.write() == 2 && f.writer.pending() == 2);
    EXPECT(!f.writer.flush() && f.writer.pending() == 1);
    auto rows = f.pop();
    EXPECT(rows.size() == 3 && f.writer.flush() && f.writer.pending() == 0);
    for (const Row& row : f.pop()) rows.push_back(row);
    EXPECT(rows.size() == 4);
    for (size_t i = 0; i < 4; ++i) EXPECT(rows[i].stream == 10 + i % 2 && rows[i].step == i / 2);
}

static void a_full_ring_that_drops_leaves_a_gap_in_step() {
    Fixture f(3, true);
    f.write();
    EXPECT(f.write() == 2 && f.writer.flush() && f.ring.dropped() == 1);
    const auto before = f.pop();
    EXPECT(before.size() == 3 && before[2].stream == 10 && before[2].step == 1);
    f.write();
    const auto after = f.pop();
    EXPECT(after.size() == 2 && after[1].stream == 11 && after[1].step == 2);
}

static void a_closed_ring_takes_no_more_rows() {
    Fixture f(3, false);
    f.write();
    f.ring.close();
    f.write();
    EXPECT(f.writer.flush() && f.writer.pending() == 0 && f.pop().size() == 2);
}

static void after_a_cut_episodes_begin_at_step_zero() {
    Fixture f(16, false);
    f.terminated[1] = true;
    f.write();
    f.terminated[1] = false;
    f.writer.cut();
    f.write();
    const auto rows = f.pop();
    EXPECT(rows.size() == 5 && rows[3].step == 0 && rows[4].step == 0);
}

int main() {
    RUN(a_step_writes_one_row_an_environment_with_its_newest_frame);
    RUN(an_end_writes_the_final_state_and_the_reset_step_writes_nothing);
    RUN(rows_that_find_no_room_wait_and_arrive_in_order);
    RUN(a_full_ring_that_drops_leaves_a_gap_in_step);
    RUN(a_closed_ring_takes_no_more_rows);
    RUN(after_a_cut_episodes_begin_at_step_zero);
}
