// Histories of episodes through the whole kernel: every eviction, every window, invariants after each step; limbo under
// a held reader.
#include "replay_fixture.hpp"

using namespace fixture;

namespace {

std::unique_ptr<Eviction> make_eviction(int kind) {
    if (kind == 0) return std::make_unique<Fifo>();
    if (kind == 1) return std::make_unique<SecondChance>();
    if (kind == 2) return std::make_unique<Lru>();
    return std::make_unique<Lfu>();
}

void random_histories_keep_every_invariant() {
    Random random(7, 7);
    for (int round = 0; round < 160; ++round) {
        Options chosen = options(16 + below(random, 100), 1 + below(random, 5), below(random, 4), below(random, 4));
        chosen.short_picks = round % 3 == 0;
        Replay replay(chosen, make_eviction(round % 4));
        for (const SelectorKind& kind : selector_kinds())
            replay.add_selector(kind.make(Random(1, replay.selector_count()), chosen.capacity, kind.defaults));
        Batch batch;
        for (u32 step = 0; step < 60; ++step) {
            if (below(random, 3)) {
                add_episode(replay, step + 1, 1 + below(random, 30), static_cast<Ending>(below(random, 4)));
            } else if (batch.draw(replay, below(random, replay.selector_count()), 1 + below(random, 20), true)) {
                for (float& priority : batch.weight) priority = static_cast<float>(random.unit() * 3);
                for (u32 selector = 0; selector < replay.selector_count(); ++selector)
                    replay.set_priority(selector, batch.handle, batch.position, batch.weight);
            }
            expect_sound(replay);
        }
    }
}

void an_episode_longer_than_the_capacity_goes_on_under_a_new_handle() {
    Replay replay(options(10), std::make_unique<Fifo>());
    u64 handle = replay.new_episode(), first = handle;
    for (u32 step = 0; step < 25; ++step)
        handle = replay.record(handle, Records(1, step, 1).rows(), Ending::LIVE, nullptr);
    EXPECT(handle == first + 2 && replay.records() == 5);
    expect_sound(replay);
}

void memory_of_evicted_episodes_is_not_written_while_a_reader_copies() {
    Replay replay(options(40, 4), std::make_unique<Fifo>());
    const u32 uniform = replay.add_selector(std::make_unique<Uniform>(Random(1, 1)));
    for (u32 tag = 1; tag <= 4; ++tag) add_episode(replay, tag, 10);
    std::vector<u64> handles(64);
    std::vector<u32> positions(64), length(64), next_length(64);
    std::vector<float> state(64 * 8), next(64 * 8), reward(64 * 4);
    std::vector<u64> action(64 * 4);
    replay.draw(uniform, 64, handles.data(), positions.data(), nullptr, [&](std::span<const Window> windows) {
        for (u32 tag = 5; tag <= 20; ++tag)
            add_episode(replay, tag, 10);  // every drawn episode is evicted before the copy
        byte *state_to = reinterpret_cast<byte*>(state.data()), *next_to = reinterpret_cast<byte*>(next.data());
        byte* const column[] = {state_to, reinterpret_cast<byte*>(action.data()),
                                reinterpret_cast<byte*>(reward.data()), nullptr};
        const WindowOutputs outputs{column, &next_to, length.data(), next_length.data()};
        gather(replay, windows, [&](const auto& loops) { loops.windows(outputs); });
    });
    for (std::size_t i = 0; i < 64; ++i)
        EXPECT(state[8 * i] == static_cast<float>(handles[i] + 1) && state[8 * i] <= 4);
    expect_sound(replay);
    const std::size_t before = replay.nbytes();
    for (u32 tag = 21; tag <= 400; ++tag) add_episode(replay, tag, 10);
    EXPECT(replay.nbytes() <= before + 4096);  // limbo was given back
}

void the_lowest_key_goes_first_in_lru_and_lfu() {
    for (const bool recent : {true, false}) {
        Replay replay(options(40),
                      recent ? std::unique_ptr<Eviction>(std::make_unique<Lru>()) : std::make_unique<Lfu>());
        const u32 selector = replay.add_selector(std::make_unique<Prioritized>(Random(1, 1), 40, exponents(1.0, 0.0)));
        for (u32 tag = 1; tag <= 4; ++tag) add_episode(replay, tag, 10);
        std::vector<u64> handles;
        std::vector<u32> positions;
        std::vector<float> priorities;
        for (u64 handle = 0; handle < 4; ++handle)
            for (u32 position = 0; position < 10; ++position)
                handles.push_back(handle), positions.push_back(position),
                    priorities.push_back(handle == 2 ? 0.0f : 1.0f);
        replay.set_priority(selector, handles, positions, priorities);
        Batch batch;
        for (int i = 0; i < 10; ++i) batch.draw(replay, selector, 32);  // episodes 0, 1 and 3 are used
        add_episode(replay, 5, 10);
        EXPECT(replay.store().find(2) == NONE && replay.store().find(0) != NONE);
        add_episode(replay, 6, 10);
        EXPECT(replay.store().find(4) != NONE);  // which has just ended, and was not drawn yet
        expect_sound(replay);
    }
}

void an_episode_that_is_recorded_is_not_evicted_in_favor_of_itself() {
    for (const int kind : {0, 2, 3}) {  // second chance may take it: it is the one episode without a flag
        Replay replay(options(100), make_eviction(kind));
        const u32 uniform = replay.add_selector(std::make_unique<Uniform>(Random(1, 1)));
        Batch batch;
        for (u32 tag = 1; tag <= 40; ++tag) add_episode(replay, tag, 5);
        for (u32 tag = 50; tag < 60;
             ++tag) {  // the running episode is the least used one, and it takes the room of several others
            batch.draw(replay, uniform, 128);
            const u64 begun = replay.new_episode();
            for (u32 step = 0; step < 35; ++step)
                EXPECT(replay.record(begun, Records(tag, step, 1).rows(), Ending::LIVE, nullptr) == begun);
            replay.cut(begun);
            expect_sound(replay);
        }
    }
}

void second_chance_passes_over_used_episodes_and_ends_when_all_are_used() {
    Replay replay(options(30), std::make_unique<SecondChance>());
    const u32 uniform = replay.add_selector(std::make_unique<Uniform>(Random(1, 1)));
    for (u32 tag = 1; tag <= 3; ++tag) add_episode(replay, tag, 10);
    Batch batch;
    batch.draw(replay, uniform, 200);  // all flagged: one turn, then the first goes
    add_episode(replay, 4, 10);
    EXPECT(replay.store().find(0) == NONE && replay.store().find(1) != NONE);
    add_episode(replay, 5, 10);  // flags were taken: the next goes
    EXPECT(replay.store().find(1) == NONE && replay.store().find(2) != NONE);
}

void second_chance_gives_none_to_episodes_that_were_never_drawn() {
    Replay replay(options(30), std::make_unique<SecondChance>());
    const u32 selector = replay.add_selector(std::make_unique<Prioritized>(Random(1, 1), 30, exponents(1.0, 0.0)));
    for (u32 tag = 1; tag <= 4; ++tag) add_episode(replay, tag, 10);  // the first goes
    std::vector<u64> handles;
    std::vector<u32> positions;
    std::vector<float> priorities;
    for (u64 handle = 1; handle < 4; ++handle)
        for (u32 position = 0; position < 10; ++position)
            handles.push_back(handle), positions.push_back(position), priorities.push_back(handle == 1 ? 1.0f : 0.0f);
    replay.set_priority(selector, handles, positions, priorities);
    Batch batch;
    batch.draw(replay, selector, 32);  // of the second alone, whose flag the next turn takes
    add_episode(replay, 5, 10);
    EXPECT(replay.store().find(1) != NONE && replay.store().find(2) == NONE);
    add_episode(replay, 6, 10);
    EXPECT(replay.store().find(1) != NONE && replay.store().find(3) == NONE);
}

void interleaved_rows_make_the_same_episodes_as_records_by_handle() {
    Replay replay(options(1000, 1, 2), std::make_unique<Fifo>());
    std::vector<Row> rows;
    for (u32 step = 0; step <= 20; ++step)
        for (u32 stream = 0; stream < 5; ++stream) {
            if (stream == 3 && step == 7) continue;  // a dropped row
            const bool ends = step == 20;
            rows.push_back({stream,
                            stream,
                            step,
                            static_cast<float>(step),
                            ends ? 1u : 0u,
                            stream * 1000 + step,
                            {static_cast<float>(stream), static_cast<float>(step)}});
        }
    EXPECT(replay.record_rows(reinterpret_cast<const byte*>(rows.data()), static_cast<u32>(rows.size()),
                              row_layout()) == 99);
    EXPECT(replay.episodes() == 6 && replay.records() == 99);
    expect_sound(replay);
    EXPECT(replay.pick_count() == 4 * 20 + 6 + 12);  // a cut episode's last record bootstraps nothing
}

}  // namespace

int main() {
    RUN(random_histories_keep_every_invariant);
    RUN(an_episode_longer_than_the_capacity_goes_on_under_a_new_handle);
    RUN(memory_of_evicted_episodes_is_not_written_while_a_reader_copies);
    RUN(the_lowest_key_goes_first_in_lru_and_lfu);
    RUN(an_episode_that_is_recorded_is_not_evicted_in_favor_of_itself);
    RUN(second_chance_passes_over_used_episodes_and_ends_when_all_are_used);
    RUN(second_chance_gives_none_to_episodes_that_were_never_drawn);
    RUN(interleaved_rows_make_the_same_episodes_as_records_by_handle);
}
