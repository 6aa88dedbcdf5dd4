// The evictions that a replay has by name: a new one is added to this list.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "fifo.hpp"
#include "ranked_eviction.hpp"
#include "second_chance.hpp"

namespace ddrl::replay {

inline std::unique_ptr<Eviction> make_eviction(const std::string& kind) {
    if (kind == "fifo") return std::make_unique<Fifo>();
    if (kind == "second_chance") return std::make_unique<SecondChance>();
    if (kind == "lru") return std::make_unique<Lru>();
    if (kind == "lfu") return std::make_unique<Lfu>();
    throw std::invalid_argument("there is no eviction '" + kind + "': choose fifo, second_chance, lru or lfu");
}

}  // namespace ddrl::replay
