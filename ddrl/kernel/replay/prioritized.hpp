// Proportional prioritized draws (Schaul et al. 2016): mass = priority^alpha, P = mass / sum of masses, and importance
// weights w = (N P)^-beta / max w, the maximum over the batch drawn. O(log16 N) a draw, whatever the masses.
//
// A new pick gets the maximal priority so far (at first 1). Priority 0 is mass 0: such a pick is not drawn until its
// priority is raised. Stratified: the sum is cut into one equal part a draw, and each draw falls into its own part (the
// same law for a batch's average).
#pragma once

#include <cfloat>
#include <cmath>

#include "random.hpp"
#include "selector.hpp"
#include "sum_tree.hpp"

namespace ddrl::replay {

// Targets for `count` draws in [0, total), independent or one in each of `count` equal parts.
inline void draw_targets(Random& random, double total, bool stratified, std::span<double> target) {
    const double part = total / static_cast<double>(target.size());
    for (std::size_t i = 0; i < target.size(); ++i)
        target[i] = stratified ? (static_cast<double>(i) + random.unit()) * part : random.unit() * total;
}

// `index.size()` draws in proportion to the tree's masses, and the weights (N P)^-beta / max; false where there is no
// mass.
inline bool draw_by_mass(Random& random, SumTree& tree, bool stratified, float beta, std::vector<double>& target,
                         std::span<u32> index, std::span<float> weight) {
    const double total = tree.total();
    if (!(total > 0.0)) return false;
    target.resize(index.size());
    draw_targets(random, total, stratified, target);
    tree.find(target, index);
    if (beta == 0.0f) std::fill(weight.begin(), weight.end(), 1.0f);
    if (weight.empty() || beta == 0.0f) return true;
    float least = FLT_MAX;
    for (std::size_t i = 0; i < index.size(); ++i) least = std::min(least, weight[i] = tree.mass(index[i]));
    for (float& w : weight) w = std::pow(least / w, beta);
    return true;
}

class Prioritized final : public PickSelector {
public:
    Prioritized(Random random, std::size_t capacity, double priority_exponent, double importance_exponent,
                bool stratified)
        : random_(random),
          tree_(capacity),
          alpha_(static_cast<float>(priority_exponent)),
          beta_(static_cast<float>(importance_exponent)),
          stratified_(stratified) {}

    void picks_added(u32 first, u32 count) override {
        tree_.fill(first, count, mass_of(max_priority_));
        size_ = first + count;
    }
    void picks_moved(std::span<const Move> moves) override {
        for (const Move& move : moves) tree_.set(move.to, tree_.mass(move.from));
    }
    void picks_dropped(u32 size) override {
        tree_.fill(size, size_ - size, 0.0f);
        size_ = size;
    }
    void set_priority(std::span<const u32> index, std::span<const float> priority) override {
        for (std::size_t i = 0; i < index.size(); ++i) {
            max_priority_ = std::max(max_priority_, priority[i]);
            if (index[i] != NONE) tree_.set(index[i], mass_of(priority[i]));
        }
    }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        return draw_by_mass(random_, tree_, stratified_, beta_, target_, index, weight);
    }
    void law(std::span<double> probability) override {
        const double total = tree_.total();
        for (u32 i = 0; i < probability.size(); ++i) probability[i] = static_cast<double>(tree_.mass(i)) / total;
    }
    void set_importance_exponent(double beta) override { beta_ = static_cast<float>(beta); }
    std::size_t nbytes() const override { return sizeof *this + tree_.nbytes() + target_.capacity() * sizeof(double); }
    void save(Writer& out, bool whole) const override {
        out.value(random_), out.value(beta_), out.value(max_priority_);
        tree_.save(out, size_, whole);
    }
    void mark_saved() override { tree_.mark_saved(); }
    void load(Reader& in) override {
        random_ = in.value<Random>(), beta_ = in.value<float>(), max_priority_ = in.value<float>();
        size_ = tree_.load(in);
    }
    std::string check(u32 size) override {
        if (!(max_priority_ >= 0.0f && max_priority_ <= FLT_MAX && beta_ >= 0.0f && beta_ <= FLT_MAX))
            return "a prioritized selector has an exponent or a priority that cannot be";
        return size == size_ ? tree_.check(size) : "a prioritized selector has lost picks";
    }

private:
    float mass_of(float priority) const {
        return priority > 0.0f ? std::clamp(std::pow(priority, alpha_), FLT_MIN, FLT_MAX) : 0.0f;
    }

    Random random_;
    SumTree tree_;
    std::vector<double> target_;
    float alpha_, beta_, max_priority_ = 1.0f;
    bool stratified_;
    u32 size_ = 0;
};

}  // namespace ddrl::replay
