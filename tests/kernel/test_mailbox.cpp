#include "mailbox.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <vector>

#include "checksum.hpp"
#include "expect.hpp"

using ddrl::Mailbox;
using ddrl::Sealed;

static Memory fresh(size_t slots, size_t readers, size_t data_bytes) {
    Memory memory = poisoned(Mailbox::bytes(slots, readers, data_bytes));
    Mailbox::initialize(memory.get(), slots, readers, data_bytes);
    return memory;
}

static void publish(Mailbox& mailbox, int64_t version) {
    const int slot = mailbox.begin(true);
    EXPECT(slot >= 0);
    std::memset(mailbox.data(static_cast<size_t>(slot)), static_cast<int>(version & 127), mailbox.data_bytes());
    EXPECT(mailbox.seal(static_cast<size_t>(slot), version, static_cast<uint64_t>(version) * 3, version * 5,
                        {static_cast<double>(version)}));
}

static void a_reader_has_nothing_until_a_version_is_sealed() {
    Memory memory = fresh(3, 1, 100);
    Mailbox mailbox(memory.get());
    EXPECT(mailbox.pin(0).word == 0 && mailbox.newest_version() == -1);
    const int slot = mailbox.begin(true);
    EXPECT(mailbox.pin(0).word == 0);
    mailbox.abandon(static_cast<size_t>(slot));
    EXPECT(mailbox.pin(0).word == 0);
    publish(mailbox, 0);
    const Sealed pinned = mailbox.pin(0);
    EXPECT(pinned.version == 0 && pinned.checksum == 0 && pinned.values[0] == 0 && mailbox.valid(pinned.word));
}

static void a_pinned_version_stays_whole_while_free_slots_go_round() {
    Memory memory = fresh(3, 2, 64);
    Mailbox writer(memory.get()), reader(memory.get());
    publish(writer, 1);
    const Sealed held = reader.pin(0);
    for (int64_t version = 2; version < 50; ++version) {
        publish(writer, version);
        EXPECT(reader.valid(held.word) && reader.data(Mailbox::slot_of(held.word))[5] == std::byte{1});
        const Sealed newest = reader.pin(1);
        EXPECT(newest.version == version && newest.checksum == static_cast<uint64_t>(version) * 3 &&
               newest.time_ns == version * 5);
        reader.unpin(1);
    }
    EXPECT(writer.revoked() == 0);
}

static void the_oldest_pin_is_taken_away_when_no_slot_is_free() {
    Memory memory = fresh(3, 2, 64);
    Mailbox mailbox(memory.get());
    publish(mailbox, 1);
    const Sealed first = mailbox.pin(0);
    publish(mailbox, 2);
    const Sealed second = mailbox.pin(1);
    publish(mailbox, 3);
    EXPECT(mailbox.begin(false) == -1);
    EXPECT(mailbox.valid(first.word));
    const int slot = mailbox.begin(true);
    EXPECT(slot == static_cast<int>(Mailbox::slot_of(first.word)));
    EXPECT(!mailbox.valid(first.word) && mailbox.valid(second.word) && mailbox.revoked() == 1);
    EXPECT(mailbox.pin(0).version == 3);
    mailbox.seal(static_cast<size_t>(slot), 4, 0, 0, {});
    EXPECT(!mailbox.valid(first.word) && mailbox.pin(0).version == 4);
}

static void firm_pins_and_the_newest_version_are_never_taken() {
    Memory memory = fresh(2, 1, 64);
    Mailbox mailbox(memory.get());
    mailbox.claim(0, 1, 1, true);
    publish(mailbox, 1);
    const Sealed held = mailbox.pin(0);
    publish(mailbox, 2);
    EXPECT(mailbox.begin(true) == -1 && mailbox.valid(held.word));
    mailbox.release(0);
    EXPECT(mailbox.begin(true) == static_cast<int>(Mailbox::slot_of(held.word)));
    EXPECT(mailbox.begin(true) == -1);
}

static void an_older_version_never_replaces_a_newer_one() {
    Memory memory = fresh(4, 1, 64);
    Mailbox mailbox(memory.get());
    const int early = mailbox.begin(true), late = mailbox.begin(true);
    EXPECT(early >= 0 && late >= 0 && early != late);
    EXPECT(mailbox.seal(static_cast<size_t>(late), 8, 0, 0, {}));
    EXPECT(!mailbox.seal(static_cast<size_t>(early), 7, 0, 0, {}));
    EXPECT(mailbox.newest_version() == 8 && mailbox.pin(0).version == 8);
}

static void a_waiter_is_woken_by_the_version_it_waits_for() {
    Memory memory = fresh(3, 1, 64);
    Mailbox writer(memory.get());
    std::thread waiter([&] {
        Mailbox mailbox(memory.get());
        int64_t seen = -1;
        while (seen < 300) {
            const int64_t newest = mailbox.wait_newer(seen, 60.0);
            EXPECT(newest >= seen);
            seen = newest;
        }
    });
    for (int64_t version = 0; version <= 300; ++version) publish(writer, version);
    waiter.join();
}

// With a slot to spare for every reader no pin is ever taken away, and plain memory is enough: the thread sanitizer
// sees every access.
static void plain_reads_never_race_when_every_reader_has_a_slot() {
    constexpr size_t readers = 3, words = 32;
#ifdef DDRL_SANITIZED
    constexpr int64_t versions = 20'000;
#else
    constexpr int64_t versions = 300'000;
#endif
    Memory memory = fresh(readers + 2, readers, 8 * words);
    std::vector<std::thread> threads;
    for (size_t reader = 0; reader < readers; ++reader) {
        threads.emplace_back([&, reader] {
            Mailbox mailbox(memory.get());
            for (int64_t last = -1; last < versions;) {
                const Sealed pinned = mailbox.pin(reader);
                if (pinned.word == 0) continue;
                const auto* data = reinterpret_cast<const uint64_t*>(mailbox.data(Mailbox::slot_of(pinned.word)));
                for (size_t i = 0; i < words; ++i) EXPECT(data[i] == static_cast<uint64_t>(pinned.version) * (i + 1));
                EXPECT(pinned.version >= last && pinned.values[7] == static_cast<double>(pinned.version) &&
                       mailbox.valid(pinned.word));
                last = pinned.version;
                if (reader == 0) {
                    mailbox.unpin(reader);
                    std::this_thread::yield();
                }
            }
        });
    }
    Mailbox writer(memory.get());
    for (int64_t version = 0; version <= versions; ++version) {
        const int slot = writer.begin(true);
        EXPECT(slot >= 0);
        auto* data = reinterpret_cast<uint64_t*>(writer.data(static_cast<size_t>(slot)));
        for (size_t i = 0; i < words; ++i) data[i] = static_cast<uint64_t>(version) * (i + 1);
        EXPECT(
            writer.seal(static_cast<size_t>(slot), version, 0, 0, {0, 0, 0, 0, 0, 0, 0, static_cast<double>(version)}));
    }
    for (auto& thread : threads) thread.join();
    EXPECT(writer.revoked() == 0);
}

// Processes that read as fast as they can while a writer with too few slots takes them away: what a reader finds valid
// is one version. The words are relaxed atomics, since a reader may by design look at a slot that is being rewritten;
// valid() tells it afterwards.
static void ten_million_reads_under_revocation_are_whole_or_known_to_be_lost() {
#if defined(DDRL_THREAD_SANITIZER)
    constexpr uint64_t reads = 20'000;
#elif defined(DDRL_SANITIZED)
    constexpr uint64_t reads = 200'000;
#else
    constexpr uint64_t reads = 2'500'000;
#endif
    constexpr size_t readers = 4, words = 16, slots = 2;
    using Word = std::atomic<uint64_t>;
    const size_t bytes = Mailbox::bytes(slots, readers, 8 * words);
    void* memory = mmap(nullptr, bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    EXPECT(memory != MAP_FAILED);
    auto* at = static_cast<std::byte*>(memory);
    Mailbox::initialize(at, slots, readers, 8 * words);
    auto* tally =
        new (at + (bytes + 63) / 64 * 64) std::atomic<uint64_t>[4]{};  // whole, lost, readers done, versions seen
    std::vector<pid_t> children;
    for (size_t reader = 0; reader < readers; ++reader) {
        const pid_t child = fork();
        if (child == 0) {
            Mailbox mailbox(at);
            mailbox.claim(reader, static_cast<uint32_t>(getpid()), 1, false);
            uint64_t whole = 0, lost = 0, changes = 0, stale = 0;
            int64_t last = -1;
            Sealed pinned;
            while (whole + lost < reads) {
                if (pinned.word == 0 || (whole + lost) % 3 == 0) pinned = mailbox.pin(reader);
                if (pinned.word == 0) continue;
                const auto* data = reinterpret_cast<const Word*>(mailbox.data(Mailbox::slot_of(pinned.word)));
                bool same = true;
                for (size_t i = 0; i < words; ++i) {
                    same = same &&
                           data[i].load(std::memory_order_relaxed) == static_cast<uint64_t>(pinned.version) * (i + 1);
                }
                if (mailbox.valid(pinned.word)) {
                    EXPECT(same);
                    EXPECT(pinned.checksum == ~static_cast<uint64_t>(pinned.version) && pinned.version >= last);
                    ++whole;
                } else {
                    ++lost;
                }
                if (pinned.version != last) {
                    ++changes;
                    stale = 0;
                } else if (++stale % 31 == 0) {  // no multiple of 3: it comes back to a pin that may be gone
                    sched_yield();  // few cores: let the writer go on
                }
                last = pinned.version;
            }
            tally[0].fetch_add(whole);
            tally[1].fetch_add(lost);
            tally[3].fetch_add(changes);
            tally[2].fetch_add(1);
            std::_Exit(0);
        }
        children.push_back(child);
    }
    Mailbox writer(at);
    int64_t version = 0;
    for (; tally[2].load() < readers; ++version) {
        int dead = 0;
        if (version % 4096 == 0) EXPECT(waitpid(-1, &dead, WNOHANG) <= 0 || dead == 0);
        if (version % 16 == 0) sched_yield();
        const int slot = writer.begin(true);
        EXPECT(slot >= 0);
        auto* data = reinterpret_cast<Word*>(writer.data(static_cast<size_t>(slot)));
        for (size_t i = 0; i < words; ++i)
            data[i].store(static_cast<uint64_t>(version) * (i + 1), std::memory_order_relaxed);
        EXPECT(writer.seal(static_cast<size_t>(slot), version, ~static_cast<uint64_t>(version), 0, {}));
    }
    while (wait(nullptr) > 0) {
    }
    EXPECT(tally[0].load() + tally[1].load() == reads * readers);
    EXPECT(tally[3].load() > 100 && tally[1].load() > 0);
    std::fprintf(stderr,
                 "  %llu whole reads, %llu known to be lost, %llu changes of version seen, %lld versions sealed, %llu "
                 "slots taken away\n",
                 static_cast<unsigned long long>(tally[0].load()), static_cast<unsigned long long>(tally[1].load()),
                 static_cast<unsigned long long>(tally[3].load()), static_cast<long long>(version),
                 static_cast<unsigned long long>(writer.revoked()));
    munmap(memory, bytes + 4096);
}

int main() {
    RUN(a_reader_has_nothing_until_a_version_is_sealed);
    RUN(a_pinned_version_stays_whole_while_free_slots_go_round);
    RUN(the_oldest_pin_is_taken_away_when_no_slot_is_free);
    RUN(firm_pins_and_the_newest_version_are_never_taken);
    RUN(an_older_version_never_replaces_a_newer_one);
    RUN(a_waiter_is_woken_by_the_version_it_waits_for);
    RUN(plain_reads_never_race_when_every_reader_has_a_slot);
    RUN(ten_million_reads_under_revocation_are_whole_or_known_to_be_lost);
}
