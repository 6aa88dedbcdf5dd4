// Copies drawn windows out of the store, outside the lock: windows of records, n-step transitions, and sequences with
// burn-in.
//
// Every output is an array of whole windows [B, L, ..] that the caller supplies; what lies past a window's length is
// set to zero. An observation is `frame_stack` states: that of position p is the states p - k + 1 .. p, where positions
// before 0 repeat state 0. The loops (gather_loops.hpp) are compiled three times, for any processor, AVX2 and AVX-512;
// the processor at hand decides.
#pragma once

#include <algorithm>
#include <cstring>

#include "replay.hpp"
#include "wide.hpp"

namespace ddrl::replay {

struct WindowOutputs {
    byte *const *state, *const *next;  // one array for each state column
    byte *action, *reward;
    u32 *length, *next_length;
};
struct TransitionOutputs {
    byte *const *s_tm1, *const *s_t;
    byte* action;
    float *reward, *discount;
    byte* version;
};
struct SequenceOutputs {
    byte* const* state;
    byte* action;
    float *reward, *discount;
    u32 *ahead, *burn, *length;
    byte *version, *memory;  // memory: null without a recurrent state
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
