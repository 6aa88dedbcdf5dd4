// A doorbell: 64 bytes of shared memory that processes wait on and ring, by futex. Nobody polls, nobody sleeps.
//
// Written by whoever rings, read by whoever waits; any number of both. Who rings wakes a few, and each of these as many
// more before it goes on: so a ring costs the one who rings next to nothing however many wait, and all cores take part
// in waking. A waiter takes no lock; one that is killed before it has passed a ring on keeps the others waiting until
// the first of them polls (Python's waits do, every 0.2 s).
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <limits>
#include <stdexcept>

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ddrl {

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free &&
                  sizeof(std::atomic<uint32_t>) == 4,
              "shared memory needs lock-free atomics");

using Clock = std::chrono::steady_clock;

// Sleep while *word == seen, at most `seconds`; returns early on any signal. The word is shared between processes.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
#ifdef __linux__
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(seconds);
    limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
    (void)word, (void)seen, (void)seconds;
    throw std::runtime_error("waiting in shared memory needs Linux (futex): run ddrl's channels on Linux");
#endif
}

// Wake at most `count` that sleep on the word, in the order in which they fell asleep.
inline void futex_wake(std::atomic<uint32_t>& word, int count) {
#ifdef __linux__
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, count, nullptr, nullptr, 0);
#else
    (void)word, (void)count;
#endif
}

// Lives in memory of the caller, 64-byte aligned; `new (memory) Doorbell` makes a fresh one.
struct alignas(64) Doorbell {
    std::atomic<uint32_t> value{0};  // how often it was rung, modulo 2^32, or what `set` stored
    std::atomic<uint32_t> waiters{0};  // processes in `wait_until`; the killed stay counted

    void ring() {
        value.fetch_add(1, std::memory_order_seq_cst);
        wake_beside(0);
    }

    void set(uint32_t word) {
        value.store(word, std::memory_order_seq_cst);
        wake_beside(0);
    }

    // Wait until ready() holds, at most `seconds`, or until a signal arrives; returns whether it holds.
    // Whoever makes ready() true must do so by a seq_cst store and then call ring() or ring_waiters().
    template <class Ready>
    bool wait_until(Ready ready, double seconds) {
        if (ready()) return true;
        if (!(seconds > 0)) return false;
        const uint32_t seen = value.load(std::memory_order_seq_cst);
        waiters.fetch_add(1, std::memory_order_seq_cst);
        // Either this sees the change, or the changer sees the waiter: both sides are sequentially consistent.
        bool held = ready();
        if (!held) {
            futex_wait(value, seen, seconds < max_seconds ? seconds : max_seconds);
            // Only what was rung is passed on, or those who sleep again would keep each other awake. They stand behind
            // all who still sleep through this ring, so no call is lost on them.
            if (value.load(std::memory_order_seq_cst) != seen) wake_beside(1);
            held = ready();
        }
        waiters.fetch_sub(1, std::memory_order_seq_cst);
        return held;
    }

    // Ring only if somebody waits: for channels whose state is not the bell's own value.
    void ring_waiters() {
        if (waiters.load(std::memory_order_seq_cst) != 0) ring();
    }

private:
    static constexpr double max_seconds = 1e6;

    static constexpr int few = 2;

    // `self`: how many of the waiters the caller itself is.
    void wake_beside(uint32_t self) {
        if (waiters.load(std::memory_order_seq_cst) > self) futex_wake(value, few);
    }
};
static_assert(sizeof(Doorbell) == 64);

}  // namespace ddrl
