// The selectors of new_pick_selector by name: a new one is added to this list.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "prioritized.hpp"
#include "rank_based.hpp"
#include "recency.hpp"
#include "uniform.hpp"

namespace ddrl::replay {

// Parameters by name, in the order of the kind's defaults; a yes-or-no is 1 or 0.
using Parameters = std::vector<std::pair<std::string, double>>;

struct SelectorKind {
    std::string name;
    Parameters defaults;
    std::unique_ptr<PickSelector> (*make)(Random random, std::size_t capacity, const Parameters& chosen);
};

inline const std::vector<SelectorKind>& selector_kinds() {
    using Made = std::unique_ptr<PickSelector>;
    static const std::vector<SelectorKind> kinds = {
        {"uniform",
         {},
         [](Random random, std::size_t, const Parameters&) -> Made { return std::make_unique<Uniform>(random); }},
        {"prioritized",
         {{"priority_exponent", 0.6}, {"importance_exponent", 0.4}, {"stratified", 0}},
         [](Random random, std::size_t capacity, const Parameters& p) -> Made {
             return std::make_unique<Prioritized>(random, capacity, p[0].second, p[1].second, p[2].second != 0);
         }},
        {"rank_based",
         {{"priority_exponent", 0.7}, {"importance_exponent", 0.5}, {"stratified", 0}},
         [](Random random, std::size_t capacity, const Parameters& p) -> Made {
             return std::make_unique<RankBased>(random, capacity, p[0].second, p[1].second, p[2].second != 0);
         }},
        {"recency",
         {{"half_life", 10000}, {"importance_exponent", 0}, {"stratified", 0}},
         [](Random random, std::size_t capacity, const Parameters& p) -> Made {
             return std::make_unique<Recency>(random, capacity, p[0].second, p[1].second, p[2].second != 0);
         }},
    };
    return kinds;
}

inline const SelectorKind& find_selector_kind(const std::string& name) {
    std::string names;
    for (const SelectorKind& kind : selector_kinds()) {
        if (kind.name == name) return kind;
        names += (names.empty() ? "" : ", ") + kind.name;
    }
    throw std::invalid_argument("there is no pick selector '" + name + "': choose one of " + names);
}

}  // namespace ddrl::replay
