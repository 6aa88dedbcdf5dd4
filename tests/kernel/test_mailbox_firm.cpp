// Firm readers under real concurrency: each thread gives its core away at random between two steps of the protocol,
// which a scheduler does rarely.
#include <sched.h>

#include <cstdint>

static thread_local uint64_t random_state = 1;

static uint64_t next_random() {  // Marsaglia 2003: xorshift
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static void pause_at_random() {
    if (next_random() % 4 == 0) sched_yield();
}
#define DDRL_MAILBOX_PAUSE() pause_at_random()
#include "mailbox.hpp"

#include <array>
#include <atomic>
#include <thread>
#include <vector>

#include "expect.hpp"

using ddrl::Mailbox;
using ddrl::Sealed;

// The words are relaxed atomics: a fault is to be seen as a version that is not whole, with and without sanitizers.
using Word = std::atomic<uint64_t>;
constexpr size_t WORDS = 16;

static void expect_whole(const Mailbox& mailbox, const Sealed& pinned) {
    const auto* data = reinterpret_cast<const Word*>(mailbox.data(Mailbox::slot_of(pinned.word)));
    for (size_t i = 0; i < WORDS; ++i) {
        EXPECT(data[i].load(std::memory_order_relaxed) == static_cast<uint64_t>(pinned.version) * (i + 1));
        if (i % 4 == 3) pause_at_random();
    }
}

// The writer publishes until each reader has held `HOLDS` different versions. With one slot more than readers it lacks
// a slot at times, and with two more never.
static void what_a_firm_reader_holds_stays_whole(size_t spare) {
#ifdef DDRL_SANITIZED
    constexpr uint64_t HOLDS = 2'000;
#else
    constexpr uint64_t HOLDS = 10'000;
#endif
    constexpr size_t readers = 3;
    Memory memory = poisoned(Mailbox::bytes(readers + spare, readers, 8 * WORDS));
    Mailbox::initialize(memory.get(), readers + spare, readers, 8 * WORDS);
    std::atomic<size_t> done{0};
    std::vector<std::thread> threads;
    for (size_t reader = 0; reader < readers; ++reader) {
        threads.emplace_back([&, reader] {
            random_state = reader + 2;
            Mailbox mailbox(memory.get());
            mailbox.claim(reader, 1, 1, true);
            int64_t last = -1;
            for (uint64_t holds = 0; holds < HOLDS;) {
                const Sealed pinned = mailbox.pin(reader);
                if (pinned.version == last) {  // or none yet
                    sched_yield();
                    continue;
                }
                expect_whole(mailbox, pinned);
                EXPECT(pinned.version > last && pinned.checksum == ~static_cast<uint64_t>(pinned.version));
                for (uint64_t pauses = next_random() % 4; pauses > 0; --pauses) pause_at_random();
                expect_whole(mailbox, pinned);  // the writer has gone on meanwhile
                EXPECT(mailbox.valid(pinned.word));
                last = pinned.version;
                ++holds;
            }
            mailbox.release(reader);
            done.fetch_add(1);
        });
    }
    Mailbox writer(memory.get());
    uint64_t version = 0, put_off = 0;
    while (done.load() < readers) {
        const int slot = writer.begin(true);
        if (slot < 0) {
            ++put_off;
            sched_yield();
            continue;
        }
        auto* data = reinterpret_cast<Word*>(writer.data(static_cast<size_t>(slot)));
        for (size_t i = 0; i < WORDS; ++i) {
            data[i].store(version * (i + 1), std::memory_order_relaxed);
            if (i % 4 == 3) pause_at_random();
        }
        EXPECT(writer.seal(static_cast<size_t>(slot), static_cast<int64_t>(version), ~version, 0, {}));
        ++version;
    }
    for (auto& thread : threads) thread.join();
    EXPECT(writer.revoked() == 0);
    EXPECT(spare == 1 || put_off == 0);
    std::fprintf(stderr, "  %zu slots: %llu versions sealed, %llu put off\n", readers + spare,
                 static_cast<unsigned long long>(version), static_cast<unsigned long long>(put_off));
}

static void what_a_firm_reader_holds_stays_whole_where_slots_are_scarce() { what_a_firm_reader_holds_stays_whole(1); }
static void what_a_firm_reader_holds_stays_whole_where_a_slot_is_free() { what_a_firm_reader_holds_stays_whole(2); }

int main() {
    RUN(what_a_firm_reader_holds_stays_whole_where_slots_are_scarce);
    RUN(what_a_firm_reader_holds_stays_whole_where_a_slot_is_free);
}
