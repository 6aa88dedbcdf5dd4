// Which vectors the processor at hand has, and whether the compiler can make code for each of them in one file.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DDRL_REPLAY_WIDE 1
#else
#define DDRL_REPLAY_WIDE 0
#endif

namespace ddrl::replay {

// Bytes of the widest vectors: 64 (AVX-512), 32 (AVX2) or 16.
inline int lane_bytes() {
#if DDRL_REPLAY_WIDE
    static const int lane =
        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")
            ? 64
        : __builtin_cpu_supports("avx2") ? 32
                                         : 16;
    return lane;
#else
    return 16;
#endif
}

}  // namespace ddrl::replay
