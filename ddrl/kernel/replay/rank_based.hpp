// Rank-based prioritized draws (Schaul et al. 2016): P(pick) = rank^-alpha / sum of rank^-alpha, rank 1 the highest
// priority; among equal priorities the lower index of the pick table ranks higher. The ranks are exact at every draw.
//
// Keys (priority, index) stand sorted in blocks of at most 256: a change moves at most one block, O(log N + block); a
// draw finds its rank in the cumulative law and its block by halving, O(log N). Blocks are counted anew when a draw
// follows changes, O(N / block). Priority 0 is the lowest rank, and is drawn. A new pick gets the maximal priority
// seen.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>

#include "prioritized.hpp"
#include "random.hpp"
#include "selector.hpp"

namespace ddrl::replay {

// Sorted u64 keys, all different.
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
        const std::size_t at = static_cast<std::size_t>(&block - blocks_.data());
        std::vector<u64> upper(block.begin() + MAX_BLOCK / 2, block.end());
        upper.reserve(MAX_BLOCK);
        block.resize(MAX_BLOCK / 2);
        blocks_.insert(blocks_.begin() + static_cast<std::ptrdiff_t>(at) + 1, std::move(upper));
    }
    void erase(u64 key) {
        const std::size_t at = block_of(key);
        auto& block = blocks_[at];
        block.erase(std::lower_bound(block.begin(), block.end(), key));
        stale_ = true;
        if (block.empty()) blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(at));
    }
    // The key with `rank` smaller ones.
    u64 at(u32 rank) {
        if (stale_) {
            starts_.clear();
            u32 start = 0;
            for (const auto& block : blocks_) starts_.push_back(start), start += static_cast<u32>(block.size());
            stale_ = false;
        }
        const auto after = std::upper_bound(starts_.begin(), starts_.end(), rank);
        const std::size_t block = static_cast<std::size_t>(after - starts_.begin()) - 1;
        return blocks_[block][rank - starts_[block]];
    }
    void assign(std::vector<u64> keys) {
        std::sort(keys.begin(), keys.end());
        blocks_.clear();
        for (std::size_t at = 0; at < keys.size(); at += MAX_BLOCK / 2) {
            auto& block = blocks_.emplace_back();
            block.reserve(MAX_BLOCK);
            block.assign(keys.begin() + static_cast<std::ptrdiff_t>(at),
                         keys.begin() + static_cast<std::ptrdiff_t>(std::min(keys.size(), at + MAX_BLOCK / 2)));
        }
        stale_ = true;
    }
    template <class Visit>
    void each(Visit visit) const {
        for (const auto& block : blocks_)
            for (const u64 key : block) visit(key);
    }
    std::size_t nbytes() const {
        std::size_t bytes = blocks_.capacity() * sizeof(std::vector<u64>) + starts_.capacity() * sizeof(u32);
        for (const auto& block : blocks_) bytes += block.capacity() * sizeof(u64);
        return bytes;
    }

private:
    static constexpr std::size_t MAX_BLOCK = 256;
    // The last block whose first key is not above `key`, or the first block.
    std::size_t block_of(u64 key) const {
        const auto after = std::upper_bound(blocks_.begin(), blocks_.end(), key,
                                            [](u64 k, const auto& block) { return k < block.front(); });
        return after == blocks_.begin() ? 0 : static_cast<std::size_t>(after - blocks_.begin()) - 1;
    }
    std::vector<std::vector<u64>> blocks_;  // none is empty
    std::vector<u32> starts_;
    bool stale_ = true;
};

class RankBased final : public PickSelector {
public:
    RankBased(Random random, std::size_t capacity, double priority_exponent, double importance_exponent,
              bool stratified)
        : random_(random),
          priority_(capacity + 1),
          alpha_(priority_exponent),
          beta_(importance_exponent),
          stratified_(stratified) {}

    void picks_added(u32 first, u32 count) override {
        if (size_ == 0 && count > 1024) {  // a selector made late
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
        for (const Move& move : moves) {
            keys_.erase(key(move.to));
            priority_.set(move.to, priority_[move.from]);
            keys_.insert(key(move.to));
        }
    }
    void picks_dropped(u32 size) override {
        for (; size_ > size; --size_) keys_.erase(key(size_ - 1));
    }
    void set_priority(std::span<const u32> index, std::span<const float> priority) override {
        for (std::size_t i = 0; i < index.size(); ++i) {
            max_priority_ = std::max(max_priority_, priority[i]);
            if (index[i] == NONE) continue;
            keys_.erase(key(index[i]));
            priority_.set(index[i], priority[i]);
            keys_.insert(key(index[i]));
        }
    }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        if (!size_) return false;
        const double total = cumulative(size_);
        target_.resize(index.size());
        draw_targets(random_, total, stratified_, target_);
        u32 largest = 0;
        for (std::size_t i = 0; i < index.size(); ++i) {
            const auto end = cumulative_.begin() + size_;
            const auto at = std::upper_bound(cumulative_.begin(), end, target_[i]);
            const u32 rank = at == end ? size_ - 1 : static_cast<u32>(at - cumulative_.begin());
            index[i] = static_cast<u32>(keys_.at(rank));
            target_[i] = rank, largest = std::max(largest, rank);
        }
        // P falls with the rank, so the largest weight is that of the lowest rank drawn: w = (rank / lowest
        // rank)^(alpha beta).
        for (std::size_t i = 0; i < weight.size(); ++i)
            weight[i] = static_cast<float>(std::pow((target_[i] + 1) / (largest + 1.0), alpha_ * beta_));
        return true;
    }
    void law(std::span<double> probability) override {
        const double total = cumulative(size_);
        u32 rank = 0;
        keys_.each([&](u64 key) { probability[static_cast<u32>(key)] = std::pow(++rank, -alpha_) / total; });
    }
    void set_importance_exponent(double beta) override { beta_ = beta; }
    std::size_t nbytes() const override {
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
    std::string check(u32 size) override {
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
        return sound && count == size_ ? "" : "a rank-based selector has lost the order of its picks";
    }

private:
    // Ascending keys are descending priorities (their bits are in order, as none is negative), then ascending indices.
    u64 key(u32 index) const { return u64{~std::bit_cast<u32>(priority_[index])} << 32 | index; }
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

}  // namespace ddrl::replay
