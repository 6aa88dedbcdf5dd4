// Selectors: ways of drawing picks. A selector follows every change of the pick table and draws indices of it.
//
// One call covers a batch, never a single pick, so virtual calls cost nothing. All calls are made under the replay's
// lock. A new selector derives from PickSelector and gets a line in selector_kinds() (docs/replay.md).
#pragma once

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <map>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "picks.hpp"
#include "random.hpp"
#include "sum_tree.hpp"

namespace ddrl::replay {

class PickSelector {
public:
    virtual ~PickSelector() = default;
    // The table grew by picks first .. first + count - 1, in the order in which they were made.
    virtual void picks_added(u32 first, u32 count) = 0;
    // Picks moved, in this order, each from an index at the table's end to a free index before it.
    virtual void picks_moved(std::span<const Move> moves) = 0;
    // The table now holds `size` picks; those at and after that index were dropped.
    virtual void picks_dropped(u32 size) = 0;
    // New priorities, checked to be finite and at least 0; index NONE: the pick was evicted. A selector without
    // priorities ignores them.
    virtual void set_priority(std::span<const u32> /*index*/, std::span<const float> /*priority*/) {}
    // Draws index.size() picks, with replacement; weight (of the same size, or empty) receives the importance weights,
    // largest 1. False when nothing can be drawn.
    virtual bool draw(std::span<u32> index, std::span<float> weight) = 0;
    // The exact probability with which the next draw takes each pick [table size], for tests and plots. At most
    // O(size log size).
    virtual void probabilities(std::span<double> probability) = 0;
    virtual void set_importance_exponent(double) {}
    virtual size_t nbytes() const = 0;
    // The state for a snapshot, and back. Not `whole`: only what changed since mark_saved, which load writes over the
    // present state; saving everything every time is correct too.
    virtual void save(Writer& out, bool whole) const = 0;
    virtual void load(Reader& in) = 0;
    virtual void mark_saved() {}
    // Throws what is wrong with the state, where the table holds `size` picks.
    virtual void check(u32 /*size*/) {}
};

// Options by name; a yes-or-no is 1 or 0.
using Parameters = std::map<std::string, double>;

// All picks with the same probability. O(1) a draw, no memory per pick.
class Uniform final : public PickSelector {
public:
    explicit Uniform(Random random, size_t = 0, const Parameters& = {}) : random_(random) {}
    void picks_added(u32, u32 count) override { size_ += count; }
    void picks_moved(std::span<const Move>) override {}
    void picks_dropped(u32 size) override { size_ = size; }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        if (!size_) return false;
        random_.below(size_, index);
        std::fill(weight.begin(), weight.end(), 1.0f);
        return true;
    }
    void probabilities(std::span<double> probability) override {
        std::fill(probability.begin(), probability.end(), 1.0 / size_);
    }
    size_t nbytes() const override { return sizeof *this; }
    void save(Writer& out, bool) const override { out.value(random_), out.value(size_); }
    void load(Reader& in) override { random_ = in.value<Random>(), size_ = in.value<u32>(); }
    void check(u32 size) override { fail_if(size != size_, "a uniform selector has lost picks"); }

private:
    Random random_;
    u32 size_ = 0;
};

// Targets for target.size() draws in [0, total): independent, or stratified, one in each of as many equal parts. Both
// draw a pick equally often on average.
inline void draw_targets(Random& random, double total, bool stratified, std::span<double> target) {
    const double part = total / static_cast<double>(target.size());
    for (size_t i = 0; i < target.size(); ++i)
        target[i] = stratified ? (static_cast<double>(i) + random.unit()) * part : random.unit() * total;
}

// What selectors share that keep a mass for each pick and draw in proportion to it: P = mass / sum of masses, with
// importance weights w = (N P)^-beta / max w, the maximum over the batch drawn. O(log16 N) a draw, whatever the masses.
class MassSelector : public PickSelector {
public:
    void picks_moved(std::span<const Move> moves) override {
        for (const Move& move : moves) tree_.set(move.to, tree_.mass(move.from));
    }
    void picks_dropped(u32 size) override {
        tree_.fill(size, size_ - size, 0.0f);
        size_ = size;
    }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        const double total = tree_.total();
        if (!(total > 0.0)) return false;
        target_.resize(index.size());
        draw_targets(random_, total, stratified_, target_);
        tree_.find(target_, index);
        if (beta_ == 0.0f) std::fill(weight.begin(), weight.end(), 1.0f);
        if (weight.empty() || beta_ == 0.0f) return true;
        float least = FLT_MAX;
        for (size_t i = 0; i < index.size(); ++i) least = std::min(least, weight[i] = tree_.mass(index[i]));
        for (float& w : weight) w = std::pow(least / w, beta_);
        return true;
    }
    void probabilities(std::span<double> probability) override {
        const double total = tree_.total();
        for (u32 i = 0; i < probability.size(); ++i) probability[i] = static_cast<double>(tree_.mass(i)) / total;
    }
    void set_importance_exponent(double beta) override { beta_ = static_cast<float>(beta); }
    size_t nbytes() const override { return sizeof *this + tree_.nbytes() + target_.capacity() * sizeof(double); }
    void save(Writer& out, bool whole) const override {
        out.value(random_), out.value(beta_);
        tree_.save(out, size_, whole);
    }
    void mark_saved() override { tree_.mark_saved(); }
    void load(Reader& in) override {
        random_ = in.value<Random>(), beta_ = in.value<float>();
        size_ = tree_.load(in);
    }
    void check(u32 size) override {
        fail_if(!(beta_ >= 0.0f && beta_ <= FLT_MAX), "a selector has an impossible exponent");
        fail_if(size != size_, "a selector has lost picks");
        tree_.check(size);
    }

protected:
    MassSelector(Random random, size_t capacity, const Parameters& parameters)
        : random_(random),
          tree_(capacity),
          beta_(static_cast<float>(parameters.at("importance_exponent"))),
          stratified_(parameters.at("stratified") != 0) {}

    Random random_;
    SumTree tree_;
    std::vector<double> target_;
    float beta_;
    bool stratified_;
    u32 size_ = 0;
};

// Proportional prioritized draws (Schaul et al. 2016): mass = priority^alpha. A new pick gets the highest priority so
// far (at first 1). Priority 0 is mass 0: such a pick is not drawn until its priority is raised.
class Prioritized final : public MassSelector {
public:
    Prioritized(Random random, size_t capacity, const Parameters& parameters)
        : MassSelector(random, capacity, parameters), alpha_(static_cast<float>(parameters.at("priority_exponent"))) {}

    void picks_added(u32 first, u32 count) override {
        tree_.fill(first, count, mass_of(max_priority_));
        size_ = first + count;
    }
    void set_priority(std::span<const u32> index, std::span<const float> priority) override {
        for (size_t i = 0; i < index.size(); ++i) {
            max_priority_ = std::max(max_priority_, priority[i]);
            if (index[i] != NONE) tree_.set(index[i], mass_of(priority[i]));
        }
    }
    void save(Writer& out, bool whole) const override { out.value(max_priority_), MassSelector::save(out, whole); }
    void load(Reader& in) override { max_priority_ = in.value<float>(), MassSelector::load(in); }
    void check(u32 size) override {
        fail_if(!(max_priority_ >= 0.0f && max_priority_ <= FLT_MAX), "a selector has an impossible priority");
        MassSelector::check(size);
    }

private:
    float mass_of(float priority) const {
        return priority > 0.0f ? std::clamp(std::pow(priority, alpha_), FLT_MIN, FLT_MAX) : 0.0f;
    }
    float alpha_, max_priority_ = 1.0f;
};

// Recency-weighted draws: P(pick) is halved with every `half_life` picks made after it. A pick's mass never changes: it
// is 2^(birth / half_life), and the origin of births moves forward before a float overflows. Picks older than about 120
// half-lives share the smallest mass.
class Recency final : public MassSelector {
public:
    Recency(Random random, size_t capacity, const Parameters& parameters)
        : MassSelector(random, capacity, parameters), half_life_(parameters.at("half_life")) {}

    void picks_added(u32 first, u32 count) override {
        for (u32 i = first; i < first + count; ++i) {
            if (static_cast<double>(births_ - origin_) > MAX_HALF_LIVES * half_life_) move_origin(i);
            const double age = static_cast<double>(births_++ - origin_) / half_life_;
            tree_.fill(i, 1, static_cast<float>(std::exp2(age)));
        }
        size_ = first + count;
    }
    void save(Writer& out, bool whole) const override {
        out.value(births_), out.value(origin_);
        MassSelector::save(out, whole);
    }
    void load(Reader& in) override {
        births_ = in.value<u64>(), origin_ = in.value<u64>();
        MassSelector::load(in);
    }
    void check(u32 size) override {
        fail_if(origin_ > births_, "a recency selector has lost its origin");
        MassSelector::check(size);
    }

private:
    static constexpr double MAX_HALF_LIVES = 60.0;  // past the origin
    void move_origin(u32 size) {
        const double shift = std::floor(static_cast<double>(births_ - origin_));
        const float factor = static_cast<float>(std::exp2(-shift / half_life_));
        for (u32 i = 0; i < size; ++i) tree_.set(i, std::max(tree_.mass(i) * factor, FLT_MIN));
        origin_ = births_;
    }
    double half_life_;
    u64 births_ = 0, origin_ = 0;
};

// Sorted u64 keys, all different, in sorted blocks of at most 256: a change moves at most one block, O(log N + block).
class SortedKeys {
public:
    void insert(u64 key) {
        stale_ = true;
        if (blocks_.empty()) {
            blocks_.push_back({key});
            return;
        }
        auto& block = blocks_[block_of(key)];
        block.insert(std::lower_bound(block.begin(), block.end(), key), key);
        if (block.size() < MAX_BLOCK) return;
        const size_t at = &block - blocks_.data();
        std::vector<u64> upper(block.begin() + MAX_BLOCK / 2, block.end());
        upper.reserve(MAX_BLOCK);
        block.resize(MAX_BLOCK / 2);
        blocks_.insert(blocks_.begin() + at + 1, std::move(upper));
    }
    void erase(u64 key) {
        const size_t at = block_of(key);
        auto& block = blocks_[at];
        block.erase(std::lower_bound(block.begin(), block.end(), key));
        stale_ = true;
        if (block.empty()) blocks_.erase(blocks_.begin() + at);
    }
    // The key that `rank` keys are smaller than.
    u64 at(u32 rank) {
        if (stale_) {
            starts_.clear();
            u32 start = 0;
            for (const auto& block : blocks_) starts_.push_back(start), start += static_cast<u32>(block.size());
            stale_ = false;
        }
        const auto after = std::upper_bound(starts_.begin(), starts_.end(), rank);
        const size_t block = (after - starts_.begin()) - 1;
        return blocks_[block][rank - starts_[block]];
    }
    void assign(std::vector<u64> keys) {
        std::sort(keys.begin(), keys.end());
        blocks_.clear();
        for (size_t at = 0; at < keys.size(); at += MAX_BLOCK / 2) {
            auto& block = blocks_.emplace_back();
            block.reserve(MAX_BLOCK);
            block.assign(keys.begin() + at, keys.begin() + (std::min(keys.size(), at + MAX_BLOCK / 2)));
        }
        stale_ = true;
    }
    template <class Visit>
    void each(Visit visit) const {
        for (const auto& block : blocks_)
            for (const u64 key : block) visit(key);
    }
    size_t nbytes() const {
        size_t bytes = blocks_.capacity() * sizeof(std::vector<u64>) + starts_.capacity() * sizeof(u32);
        for (const auto& block : blocks_) bytes += block.capacity() * sizeof(u64);
        return bytes;
    }

private:
    static constexpr size_t MAX_BLOCK = 256;
    // The last block whose first key is not above `key`, or the first block.
    size_t block_of(u64 key) const {
        const auto after = std::upper_bound(blocks_.begin(), blocks_.end(), key,
                                            [](u64 k, const auto& block) { return k < block.front(); });
        return after == blocks_.begin() ? 0 : (after - blocks_.begin()) - 1;
    }
    std::vector<std::vector<u64>> blocks_;  // none is empty
    std::vector<u32> starts_;  // rank of each block's first key; computed again when `stale_`
    bool stale_ = true;
};

// Rank-based prioritized draws (Schaul et al. 2016): P(pick) = rank^-alpha / sum of rank^-alpha, rank 1 the highest
// priority; among equal priorities the lower index of the pick table ranks higher. The ranks are exact at every draw.
//
// A draw finds its rank in the cumulative probabilities, and its block by bisection: O(log N), and O(N / block) for the
// first draw after changes. Priority 0 is the lowest rank, and is drawn. A new pick gets the highest priority so far.
class RankBased final : public PickSelector {
public:
    RankBased(Random random, size_t capacity, const Parameters& parameters)
        : random_(random),
          priority_(capacity + 1),
          alpha_(parameters.at("priority_exponent")),
          beta_(parameters.at("importance_exponent")),
          stratified_(parameters.at("stratified") != 0) {}

    void picks_added(u32 first, u32 count) override {
        if (size_ == 0 && count > 1024) {  // the selector was made after the records
            for (u32 i = 0; i < count; ++i) priority_.set(i, max_priority_);
            size_ = count;
            rebuild();
            return;
        }
        for (u32 i = first; i < first + count; ++i) {
            priority_.set(i, max_priority_);
            keys_.insert(key(i));
        }
        size_ = first + count;
    }
    void picks_moved(std::span<const Move> moves) override {
        for (const Move& move : moves) change(move.to, priority_[move.from]);
    }
    void picks_dropped(u32 size) override {
        for (; size_ > size; --size_) keys_.erase(key(size_ - 1));
    }
    void set_priority(std::span<const u32> index, std::span<const float> priority) override {
        for (size_t i = 0; i < index.size(); ++i) {
            max_priority_ = std::max(max_priority_, priority[i]);
            if (index[i] != NONE) change(index[i], priority[i]);
        }
    }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        if (!size_) return false;
        const double total = cumulative(size_);
        target_.resize(index.size());
        draw_targets(random_, total, stratified_, target_);
        u32 largest = 0;
        for (size_t i = 0; i < index.size(); ++i) {
            const auto end = cumulative_.begin() + size_;
            const auto at = std::upper_bound(cumulative_.begin(), end, target_[i]);
            const u32 rank = at == end ? size_ - 1 : static_cast<u32>(at - cumulative_.begin());
            index[i] = static_cast<u32>(keys_.at(rank));
            target_[i] = rank, largest = std::max(largest, rank);
        }
        // P falls with the rank, so the largest weight is that of the lowest rank drawn: w = (rank / lowest
        // rank)^(alpha beta).
        for (size_t i = 0; i < weight.size(); ++i)
            weight[i] = static_cast<float>(std::pow((target_[i] + 1) / (largest + 1.0), alpha_ * beta_));
        return true;
    }
    void probabilities(std::span<double> probability) override {
        const double total = cumulative(size_);
        u32 rank = 0;
        keys_.each([&](u64 key) { probability[static_cast<u32>(key)] = std::pow(++rank, -alpha_) / total; });
    }
    void set_importance_exponent(double beta) override { beta_ = beta; }
    size_t nbytes() const override {
        return sizeof *this + keys_.nbytes() + size_ * sizeof(float) +
               (cumulative_.capacity() + target_.capacity()) * sizeof(double);
    }
    void save(Writer& out, bool whole) const override {
        out.value(random_), out.value(beta_), out.value(max_priority_);
        priority_.save(out, size_, whole);
    }
    void mark_saved() override { priority_.clear_written(); }
    void load(Reader& in) override {
        random_ = in.value<Random>(), beta_ = in.value<double>(), max_priority_ = in.value<float>();
        size_ = static_cast<u32>(priority_.load(in));
        rebuild();
    }
    void check(u32 size) override {
        u32 count = 0;
        u64 last = 0;
        bool sound =
            size == size_ && max_priority_ >= 0.0f && max_priority_ <= FLT_MAX && beta_ >= 0.0 && beta_ <= DBL_MAX;
        for (u32 i = 0; i < size_; ++i) sound = sound && priority_[i] >= 0.0f && priority_[i] <= FLT_MAX;
        keys_.each([&](u64 entry) {
            sound = sound && (count++ == 0 || last < entry) && static_cast<u32>(entry) < size_ &&
                    key(static_cast<u32>(entry)) == entry;
            last = entry;
        });
        fail_if(!sound || count != size_, "a rank-based selector has lost the order of its picks");
    }

private:
    // Ascending keys are descending priorities (bits of floats from 0 on are ordered like the floats), then ascending
    // indices.
    u64 key(u32 index) const { return u64{~std::bit_cast<u32>(priority_[index])} << 32 | index; }
    void change(u32 index, float priority) {
        keys_.erase(key(index));
        priority_.set(index, priority);
        keys_.insert(key(index));
    }
    void rebuild() {
        std::vector<u64> keys;
        for (u32 i = 0; i < size_; ++i) keys.push_back(key(i));
        keys_.assign(std::move(keys));
    }
    // Sum of rank^-alpha over the first `count` ranks.
    double cumulative(u32 count) {
        double sum = cumulative_.empty() ? 0.0 : cumulative_.back();
        while (cumulative_.size() < count)
            cumulative_.push_back(sum += std::pow(static_cast<double>(cumulative_.size() + 1), -alpha_));
        return count ? cumulative_[count - 1] : 0.0;
    }

    Random random_;
    Tracked<float> priority_;
    SortedKeys keys_;
    std::vector<double> cumulative_, target_;
    double alpha_, beta_;
    float max_priority_ = 1.0f;
    bool stratified_;
    u32 size_ = 0;
};

// The selectors by name: a new one is added to this list.
struct SelectorKind {
    std::string name;
    Parameters defaults;
    std::unique_ptr<PickSelector> (*make)(Random random, size_t capacity, const Parameters& parameters);
};

template <class Selector>
std::unique_ptr<PickSelector> make_selector(Random random, size_t capacity, const Parameters& parameters) {
    return std::make_unique<Selector>(random, capacity, parameters);
}

inline const std::vector<SelectorKind>& selector_kinds() {
    static const std::vector<SelectorKind> kinds = {
        {"uniform", {}, make_selector<Uniform>},
        {"prioritized",
         {{"priority_exponent", 0.6}, {"importance_exponent", 0.4}, {"stratified", 0}},
         make_selector<Prioritized>},
        {"rank_based",
         {{"priority_exponent", 0.7}, {"importance_exponent", 0.5}, {"stratified", 0}},
         make_selector<RankBased>},
        {"recency", {{"half_life", 10000}, {"importance_exponent", 0}, {"stratified", 0}}, make_selector<Recency>},
    };
    return kinds;
}

inline const SelectorKind& find_selector_kind(const std::string& name) {
    std::string names;
    for (const SelectorKind& kind : selector_kinds()) {
        if (kind.name == name) return kind;
        names += (names.empty() ? "" : ", ") + kind.name;
    }
    throw std::invalid_argument("there is no pick selector '" + name + "': choose one of " + names);
}

}  // namespace ddrl::replay
