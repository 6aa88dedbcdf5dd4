// A mailbox: slots of bytes, one writer, many readers that use a slot in place. A reader gets one whole version or
// none; the writer never waits.
//
// Each sealed version gives its slot a fresh ticket. `newest` holds ticket and slot of the newest version; a reader
// pins it by storing that word in its own line (a hazard pointer) and then reading `newest` again: unchanged means that
// the writer, which never takes the newest slot and reads all hazards after it has sealed a newer one, cannot miss the
// pin (all of these are sequentially consistent). Where every other slot is pinned the writer takes the oldest one from
// its readers: it sets the ticket to 0 before it writes a byte, so the reader's valid() is false from then on. Pins of
// `firm` readers (a network transfer reads the slot) are never taken away.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "shared_memory.hpp"

// Between two steps of the protocol. The kernel's tests let other threads run here; otherwise it does nothing.
#ifndef DDRL_MAILBOX_PAUSE
#define DDRL_MAILBOX_PAUSE() static_cast<void>(0)
#endif

namespace ddrl {

struct MailboxHeader {
    alignas(64) uint64_t slots;
    uint64_t readers;
    uint64_t data_bytes;
    uint64_t stride;  // bytes between the data of two slots
    alignas(64) std::atomic<uint64_t> newest;  // ticket * 256 + slot; 0: nothing sealed yet
    std::atomic<int64_t> newest_version;  // -1: nothing sealed yet
    std::atomic<uint64_t> next_ticket;  // used by the writer alone
    std::atomic<uint64_t> revoked;  // pins taken away
    alignas(64) Doorbell sealed;  // rung when a newer version is there
};

struct alignas(64) SlotHeader {
    std::atomic<uint64_t> ticket;  // 0: being written, or never
    std::atomic<int64_t> version;
    std::atomic<uint64_t> checksum;
    std::atomic<int64_t> time_ns;
    std::atomic<double> values[8];
};

struct alignas(64) ReaderLine {
    std::atomic<uint64_t> hazard;  // the word of the pinned version; 0: none
    std::atomic<uint64_t> start;  // start time of the process that reads, as the kernel counts it
    std::atomic<uint32_t> pid;  // 0: no process
    std::atomic<uint32_t> firm;  // 1: its pins may not be taken away
};

struct Sealed {  // what is known of a pinned version
    uint64_t word = 0;
    int64_t version = -1;
    uint64_t checksum = 0;
    int64_t time_ns = 0;
    std::array<double, 8> values{};
};

class Mailbox {
public:
    static constexpr size_t max_slots = 255;
    static constexpr size_t page = 4096;

    static size_t data_offset(size_t slots, size_t readers) {
        const size_t end = sizeof(MailboxHeader) + slots * sizeof(SlotHeader) + readers * sizeof(ReaderLine);
        return (end + page - 1) / page * page;
    }
    static size_t stride(size_t data_bytes) { return (data_bytes + page - 1) / page * page; }
    static size_t bytes(size_t slots, size_t readers, size_t data_bytes) {
        return data_offset(slots, readers) + slots * stride(data_bytes);
    }

    // Make a fresh mailbox in `memory` (64-byte aligned, `bytes(...)` long); the slots' data stay as they are.
    static void initialize(byte* memory, size_t slots, size_t readers, size_t data_bytes) {
        auto* header = new (memory) MailboxHeader{};  // all zero
        header->slots = slots;
        header->readers = readers;
        header->data_bytes = data_bytes;
        header->stride = stride(data_bytes);
        header->newest_version.store(-1);
        header->next_ticket.store(1);
        byte* at = memory + sizeof(MailboxHeader);
        for (size_t i = 0; i < slots; ++i, at += sizeof(SlotHeader)) (new (at) SlotHeader{})->version.store(-1);
        for (size_t i = 0; i < readers; ++i, at += sizeof(ReaderLine)) new (at) ReaderLine{};
    }

    explicit Mailbox(byte* memory)
        : header_(reinterpret_cast<MailboxHeader*>(memory)),
          slots_(reinterpret_cast<SlotHeader*>(memory + sizeof(MailboxHeader))),
          readers_(reinterpret_cast<ReaderLine*>(memory + sizeof(MailboxHeader) + header_->slots * sizeof(SlotHeader))),
          data_(memory + data_offset(header_->slots, header_->readers)),
          open_(header_->slots, 0) {}

    size_t slots() const { return header_->slots; }
    size_t readers() const { return header_->readers; }
    size_t data_bytes() const { return header_->data_bytes; }
    uint64_t revoked() const { return header_->revoked.load(std::memory_order_relaxed); }
    int64_t newest_version() const { return header_->newest_version.load(std::memory_order_seq_cst); }
    // The largest version in any slot, -1: none. A writer that was killed may have sealed it without a word of it in
    // newest_version; the next writer counts on from here.
    int64_t last_version() const {
        int64_t last = newest_version();
        for (size_t i = 0; i < slots(); ++i) last = std::max(last, slots_[i].version.load(std::memory_order_relaxed));
        return last;
    }
    byte* data(size_t slot) const { return data_ + slot * header_->stride; }
    static size_t slot_of(uint64_t word) { return word & 255; }

    // Writer: take a slot to write into, or -1. A free one if there is one, the one sealed longest ago first; else,
    // where `revoke`, the oldest that only ordinary readers pin. O(slots + readers), never waits.
    int begin(bool revoke) {
        std::vector<uint8_t> pinned(slots(), 0);  // 1: by ordinary readers, 2: firmly
        for (size_t i = 0; i < readers(); ++i) {
            const uint64_t word = readers_[i].hazard.load(std::memory_order_seq_cst);
            DDRL_MAILBOX_PAUSE();
            if (word == 0 || slots_[slot_of(word)].ticket.load(std::memory_order_relaxed) != word >> 8) continue;
            const uint8_t hold = readers_[i].firm.load(std::memory_order_relaxed) ? 2 : 1;
            if (hold > pinned[slot_of(word)]) pinned[slot_of(word)] = hold;
        }
        int chosen = oldest(pinned, 0);
        if (chosen < 0 && revoke) {
            chosen = oldest(pinned, 1);
            if (chosen >= 0) header_->revoked.fetch_add(1, std::memory_order_relaxed);
        }
        if (chosen < 0) return -1;
        const size_t slot = chosen;
        open_[slot] = 1;
        slots_[slot].ticket.store(0, std::memory_order_seq_cst);
        std::atomic_thread_fence(
            std::memory_order_seq_cst);  // no byte of the new version may be visible before the ticket was cleared
        return chosen;
    }

    // Writer: hand over a slot from begin(). Returns whether it is now the newest version (an older one never replaces
    // a newer one).
    bool seal(size_t slot, int64_t version, uint64_t sum, int64_t time_ns, const std::array<double, 8>& values) {
        close(slot);
        SlotHeader& header = slots_[slot];
        header.version.store(version, std::memory_order_relaxed);
        header.checksum.store(sum, std::memory_order_relaxed);
        header.time_ns.store(time_ns, std::memory_order_relaxed);
        for (size_t i = 0; i < values.size(); ++i) header.values[i].store(values[i], std::memory_order_relaxed);
        const uint64_t ticket = header_->next_ticket.fetch_add(1, std::memory_order_relaxed);
        header.ticket.store(ticket, std::memory_order_release);
        if (version <= newest_version()) return false;
        header_->newest.store(ticket << 8 | slot, std::memory_order_seq_cst);
        DDRL_MAILBOX_PAUSE();
        header_->newest_version.store(version, std::memory_order_seq_cst);
        header_->sealed.ring();
        return true;
    }

    // Writer: give a slot from begin() back unsealed.
    void abandon(size_t slot) { close(slot); }

    // Reader: pin the newest version in place of what this reader pinned before; word 0 where there is none yet.
    // Lock-free: repeats only when a newer version was sealed meanwhile.
    Sealed pin(size_t reader) {
        ReaderLine& line = line_of(reader);
        for (;;) {
            Sealed pinned;
            pinned.word = header_->newest.load(std::memory_order_seq_cst);
            if (pinned.word == 0) return pinned;
            DDRL_MAILBOX_PAUSE();
            line.hazard.store(pinned.word, std::memory_order_seq_cst);
            DDRL_MAILBOX_PAUSE();
            if (header_->newest.load(std::memory_order_seq_cst) != pinned.word) continue;
            const SlotHeader& header = slots_[slot_of(pinned.word)];
            pinned.version = header.version.load(std::memory_order_relaxed);
            pinned.checksum = header.checksum.load(std::memory_order_relaxed);
            pinned.time_ns = header.time_ns.load(std::memory_order_relaxed);
            for (size_t i = 0; i < pinned.values.size(); ++i)
                pinned.values[i] = header.values[i].load(std::memory_order_relaxed);
            if (valid(pinned.word)) return pinned;
        }
    }

    // Reader: the word a pin() would return now; equal to the pinned one means nothing newer.
    uint64_t newest_word() const { return header_->newest.load(std::memory_order_acquire); }

    // Whether everything read from the slot until now belongs to the version pinned as `word`.
    bool valid(uint64_t word) const {
        std::atomic_thread_fence(std::memory_order_acquire);  // the reads come before that of the ticket
        return slots_[slot_of(word)].ticket.load(std::memory_order_relaxed) == word >> 8;
    }

    void unpin(size_t reader) { line_of(reader).hazard.store(0, std::memory_order_release); }

    // Wait for a version above `version`, at most `seconds`; returns the newest.
    int64_t wait_newer(int64_t version, double seconds) {
        header_->sealed.wait_until([&] { return newest_version() > version; }, seconds);
        return newest_version();
    }

    void claim(size_t reader, uint32_t pid, uint64_t start, bool firm) {
        ReaderLine& line = line_of(reader);
        line.hazard.store(0, std::memory_order_seq_cst);
        line.firm.store(firm ? 1 : 0, std::memory_order_relaxed);
        line.start.store(start, std::memory_order_relaxed);
        line.pid.store(pid, std::memory_order_release);
    }
    void release(size_t reader) {
        unpin(reader);
        line_of(reader).pid.store(0, std::memory_order_release);
    }
    // Process id (0: none) and start time of a reader.
    std::pair<uint32_t, uint64_t> reader_process(size_t reader) const {
        const ReaderLine& line = line_of(reader);
        return {line.pid.load(std::memory_order_acquire), line.start.load(std::memory_order_relaxed)};
    }

private:
    ReaderLine& line_of(size_t reader) const {
        if (reader >= readers())
            throw std::out_of_range("reader " + std::to_string(reader) + " of a mailbox made for " +
                                    std::to_string(readers()));
        return readers_[reader];
    }
    void close(size_t slot) {
        if (slot >= slots() || !open_[slot])
            throw std::invalid_argument("slot " + std::to_string(slot) + " is not open for writing");
        open_[slot] = 0;
    }
    // The slot sealed longest ago that is neither newest nor open and is held just as strongly as `hold`; -1: none.
    int oldest(const std::vector<uint8_t>& pinned, uint8_t hold) const {
        const uint64_t newest = header_->newest.load(std::memory_order_relaxed);
        int chosen = -1;
        uint64_t least = UINT64_MAX;
        for (size_t i = 0; i < slots(); ++i) {
            const uint64_t ticket = slots_[i].ticket.load(std::memory_order_relaxed);
            if (open_[i] || pinned[i] != hold || (newest != 0 && slot_of(newest) == i) || ticket >= least) continue;
            least = ticket;
            chosen = static_cast<int>(i);
        }
        return chosen;
    }

    MailboxHeader* header_;
    SlotHeader* slots_;
    ReaderLine* readers_;
    byte* data_;
    std::vector<uint8_t> open_;  // slots between begin() and seal() or abandon(); used by the writer alone
};

}  // namespace ddrl
