#include "ring.hpp"

#include <deque>
#include <random>
#include <thread>
#include <vector>

#include "expect.hpp"

using ddrl::Ring;

struct Row {
    uint64_t number;
    uint64_t twin;
    uint64_t filler[2];
};
static Row make(uint64_t number) { return {number, ~number, {number * 3, number * 5}}; }
static bool whole(const Row& row) {
    return row.twin == ~row.number && row.filler[0] == row.number * 3 && row.filler[1] == row.number * 5;
}
static const std::byte* bytes(const Row* row) { return reinterpret_cast<const std::byte*>(row); }
static std::byte* bytes(Row* row) { return reinterpret_cast<std::byte*>(row); }

static void random_pushes_and_pops_agree_with_a_queue() {
    std::mt19937_64 random(1);
    for (size_t capacity : {1u, 2u, 3u, 7u, 64u}) {
        Memory memory = poisoned(Ring::bytes(capacity, sizeof(Row)));
        Ring::initialize(memory.get(), capacity, sizeof(Row));
        Ring producer(memory.get()), consumer(memory.get());
        std::deque<uint64_t> reference;
        uint64_t next = 0;
        for (int turn = 0; turn < 20000; ++turn) {
            const size_t count = random() % (capacity + 3);
            std::vector<Row> rows(count);
            if (random() % 2) {
                for (size_t i = 0; i < count; ++i) rows[i] = make(next + i);
                const size_t pushed = producer.push_fitting(bytes(rows.data()), count);
                EXPECT(pushed == std::min(count, capacity - reference.size()));
                for (size_t i = 0; i < pushed; ++i) reference.push_back(next++);
            } else {
                const size_t popped = consumer.pop(bytes(rows.data()), count);
                EXPECT(popped == std::min(count, reference.size()));
                for (size_t i = 0; i < popped; ++i) {
                    EXPECT(rows[i].number == reference.front() && whole(rows[i]));
                    reference.pop_front();
                }
            }
            EXPECT(producer.size() == reference.size() && consumer.pushed() - consumer.popped() == reference.size());
        }
    }
}

static void every_row_arrives_once_and_in_order_while_the_producer_waits() {
    constexpr uint64_t total = 400'000;
    constexpr size_t capacity = 61;
    Memory memory = poisoned(Ring::bytes(capacity, sizeof(Row)));
    Ring::initialize(memory.get(), capacity, sizeof(Row));
    std::thread producer([&] {
        Ring ring(memory.get());
        std::mt19937_64 random(2);
        std::vector<Row> rows(40);
        for (uint64_t next = 0; next < total;) {
            const size_t count = std::min<uint64_t>(1 + random() % rows.size(), total - next);
            for (size_t i = 0; i < count; ++i) rows[i] = make(next + i);
            for (size_t done = 0; done < count;) {
                done += ring.push_fitting(bytes(rows.data() + done), count - done);
                if (done < count) ring.wait_room(60.0);
            }
            next += count;
        }
    });
    Ring ring(memory.get());
    std::mt19937_64 random(3);
    std::vector<Row> rows(50);
    for (uint64_t expected = 0; expected < total;) {
        const size_t count = ring.pop(bytes(rows.data()), 1 + random() % rows.size());
        for (size_t i = 0; i < count; ++i) EXPECT(rows[i].number == expected + i && whole(rows[i]));
        expected += count;
    }
    producer.join();
    EXPECT(ring.size() == 0 && ring.pushed() == total);
}

static void rows_written_in_place_are_seen_only_when_published() {
    Memory memory = poisoned(Ring::bytes(4, sizeof(Row)));
    Ring::initialize(memory.get(), 4, sizeof(Row));
    Ring producer(memory.get()), consumer(memory.get());
    for (uint64_t round = 0; round < 9; ++round) {
        EXPECT(producer.room(3) >= 3);
        for (size_t i = 0; i < 3; ++i) *reinterpret_cast<Row*>(producer.vacant(i)) = make(3 * round + i);
        EXPECT(consumer.filled(1) == 0);
        producer.publish(3);
        Row rows[4];
        EXPECT(consumer.pop(bytes(rows), 4) == 3);
        for (size_t i = 0; i < 3; ++i) EXPECT(rows[i].number == 3 * round + i && whole(rows[i]));
    }
}

static void closing_wakes_a_waiting_producer() {
    Memory memory = poisoned(Ring::bytes(1, sizeof(Row)));
    Ring::initialize(memory.get(), 1, sizeof(Row));
    Ring consumer(memory.get());
    std::thread thread([&] {
        Ring producer(memory.get());
        const Row row = make(1);
        EXPECT(producer.push_fitting(bytes(&row), 1) == 1);
        EXPECT(producer.wait_room(1e6));
        EXPECT(producer.closed() && producer.room(1) == 0);
    });
    const auto* header = reinterpret_cast<const ddrl::RingHeader*>(memory.get());
    while (header->room.waiters.load() == 0) std::this_thread::yield();
    consumer.close();
    thread.join();
    EXPECT(consumer.size() == 1);
}

int main() {
    RUN(random_pushes_and_pops_agree_with_a_queue);
    RUN(every_row_arrives_once_and_in_order_while_the_producer_waits);
    RUN(rows_written_in_place_are_seen_only_when_published);
    RUN(closing_wakes_a_waiting_producer);
}
