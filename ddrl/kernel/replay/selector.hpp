// What a way of drawing picks must do: follow every change of the pick table, and draw indices of it.
//
// A call covers a batch (never one pick), so being virtual costs nothing. All calls come under the replay's lock. To
// add a selector: derive from PickSelector in a header of its own and hand an object to Replay::add_selector
// (docs/replay.md).
#pragma once

#include <memory>
#include <span>

#include "archive.hpp"
#include "picks.hpp"

namespace ddrl::replay {

class PickSelector {
public:
    virtual ~PickSelector() = default;
    // The table grew by picks first .. first + count - 1, in order of their making.
    virtual void picks_added(u32 first, u32 count) = 0;
    // Picks moved, in this order, each from an index at the table's end into a hole.
    virtual void picks_moved(std::span<const Move> moves) = 0;
    // The table now holds `size` picks; what stood behind was dropped.
    virtual void picks_dropped(u32 size) = 0;
    // New priorities, checked to be finite and at least 0. A selector without priorities ignores them.
    virtual void set_priority(std::span<const u32> index, std::span<const float> priority) = 0;
    // Draws index.size() picks, with replacement; weight (of the same size, or empty) gets the importance weights,
    // largest 1. False when nothing can be drawn.
    virtual bool draw(std::span<u32> index, std::span<float> weight) = 0;
    // The exact probability with which the next draw takes each pick [table size]; for tests and plots. O(size log
    // size) at most.
    virtual void law(std::span<double> probability) = 0;
    virtual void set_importance_exponent(double) {}
    virtual std::size_t nbytes() const = 0;
    // The selector's state, for a snapshot and back. Not `whole`: what changed since mark_saved may do, where load
    // patches it in; to write everything each time is right too.
    virtual void save(Writer& out, bool whole) const = 0;
    virtual void load(Reader& in) = 0;
    virtual void mark_saved() {}
    virtual std::string check(u32 size) { return size == ~u32{0} ? "impossible" : ""; }
};

}  // namespace ddrl::replay
