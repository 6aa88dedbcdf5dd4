#include "step_writer.hpp"

#include <limits>
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
                              offsetof(Row, kind),
                              {offsetof(Row, reward), 4},
                              {offsetof(Row, action), 8},
                              {offsetof(Row, state), 8},
                              16,  // two frames of two floats
                              {},
                              {{0, 2, 4}}};

struct Fixture {
    Memory memory;
    Ring ring, consumer;
    StepWriter writer;
    float state[2][4] = {}, next[2][4] = {};
    int64_t action[2] = {1, 2};
    float reward[2] = {0.5f, 1.5f};
    bool terminated[2] = {}, truncated[2] = {};
    uint64_t version = 0;
    int broken = -1;  // environment whose newest frame holds a NaN

    explicit Fixture(size_t capacity, bool drop_nonfinite = false)
        : memory(prepare(capacity)),
          ring(memory.get()),
          consumer(memory.get()),
          writer(&ring, format, 10, drop_nonfinite) {
        writer.start(2);
    }
    static Memory prepare(size_t capacity) {
        Memory memory = poisoned(Ring::bytes(capacity, sizeof(Row)));
        Ring::initialize(memory.get(), capacity, sizeof(Row));
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
        if (broken >= 0) state[broken][3] = std::numeric_limits<float>::quiet_NaN();
        const auto raw = [](const auto* values) { return reinterpret_cast<const std::byte*>(values); };
        return writer.write({raw(&state[0][0]), raw(action), raw(reward), terminated, truncated, raw(&next[0][0]),
                             nullptr, nullptr, version});
    }
    std::vector<Row> pop() {
        std::vector<Row> rows(64);
        rows.resize(consumer.pop(reinterpret_cast<std::byte*>(rows.data()), rows.size()));
        return rows;
    }
};

static void a_step_writes_one_row_an_environment_with_its_newest_frame() {
    Fixture f(16);
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
    Fixture f(16);
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
    Fixture f(3);
    EXPECT(f.write() == 2 && f.writer.pending() == 0);
    EXPECT(f.write() == 2 && f.writer.pending() == 2);
    EXPECT(!f.writer.flush() && f.writer.pending() == 1);
    auto rows = f.pop();
    EXPECT(rows.size() == 3 && f.writer.flush() && f.writer.pending() == 0);
    for (const Row& row : f.pop()) rows.push_back(row);
    EXPECT(rows.size() == 4);
    for (size_t i = 0; i < 4; ++i) EXPECT(rows[i].stream == 10 + i % 2 && rows[i].step == i / 2);
}

static void a_closed_ring_takes_no_more_rows() {
    Fixture f(3);
    f.write();
    f.ring.close();
    f.write();
    EXPECT(f.writer.flush() && f.writer.pending() == 0 && f.pop().size() == 2);
}

static void after_a_cut_episodes_begin_at_step_zero() {
    Fixture f(16);
    f.terminated[1] = true;
    f.write();
    f.terminated[1] = false;
    f.writer.cut();
    f.write();
    const auto rows = f.pop();
    EXPECT(rows.size() == 5 && rows[3].step == 0 && rows[4].step == 0);
}

static void a_nan_is_refused_with_its_environment_and_step_and_nothing_is_written() {
    Fixture f(16);
    f.write();
    f.broken = 1;
    bool refused = false;
    try {
        f.write();
    } catch (const ddrl::NonFiniteValue& value) {
        refused = value.env == 1 && value.step == 1;
    }
    EXPECT(refused && f.pop().size() == 2);
    f.broken = -1;
    f.reward[0] = std::numeric_limits<float>::infinity();
    refused = false;
    try {
        f.write();
    } catch (const ddrl::NonFiniteValue& value) {
        refused = value.env == 0 && value.step == 1;
    }
    EXPECT(refused);
}

static void a_dropped_nan_leaves_a_gap_that_no_later_row_closes() {
    Fixture f(64, true);
    f.write();  // step 0
    f.terminated[1] = true;
    f.broken = 1;
    EXPECT(f.write() == 1 && f.writer.nonfinite_rows() == 2);  // step 1 and its end
    f.terminated[1] = false;
    f.broken = -1;
    EXPECT(f.write() == 1);  // the reset step of environment 1
    f.broken = 1;
    EXPECT(f.write() == 1);  // step 0 of its next episode
    f.broken = -1;
    EXPECT(f.write() == 2);  // step 1, which a reader would take for the step after the first row
    std::vector<uint32_t> steps;
    for (const Row& row : f.pop())
        if (row.stream == 11) steps.push_back(row.step);
    EXPECT(steps.size() == 2 && steps[0] == 0 && steps[1] == 2);
}

int main() {
    RUN(a_nan_is_refused_with_its_environment_and_step_and_nothing_is_written);
    RUN(a_dropped_nan_leaves_a_gap_that_no_later_row_closes);
    RUN(a_step_writes_one_row_an_environment_with_its_newest_frame);
    RUN(an_end_writes_the_final_state_and_the_reset_step_writes_nothing);
    RUN(rows_that_find_no_room_wait_and_arrive_in_order);
    RUN(a_closed_ring_takes_no_more_rows);
    RUN(after_a_cut_episodes_begin_at_step_zero);
}
