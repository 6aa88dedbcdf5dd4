// The learner's losses and their derivatives by the networks' outputs, row by row: what `ddrl.learner.losses` says in
// twenty to thirty operations of torch each, in one call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "adam.hpp"

namespace ddrl {

// ---- action values -------------------------------------------------------------------------------------------------

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

// Whether every action is in [0, actions): the losses below read and write at it without a further look.
inline bool actions_fit(const int64_t* action, std::size_t rows, std::size_t actions) {
    return std::all_of(action, action + rows,
                       [actions](int64_t each) { return each >= 0 && static_cast<std::size_t>(each) < actions; });
}

// Writes size [rows] = |error| with error = r_t + discount_t q_t(best) - q_tm1(action), taken [rows] = q_tm1(action),
// and slope [rows, actions], the derivative by q_tm1 of mean_b weight_b l(error_b): l is Huber's with delta 1, or half
// the square. Returns that loss.
inline double q_learning_loss(const QBatch& batch, bool huber, float* size, float* taken, float* slope) {
    const std::size_t count = batch.actions;
    const float share = static_cast<float>(-1.0 / static_cast<double>(batch.rows));
    double loss = 0;
    std::fill_n(slope, batch.rows * count, 0.0f);
    for (std::size_t row = 0; row < batch.rows; ++row) {
        const std::size_t at = row * count + static_cast<std::size_t>(batch.action[row]);
        const std::size_t best = row * count + place_of_largest(batch.selector + row * count, count);
        const float target = batch.r_t[row] + batch.discount_t[row] * batch.q_t[best];
        const float error = target - batch.q_tm1[at];
        const float inside = huber ? std::clamp(error, -1.0f, 1.0f) : error;  // NaN stays
        size[row] = std::fabs(error);
        taken[row] = batch.q_tm1[at];
        slope[at] = inside * batch.weight[row] * share;
        loss += static_cast<double>(batch.weight[row] * inside * (error - 0.5f * inside));
    }
    return loss / static_cast<double>(batch.rows);
}

// ---- quantiles -----------------------------------------------------------------------------------------------------

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
DDRL_WIDEST inline void add_target(float target, const float* __restrict value, const float* __restrict fraction,
                                   std::size_t count, float kappa, float* __restrict loss, float* __restrict slope) {
    if (kappa > 0) {
        const float inverse = 1.0f / kappa;
        for (std::size_t i = 0; i < count; ++i) {
            const float error = target - value[i];
            const float share = error < 0 ? 1.0f - fraction[i] : fraction[i];
            const float cut = error > kappa ? kappa : error < -kappa ? -kappa : error;  // NaN stays
            loss[i] += share * cut * inverse * (error - 0.5f * cut);
            slope[i] += share * cut * inverse;
        }
        return;
    }
    for (std::size_t i = 0; i < count; ++i) {
        const float error = target - value[i];
        const float share = error < 0 ? 1.0f - fraction[i] : fraction[i];
        loss[i] += share * std::fabs(error);
        slope[i] += share * (error > 0 ? 1.0f : error < 0 ? -1.0f : error);
    }
}

// Writes each [rows] = sum_i mean_j of what `add_target` says of the targets r_t + discount_t value_t_j(best), size
// [rows] of the mean target less the mean prediction, taken [rows], that mean prediction, and slope [rows, actions,
// count], the derivative by value_tm1 of mean_b weight_b each_b. Returns that loss.
inline double quantile_loss(const QuantileBatch& batch, float kappa, float* each, float* size, float* taken,
                            float* slope) {
    const std::size_t n = batch.count;
    const std::size_t m = batch.count_t;
    const std::size_t k = batch.count_selector;
    std::vector<float> means(batch.actions);
    std::vector<float> losses(n);
    double loss = 0;
    std::fill_n(slope, batch.rows * batch.actions * n, 0.0f);
    for (std::size_t row = 0; row < batch.rows; ++row) {
        for (std::size_t a = 0; a < batch.actions; ++a)
            means[a] = mean_of(batch.selector + (row * batch.actions + a) * k, k);
        const std::size_t best = place_of_largest(means.data(), batch.actions);
        const float* following = batch.value_t + (row * batch.actions + best) * m;
        const std::size_t at = (row * batch.actions + static_cast<std::size_t>(batch.action[row])) * n;
        const float* value = batch.value_tm1 + at;
        std::fill(losses.begin(), losses.end(), 0.0f);
        for (std::size_t j = 0; j < m; ++j)
            add_target(batch.r_t[row] + batch.discount_t[row] * following[j], value, batch.fraction, n, kappa,
                       losses.data(), slope + at);
        each[row] = mean_of(losses.data(), n) * (static_cast<float>(n) / static_cast<float>(m));
        taken[row] = mean_of(value, n);
        size[row] = std::fabs(batch.r_t[row] + batch.discount_t[row] * mean_of(following, m) - taken[row]);
        loss += static_cast<double>(batch.weight[row] * each[row]);
        const float share = -batch.weight[row] / (static_cast<float>(batch.rows) * static_cast<float>(m));
        for (std::size_t i = 0; i < n; ++i) slope[at + i] *= share;
    }
    return loss / static_cast<double>(batch.rows);
}

// ---- distributions on fixed values ---------------------------------------------------------------------------------

struct CategoricalBatch {
    std::size_t rows, actions, atoms;
    const float* logits_tm1;  // [rows, actions, atoms], as logits_t and selector
    const int64_t* action;
    const float* r_t;
    const float* discount_t;
    const float* logits_t;
    const float* selector;  // whose largest mean names the action of s_t
    const float* weight;
    float v_min, v_max;  // values z_i = v_min + i (v_max - v_min) / (atoms - 1)
};

// Probabilities [count] of logits, and the logarithm of what they were divided by, the largest logit included.
inline float softmax(const float* logits, std::size_t count, float* probability) {
    float largest = logits[0];
    for (std::size_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    float sum = 0;
    for (std::size_t i = 0; i < count; ++i) {
        probability[i] = std::exp(logits[i] - largest);
        sum += probability[i];
    }
    for (std::size_t i = 0; i < count; ++i) probability[i] /= sum;
    return largest + std::log(sum);
}

// Writes divergence [rows] = KL(target || p(action)), where the target is the distribution of r_t + discount_t z with z
// of p_t(best), clipped to the ends and shared out between the two nearest values (Bellemare et al. 2017, eq. 7), taken
// [rows], the mean of p(action), and slope [rows, actions, atoms], the derivative of mean_b weight_b divergence_b by
// logits_tm1. Returns that loss.
inline double categorical_loss(const CategoricalBatch& batch, float* divergence, float* taken, float* slope) {
    const std::size_t n = batch.atoms;
    const float spacing = (batch.v_max - batch.v_min) / static_cast<float>(n - 1);
    std::vector<float> z(n);
    std::vector<float> p(n);
    std::vector<float> target(n);
    std::vector<float> means(batch.actions);
    double loss = 0;
    for (std::size_t i = 0; i < n; ++i) z[i] = batch.v_min + static_cast<float>(i) * spacing;
    const auto mean = [&] {
        float sum = 0;
        for (std::size_t i = 0; i < n; ++i) sum += z[i] * p[i];
        return sum;
    };
    std::fill_n(slope, batch.rows * batch.actions * n, 0.0f);
    for (std::size_t row = 0; row < batch.rows; ++row) {
        std::size_t best = 0;
        if (batch.actions > 1) {
            for (std::size_t a = 0; a < batch.actions; ++a) {
                softmax(batch.selector + (row * batch.actions + a) * n, n, p.data());
                means[a] = mean();
            }
            best = place_of_largest(means.data(), batch.actions);
        }
        softmax(batch.logits_t + (row * batch.actions + best) * n, n, p.data());
        std::fill(target.begin(), target.end(), 0.0f);
        for (std::size_t i = 0; i < n; ++i) {
            const float moved = batch.r_t[row] + batch.discount_t[row] * z[i];
            // A moved value that is not a number has no place: the divergence says so.
            const float place = (std::clamp(moved, batch.v_min, batch.v_max) - batch.v_min) / spacing;
            const float inside = place >= 0 ? std::min(place, static_cast<float>(n - 1)) : 0.0f;
            const std::size_t below = std::min(static_cast<std::size_t>(inside), n - 2);
            const float share = std::isnan(place) ? place : inside - static_cast<float>(below);
            target[below] += p[i] * (1.0f - share);
            target[below + 1] += p[i] * share;
        }
        const std::size_t at = (row * batch.actions + static_cast<std::size_t>(batch.action[row])) * n;
        const float* logits = batch.logits_tm1 + at;
        const float norm = softmax(logits, n, p.data());
        float sum = 0;
        for (std::size_t i = 0; i < n; ++i)
            if (target[i] != 0) sum += target[i] * (std::log(target[i]) - (logits[i] - norm));
        divergence[row] = sum;
        loss += static_cast<double>(batch.weight[row] * sum);
        taken[row] = mean();
        const float share = batch.weight[row] / static_cast<float>(batch.rows);
        for (std::size_t i = 0; i < n; ++i) slope[at + i] = (p[i] - target[i]) * share;
    }
    return loss / static_cast<double>(batch.rows);
}

// ---- several critics of one action ---------------------------------------------------------------------------------

struct CriticsBatch {
    std::size_t count, count_t, rows;  // critics of s_tm1, of s_t
    const float* q_tm1;  // [count, rows]
    const float* r_t;
    const float* discount_t;
    const float* q_t;  // [count_t, rows], of which the smallest counts
    const float* weight;
};

// Writes size [rows], the mean over critics of |r_t + discount_t min_i q_t_i - q_tm1_i|, and slope [count, rows], the
// derivative by q_tm1 of sum_i mean_b weight_b l(error_ib), l as in `q_learning_loss`. Returns that loss.
inline double critics_loss(const CriticsBatch& batch, bool huber, float* size, float* slope) {
    const std::size_t rows = batch.rows;
    const float share = static_cast<float>(-1.0 / static_cast<double>(rows));
    double loss = 0;
    for (std::size_t row = 0; row < rows; ++row) {
        float least = batch.q_t[row];
        for (std::size_t i = 1; i < batch.count_t; ++i) {
            const float q = batch.q_t[i * rows + row];
            least = q < least || std::isnan(q) ? q : least;  // NaN stays
        }
        const float target = batch.r_t[row] + batch.discount_t[row] * least;
        float sizes = 0;
        for (std::size_t i = 0; i < batch.count; ++i) {
            const float error = target - batch.q_tm1[i * rows + row];
            const float inside = huber ? std::clamp(error, -1.0f, 1.0f) : error;
            sizes += std::fabs(error);
            slope[i * rows + row] = inside * batch.weight[row] * share;
            loss += static_cast<double>(batch.weight[row] * (inside * (error - 0.5f * inside)));
        }
        size[row] = sizes / static_cast<float>(batch.count);
    }
    return loss / static_cast<double>(rows);
}

}  // namespace ddrl
