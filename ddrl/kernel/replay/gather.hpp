// Copies drawn windows out of the store, outside the lock: windows of records, n-step transitions, and sequences with
// burn-in.
//
// Every output is an array of whole windows [B, L, ..] that the caller supplies; what lies past a window's length is
// set to zero. An observation is `stack` states k of a column: that of position p is the states p - k + 1 .. p, where
// positions before 0 repeat state 0. The loops (gather_loops.hpp) are compiled three times, for any processor, AVX2 and
// AVX-512; the processor at hand decides.
#pragma once

#include <algorithm>
#include <cstring>

#include "replay.hpp"

namespace ddrl::replay {

// In all of them `column` holds an array for each column of the store, or null for one that is not wanted, and `next`
// an array for each column of role STATE. What an array holds depends on the column's role.
struct WindowOutputs {
    byte* const* column;  // STATE [B, L, stack, ..]; STEP and REWARD [B, L, ..]; MEMORY [B, ..], of the first record
    byte* const* next;  // [B, L, stack, ..]
    u32 *length, *next_length;
};
struct TransitionOutputs {
    byte* const* column;  // STATE [B, stack, ..]; STEP and MEMORY [B, ..], of the pick; REWARD [B, ..], n-step sums
    byte* const* next;  // [B, stack, ..], k steps on
    float* discount;
};
struct SequenceOutputs {
    byte* const* column;  // STATE [B, burn_in + L + n, stack, ..]; STEP [B, burn_in + L, ..]; REWARD [B, L, ..], n-step
                          // sums; MEMORY [B, ..], stored with the first state
    byte* const* at_pick;  // [B, ..], of the pick's first record; for each column, or null
    float* discount;
    u32 *ahead, *burn, *length;
};

namespace portable {
#define DDRL_REPLAY_LANE 16
#include "gather_loops.hpp"
#undef DDRL_REPLAY_LANE
}  // namespace portable

#if DDRL_REPLAY_WIDE
#pragma GCC push_options
#pragma GCC target("avx2,bmi,bmi2")
namespace avx2 {
#define DDRL_REPLAY_LANE 32
#include "gather_loops.hpp"
#undef DDRL_REPLAY_LANE
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512vl")
namespace avx512 {
#define DDRL_REPLAY_LANE 64
#include "gather_loops.hpp"
#undef DDRL_REPLAY_LANE
}  // namespace avx512
#pragma GCC pop_options
#endif

// Calls visit(gather) with the loops for this processor.
template <class Visit>
void gather(const Replay& replay, std::span<const Window> windows, Visit visit) {
#if DDRL_REPLAY_WIDE
    if (lane_bytes() == 64) return visit(avx512::Gather(replay.options(), replay.store(), windows));
    if (lane_bytes() == 32) return visit(avx2::Gather(replay.options(), replay.store(), windows));
#endif
    visit(portable::Gather(replay.options(), replay.store(), windows));
}

}  // namespace ddrl::replay
