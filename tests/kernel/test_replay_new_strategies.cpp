// A selector and an eviction added from outside: one class each against the interface, nothing of the kernel touched
// (docs/replay.md).
#include "replay_fixture.hpp"

using namespace fixture;

namespace {

// Draws the picks in turn, newest table entry first.
class RoundRobin final : public PickSelector {
public:
    void picks_added(u32 first, u32 count) override { size_ = first + count; }
    void picks_moved(std::span<const Move>) override {}
    void picks_dropped(u32 size) override { size_ = size; }
    void set_priority(std::span<const u32>, std::span<const float>) override {}
    bool draw(std::span<u32> index, std::span<float> weight) override {
        if (!size_) return false;
        for (u32& drawn : index) {
            next_ = next_ == 0 || next_ > size_ ? size_ : next_;
            drawn = --next_;
        }
        std::fill(weight.begin(), weight.end(), 1.0f);
        return true;
    }
    void probabilities(std::span<double> probability) override {
        std::fill(probability.begin(), probability.end(), 1.0 / size_);
    }
    std::size_t nbytes() const override { return sizeof *this; }
    void save(Writer& out, bool) const override { out.value(size_), out.value(next_); }
    void load(Reader& in) override { size_ = in.value<u32>(), next_ = in.value<u32>(); }

private:
    u32 size_ = 0, next_ = 0;
};

// Evicts the longest episode.
class LongestFirst final : public Eviction {
public:
    void added(u32, const Store&) override {}
    void ended(u32) override {}
    void removed(u32, const Store&) override {}
    void drawn(std::span<const u32>) override {}
    bool wants_draws() const override { return false; }
    u32 victim(const Store& store) override {
        u32 longest = store.oldest();
        for (u32 i = longest; i != NONE; i = store.episode(i).newer)
            if (store.episode(i).records > store.episode(longest).records) longest = i;
        return longest;
    }
    std::size_t nbytes() const override { return sizeof *this; }
    void save(Writer&, bool) const override {}
    void load(Reader&) override {}
};

void a_selector_and_an_eviction_from_outside_work_like_those_inside() {
    Replay replay(options(30), std::make_unique<LongestFirst>());
    const u32 selector = replay.add_selector(std::make_unique<RoundRobin>());
    add_episode(replay, 1, 5), add_episode(replay, 2, 20), add_episode(replay, 3, 5);
    Batch batch;
    EXPECT(batch.draw(replay, selector, 30));
    std::vector<int> seen(30);
    for (std::size_t i = 0; i < 30; ++i)
        ++seen[batch.handle[i] * 5 + (batch.handle[i] == 2 ? 15 : 0) + batch.position[i]];
    for (const int count : seen) EXPECT(count == 1);  // each pick once
    add_episode(replay, 4, 3);  // the longest, with handle 1, goes
    EXPECT(replay.store().find(1) == NONE && replay.records() == 13);
    EXPECT(batch.draw(replay, selector, 13));
    expect_sound(replay);
}

}  // namespace

int main() { RUN(a_selector_and_an_eviction_from_outside_work_like_those_inside); }
