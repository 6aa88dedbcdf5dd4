// Writers, readers, priority updates and snapshots at once: no torn record, sound invariants; the thread sanitizer
// looks on in CI.
#include <atomic>
#include <thread>

#include "replay/snapshot.hpp"
#include "replay_fixture.hpp"

using namespace fixture;

namespace {

struct MemorySink {
    std::vector<byte> bytes;
    void begin(std::size_t size) { bytes.reserve(size); }
    void put(const void* data, std::size_t size) {
        const auto* from = static_cast<const byte*>(data);
        bytes.insert(bytes.end(), from, from + size);
    }
    void finish() { EXPECT(bytes.size() == bytes.capacity()); }
};

void many_writers_and_readers_leave_no_torn_record() {
    Replay replay(options(3000, 4, 2), std::make_unique<Lru>());
    const u32 selectors[] = {
        replay.add_selector(std::make_unique<Uniform>(Random(1, 1))),
        replay.add_selector(std::make_unique<Prioritized>(Random(1, 2), 3000, exponents(0.6, 0.4)))};
    for (u32 tag = 1; tag <= 40; ++tag) add_episode(replay, tag, 50);
    std::atomic<bool> stop{false};
    std::vector<std::thread> writers, readers;
    for (u32 writer = 0; writer < 2; ++writer)
        writers.emplace_back([&, writer] {
            for (u32 tag = 100 + writer; !stop; tag += 2) add_episode(replay, tag % 10000, 1 + tag % 97);
        });
    for (u32 reader = 0; reader < 2; ++reader)
        readers.emplace_back([&, reader] {
            Batch batch;
            for (int i = 0; i < 1000; ++i) {
                EXPECT(batch.draw(replay, selectors[reader], 64, true));
                replay.set_priority(selectors[1], batch.handle, batch.position, std::vector<float>(64, 2.0f));
            }
        });
    std::thread saver([&] {
        for (int i = 0; i < 10; ++i) {
            MemorySink sink;
            Snapshot::write(replay, "x", SnapshotKind::COPY, sink, [](u64, u64) {});
            Replay other(options(3000, 4, 2), std::make_unique<Lru>());
            const u32 uniform = other.add_selector(std::make_unique<Uniform>(Random(1, 1)));
            other.add_selector(std::make_unique<Prioritized>(Random(1, 2), 3000, exponents(0.6, 0.4)));
            const std::span<const byte> source(sink.bytes);
            Snapshot::read(other, "x", {&source, 1}, [](u64, u64) {});
            expect_sound(other);
            Batch batch;
            EXPECT(batch.draw(other, uniform, 256, true));  // checks every record it sees
        }
    });
    for (auto& thread : readers) thread.join();
    saver.join();
    stop = true;
    for (auto& thread : writers) thread.join();
    expect_sound(replay);
}

// A writer without a free chunk waits, in the middle of one call, for the reader that holds them; whoever comes
// meanwhile finds selectors and pick table agreed.
void a_snapshot_taken_while_a_writer_waits_for_a_reader_is_sound() {
    Replay replay(options(40, 1, 0), std::make_unique<Fifo>());
    const u32 uniform = replay.add_selector(std::make_unique<Uniform>(Random(1, 1)));
    replay.add_selector(std::make_unique<Prioritized>(Random(1, 2), 40, exponents(0.6, 0.4)));
    for (u32 tag = 1; tag <= 4; ++tag) add_episode(replay, tag, 10);
    std::vector<Row> rows;
    for (u32 stream = 0; stream < 10; ++stream)
        rows.push_back({1, stream, 0, 0, 0, u64{stream} * 1000, {static_cast<float>(stream), 0}});
    const std::size_t chunks = replay.store().max_slots() >> replay.store().shift();
    std::vector<u64> handles(8);
    std::vector<u32> positions(8);
    std::thread writer;
    replay.draw(uniform, 8, handles.data(), positions.data(), nullptr, [&](std::span<const Window>) {
        for (u32 tag = 5; replay.store().chunks_touched() + 5 < chunks; ++tag)
            add_episode(replay, tag, 10);  // every chunk of before stays held
        writer = std::thread([&] {
            replay.record_rows(reinterpret_cast<const byte*>(rows.data()), 10, row_layout());
        });  // a chunk a row
        for (bool waits = false; !waits; std::this_thread::yield()) {
            std::lock_guard lock(replay.mutex());
            waits = !replay.store().has_room();  // it holds the lock but while it waits
        }
        expect_sound(replay);
        MemorySink sink;
        Snapshot::write(replay, "x", SnapshotKind::COPY, sink, [](u64, u64) {});
        Replay other(options(40, 1, 0), std::make_unique<Fifo>());
        other.add_selector(std::make_unique<Uniform>(Random(1, 1)));
        other.add_selector(std::make_unique<Prioritized>(Random(1, 2), 40, exponents(0.6, 0.4)));
        const std::span<const byte> source(sink.bytes);
        Snapshot::read(other, "x", {&source, 1}, [](u64, u64) {});
        expect_sound(other);
        EXPECT(other.records() == replay.records() && other.pick_count() == replay.pick_count());
    });
    writer.join();
    expect_sound(replay);
    EXPECT(replay.episodes() >= 10);
}

}  // namespace

int main() {
    RUN(a_snapshot_taken_while_a_writer_waits_for_a_reader_is_sound);
    RUN(many_writers_and_readers_leave_no_torn_record);
}
