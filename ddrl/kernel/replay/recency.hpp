// Recency-weighted draws: P(pick) is halved with every `half_life` picks made after it. O(log16 N) a draw.
//
// A pick's mass never changes: 2^(birth / half_life), only the origin of births moves on before a float overflows.
// Picks older than about 120 half-lives share the smallest mass.
#pragma once

#include <cfloat>
#include <cmath>

#include "prioritized.hpp"

namespace ddrl::replay {

class Recency final : public PickSelector {
public:
    Recency(Random random, std::size_t capacity, double half_life, double importance_exponent, bool stratified)
        : random_(random),
          tree_(capacity),
          half_life_(half_life),
          beta_(static_cast<float>(importance_exponent)),
          stratified_(stratified) {}

    void picks_added(u32 first, u32 count) override {
        for (u32 i = first; i < first + count; ++i) {
            if (static_cast<double>(births_ - origin_) > HIGHEST * half_life_) move_origin(i);
            const double age = static_cast<double>(births_++ - origin_) / half_life_;
            tree_.fill(i, 1, static_cast<float>(std::exp2(age)));
        }
        size_ = first + count;
    }
    void picks_moved(std::span<const Move> moves) override {
        for (const Move& move : moves) tree_.set(move.to, tree_.mass(move.from));
    }
    void picks_dropped(u32 size) override {
        tree_.fill(size, size_ - size, 0.0f);
        size_ = size;
    }
    void set_priority(std::span<const u32>, std::span<const float>) override {}
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
        out.value(random_), out.value(beta_), out.value(births_), out.value(origin_);
        tree_.save(out, size_, whole);
    }
    void mark_saved() override { tree_.mark_saved(); }
    void load(Reader& in) override {
        random_ = in.value<Random>(), beta_ = in.value<float>(), births_ = in.value<u64>(), origin_ = in.value<u64>();
        size_ = tree_.load(in);
    }
    std::string check(u32 size) override {
        if (origin_ > births_ || !(beta_ >= 0.0f && beta_ <= FLT_MAX)) return "a recency selector has lost its origin";
        return size == size_ ? tree_.check(size) : "a recency selector has lost picks";
    }

private:
    static constexpr double HIGHEST = 60.0;  // half-lives past the origin
    void move_origin(u32 size) {
        const double shift = std::floor(static_cast<double>(births_ - origin_));
        const float factor = static_cast<float>(std::exp2(-shift / half_life_));
        for (u32 i = 0; i < size; ++i) tree_.set(i, std::max(tree_.mass(i) * factor, FLT_MIN));
        origin_ = births_;
    }

    Random random_;
    SumTree tree_;
    std::vector<double> target_;
    double half_life_;
    float beta_;
    bool stratified_;
    u32 size_ = 0;
    u64 births_ = 0, origin_ = 0;
};

}  // namespace ddrl::replay
