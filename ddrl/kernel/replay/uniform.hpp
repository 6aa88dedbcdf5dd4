// Uniform draws: every pick with the same probability. O(1) a draw, no memory per pick.
#pragma once

#include <algorithm>

#include "random.hpp"
#include "selector.hpp"

namespace ddrl::replay {

class Uniform final : public PickSelector {
public:
    explicit Uniform(Random random) : random_(random) {}
    void picks_added(u32, u32 count) override { size_ += count; }
    void picks_moved(std::span<const Move>) override {}
    void picks_dropped(u32 size) override { size_ = size; }
    void set_priority(std::span<const u32>, std::span<const float>) override {}
    bool draw(std::span<u32> index, std::span<float> weight) override {
        if (!size_) return false;
        random_.below(size_, index);
        std::fill(weight.begin(), weight.end(), 1.0f);
        return true;
    }
    void law(std::span<double> probability) override { std::fill(probability.begin(), probability.end(), 1.0 / size_); }
    std::size_t nbytes() const override { return sizeof *this; }
    void save(Writer& out, bool) const override { out.value(random_), out.value(size_); }
    void load(Reader& in) override { random_ = in.value<Random>(), size_ = in.value<u32>(); }
    std::string check(u32 size) override { return size == size_ ? "" : "a uniform selector has lost picks"; }

private:
    Random random_;
    u32 size_ = 0;
};

}  // namespace ddrl::replay
