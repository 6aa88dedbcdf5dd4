// Evictions: which episode is removed when the replay is full. An eviction is told of episodes added, ended, drawn (one
// batch at a time) and removed, and names the victim. All calls are made under the replay's lock. A new eviction
// derives from Eviction and gets a line in make_eviction (docs/replay.md).
#pragma once

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
    virtual std::size_t nbytes() const = 0;
    // All of the state, or what changed since mark_saved; load writes either over the present state.
    virtual void save(Writer& out, bool whole) const = 0;
    virtual void load(Reader& in) = 0;
    virtual void mark_saved() {}
    // What is wrong with the state, or nothing; a snapshot's is checked before it is used.
    virtual std::string check(const Store&) const { return ""; }
};

// First in, first out: the episode with the lowest handle is removed.
class Fifo final : public Eviction {
public:
    u32 victim(const Store& store) override {
        u32 episode = store.oldest();
        while (!store.episode(episode).records) episode = store.episode(episode).newer;
        return episode;
    }
    std::size_t nbytes() const override { return sizeof *this; }
    void save(Writer&, bool) const override {}
    void load(Reader&) override {}
};

// Second chance: an episode's flag is set when a pick of it is drawn. A pointer cycles through the episodes in order of
// handles, clears the flags it passes, and evicts the first episode without one; with all flagged that is the episode
// at which it started, after one full turn.
class SecondChance final : public Eviction {
public:
    void added(u32 episode, const Store&) override {
        if (flag_.size() <= episode) flag_.resize(episode + std::size_t{1});
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
    std::size_t nbytes() const override { return flag_.nbytes(); }
    void save(Writer& out, bool whole) const override { out.value(pointer_), flag_.save(out, whole); }
    void load(Reader& in) override { pointer_ = in.value<u32>(), flag_.load(in); }
    void mark_saved() override { flag_.clear_written(); }
    std::string check(const Store& store) const override {
        bool any = false;
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer)
            if (store.episode(i).records) {
                any = true;
                if (i >= flag_.size()) return "the eviction has lost an episode";
            }
        if (pointer_ == NONE) return any ? "the eviction has lost its pointer" : "";
        const bool there = pointer_ < store.episodes().table_size() && store.episode(pointer_).used;
        return there ? "" : "the eviction points at no episode";
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
// episode is, the less it has been drawn: it would be removed first, piece by piece, while it is being recorded.) A
// tournament over groups of 16 keys finds the lowest key; a draw only writes a key and marks its group, and the next
// victim() recomputes the marked groups.
class RankedEviction : public Eviction {
public:
    void added(u32 episode, const Store& store) override {
        if (entries_.size() <= episode) grow(episode);
        entries_.set(episode, {RUNNING, store.episode(episode).handle});
        mark(episode);
    }
    void ended(u32 episode) override {
        entries_.change(episode).key = first_key();
        mark(episode);
    }
    void removed(u32 episode, const Store&) override {
        if (entries_.size() <= episode) return;  // it never held a record
        entries_.set(episode, {});
        mark(episode);
    }
    bool wants_draws() const override { return true; }
    u32 victim(const Store&) override {
        repair();
        return levels_.back()[0];
    }
    std::size_t nbytes() const override {
        std::size_t bytes = entries_.nbytes() + marked_.capacity() + pending_.capacity() * sizeof(u32);
        for (const auto& level : levels_) bytes += level.capacity() * sizeof(u32);
        return bytes;
    }
    void save(Writer& out, bool whole) const override { out.value(clock_), entries_.save(out, whole); }
    void load(Reader& in) override {
        clock_ = in.value<u64>();
        entries_.load(in);
        if (entries_.size() % GROUP) throw std::runtime_error("it is inconsistent");
        lay_out();
    }
    void mark_saved() override { entries_.clear_written(); }
    std::string check(const Store& store) const override {
        std::size_t held = 0, entered = 0;
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer) {
            if (!store.episode(i).records) continue;
            ++held;
            if (i >= entries_.size() || entries_[i].handle != store.episode(i).handle || entries_[i].key > RUNNING)
                return "the eviction has lost an episode";
        }
        for (std::size_t i = 0; i < entries_.size(); ++i) entered += entries_[i].key != Entry{}.key;
        return entered == held ? "" : "the eviction holds an episode that is gone";
    }

protected:
    static constexpr u32 GROUP = 16;
    struct Entry {
        u64 key = ~u64{0}, handle = ~u64{0};
        bool before(const Entry& other) const { return key != other.key ? key < other.key : handle < other.handle; }
    };
    static constexpr u64 RUNNING = ~u64{0} - 1;  // after every other key but that of no episode
    virtual u64 first_key() = 0;
    void mark(u32 episode) {
        const u32 group = episode / GROUP;
        if (!marked_[group]) marked_[group] = 1, pending_.push_back(group);
    }
    u64 clock_ = 0;  // lru: the time; lfu: the highest key so far
    TrackedVector<Entry> entries_;

private:
    void grow(u32 episode) {
        entries_.resize(round_up(std::max<std::size_t>(episode + std::size_t{1}, 2 * entries_.size()), GROUP));
        lay_out();
    }
    // The tournament over all entries, every group marked.
    void lay_out() {
        marked_.assign(entries_.size() / GROUP, 1);
        levels_.clear();
        if (!entries_.size()) return pending_.clear();
        for (std::size_t width = entries_.size(); levels_.empty() || width > 1;)
            levels_.emplace_back(width = (width + GROUP - 1) / GROUP);
        pending_.resize(marked_.size());
        for (u32 i = 0; i < pending_.size(); ++i) pending_[i] = i;
    }
    // Lowest of each marked group, then of the groups above them.
    void repair() {
        for (std::size_t level = 0; level < levels_.size(); ++level) {
            std::vector<u32>& winners = levels_[level];
            for (const u32 group : pending_) {
                const std::size_t end = level ? levels_[level - 1].size() : entries_.size();
                u32 best = contender(level, group * std::size_t{GROUP});
                for (std::size_t i = group * std::size_t{GROUP} + 1;
                     i < std::min<std::size_t>(end, (group + std::size_t{1}) * GROUP); ++i) {
                    const u32 other = contender(level, i);
                    if (entries_[other].before(entries_[best])) best = other;
                }
                winners[group] = best;
                if (level == 0) marked_[group] = 0;
            }
            u32 groups = 0;
            for (const u32 group : pending_)
                if (!groups || pending_[groups - 1] != group / GROUP) pending_[groups++] = group / GROUP;
            pending_.resize(groups);
        }
        pending_.clear();
    }
    u32 contender(std::size_t level, std::size_t i) const {
        return level ? levels_[level - 1][i] : static_cast<u32>(i);
    }

    std::vector<u8> marked_;
    std::vector<u32> pending_;
    std::vector<std::vector<u32>> levels_;
};

// The key is the time (batches drawn, episodes ended) of the last batch that drew from the episode, at first of its
// end.
class Lru final : public RankedEviction {
public:
    void drawn(std::span<const u32> episodes) override {
        ++clock_;
        for (const u32 episode : episodes)
            if (entries_[episode].key < clock_) entries_.change(episode).key = clock_, mark(episode);
    }

private:
    u64 first_key() override { return ++clock_; }
};

// The key counts the picks drawn; an episode that ends gets the highest key so far, or it would be the next victim.
class Lfu final : public RankedEviction {
public:
    void drawn(std::span<const u32> episodes) override {
        for (const u32 episode : episodes) {
            if (entries_[episode].key == RUNNING) continue;
            clock_ = std::max(clock_, ++entries_.change(episode).key);
            mark(episode);
        }
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
