// What a replay is made with, and the plain structs in which records come in and picks go out.
#pragma once

#include <string>
#include <vector>

#include "store.hpp"

namespace ddrl::replay {

struct Options {
    Columns columns;
    u64 capacity = 0;  // [records]
    u32 pick_len = 1;  // L [records]
    u32 n_step = 1;  // n; 0: a pick needs no state after its last record
    u32 burn_in = 0;  // [records] before a pick that sequences() adds
    bool short_picks = false;
    u32 shift = 6;  // log2 of the records in a chunk
    std::string file;  // the buffer's file, or empty: RAM
};

// A drawn pick: its first record, and how much of the episode the window sees.
struct Window {
    u32 slot, position;
    u32 records_, states_;  // of the episode, as in EpisodeView
    u32 records() const { return records_ & ~EpisodeView::TERMINAL; }
    u32 states() const { return states_; }
    bool terminal_end() const { return records_ & EpisodeView::TERMINAL; }
};

// Where one row of many interleaved streams (ddrl.core.rows.RowSchema) keeps what the recording reads, and each column
// of the store.
struct RowLayout {
    std::size_t row_bytes, stream, step, kind;
    std::vector<std::size_t> columns;
};

}  // namespace ddrl::replay
