// Selectors and evictions written in Python, as the kernel sees them. For bind_replay.cpp alone.
//
// The kernel calls them under the replay's lock and takes the GIL for it. That cannot block for ever: a thread releases
// the GIL before it takes the lock (Unlocked), so whoever waits for the lock does not hold the GIL. The one way left
// is a strategy that calls the replay it belongs to; Unlocked refuses that.
//
// What happens to the pick table or to episodes is noted here and handed over once, before the next draw or victim, so
// that recording calls no Python. An error of a strategy surfaces from the call that drew or recorded.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <cmath>
#include <thread>
#include <vector>

#include "replay/eviction.hpp"
#include "replay/selector.hpp"

namespace ddrl::replay {

namespace nb = nanobind;

// Which thread is inside a strategy of one replay, if any.
struct Strategies {
    std::atomic<std::thread::id> inside{};
};

// The GIL released for a call that takes the replay's lock.
class Unlocked {
public:
    explicit Unlocked(const Strategies& strategies) : checked_(check(strategies)) {}

private:
    static bool check(const Strategies& strategies) {
        if (strategies.inside.load(std::memory_order_relaxed) == std::this_thread::get_id())
            throw std::runtime_error("a selector or eviction may not call the replay that it belongs to");
        return true;
    }
    bool checked_;
    nb::gil_scoped_release release_;
};

// The GIL taken for a call of a strategy.
class Inside {
public:
    explicit Inside(Strategies& strategies) : strategies_(strategies) {
        strategies_.inside.store(std::this_thread::get_id(), std::memory_order_relaxed);
    }
    ~Inside() { strategies_.inside.store({}, std::memory_order_relaxed); }

private:
    nb::gil_scoped_acquire acquire_;
    Strategies& strategies_;
};

// A numpy array of its own with a copy of `items`.
template <class T>
nb::object array_of(const T* items, std::size_t count) {
    T* copy = new T[count];
    std::copy(items, items + count, copy);
    nb::capsule owner(copy, [](void* data) noexcept { delete[] static_cast<T*>(data); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(copy, {count}, owner));
}

template <class T>
void copy_from(nb::handle object, std::span<T> to, const char* what) {
    using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    Array given;
    if (!nb::try_cast<Array>(object, given) || given.shape(0) != to.size())
        throw std::invalid_argument(std::string("the selector's ") + what + " of " + std::to_string(to.size()) +
                                    " picks must be an array of one number each");
    std::copy(given.data(), given.data() + to.size(), to.begin());
}

inline std::vector<byte> state_of(const nb::object& strategy) {
    const nb::bytes state = nb::cast<nb::bytes>(strategy.attr("state")());
    const auto* begin = reinterpret_cast<const byte*>(state.c_str());
    return {begin, begin + state.size()};
}
inline void save_state(const nb::object& strategy, Writer& out) {
    const std::vector<byte> state = state_of(strategy);
    out.array(state.data(), state.size());
}
inline void load_state(const nb::object& strategy, Reader& in) {
    const std::size_t bytes = in.count(1);
    const byte* from = in.take(bytes);
    strategy.attr("load_state")(nb::bytes(from, bytes));
}

// ddrl.replay.selectors.Selector.
class ForeignSelector final : public PickSelector {
public:
    ForeignSelector(nb::object strategy, Strategies& strategies)
        : strategy_(std::move(strategy)), strategies_(strategies) {}
    ~ForeignSelector() override {
        nb::gil_scoped_acquire acquire;
        strategy_.reset();
    }
    void picks_added(u32 first, u32 count) override {
        if (!events_.empty() && events_.back().kind == Event::ADDED && events_.back().a + events_.back().b == first)
            events_.back().b += count;
        else
            events_.push_back({Event::ADDED, first, count, {}});
        size_ = first + count;
    }
    void picks_moved(std::span<const Move> moves) override {
        events_.push_back({Event::MOVED, 0, 0, {moves.begin(), moves.end()}});
    }
    void picks_dropped(u32 size) override {
        events_.push_back({Event::DROPPED, size, 0, {}});
        size_ = size;
    }
    void set_priority(std::span<const u32> index, std::span<const float> priority) override {
        std::vector<u32> indices;
        std::vector<float> values;
        for (std::size_t i = 0; i < index.size(); ++i)
            if (index[i] != NONE) indices.push_back(index[i]), values.push_back(priority[i]);
        Inside inside(strategies_);
        hand_over();
        strategy_.attr("set_priority")(array_of(indices.data(), indices.size()),
                                       array_of(values.data(), values.size()));
    }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        Inside inside(strategies_);
        hand_over();
        const nb::object drawn = strategy_.attr("draw")(index.size());
        if (drawn.is_none()) return false;
        const nb::tuple parts = nb::cast<nb::tuple>(drawn);
        copy_from(parts[0], index, "indices (uint32)");
        for (const u32 drawn_index : index)
            if (drawn_index >= size_)
                throw std::invalid_argument("the selector drew pick " + std::to_string(drawn_index) + " of " +
                                            std::to_string(size_));
        if (nb::handle(parts[1]).is_none())
            std::fill(weight.begin(), weight.end(), 1.0f);
        else if (!weight.empty())
            copy_from(parts[1], weight, "weights (float32)");
        return true;
    }
    void law(std::span<double> probability) override {
        Inside inside(strategies_);
        hand_over();
        copy_from(strategy_.attr("law")(), probability, "law (float64)");
    }
    void set_importance_exponent(double exponent) override {
        Inside inside(strategies_);
        strategy_.attr("set_importance_exponent")(exponent);
    }
    std::size_t nbytes() const override { return sizeof *this; }
    void save(Writer& out, bool) const override {
        Inside inside(strategies_);
        hand_over();
        save_state(strategy_, out);
    }
    void load(Reader& in) override {
        Inside inside(strategies_);
        events_.clear();
        load_state(strategy_, in);
        size_ = NONE;
    }
    std::string check(u32 size) override {
        if (size_ == NONE) size_ = size;  // just loaded: it draws from the table as it stands
        return size == size_ ? "" : "a selector from outside has lost picks";
    }

private:
    struct Event {
        enum Kind { ADDED, MOVED, DROPPED } kind;
        u32 a, b;
        std::vector<Move> moves;
    };
    // The caller holds the GIL. Events leave the list one by one: one that raises is not handed over twice.
    void hand_over() const {
        std::vector<Event> events = std::exchange(events_, {});
        for (const Event& event : events) {
            if (event.kind == Event::ADDED) {
                strategy_.attr("added")(event.a, event.b);
            } else if (event.kind == Event::DROPPED) {
                strategy_.attr("dropped")(event.a);
            } else {
                std::vector<u32> from, to;
                for (const Move& move : event.moves) from.push_back(move.from), to.push_back(move.to);
                strategy_.attr("moved")(array_of(from.data(), from.size()), array_of(to.data(), to.size()));
            }
        }
    }
    nb::object strategy_;
    Strategies& strategies_;
    mutable std::vector<Event> events_;
    u32 size_ = 0;  // NONE: unknown until `check`, which follows each load
};

// ddrl.replay.evictions.Eviction; it names episodes by handle.
class ForeignEviction final : public Eviction {
public:
    ForeignEviction(nb::object strategy, Strategies& strategies)
        : strategy_(std::move(strategy)),
          strategies_(strategies),
          wants_draws_(nb::cast<bool>(strategy_.attr("wants_draws"))) {}
    ~ForeignEviction() override {
        nb::gil_scoped_acquire acquire;
        strategy_.reset();
    }
    void added(u32 episode, const Store& store) override {
        if (handles_.size() <= episode) handles_.resize(episode + std::size_t{1});
        handles_[episode] = store.episode(episode).handle;
        added_.push_back(handles_[episode]);
    }
    void ended(u32 episode) override { ended_.push_back(handles_[episode]); }
    void removed(u32 episode, const Store& store) override {
        if (store.episode(episode).records) removed_.push_back(store.episode(episode).handle);
    }
    void drawn(std::span<const u32> episodes) override {
        for (const u32 episode : episodes) drawn_.push_back(handles_[episode]);
    }
    bool wants_draws() const override { return wants_draws_; }
    u32 victim(const Store& store) override {
        Inside inside(strategies_);
        hand_over();
        const u64 handle = nb::cast<u64>(strategy_.attr("victim")());
        const u32 episode = store.find(handle);
        if (episode == NONE || !store.episode(episode).records)
            throw std::invalid_argument("the eviction chose episode " + std::to_string(handle) +
                                        ", which holds no records");
        return episode;
    }
    std::size_t nbytes() const override { return sizeof *this + handles_.capacity() * sizeof(u64); }
    void save(Writer& out, bool) const override {
        Inside inside(strategies_);
        hand_over();
        out.array(handles_.data(), handles_.size());
        save_state(strategy_, out);
    }
    void load(Reader& in) override {
        Inside inside(strategies_);
        added_.clear(), ended_.clear(), removed_.clear(), drawn_.clear();
        handles_.resize(in.count(sizeof(u64)));
        const byte* from = in.take(handles_.size() * sizeof(u64));
        if (!handles_.empty()) std::memcpy(handles_.data(), from, handles_.size() * sizeof(u64));
        load_state(strategy_, in);
    }
    std::string check(const Store& store) const override {
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer)
            if (store.episode(i).records && i >= handles_.size()) return "the eviction has lost an episode";
        return "";
    }

private:
    // The caller holds the GIL.
    void hand_over() const {
        if (added_.empty() && ended_.empty() && removed_.empty() && drawn_.empty()) return;
        const auto list = [](std::vector<u64>& handles) {
            const nb::object array = array_of(handles.data(), handles.size());
            handles.clear();
            return array;
        };
        const nb::object added = list(added_), ended = list(ended_), drawn = list(drawn_), removed = list(removed_);
        strategy_.attr("changed")(added, ended, drawn, removed);
    }
    nb::object strategy_;
    Strategies& strategies_;
    bool wants_draws_;
    std::vector<u64> handles_;  // of the episode at each index
    mutable std::vector<u64> added_, ended_, removed_, drawn_;
};

}  // namespace ddrl::replay
