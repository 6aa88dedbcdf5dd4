// First in, first out: the lowest live handle goes.
#pragma once

#include "eviction.hpp"

namespace ddrl::replay {

class Fifo final : public Eviction {
public:
    void added(u32, const Store&) override {}
    void ended(u32) override {}
    void removed(u32, const Store&) override {}
    void drawn(std::span<const u32>) override {}
    bool wants_draws() const override { return false; }
    u32 victim(const Store& store) override {
        u32 episode = store.oldest();
        while (!store.episode(episode).records) episode = store.episode(episode).newer;
        return episode;
    }
    std::size_t nbytes() const override { return sizeof *this; }
    void save(Writer&, bool) const override {}
    void load(Reader&) override {}
};

}  // namespace ddrl::replay
