// What processes of a host share besides their channels: mapped memory, a table of counters, and doorbells to wait on.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <limits>
#include <stdexcept>
#include <system_error>

namespace ddrl {

using std::byte;

// Memory that processes share: `bytes` of the file `descriptor`, or anonymous zeroed pages that forks share
// (descriptor -1). Keeps no file descriptor. Throws std::system_error.
struct Mapping {
    void* memory;
    size_t bytes;

    Mapping(int descriptor, size_t size) : bytes(size) {
        const int flags = descriptor < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
        memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor, 0);
        if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    }
    ~Mapping() { munmap(memory, bytes); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
};

// Counters: a table of float64 values, each row with one writer and any number of readers. A value that was never
// stored is NaN.
static_assert(std::atomic_ref<double>::is_always_lock_free);

inline double read_value(const double* value) {
    return std::atomic_ref<double>(*const_cast<double*>(value)).load(std::memory_order_relaxed);
}
inline void store_value(double* value, double x) {
    std::atomic_ref<double>(*value).store(x, std::memory_order_relaxed);
}

// Called by the row's only writer, so a load and a store are enough. A fresh value counts from 0.
inline void add_value(double* value, double x) {
    const double old = read_value(value);
    store_value(value, std::isnan(old) ? x : old + x);
}

inline void read_table(double* out, const double* table, size_t count) {
    for (size_t i = 0; i < count; ++i) out[i] = read_value(table + i);
}
inline void store_table(double* table, const double* from, size_t count) {
    for (size_t i = 0; i < count; ++i) store_value(table + i, from[i]);
}

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<uint64_t>::is_always_lock_free &&
                  sizeof(std::atomic<uint32_t>) == 4,
              "shared memory needs lock-free atomics");

using Clock = std::chrono::steady_clock;

// Sleep while *word == seen, at most `seconds`; returns early on any signal. The word is shared between processes.
inline void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, double seconds) {
    timespec limit{};
    limit.tv_sec = static_cast<time_t>(seconds);
    limit.tv_nsec = static_cast<long>((seconds - static_cast<double>(limit.tv_sec)) * 1e9);
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

// Wake at most `count` that sleep on the word, in the order in which they fell asleep.
inline void futex_wake(std::atomic<uint32_t>& word, int count) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, count, nullptr, nullptr, 0);
}

// A doorbell: 64 bytes of shared memory that any number of processes wait on and ring, by futex; waiting takes no
// processor time. It is in memory of the caller, aligned to 64 bytes; `new (memory) Doorbell` makes a fresh one.
//
// A ring wakes two waiters, and each of these two more before it returns: so ringing costs little however many wait,
// and all cores take part in waking. A waiter takes no lock. One that is killed before it has woken others keeps these
// waiting until the first of them wakes by its time limit (Python's waits do, every 0.2 s).
struct alignas(64) Doorbell {
    std::atomic<uint32_t> value{0};  // how often it was rung, modulo 2^32, or what `set` stored
    std::atomic<uint32_t> waiters{0};  // processes in `wait_until`; killed ones stay counted

    void ring() {
        value.fetch_add(1, std::memory_order_seq_cst);
        wake_beside(0);
    }

    void set(uint32_t word) {
        value.store(word, std::memory_order_seq_cst);
        wake_beside(0);
    }

    // Wait until ready() holds, at most `seconds`, or until a signal arrives; returns whether it holds.
    // The process that makes ready() true must do so by a seq_cst store and then call ring() or ring_waiters().
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
            // Wake others only after a ring, or waiters whose condition is false would keep waking each other. Those
            // that sleep again are queued after all that have not been woken by this ring, so each wake-up counts.
            if (value.load(std::memory_order_seq_cst) != seen) wake_beside(1);
            held = ready();
        }
        waiters.fetch_sub(1, std::memory_order_seq_cst);
        return held;
    }

    // Ring only if a process waits: for channels whose state is not the bell's own value.
    void ring_waiters() {
        if (waiters.load(std::memory_order_seq_cst) != 0) ring();
    }

private:
    static constexpr double max_seconds = 1e6;

    static constexpr int woken_by_each = 2;

    // Wakes some waiters; `self`: 1 where the caller is counted as one, else 0.
    void wake_beside(uint32_t self) {
        if (waiters.load(std::memory_order_seq_cst) > self) futex_wake(value, woken_by_each);
    }
};
static_assert(sizeof(Doorbell) == 64);

}  // namespace ddrl
