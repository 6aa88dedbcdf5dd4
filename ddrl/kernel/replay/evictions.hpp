// Evictions: which episode is removed when the replay is full. An eviction is notified of episodes added, ended, drawn
// (one batch at a time) and removed, and names the victim. All calls are made under the replay's lock. A new eviction
// derives from Eviction and gets a line in make_eviction (docs/replay.md).
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "store.hpp"

namespace ddrl::replay {

class Eviction {
public:
    virtual ~Eviction() = default;
    // An episode got its first records; one without records is never a victim.
    virtual void added(u32 /*episode*/, const Store&) {}
    virtual void ended(u32 /*episode*/) {}
    // Called before the episode leaves the store; it may never have been added.
    virtual void removed(u32 /*episode*/, const Store&) {}
    // Episodes whose picks were drawn, one entry a pick; not called when wants_draws() is false.
    virtual void drawn(std::span<const u32> /*episodes*/) {}
    virtual bool wants_draws() const { return false; }
    // The episode to evict, one that was added; there is at least one.
    virtual u32 victim(const Store& store) = 0;
    virtual size_t nbytes() const = 0;
    // All of the state, or what changed since mark_saved; load writes either over the present state.
    virtual void save(Writer& out, bool whole) const = 0;
    virtual void load(Reader& in) = 0;
    virtual void mark_saved() {}
    // Throws what is wrong with the state; a snapshot's is checked before it is used.
    virtual void check(const Store&) const {}
};

// First in, first out: the episode with the lowest handle is removed.
class Fifo final : public Eviction {
public:
    u32 victim(const Store& store) override {
        u32 episode = store.oldest();
        while (!store.episode(episode).records) episode = store.episode(episode).newer;
        return episode;
    }
    size_t nbytes() const override { return sizeof *this; }
    void save(Writer&, bool) const override {}
    void load(Reader&) override {}
};

// Second chance: an episode's flag is set when a pick of it is drawn. A pointer cycles through the episodes in order of
// handles, clears the flags it passes, and evicts the first episode without one; with all flagged that is the episode
// at which it started, after one full turn.
class SecondChance final : public Eviction {
public:
    void added(u32 episode, const Store&) override {
        if (flag_.size() <= episode) flag_.resize(episode + size_t{1});
        flag_.set(episode, 0);
        if (pointer_ == NONE) pointer_ = episode;
    }
    void removed(u32 episode, const Store& store) override {
        if (pointer_ == episode) step(store);
        if (pointer_ == episode) pointer_ = NONE;
    }
    void drawn(std::span<const u32> episodes) override {
        for (const u32 episode : episodes)
            if (!flag_[episode]) flag_.set(episode, 1);
    }
    bool wants_draws() const override { return true; }
    u32 victim(const Store& store) override {
        for (; !store.episode(pointer_).records || flag_[pointer_]; step(store))
            if (store.episode(pointer_).records) flag_.set(pointer_, 0);
        return pointer_;
    }
    size_t nbytes() const override { return flag_.nbytes(); }
    void save(Writer& out, bool whole) const override { out.value(pointer_), flag_.save(out, whole); }
    void load(Reader& in) override { pointer_ = in.value<u32>(), flag_.load(in); }
    void mark_saved() override { flag_.clear_written(); }
    void check(const Store& store) const override {
        bool any = false;
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer)
            if (store.episode(i).records) {
                any = true;
                fail_if(i >= flag_.size(), "the eviction has lost an episode");
            }
        const bool there = pointer_ < store.episodes().table_size() && store.episode(pointer_).used;
        fail_if(pointer_ == NONE ? any : !there, "the eviction points at no episode");
    }

private:
    void step(const Store& store) {
        pointer_ = store.episode(pointer_).newer;
        if (pointer_ == NONE) pointer_ = store.oldest();
    }
    TrackedVector<u8> flag_;
    u32 pointer_ = NONE;
};

// Least recently used and least frequently used: the episode with the lowest key is removed, the lowest handle among
// equals.
//
// Only episodes that have ended compete; while all are running, the lowest handle is removed. (The younger a running
// episode is, the less it has been drawn: it would be removed first, piece by piece, while it is being recorded.) The
// keys of ended episodes only grow. So a draw just writes them, and a heap keeps each episode by an earlier key: what
// is on top by its present key has the lowest. O(log N) for an episode that was drawn, however often, since it was on
// top.
class RankedEviction : public Eviction {
public:
    void added(u32 episode, const Store& store) override {
        if (entries_.size() <= episode) entries_.resize(episode + size_t{1});
        entries_.set(episode, {RUNNING, store.episode(episode).handle});
    }
    void ended(u32 episode) override {
        entries_.change(episode).key = first_key();
        push(episode);
    }
    void removed(u32 episode, const Store&) override {
        if (episode < entries_.size()) entries_.set(episode, {});  // else it never held a record
    }
    bool wants_draws() const override { return true; }
    u32 victim(const Store& store) override {
        while (!heap_.empty()) {
            const Held& held = heap_.front();
            const u32 episode = held.episode;
            const Entry& now = entries_[episode];
            if (now.key == held.entry.key && now.handle == held.entry.handle) return episode;
            const bool there = now.handle == held.entry.handle;
            std::pop_heap(heap_.begin(), heap_.end());
            heap_.pop_back();
            if (there) push(episode);
        }
        return Fifo().victim(store);
    }
    size_t nbytes() const override { return entries_.nbytes() + heap_.capacity() * sizeof(Held); }
    void save(Writer& out, bool whole) const override { out.value(clock_), entries_.save(out, whole); }
    void load(Reader& in) override {
        clock_ = in.value<u64>();
        entries_.load(in);
        heap_.clear();
        for (u32 i = 0; i < entries_.size(); ++i)
            if (entries_[i].key < RUNNING) push(i);
    }
    void mark_saved() override { entries_.clear_written(); }
    void check(const Store& store) const override {
        size_t held = 0, entered = 0;
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer) {
            if (!store.episode(i).records) continue;
            ++held;
            fail_if(i >= entries_.size() || entries_[i].handle != store.episode(i).handle ||
                        entries_[i].key > RUNNING ||
                        (entries_[i].key == RUNNING) != (store.episode(i).ending == Ending::LIVE),
                    "the eviction has lost an episode");
        }
        for (size_t i = 0; i < entries_.size(); ++i) entered += entries_[i].key != Entry{}.key;
        fail_if(entered != held, "the eviction holds an episode that is gone");
    }

protected:
    struct Entry {
        u64 key = ~u64{0}, handle = ~u64{0};
    };
    static constexpr u64 RUNNING = ~u64{0} - 1;  // after every other key but that of no episode
    virtual u64 first_key() = 0;
    u64 clock_ = 0;  // lru: the time; lfu: the highest key so far
    TrackedVector<Entry> entries_;

private:
    struct Held {
        Entry entry;  // as it was when the episode was pushed
        u32 episode;
        bool operator<(const Held& other) const {  // the lowest is on top
            return entry.key != other.entry.key ? entry.key > other.entry.key : entry.handle > other.entry.handle;
        }
    };
    void push(u32 episode) {
        heap_.push_back({entries_[episode], episode});
        std::push_heap(heap_.begin(), heap_.end());
    }
    std::vector<Held> heap_;  // the episodes that have ended, each once
};

// The key is the time (batches drawn, episodes ended) of the last batch that drew from the episode, at first of its
// end.
class Lru final : public RankedEviction {
public:
    void drawn(std::span<const u32> episodes) override {
        ++clock_;
        for (const u32 episode : episodes)
            if (entries_[episode].key < clock_) entries_.change(episode).key = clock_;
    }

private:
    u64 first_key() override { return ++clock_; }
};

// The key counts the picks drawn; an episode that ends gets the highest key so far, or it would be the next victim.
class Lfu final : public RankedEviction {
public:
    void drawn(std::span<const u32> episodes) override {
        for (const u32 episode : episodes)
            if (entries_[episode].key != RUNNING) clock_ = std::max(clock_, ++entries_.change(episode).key);
    }

private:
    u64 first_key() override { return clock_; }
};

// The evictions by name: a new one is added to this list.
inline std::unique_ptr<Eviction> make_eviction(const std::string& kind) {
    if (kind == "fifo") return std::make_unique<Fifo>();
    if (kind == "second_chance") return std::make_unique<SecondChance>();
    if (kind == "lru") return std::make_unique<Lru>();
    if (kind == "lfu") return std::make_unique<Lfu>();
    throw std::invalid_argument("there is no eviction '" + kind + "': choose fifo, second_chance, lru or lfu");
}

}  // namespace ddrl::replay
