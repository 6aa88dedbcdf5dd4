// The loss of quantile regression on action values and its slopes, row by row: what `ddrl.learner.quantiles` says in
// thirty operations of torch, each of them over [rows, count, count_t] numbers, in one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "q_learning.hpp"

namespace ddrl {

struct QuantileBatch {
    std::size_t rows, actions;
    std::size_t count, count_t, count_selector;  // quantiles of an action
    const float* value_tm1;  // [rows, actions, count]
    const float* fraction;  // [count]
    const int64_t* action;
    const float* r_t;
    const float* discount_t;
    const float* value_t;  // [rows, actions, count_t]
    const float* selector;  // [rows, actions, count_selector], whose largest mean names the action of s_t
    const float* weight;
};

inline float mean_of(const float* values, std::size_t count) {
    float sum = 0;
    for (std::size_t i = 0; i < count; ++i) sum += values[i];
    return sum / static_cast<float>(count);
}

// Adds to `loss` and `slope` [count] what one target gives: |tau_i - 1{d_i < 0}| L(d_i) with d_i = target - value_i,
// and its derivative by d_i. L is the Huber loss over kappa; |d| where kappa is 0.
inline void add_target(float target, const float* value, const float* fraction, std::size_t count, float kappa,
                       float* loss, float* slope) {
    for (std::size_t i = 0; i < count; ++i) {
        const float error = target - value[i];
        const float share = error < 0 ? 1.0f - fraction[i] : fraction[i];
        const float sign = error > 0 ? 1.0f : error < 0 ? -1.0f : error;  // NaN stays
        const float inside = kappa > 0 ? std::clamp(error, -kappa, kappa) / kappa : sign;
        loss[i] += share * inside * (error - 0.5f * kappa * inside);
        slope[i] += share * inside;
    }
}

// Writes the loss [rows] = sum_i mean_j of what `add_target` says of the targets r_t + discount_t value_t_j(best), the
// size [rows] of the mean target less the mean prediction, that mean [rows], and slope [rows, actions, count], the
// derivative by value_tm1 of mean_b weight_b loss_b. False, with the outputs undefined, where an action is out of
// range.
inline bool quantile_slopes(const QuantileBatch& batch, float kappa, float* loss, float* size, float* taken,
                            float* slope) {
    const std::size_t n = batch.count, m = batch.count_t, k = batch.count_selector;
    std::vector<float> means(batch.actions), losses(n);
    std::fill_n(slope, batch.rows * batch.actions * n, 0.0f);
    for (std::size_t row = 0; row < batch.rows; ++row) {
        const int64_t action = batch.action[row];
        if (action < 0 || static_cast<std::size_t>(action) >= batch.actions) return false;
        for (std::size_t a = 0; a < batch.actions; ++a)
            means[a] = mean_of(batch.selector + (row * batch.actions + a) * k, k);
        const std::size_t best = place_of_largest(means.data(), batch.actions);
        const float* following = batch.value_t + (row * batch.actions + best) * m;
        const std::size_t at = (row * batch.actions + static_cast<std::size_t>(action)) * n;
        const float* value = batch.value_tm1 + at;
        std::fill(losses.begin(), losses.end(), 0.0f);
        for (std::size_t j = 0; j < m; ++j)
            add_target(batch.r_t[row] + batch.discount_t[row] * following[j], value, batch.fraction, n, kappa,
                       losses.data(), slope + at);
        loss[row] = mean_of(losses.data(), n) * (static_cast<float>(n) / static_cast<float>(m));
        taken[row] = mean_of(value, n);
        size[row] = std::fabs(batch.r_t[row] + batch.discount_t[row] * mean_of(following, m) - taken[row]);
        const float share = -batch.weight[row] / (static_cast<float>(batch.rows) * static_cast<float>(m));
        for (std::size_t i = 0; i < n; ++i) slope[at + i] *= share;
    }
    return true;
}

}  // namespace ddrl
