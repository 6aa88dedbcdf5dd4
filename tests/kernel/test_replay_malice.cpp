// Snapshots made by malice: a structure changed at random, under checksums made anew. Each is refused with nothing
// changed, or read into a replay that is sound and goes on working. Meant to run under sanitizers.
#include "replay/snapshot.hpp"
#include "replay_fixture.hpp"

using namespace fixture;

namespace {

#ifdef DDRL_THREAD_SANITIZER
constexpr int ROUNDS = 200;  // of one thread
#else
constexpr int ROUNDS = 4000;
#endif

struct Bytes {
    std::vector<byte> bytes;
    void begin(std::size_t size) { bytes.reserve(size); }
    void put(const void* data, std::size_t size) {
        const auto* from = static_cast<const byte*>(data);
        bytes.insert(bytes.end(), from, from + size);
    }
    void finish() {}
};

const auto nothing = [](u64, u64) {};

std::vector<byte> snapshot(Replay& replay, SnapshotKind kind) {
    Bytes sink;
    Snapshot::write(replay, "{}", kind, sink, nothing);
    return sink.bytes;
}

std::unique_ptr<Replay> make_replay(int eviction) {
    const auto strategy = [&]() -> std::unique_ptr<Eviction> {
        if (eviction == 0) return std::make_unique<Fifo>();
        if (eviction == 1) return std::make_unique<SecondChance>();
        if (eviction == 2) return std::make_unique<Lru>();
        return std::make_unique<Lfu>();
    };
    const Options chosen = options(60, 2, 2);
    auto replay = std::make_unique<Replay>(chosen, strategy());
    for (const SelectorKind& kind : selector_kinds())
        replay->add_selector(kind.make(Random(1, replay->selector_count()), chosen.capacity, kind.defaults));
    return replay;
}

// Draws, priorities, rows of streams, evictions: whatever a snapshot may have spoiled.
void work(Replay& replay, Random& random) {
    std::vector<u64> handle(16), action(32);
    std::vector<u32> position(16), length(16), next_length(16);
    std::vector<float> state(64), next(64), reward(32), weight(16);
    byte *state_to = reinterpret_cast<byte*>(state.data()), *next_to = reinterpret_cast<byte*>(next.data());
    byte* const column[] = {state_to, reinterpret_cast<byte*>(action.data()), reinterpret_cast<byte*>(reward.data()),
                            nullptr};
    const WindowOutputs outputs{column, &next_to, length.data(), next_length.data()};
    for (u32 turn = 0; turn < 3; ++turn) {
        for (u32 selector = 0; selector < replay.selector_count(); ++selector)
            if (replay.draw(selector, 16, handle.data(), position.data(), weight.data(),
                            [&](std::span<const Window> windows) {
                                gather(replay, windows, [&](const auto& loops) { loops.windows(outputs); });
                            }))
                for (u32 other = 0; other < replay.selector_count(); ++other)
                    replay.set_priority(other, handle, position, weight);
        Row rows[24];
        for (u32 i = 0; i < 24; ++i) rows[i] = {1, i % 3, turn * 8 + i / 3, 0, below(random, 12) == 0, 0, {0, 0}};
        replay.record_rows(reinterpret_cast<const byte*>(rows), 24, row_layout());
        add_episode(replay, 99, 1 + below(random, 20), static_cast<Ending>(below(random, 4)));
        expect_sound(replay);
    }
    replay.cut_streams();
}

u64 word(const std::vector<byte>& bytes, std::size_t at) {
    u64 value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
}

void set_checksum(std::vector<byte>& bytes, std::size_t begin, std::size_t end) {
    const u64 value = ddrl::checksum(bytes.data() + begin, end - begin);
    std::memcpy(bytes.data() + end, &value, sizeof value);
}

constexpr std::size_t LENGTHS = 8 + 4 + 2 + 16, HEAD = LENGTHS + 16;  // of a configuration of two bytes

// Changes bytes, numbers or the length of the structure, then makes its checksums good.
void spoil(std::vector<byte>& bytes, Random& random) {
    const std::size_t begin = HEAD + 8;
    std::size_t length = word(bytes, LENGTHS);
    for (u32 change = 0; change < 1 + below(random, 3); ++change) {
        byte* place = bytes.data() + begin + below(random, static_cast<u32>(length - 8));
        static constexpr u64 NUMBERS[] = {
            0,          1,    2,        60,           255,     0x7FC00000,  0x7FFFFFFF,
            0x80000000, NONE, NONE - 1, u64{1} << 40, ~u64{0}, ~u64{0} - 1, 0x7FF8000000000000};
        const u64 number = NUMBERS[below(random, std::size(NUMBERS))];
        switch (below(random, 4)) {
            case 0: *place = static_cast<byte>(below(random, 256)); break;
            case 1: std::memcpy(place, &number, 4); break;
            case 2: std::memcpy(place, &number, 8); break;
            default: *place = static_cast<byte>(std::to_integer<int>(*place) + 1);
        }
    }
    if (below(random, 8) == 0) {  // cut short, the lengths with it
        const std::size_t lost = 1 + below(random, static_cast<u32>(std::min<std::size_t>(length / 2, 64)));
        const auto end = bytes.begin() + static_cast<std::ptrdiff_t>(begin + length);
        bytes.erase(end - static_cast<std::ptrdiff_t>(lost), end);
        length -= lost;
        const u64 value = length;
        std::memcpy(bytes.data() + LENGTHS, &value, sizeof value);
    }
    set_checksum(bytes, 0, HEAD);
    set_checksum(bytes, begin, begin + length);
}

void a_spoiled_structure_is_refused_or_sound() {
    Random random(11, 3);
    int refused = 0, read = 0;
    for (int round = 0; round < ROUNDS; ++round) {
        auto source = make_replay(round % 4);
        for (u32 tag = 0; tag < 6; ++tag)
            add_episode(*source, tag, 3 + below(random, 20), static_cast<Ending>(below(random, 4)));
        work(*source, random);
        std::vector<std::vector<byte>> chain{snapshot(*source, SnapshotKind::WHOLE)};
        if (round % 3 == 0) {
            add_episode(*source, 7, 9);
            chain.push_back(snapshot(*source, SnapshotKind::INCREMENT));
        }
        spoil(chain.back(), random);
        auto target = make_replay(round % 4);
        if (round % 2) add_episode(*target, 1, 12), add_episode(*target, 2, 30);
        std::vector<byte> before = snapshot(*target, SnapshotKind::COPY);
        std::vector<std::span<const byte>> sources(chain.begin(), chain.end());
        try {
            Snapshot::read(*target, "{}", sources, nothing);
            ++read;
        } catch (const std::runtime_error&) {
            ++refused;
            EXPECT(snapshot(*target, SnapshotKind::COPY) == before);
        }
        expect_sound(*target);
        work(*target, random);
    }
    std::printf("%d refused, %d read\n", refused, read);
    EXPECT(refused > ROUNDS / 4 && read > ROUNDS / 400);
}

}  // namespace

int main() { a_spoiled_structure_is_refused_or_sound(); }
