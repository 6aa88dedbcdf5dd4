// From the column table of Python to the columns of the store. For bind_replay.cpp alone.
#pragma once

#include "bind_arrays.hpp"
#include "replay/store.hpp"

namespace ddrl::replay {

using bind::ColumnEntry;

// The columns of the store that a table describes.
inline Columns columns_of(const std::vector<ColumnEntry>& table) {
    Columns columns;
    for (const auto& [name, role, offset, bytes, format, shape, stack] : table) {
        if (role > static_cast<unsigned>(Role::REWARD)) throw bind::nb::value_error("a column has no such role");
        columns.push_back({static_cast<u32>(bytes), static_cast<Role>(role), stack});
    }
    return columns;
}

}  // namespace ddrl::replay
