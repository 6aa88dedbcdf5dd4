// Second chance: an episode's flag is set when a pick of it is drawn. A pointer goes round the episodes in order of
// handles, takes the flag from those it passes, and evicts the first without one; with all flagged that is the one it
// began at, after one full turn.
#pragma once

#include "eviction.hpp"

namespace ddrl::replay {

class SecondChance final : public Eviction {
public:
    void added(u32 episode, const Store&) override {
        if (flag_.size() <= episode) flag_.resize(episode + std::size_t{1});
        flag_.set(episode, 0);
        if (pointer_ == NONE) pointer_ = episode;
    }
    void ended(u32) override {}
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

}  // namespace ddrl::replay
