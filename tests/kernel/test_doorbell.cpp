#include "shared_memory.hpp"

#include <sys/mman.h>
#include <sys/wait.h>

#include <thread>
#include <vector>

#include "expect.hpp"

using ddrl::Doorbell;

static void a_wait_ends_at_once_when_the_value_has_changed_already() {
    Doorbell bell;
    bell.ring();
    EXPECT(bell.wait_until([&] { return bell.value.load() != 0; }, 1e9));
    EXPECT(!bell.wait_until([&] { return bell.value.load() != 1; }, 0.0));
}

static void a_wait_nobody_ends_is_over_after_its_time() {
    Doorbell bell;
    const auto begin = ddrl::Clock::now();
    EXPECT(!bell.wait_until([] { return false; }, 0.02));
    EXPECT(ddrl::Clock::now() - begin >= std::chrono::milliseconds(19));
    EXPECT(bell.waiters.load() == 0);
}

// Each round, every waiter must be woken by the one ring, though it wakes only a few itself: a lost wake-up would hang
// the test.
static void every_ring_wakes_every_waiter(uint32_t waiters, uint32_t rounds) {
    Doorbell bell, answer;
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < waiters; ++i) {
        threads.emplace_back([&, rounds] {
            for (uint32_t round = 0; round < rounds; ++round) {
                while (!bell.wait_until([&] { return bell.value.load() > round; }, 60.0)) {
                }
                answer.ring();
            }
        });
    }
    for (uint32_t round = 0; round < rounds; ++round) {
        bell.ring();
        while (!answer.wait_until([&] { return answer.value.load() >= waiters * (round + 1); }, 60.0)) {
        }
    }
    for (auto& thread : threads) thread.join();
    EXPECT(bell.waiters.load() == 0 && answer.waiters.load() == 0);
}

static void few_and_many_waiters_are_woken_by_one_ring() {
    every_ring_wakes_every_waiter(3, 2000);
    every_ring_wakes_every_waiter(24, 100);
}

// A call that finds only waiters for whom nothing was rung ends with them: they must not wake each other for ever.
static void who_slept_through_nothing_wakes_nobody() {
    Doorbell bell;
    std::atomic<int> looks{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] {
            while (!bell.wait_until(
                [&] {
                    ++looks;
                    return bell.value.load() == 1;
                },
                60.0)) {
            }
        });
    }
    while (bell.waiters.load() != 4) std::this_thread::yield();
    ddrl::futex_wake(bell.value, 1);  // of nothing
    const int before = looks.load();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT(looks.load() <= before + 8);  // the one that was woken looked again, the others may just have fallen asleep
    bell.ring();
    for (auto& thread : threads) thread.join();
    EXPECT(bell.waiters.load() == 0);
}

static void a_ring_reaches_another_process() {
    void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED);
    auto* there = new (memory) Doorbell;
    auto* back = new (static_cast<std::byte*>(memory) + 64) Doorbell;
    const pid_t child = fork();
    if (child == 0) {
        while (!there->wait_until([&] { return there->value.load() >= 7; }, 60.0)) {
        }
        back->set(8);
        std::_Exit(0);
    }
    there->set(7);
    while (!back->wait_until([&] { return back->value.load() == 8; }, 60.0)) {
    }
    int status = 1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    munmap(memory, 4096);
}

int main() {
    RUN(a_wait_ends_at_once_when_the_value_has_changed_already);
    RUN(a_wait_nobody_ends_is_over_after_its_time);
    RUN(few_and_many_waiters_are_woken_by_one_ring);
    RUN(who_slept_through_nothing_wakes_nobody);
    RUN(a_ring_reaches_another_process);
}
