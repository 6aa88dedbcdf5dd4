#include "ring.hpp"

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
    LaneSet set() {
        std::vector<Ring*> rings;
        for (Ring& ring : consumers) rings.push_back(&ring);
        return LaneSet(rings);
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

int main() {
    RUN(rows_keep_their_order_within_a_lane_and_none_is_lost);
    RUN(full_lanes_share_the_space_equally);
    RUN(what_a_short_lane_leaves_free_goes_to_the_others);
    RUN(no_lane_starves_when_the_space_is_smaller_than_the_set);
}
