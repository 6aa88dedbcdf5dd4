#include "ring.hpp"

#include <iterator>
#include <map>
#include <random>
#include <vector>

#include "expect.hpp"

using ddrl::LaneSet;
using ddrl::Ring;

struct Row {
    uint32_t lane;
    uint32_t number;
};

struct Lanes {
    std::vector<Memory> memory;
    std::vector<Ring> producers, consumers;
    std::vector<uint32_t> next;

    Lanes(size_t count, size_t capacity) : next(count, 0) {
        for (size_t i = 0; i < count; ++i) {
            memory.push_back(poisoned(Ring::bytes(capacity, sizeof(Row))));
            Ring::initialize(memory.back().get(), capacity, sizeof(Row));
            producers.emplace_back(memory.back().get());
            consumers.emplace_back(memory.back().get());
        }
    }
    size_t push(size_t lane, size_t count) {
        size_t pushed = 0;
        for (; pushed < count; ++pushed) {
            const Row row{static_cast<uint32_t>(lane), next[lane]};
            if (producers[lane].push_fitting(reinterpret_cast<const std::byte*>(&row), 1) == 0) break;
            ++next[lane];
        }
        return pushed;
    }
    LaneSet set(std::vector<size_t> streams = {}) {
        std::vector<Ring*> rings;
        for (Ring& ring : consumers) rings.push_back(&ring);
        return LaneSet(rings, streams);
    }
};

static size_t drain(LaneSet& set, std::vector<Row>& out, size_t count) {
    out.resize(count);
    const size_t moved = set.drain(reinterpret_cast<std::byte*>(out.data()), count);
    out.resize(moved);
    return moved;
}

static void rows_keep_their_order_within_a_lane_and_none_is_lost() {
    std::mt19937_64 random(4);
    Lanes lanes(5, 31);
    LaneSet set = lanes.set();
    std::vector<uint32_t> expected(5, 0);
    std::vector<Row> out;
    size_t inside = 0;
    for (int turn = 0; turn < 20000; ++turn) {
        inside += lanes.push(random() % 5, random() % 40);
        EXPECT(set.pending() == inside);
        const size_t wanted = random() % 60;
        const size_t moved = drain(set, out, wanted);
        EXPECT(moved == std::min(wanted, inside));
        inside -= moved;
        for (const Row& row : out) EXPECT(row.number == expected[row.lane]++);
    }
}

static void full_lanes_share_the_space_equally() {
    Lanes lanes(4, 100);
    LaneSet set = lanes.set();
    for (size_t lane = 0; lane < 4; ++lane) lanes.push(lane, 100);
    std::vector<Row> out;
    EXPECT(drain(set, out, 40) == 40);
    std::map<uint32_t, int> counts;
    for (const Row& row : out) ++counts[row.lane];
    for (const auto& [lane, count] : counts) EXPECT(count == 10);
}

static void what_a_short_lane_leaves_free_goes_to_the_others() {
    Lanes lanes(3, 100);
    LaneSet set = lanes.set();
    lanes.push(0, 2);
    lanes.push(1, 100);
    lanes.push(2, 100);
    std::vector<Row> out;
    EXPECT(drain(set, out, 92) == 92);
    std::map<uint32_t, int> counts;
    for (const Row& row : out) ++counts[row.lane];
    EXPECT(counts[0] == 2 && counts[1] >= 40 && counts[2] >= 40);
}

static void no_lane_starves_when_the_space_is_smaller_than_the_set() {
    Lanes lanes(6, 100);
    LaneSet set = lanes.set();
    for (size_t lane = 0; lane < 6; ++lane) lanes.push(lane, 100);
    std::vector<Row> out;
    std::map<uint32_t, int> counts;
    for (int turn = 0; turn < 60; ++turn) {
        EXPECT(drain(set, out, 1) == 1);
        ++counts[out[0].lane];
    }
    for (uint32_t lane = 0; lane < 6; ++lane) EXPECT(counts[lane] == 10);
}

using Counts = std::map<uint32_t, size_t>;

// Rows taken of each lane while all of them are full, `count` at once.
static Counts taken_of_full_lanes(Lanes& lanes, LaneSet& set, size_t rows, size_t count) {
    Counts counts;
    std::vector<Row> out;
    for (size_t lane = 0; lane < lanes.next.size(); ++lane) lanes.push(lane, 8);
    for (size_t taken = 0; taken < rows; taken += count) {
        EXPECT(drain(set, out, count) == count);
        for (const Row& row : out) {
            ++counts[row.lane];
            lanes.push(row.lane, 1);
        }
    }
    return counts;
}

static void a_few_lanes_come_first_for_a_while_and_all_of_them_in_turn() {
    Lanes lanes(40, 8);
    LaneSet set = lanes.set(std::vector<size_t>(40, 8));
    const size_t at_once = LaneSet::streams_at_once / 8;
    const size_t turn = LaneSet::stream_rows * 8;
    Counts first = taken_of_full_lanes(lanes, set, turn, 4);
    EXPECT(first.size() == at_once);
    for (const auto& [lane, count] : first) EXPECT(count == turn / at_once);
    Counts second = taken_of_full_lanes(lanes, set, turn, 4);
    EXPECT(second.size() == at_once);
    size_t again = 0;
    for (const auto& [lane, count] : second) again += first.count(lane);
    EXPECT(again == at_once - 1);  // one has had its turn
    Counts all = taken_of_full_lanes(lanes, set, 40 * turn, 4);
    EXPECT(all.size() == 40);
    for (const auto& [lane, count] : all) EXPECT(count == turn);
}

static void lanes_without_streams_share_fairly() {
    for (const size_t count : {1, 2, 4}) {
        Lanes lanes(40, 8);
        LaneSet set = lanes.set(std::vector<size_t>(40, 0));
        const Counts counts = taken_of_full_lanes(lanes, set, 1600, count);
        EXPECT(counts.size() == 40);
        for (const auto& [lane, taken] : counts) EXPECT(taken == 40);
    }
}

static void a_lane_without_streams_among_others_does_not_stay_the_first() {
    Lanes lanes(3, 64);
    LaneSet set = lanes.set({0, LaneSet::streams_at_once, LaneSet::streams_at_once});
    const size_t turn = LaneSet::stream_rows * LaneSet::streams_at_once;
    Counts counts = taken_of_full_lanes(lanes, set, 4 * turn, 1);
    EXPECT(counts[1] >= turn && counts[2] >= turn);
}

static void lanes_that_come_first_together_are_far_from_each_other() {
    Lanes lanes(300, 8);
    LaneSet set = lanes.set(std::vector<size_t>(300, 8));
    for (int turn = 0; turn < 300; ++turn) {
        const Counts first = taken_of_full_lanes(lanes, set, LaneSet::stream_rows * 8, 8);
        EXPECT(first.size() == 4);
        for (auto at = first.begin(), next = std::next(at); next != first.end(); ++at, ++next)
            EXPECT(next->first - at->first > 10);
    }
}

static void what_the_first_leave_free_goes_to_the_next_few() {
    Lanes lanes(12, 10);
    LaneSet set = lanes.set(std::vector<size_t>(12, LaneSet::streams_at_once / 4));
    for (size_t lane = 0; lane < 12; ++lane) lanes.push(lane, 10);
    std::vector<Row> out;
    EXPECT(drain(set, out, 64) == 64);
    Counts counts, lanes_of;
    for (const Row& row : out) ++counts[row.lane];
    for (const auto& [lane, count] : counts) ++lanes_of[static_cast<uint32_t>(count)];
    EXPECT(counts.size() == 8 && lanes_of[10] == 4 && lanes_of[6] == 4);
}

static void a_lane_of_many_streams_comes_first_alone_and_longer() {
    Lanes lanes(2, 8);
    LaneSet set = lanes.set({10 * LaneSet::streams_at_once, 1});
    const size_t turn = 10 * LaneSet::streams_at_once * LaneSet::stream_rows;
    EXPECT(taken_of_full_lanes(lanes, set, turn, 8).size() == 1);
    EXPECT(taken_of_full_lanes(lanes, set, 8, 8).size() == 2);
}

int main() {
    RUN(a_few_lanes_come_first_for_a_while_and_all_of_them_in_turn);
    RUN(lanes_without_streams_share_fairly);
    RUN(a_lane_without_streams_among_others_does_not_stay_the_first);
    RUN(lanes_that_come_first_together_are_far_from_each_other);
    RUN(what_the_first_leave_free_goes_to_the_next_few);
    RUN(a_lane_of_many_streams_comes_first_alone_and_longer);
    RUN(rows_keep_their_order_within_a_lane_and_none_is_lost);
    RUN(full_lanes_share_the_space_equally);
    RUN(what_a_short_lane_leaves_free_goes_to_the_others);
    RUN(no_lane_starves_when_the_space_is_smaller_than_the_set);
}
