// Least recently used and least frequently used: the episode with the lowest key goes, the lowest handle among equals.
//
// Only episodes that have ended compete; while all are running, the lowest handle goes. (A running episode is drawn
// less the younger it is: it would go first, piece by piece, while it is being recorded.) Lru: the key is the time
// (batches drawn, episodes ended) of the last batch that drew from the episode, at first of its end. Lfu: the key
// counts the picks drawn; an episode that ends starts level with the most used one, or it would be the next victim at
// once. A tournament over groups of 16 keys holds the lowest; a draw only writes a key and marks its group, the next
// victim() repairs marks.
#pragma once

#include <vector>

#include "eviction.hpp"

namespace ddrl::replay {

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

}  // namespace ddrl::replay
