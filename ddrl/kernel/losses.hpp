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

// Steps [rows]: the actions taken, n-step rewards, discounts of what follows, and importance weights.
struct Steps {
    size_t rows;
    const int64_t* action;
    const float* r_t;
    const float* discount_t;
    const float* weight;
};

// The first place of the largest number; of NaN where there is one.
inline size_t place_of_largest(const float* values, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count && !std::isnan(values[best]); ++i)
        if (values[i] > values[best] || std::isnan(values[i])) best = i;
    return best;
}

// Whether every action is in [0, actions): the losses below read and write at it without a further look.
inline bool actions_fit(const int64_t* action, size_t rows, size_t actions) {
    return std::all_of(action, action + rows,
                       [actions](int64_t each) { return each >= 0 && static_cast<size_t>(each) < actions; });
}

// Of action values q_tm1, q_t and selector [rows, actions], of which selector's largest names the action of s_t. Writes
// size [rows] = |error| with error = r_t + discount_t q_t(best) - q_tm1(action), taken [rows] = q_tm1(action),
// and slope [rows, actions], the derivative by q_tm1 of mean_b weight_b l(error_b): l is Huber's with delta 1, or half
// the square. Returns that loss.
inline double q_learning_loss(const Steps& batch, size_t count, const float* q_tm1, const float* q_t,
                              const float* selector, bool huber, float* size, float* taken, float* slope) {
    const float share = -1.0f / static_cast<float>(batch.rows);
    double loss = 0;
    std::fill_n(slope, batch.rows * count, 0.0f);
    for (size_t row = 0; row < batch.rows; ++row) {
        const size_t at = row * count + batch.action[row];
        const size_t best = row * count + place_of_largest(selector + row * count, count);
        const float target = batch.r_t[row] + batch.discount_t[row] * q_t[best];
        const float error = target - q_tm1[at];
        const float inside = huber ? std::clamp(error, -1.0f, 1.0f) : error;  // NaN stays
        size[row] = std::fabs(error);
        taken[row] = q_tm1[at];
        slope[at] = inside * batch.weight[row] * share;
        loss += static_cast<double>(batch.weight[row] * inside * (error - 0.5f * inside));
    }
    return loss / static_cast<double>(batch.rows);
}

// Values of actions [rows, actions, count].
struct Values {
    size_t count;
    const float* values;
    const float* at(size_t row) const { return values + row * count; }  // of row * actions + action
};

inline float mean_of(const float* values, size_t count) {
    float sum = 0;
    for (size_t i = 0; i < count; ++i) sum += values[i];
    return sum / static_cast<float>(count);
}

// Adds to `loss` and `slope` [count] what one target gives: |tau_i - 1{d_i < 0}| L(d_i) with d_i = target - value_i,
// and its derivative by d_i. L is the Huber loss over kappa; |d| where kappa is 0.
DDRL_WIDEST inline void add_target(float target, const float* __restrict value, const float* __restrict fraction,
                                   size_t count, float kappa, float* __restrict loss, float* __restrict slope) {
    if (kappa > 0) {
        const float inverse = 1.0f / kappa;
        for (size_t i = 0; i < count; ++i) {
            const float error = target - value[i];
            const float share = error < 0 ? 1.0f - fraction[i] : fraction[i];
            const float cut = error > kappa ? kappa : error < -kappa ? -kappa : error;  // NaN stays
            loss[i] += share * cut * inverse * (error - 0.5f * cut);
            slope[i] += share * cut * inverse;
        }
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        const float error = target - value[i];
        const float share = error < 0 ? 1.0f - fraction[i] : fraction[i];
        loss[i] += share * std::fabs(error);
        slope[i] += share * (error > 0 ? 1.0f : error < 0 ? -1.0f : error);
    }
}

// Of quantiles at the fractions [tm1.count], of which selector's largest mean names the action of s_t. Writes each
// [rows] = sum_i mean_j of what `add_target` says of the targets r_t + discount_t value_t_j(best), size
// [rows] of the mean target less the mean prediction, taken [rows], that mean prediction, and slope [rows, actions,
// count], the derivative by value_tm1 of mean_b weight_b each_b. Returns that loss.
inline double quantile_loss(const Steps& batch, size_t actions, const Values& tm1, const Values& t,
                            const Values& selector, const float* fraction, float kappa, float* each, float* size,
                            float* taken, float* slope) {
    const size_t n = tm1.count;
    const size_t m = t.count;
    std::vector<float> means(actions);
    std::vector<float> losses(n);
    double loss = 0;
    std::fill_n(slope, batch.rows * actions * n, 0.0f);
    for (size_t row = 0; row < batch.rows; ++row) {
        for (size_t a = 0; a < actions; ++a) means[a] = mean_of(selector.at(row * actions + a), selector.count);
        const size_t best = place_of_largest(means.data(), actions);
        const float* following = t.at(row * actions + best);
        const size_t at = (row * actions + batch.action[row]) * n;
        const float* value = tm1.values + at;
        std::fill(losses.begin(), losses.end(), 0.0f);
        for (size_t j = 0; j < m; ++j)
            add_target(batch.r_t[row] + batch.discount_t[row] * following[j], value, fraction, n, kappa, losses.data(),
                       slope + at);
        each[row] = mean_of(losses.data(), n) * (static_cast<float>(n) / static_cast<float>(m));
        taken[row] = mean_of(value, n);
        size[row] = std::fabs(batch.r_t[row] + batch.discount_t[row] * mean_of(following, m) - taken[row]);
        loss += static_cast<double>(batch.weight[row] * each[row]);
        const float share = -batch.weight[row] / (static_cast<float>(batch.rows) * static_cast<float>(m));
        for (size_t i = 0; i < n; ++i) slope[at + i] *= share;
    }
    return loss / static_cast<double>(batch.rows);
}

// Probabilities [count] of logits, and the logarithm of what they were divided by, the largest logit included.
inline float softmax(const float* logits, size_t count, float* probability) {
    float largest = logits[0];
    for (size_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    float sum = 0;
    for (size_t i = 0; i < count; ++i) {
        probability[i] = std::exp(logits[i] - largest);
        sum += probability[i];
    }
    for (size_t i = 0; i < count; ++i) probability[i] /= sum;
    return largest + std::log(sum);
}

// Of logits [rows, actions, n] of the values z_i = v_min + i (v_max - v_min) / (n - 1), of which selector's largest
// mean names the action of s_t. Writes divergence [rows] = KL(target || p(action)), where the target is the
// distribution of r_t + discount_t z with z of p_t(best), clipped to the ends and shared out between the two nearest
// values (Bellemare et al. 2017, eq. 7), taken [rows], the mean of p(action), and slope [rows, actions, atoms], the
// derivative of mean_b weight_b divergence_b by logits_tm1. Returns that loss.
inline double categorical_loss(const Steps& batch, size_t actions, const Values& tm1, const Values& t,
                               const Values& selector, float v_min, float v_max, float* divergence, float* taken,
                               float* slope) {
    const size_t n = tm1.count;
    const float spacing = (v_max - v_min) / static_cast<float>(n - 1);
    std::vector<float> z(n);
    std::vector<float> p(n);
    std::vector<float> target(n);
    std::vector<float> means(actions);
    double loss = 0;
    for (size_t i = 0; i < n; ++i) z[i] = v_min + static_cast<float>(i) * spacing;
    const auto mean = [&] {
        float sum = 0;
        for (size_t i = 0; i < n; ++i) sum += z[i] * p[i];
        return sum;
    };
    std::fill_n(slope, batch.rows * actions * n, 0.0f);
    for (size_t row = 0; row < batch.rows; ++row) {
        size_t best = 0;
        if (actions > 1) {
            for (size_t a = 0; a < actions; ++a) {
                softmax(selector.at(row * actions + a), n, p.data());
                means[a] = mean();
            }
            best = place_of_largest(means.data(), actions);
        }
        softmax(t.at(row * actions + best), n, p.data());
        std::fill(target.begin(), target.end(), 0.0f);
        for (size_t i = 0; i < n; ++i) {
            const float moved = batch.r_t[row] + batch.discount_t[row] * z[i];
            // A moved value that is not a number has no place: the divergence says so.
            const float place = (std::clamp(moved, v_min, v_max) - v_min) / spacing;
            const float inside = place >= 0 ? std::min(place, static_cast<float>(n - 1)) : 0.0f;
            const size_t below = std::min(static_cast<size_t>(inside), n - 2);
            const float share = std::isnan(place) ? place : inside - static_cast<float>(below);
            target[below] += p[i] * (1.0f - share);
            target[below + 1] += p[i] * share;
        }
        const size_t at = (row * actions + batch.action[row]) * n;
        const float* logits = tm1.values + at;
        const float norm = softmax(logits, n, p.data());
        float sum = 0;
        for (size_t i = 0; i < n; ++i)
            if (target[i] != 0) sum += target[i] * (std::log(target[i]) - (logits[i] - norm));
        divergence[row] = sum;
        loss += static_cast<double>(batch.weight[row] * sum);
        taken[row] = mean();
        const float share = batch.weight[row] / static_cast<float>(batch.rows);
        for (size_t i = 0; i < n; ++i) slope[at + i] = (p[i] - target[i]) * share;
    }
    return loss / static_cast<double>(batch.rows);
}

// Writes size [rows], the mean over critics of |r_t + discount_t min_i q_t_i - q_tm1_i|, and slope [count, rows], the
// derivative by q_tm1 of sum_i mean_b weight_b l(error_ib), l as in `q_learning_loss`. q_tm1 [critics, rows], q_t
// [critics_t, rows]. Returns that loss.
inline double critics_loss(const Steps& batch, size_t critics, const float* q_tm1, size_t critics_t, const float* q_t,
                           bool huber, float* size, float* slope) {
    const size_t rows = batch.rows;
    const float share = -1.0f / static_cast<float>(rows);
    double loss = 0;
    for (size_t row = 0; row < rows; ++row) {
        float least = q_t[row];
        for (size_t i = 1; i < critics_t; ++i) {
            const float q = q_t[i * rows + row];
            least = q < least || std::isnan(q) ? q : least;  // NaN stays
        }
        const float target = batch.r_t[row] + batch.discount_t[row] * least;
        float sizes = 0;
        for (size_t i = 0; i < critics; ++i) {
            const float error = target - q_tm1[i * rows + row];
            const float inside = huber ? std::clamp(error, -1.0f, 1.0f) : error;
            sizes += std::fabs(error);
            slope[i * rows + row] = inside * batch.weight[row] * share;
            loss += static_cast<double>(batch.weight[row] * (inside * (error - 0.5f * inside)));
        }
        size[row] = sizes / static_cast<float>(critics);
    }
    return loss / static_cast<double>(rows);
}

}  // namespace ddrl
