// Which episode goes when the replay is full. A strategy is notified of episodes added, ended, drawn (a batch of draws
// at a time) and removed, and names the victim. All calls come under the replay's lock. To add one: derive from
// Eviction in a header of its own (docs/replay.md).
#pragma once

#include <span>

#include "store.hpp"

namespace ddrl::replay {

class Eviction {
public:
    virtual ~Eviction() = default;
    // An episode got its first records; one without records is never a victim.
    virtual void added(u32 episode, const Store& store) = 0;
    virtual void ended(u32 episode) = 0;
    // Before the episode leaves the store; it may never have been added.
    virtual void removed(u32 episode, const Store& store) = 0;
    // Episodes whose picks were drawn, one entry a pick; not called when wants_draws() is false.
    virtual void drawn(std::span<const u32> episodes) = 0;
    virtual bool wants_draws() const = 0;
    // The episode to evict, one that was added; there is at least one.
    virtual u32 victim(const Store& store) = 0;
    virtual std::size_t nbytes() const = 0;
    // All of the state, or what changed since mark_saved; load reads either over what is there.
    virtual void save(Writer& out, bool whole) const = 0;
    virtual void load(Reader& in) = 0;
    virtual void mark_saved() {}
    // What is wrong with the state, or nothing; a snapshot's is checked before it is used.
    virtual std::string check(const Store&) const { return ""; }
};

}  // namespace ddrl::replay
