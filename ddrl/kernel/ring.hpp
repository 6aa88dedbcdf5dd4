// A ring of fixed-size rows with one producer and one consumer, in memory that the caller supplies (heap or shared
// between processes), and the set of rings that one consumer drains.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "shared_memory.hpp"

namespace ddrl {

// The producer owns `tail`, the consumer owns `head`; both only grow, so their difference is the number of rows held.
// Rows become visible by the store to `tail`, room by the store to `head`. A full ring makes the producer wait (futex).
struct RingHeader {
    alignas(64) uint64_t capacity;  // [rows]
    uint64_t row_bytes;
    alignas(64) std::atomic<uint64_t> tail;  // rows ever pushed; the producer's line
    std::atomic<uint64_t> waits;  // times the producer waited
    std::atomic<uint64_t> wait_ns;  // time it waited
    alignas(64) std::atomic<uint64_t> head;  // rows ever popped; the consumer's line
    alignas(64) Doorbell room;  // where the producer waits
    alignas(64) std::atomic<uint32_t> closed;
};

// One process's view of a ring; an object serves as producer or as consumer, from one thread at a time.
class Ring {
public:
    static constexpr size_t header_bytes = sizeof(RingHeader);

    static size_t bytes(size_t capacity, size_t row_bytes) { return header_bytes + capacity * row_bytes; }

    // Make a fresh ring in `memory` (64-byte aligned, `bytes(capacity, row_bytes)` long).
    static void initialize(byte* memory, size_t capacity, size_t row_bytes) {
        auto* header = new (memory) RingHeader{};  // all zero
        header->capacity = capacity;
        header->row_bytes = row_bytes;
    }

    explicit Ring(byte* memory)
        : header_(reinterpret_cast<RingHeader*>(memory)),
          data_(memory + header_bytes),
          capacity_(header_->capacity),
          row_bytes_(header_->row_bytes),
          cached_head_(header_->head.load(std::memory_order_acquire)),
          cached_tail_(header_->tail.load(std::memory_order_acquire)) {}

    size_t capacity() const { return capacity_; }
    size_t row_bytes() const { return row_bytes_; }
    uint64_t pushed() const { return header_->tail.load(std::memory_order_acquire); }
    uint64_t popped() const { return header_->head.load(std::memory_order_acquire); }
    uint64_t waits() const { return header_->waits.load(std::memory_order_relaxed); }
    double wait_seconds() const { return static_cast<double>(header_->wait_ns.load(std::memory_order_relaxed)) * 1e-9; }
    bool closed() const { return header_->closed.load(std::memory_order_seq_cst) != 0; }

    // Rows in the ring. Read by anyone: `head` first, so that the difference is never negative.
    size_t size() const {
        const uint64_t head = popped();
        return std::min<uint64_t>(pushed() - head, capacity_);
    }

    // From now on nobody waits: pushes return at once. What is in the ring can still be popped.
    void close() {
        header_->closed.store(1, std::memory_order_seq_cst);
        header_->room.ring();
    }

    // Whoever has seen the producer's process end, before another one attaches: make the ring ready for that. Rows that
    // the dead process did not finish are past `tail`, which nobody reads, and are overwritten. What it leaves that the
    // next one must not inherit is its place in `room`, where producers alone wait. False: the ring was damaged.
    bool hand_over() {
        const uint64_t head = popped();  // first: the consumer may pop meanwhile
        header_->room.waiters.store(0, std::memory_order_seq_cst);
        return header_->capacity == capacity_ && header_->row_bytes == row_bytes_ && pushed() - head <= capacity_;
    }

    // Producer: the bell rung after each push; nullptr for none.
    void set_bell(Doorbell* bell) { bell_ = bell; }

    // Producer: rows that fit now, looking at the consumer's line only when fewer than `wanted` are known to fit.
    size_t room(size_t wanted) {
        const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
        if (capacity_ - (tail - cached_head_) < wanted) cached_head_ = header_->head.load(std::memory_order_seq_cst);
        return capacity_ - (tail - cached_head_);
    }

    // Producer: memory of the row `offset` rows past the last pushed one; offset < room().
    byte* vacant(size_t offset) {
        const uint64_t tail = header_->tail.load(std::memory_order_relaxed);
        return data_ + ((tail + offset) % capacity_) * row_bytes_;
    }

    // Producer: hand over the first `count` vacant rows.
    void publish(size_t count) {
        if (count == 0) return;
        header_->tail.store(header_->tail.load(std::memory_order_relaxed) + count, std::memory_order_release);
        if (bell_) bell_->ring();
    }

    // Producer: copy in as many rows as fit; returns how many. O(bytes), at most two copies.
    size_t push_fitting(const byte* rows, size_t count) {
        const size_t taken = std::min(count, room(count));
        if (taken == 0) return 0;
        const size_t begin = header_->tail.load(std::memory_order_relaxed) % capacity_;
        const size_t first = std::min(taken, capacity_ - begin);
        std::memcpy(data_ + begin * row_bytes_, rows, first * row_bytes_);
        std::memcpy(data_, rows + first * row_bytes_, (taken - first) * row_bytes_);
        publish(taken);
        return taken;
    }

    void count_wait() { header_->waits.fetch_add(1, std::memory_order_relaxed); }

    // Producer: wait for room or close(), at most `seconds`; true when either holds. The time is counted.
    bool wait_room(double seconds) {
        const auto begin = Clock::now();
        const bool held = header_->room.wait_until([this] { return room(1) > 0 || closed(); }, seconds);
        const auto waited = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count();
        header_->wait_ns.fetch_add(static_cast<uint64_t>(waited), std::memory_order_relaxed);
        return held;
    }

    // Consumer: rows that can be popped now. Reads the producer's cache line only when fewer than `wanted` are known to
    // be there.
    size_t filled(size_t wanted) {
        const uint64_t head = header_->head.load(std::memory_order_relaxed);
        if (cached_tail_ - head < wanted) cached_tail_ = header_->tail.load(std::memory_order_acquire);
        return cached_tail_ - head;
    }

    // Consumer: copy out at most `count` rows, oldest first; returns how many. Wakes a waiting producer.
    size_t pop(byte* out, size_t count) {
        const size_t taken = std::min(count, filled(count));
        if (taken == 0) return 0;
        const uint64_t head = header_->head.load(std::memory_order_relaxed);
        const size_t begin = head % capacity_;
        const size_t first = std::min(taken, capacity_ - begin);
        std::memcpy(out, data_ + begin * row_bytes_, first * row_bytes_);
        std::memcpy(out + first * row_bytes_, data_, (taken - first) * row_bytes_);
        header_->head.store(head + taken, std::memory_order_seq_cst);
        header_->room.ring_waiters();
        return taken;
    }

private:
    RingHeader* header_;
    byte* data_;
    size_t capacity_;
    size_t row_bytes_;
    uint64_t cached_head_;  // head as the producer read it last
    uint64_t cached_tail_;  // tail as the consumer read it last
    Doorbell* bell_ = nullptr;
};

// Rings that one consumer drains into one block of rows, in order within each ring.
//
// Where the consumer takes fewer rows than there are, producers wait, and what waits grows old: of hundreds of
// producers each would act rarely, and what it did would be read late. So rings of a few streams (environments) come
// first, then those of a few others, as far as rows are wanted, and from time to time another ring is the first.
class LaneSet {
public:
    static constexpr size_t streams_at_once = 32;  // of rings that share what they give
    static constexpr size_t stream_rows = 512;  // taken in all for each stream of the first ring, until the next is it

    // `streams`: of each ring; 1 where it is missing. Rings of 0 all share what they give.
    LaneSet(const std::vector<Ring*>& rings, const std::vector<size_t>& streams) {
        // Neighbours explore alike (epsilon_spread), and those that come first together should not: their order is that
        // of multiples of the golden ratio.
        for (uint32_t at = 0; at < rings.size(); ++at)
            lanes_.push_back({at * 2654435769u, rings[at], at < streams.size() ? streams[at] : 1});
        std::sort(lanes_.begin(), lanes_.end(), [](const Lane& a, const Lane& b) { return a.place < b.place; });
    }

    // Rows in all rings together.
    size_t pending() const {
        size_t rows = 0;
        for (const Lane& lane : lanes_) rows += lane.ring->size();
        return rows;
    }

    // Move at most `count` rows to `out`; returns how many. O(rings + bytes).
    size_t drain(byte* out, size_t count) {
        if (lanes_.empty() || count == 0) return 0;
        size_t moved = 0;
        for (size_t begin = 0, end = 0; begin < lanes_.size() && moved < count; begin = end) {
            size_t streams = 0;
            while (end < lanes_.size() && streams < streams_at_once) streams += at(end++).streams;
            moved += share(out + moved * lanes_[0].ring->row_bytes(), count - moved, begin, end);
        }
        taken_ += moved;
        if (taken_ >= stream_rows * lanes_[first_].streams) {
            first_ = (first_ + 1) % lanes_.size();
            taken_ = 0;
        } else {
            ++turn_;  // not both, or every other ring would begin where all share and one row is taken at once
        }
        return moved;
    }

private:
    struct Lane {
        uint32_t place;
        Ring* ring;
        size_t streams;
    };

    const Lane& at(size_t after_first) const { return lanes_[(first_ + after_first) % lanes_.size()]; }

    // The same of the rings `begin` to `end`, counted from the first. Those that hold rows share the space equally,
    // space that some leave free is given to the others, and another one begins at each call: each round fills `out` or
    // empties a ring.
    size_t share(byte* out, size_t count, size_t begin, size_t end) {
        holding_.clear();
        for (size_t turned = 0; turned < end - begin; ++turned) {
            Ring* ring = at(begin + (turned + turn_) % (end - begin)).ring;
            if (ring->filled(count) > 0) holding_.push_back(ring);
        }
        size_t moved = 0;
        while (!holding_.empty() && moved < count) {
            const size_t part = std::max<size_t>(1, (count - moved) / holding_.size());
            size_t remaining = 0;
            for (Ring* ring : holding_) {
                const size_t wanted = std::min(part, count - moved);
                const size_t taken = ring->pop(out + moved * ring->row_bytes(), wanted);
                moved += taken;
                if (taken == wanted) holding_[remaining++] = ring;
            }
            holding_.resize(remaining);
        }
        return moved;
    }

    std::vector<Lane> lanes_;
    std::vector<Ring*> holding_;  // rings with rows left, within one share
    size_t turn_ = 0;  // which ring of a share begins
    size_t first_ = 0;  // the lane that comes first
    size_t taken_ = 0;  // rows since then
};

}  // namespace ddrl
