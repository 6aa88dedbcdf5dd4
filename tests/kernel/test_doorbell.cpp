#include "doorbell.hpp"

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

// Each round, every waiter must be woken by the one ring: a lost wake-up would hang the test.
static void every_ring_wakes_every_waiter() {
    Doorbell bell, answer;
    constexpr uint32_t rounds = 2000, waiters = 3;
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < waiters; ++i) {
        threads.emplace_back([&] {
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
    RUN(every_ring_wakes_every_waiter);
    RUN(a_ring_reaches_another_process);
}
