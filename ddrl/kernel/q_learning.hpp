// Temporal differences of Q-learning and the slopes of their loss, row by row: what `ddrl.learner.targets` says in
// twenty operations of torch, in one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace ddrl {

struct QBatch {
    std::size_t rows, actions;
    const float* q_tm1;  // [rows, actions], as q_t and selector
    const int64_t* action;
    const float* r_t;
    const float* discount_t;
    const float* q_t;
    const float* selector;  // whose largest value names the action of s_t; q_t itself without double
    const float* weight;
};

// The first place of the largest number; of NaN where there is one.
inline std::size_t place_of_largest(const float* values, std::size_t count) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < count && !std::isnan(values[best]); ++i)
        if (values[i] > values[best] || std::isnan(values[i])) best = i;
    return best;
}

// Writes td_error [rows] = r_t + discount_t q_t(best) - q_tm1(action), its size [rows], q_taken [rows] and slope [rows,
// actions], the derivative by q_tm1 of mean_b weight_b l(td_error_b): l is Huber's with delta 1, or half the square.
// False, with the outputs undefined, where an action is out of range.
inline bool q_slopes(const QBatch& batch, bool huber, float* td_error, float* size, float* q_taken, float* slope) {
    const std::size_t count = batch.actions;
    const float share = static_cast<float>(-1.0 / static_cast<double>(batch.rows));
    std::fill_n(slope, batch.rows * count, 0.0f);
    for (std::size_t row = 0; row < batch.rows; ++row) {
        const int64_t action = batch.action[row];
        if (action < 0 || static_cast<std::size_t>(action) >= count) return false;
        const std::size_t taken = row * count + static_cast<std::size_t>(action);
        const std::size_t best = row * count + place_of_largest(batch.selector + row * count, count);
        const float target = batch.r_t[row] + batch.discount_t[row] * batch.q_t[best];
        const float error = target - batch.q_tm1[taken];
        const float inside = huber ? std::clamp(error, -1.0f, 1.0f) : error;  // NaN stays
        td_error[row] = error, size[row] = std::fabs(error), q_taken[row] = batch.q_tm1[taken];
        slope[taken] = inside * batch.weight[row] * share;
    }
    return true;
}

}  // namespace ddrl
