// Writers, readers, priority updates and snapshots at once: no torn record, sound invariants; the thread sanitizer looks on in CI.
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
    const u32 selectors[] = {replay.add_selector(std::make_unique<Uniform>(Random(1, 1))),
                             replay.add_selector(std::make_unique<Prioritized>(Random(1, 2), 3000, 0.6, 0.4, false))};
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
            other.add_selector(std::make_unique<Prioritized>(Random(1, 2), 3000, 0.6, 0.4, false));
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

}  // namespace

int main() { RUN(many_writers_and_readers_leave_no_torn_record); }
