// Selectors and evictions written in Python, as the kernel uses them. For bind_replay.cpp alone.
//
// The kernel calls them under the replay's lock and takes the GIL for it. That cannot deadlock: a thread releases the
// GIL before it takes the lock (Unlocked), so a thread that waits for the lock does not hold the GIL. The only way left
// is a strategy that calls the replay it belongs to; Unlocked refuses that.
//
// Changes of the pick table and of episodes are noted here and delivered together before the next draw or victim, so
// that recording calls no Python. An exception of a strategy is raised by the call that drew or recorded.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "bind_arrays.hpp"
#include "replay/evictions.hpp"
#include "replay/selectors.hpp"

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

// A numpy array that owns its memory.
template <class T>
using OwnedArray = nb::ndarray<nb::numpy, T, nb::ndim<1>>;

template <class T>
OwnedArray<T> array_of(std::vector<T> items) {
    auto* held = new std::vector<T>(std::move(items));
    nb::capsule owner(held, [](void* vector) noexcept { delete static_cast<std::vector<T>*>(vector); });
    return OwnedArray<T>(held->data(), {held->size()}, owner);
}

template <class T>
void copy_from(nb::handle object, std::span<T> to, const char* what) {
    Memory<const T, 1> given;
    if (!nb::try_cast(object, given) || given.shape(0) != to.size())
        throw std::invalid_argument(std::string("the selector's ") + what + " of " + std::to_string(to.size()) +
                                    " picks must be an array of one number each");
    std::copy(given.data(), given.data() + to.size(), to.begin());
}

// A Python object with the methods state() and load_state(), used and released under the GIL.
class Strategy {
public:
    Strategy(nb::object object, Strategies& strategies) : object_(std::move(object)), strategies_(strategies) {}
    ~Strategy() {
        nb::gil_scoped_acquire acquire;
        object_.reset();
    }
    Inside enter() const { return Inside(strategies_); }
    // The caller has entered.
    template <class... Arguments>
    nb::object call(const char* method, Arguments&&... arguments) const {
        return object_.attr(method)(std::forward<Arguments>(arguments)...);
    }
    nb::object get(const char* name) const { return object_.attr(name); }
    void save(Writer& out) const {
        const nb::bytes state = nb::cast<nb::bytes>(call("state"));
        out.array(state.c_str(), state.size());
    }
    void load(Reader& in) const {
        const size_t bytes = in.count(1);
        call("load_state", nb::bytes(in.take(bytes), bytes));
    }

private:
    nb::object object_;
    Strategies& strategies_;
};

// A ddrl.replay.selectors.Selector.
class ForeignSelector final : public PickSelector {
public:
    ForeignSelector(nb::object selector, Strategies& strategies) : strategy_(std::move(selector), strategies) {}
    void picks_added(u32 first, u32 count) override {
        if (!events_.empty() && events_.back().kind == Event::ADDED && events_.back().a + events_.back().b == first)
            events_.back().b += count;
        else
            events_.push_back({Event::ADDED, first, count, {}, {}});
        size_ = first + count;
    }
    void picks_moved(std::span<const Move> moves) override {
        Event event{Event::MOVED, 0, 0, {}, {}};
        for (const Move& move : moves) event.from.push_back(move.from), event.to.push_back(move.to);
        events_.push_back(std::move(event));
    }
    void picks_dropped(u32 size) override {
        events_.push_back({Event::DROPPED, size, 0, {}, {}});
        size_ = size;
    }
    void set_priority(std::span<const u32> index, std::span<const float> priority) override {
        std::vector<u32> indices;
        std::vector<float> values;
        for (size_t i = 0; i < index.size(); ++i)
            if (index[i] != NONE) indices.push_back(index[i]), values.push_back(priority[i]);
        const Inside inside = strategy_.enter();
        deliver();
        strategy_.call("set_priority", array_of(std::move(indices)), array_of(std::move(values)));
    }
    bool draw(std::span<u32> index, std::span<float> weight) override {
        const Inside inside = strategy_.enter();
        deliver();
        const nb::object drawn = strategy_.call("draw", index.size());
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
    void probabilities(std::span<double> probability) override {
        const Inside inside = strategy_.enter();
        deliver();
        copy_from(strategy_.call("probabilities"), probability, "probabilities (float64)");
    }
    void set_importance_exponent(double exponent) override {
        const Inside inside = strategy_.enter();
        strategy_.call("set_importance_exponent", exponent);
    }
    size_t nbytes() const override { return sizeof *this; }
    void save(Writer& out, bool) const override {
        const Inside inside = strategy_.enter();
        deliver();
        strategy_.save(out);
    }
    void load(Reader& in) override {
        const Inside inside = strategy_.enter();
        events_.clear();
        strategy_.load(in);
        size_ = NONE;
    }
    void check(u32 size) override {
        if (size_ == NONE) size_ = size;  // just loaded: it draws from the table that was loaded with it
        fail_if(size != size_, "a selector from outside has lost picks");
    }

private:
    struct Event {
        enum Kind { ADDED, MOVED, DROPPED } kind;
        u32 a, b;  // ADDED: first and count; DROPPED: size
        std::vector<u32> from, to;  // MOVED
    };
    // The caller has entered. Events leave the list first: one that raises is not delivered again.
    void deliver() const {
        for (Event& event : std::exchange(events_, {})) switch (event.kind) {
                case Event::ADDED: strategy_.call("added", event.a, event.b); break;
                case Event::DROPPED: strategy_.call("dropped", event.a); break;
                case Event::MOVED:
                    strategy_.call("moved", array_of(std::move(event.from)), array_of(std::move(event.to)));
            }
    }
    Strategy strategy_;
    mutable std::vector<Event> events_;
    u32 size_ = 0;  // NONE: unknown until `check`, which follows each load
};

// A ddrl.replay.evictions.Eviction; it names episodes by handle.
class ForeignEviction final : public Eviction {
public:
    ForeignEviction(nb::object eviction, Strategies& strategies)
        : strategy_(std::move(eviction), strategies), wants_draws_(nb::cast<bool>(strategy_.get("wants_draws"))) {}
    void added(u32 episode, const Store& store) override {
        if (handles_.size() <= episode) handles_.resize(episode + size_t{1});
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
        const Inside inside = strategy_.enter();
        deliver();
        const u64 handle = nb::cast<u64>(strategy_.call("victim"));
        const u32 episode = store.find(handle);
        if (episode == NONE || !store.episode(episode).records)
            throw std::invalid_argument("the eviction chose episode " + std::to_string(handle) +
                                        ", which holds no records");
        return episode;
    }
    size_t nbytes() const override { return sizeof *this + handles_.capacity() * sizeof(u64); }
    void save(Writer& out, bool) const override {
        const Inside inside = strategy_.enter();
        deliver();
        out.array(handles_.data(), handles_.size());
        strategy_.save(out);
    }
    void load(Reader& in) override {
        const Inside inside = strategy_.enter();
        added_.clear(), ended_.clear(), removed_.clear(), drawn_.clear();
        handles_.resize(in.count(sizeof(u64)));
        for (u64& handle : handles_) handle = in.value<u64>();
        strategy_.load(in);
    }
    void check(const Store& store) const override {
        for (u32 i = store.oldest(); i != NONE; i = store.episode(i).newer)
            fail_if(store.episode(i).records && i >= handles_.size(), "the eviction has lost an episode");
    }

private:
    // The caller has entered.
    void deliver() const {
        if (added_.empty() && ended_.empty() && removed_.empty() && drawn_.empty()) return;
        strategy_.call("changed", array_of(std::exchange(added_, {})), array_of(std::exchange(ended_, {})),
                       array_of(std::exchange(drawn_, {})), array_of(std::exchange(removed_, {})));
    }
    Strategy strategy_;
    bool wants_draws_;
    std::vector<u64> handles_;  // of the episode at each index
    mutable std::vector<u64> added_, ended_, removed_, drawn_;
};

}  // namespace ddrl::replay
