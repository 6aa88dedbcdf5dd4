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
template <class T>
struct Steps {
    size_t rows;
    const int64_t* action;
    const T* r_t;
    const T* discount_t;
    const T* weight;
};

// The first place of the largest number; of NaN where there is one.
template <class T>
inline size_t place_of_largest(const T* values, size_t count) {
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
template <class T>
inline double q_learning_loss(const Steps<T>& batch, size_t count, const T* q_tm1, const T* q_t, const T* selector,
                              bool huber, T* size, T* taken, T* slope) {
    const T share = T(-1) / static_cast<T>(batch.rows);
    double loss = 0;
    std::fill_n(slope, batch.rows * count, T(0));
    for (size_t row = 0; row < batch.rows; ++row) {
        const size_t at = row * count + batch.action[row];
        const size_t best = row * count + place_of_largest(selector + row * count, count);
        const T target = batch.r_t[row] + batch.discount_t[row] * q_t[best];
        const T error = target - q_tm1[at];
        const T inside = huber ? std::clamp(error, -T(1), T(1)) : error;  // NaN stays
        size[row] = std::fabs(error);
        taken[row] = q_tm1[at];
        slope[at] = inside * batch.weight[row] * share;
        loss += static_cast<double>(batch.weight[row] * inside * (error - T(0.5) * inside));
    }
    return loss / static_cast<double>(batch.rows);
}

// Values of actions [rows, actions, count].
template <class T>
struct Values {
    size_t count;
    const T* values;
    const T* at(size_t row) const { return values + row * count; }  // of row * actions + action
};

template <class T>
inline T mean_of(const T* values, size_t count) {
    T sum = 0;
    for (size_t i = 0; i < count; ++i) sum += values[i];
    return sum / static_cast<T>(count);
}

// Adds to `loss` and `slope` [count] what one target gives: |tau_i - 1{d_i < 0}| L(d_i) with d_i = target - value_i,
// and its derivative by d_i. L is the Huber loss over kappa; |d| where kappa is 0.
template <class T>
DDRL_WIDEST inline void add_target(T target, const T* __restrict value, const T* __restrict fraction, size_t count,
                                   T kappa, T* __restrict loss, T* __restrict slope) {
    if (kappa > 0) {
        const T inverse = T(1) / kappa;
        for (size_t i = 0; i < count; ++i) {
            const T error = target - value[i];
            const T share = error < 0 ? T(1) - fraction[i] : fraction[i];
            const T cut = error > kappa ? kappa : error < -kappa ? -kappa : error;  // NaN stays
            loss[i] += share * cut * inverse * (error - T(0.5) * cut);
            slope[i] += share * cut * inverse;
        }
        return;
    }
    for (size_t i = 0; i < count; ++i) {
        const T error = target - value[i];
        const T share = error < 0 ? T(1) - fraction[i] : fraction[i];
        loss[i] += share * std::fabs(error);
        slope[i] += share * (error > 0 ? T(1) : error < 0 ? -T(1) : error);
    }
}

// Of quantiles at the fractions [tm1.count], of which selector's largest mean names the action of s_t. Writes each
// [rows] = sum_i mean_j of what `add_target` says of the targets r_t + discount_t value_t_j(best), size
// [rows] of the mean target less the mean prediction, taken [rows], that mean prediction, and slope [rows, actions,
// count], the derivative by value_tm1 of mean_b weight_b each_b. Returns that loss.
template <class T>
inline double quantile_loss(const Steps<T>& batch, size_t actions, const Values<T>& tm1, const Values<T>& t,
                            const Values<T>& selector, const T* fraction, T kappa, T* each, T* size, T* taken,
                            T* slope) {
    const size_t n = tm1.count;
    const size_t m = t.count;
    std::vector<T> means(actions);
    std::vector<T> losses(n);
    double loss = 0;
    std::fill_n(slope, batch.rows * actions * n, T(0));
    for (size_t row = 0; row < batch.rows; ++row) {
        for (size_t a = 0; a < actions; ++a) means[a] = mean_of(selector.at(row * actions + a), selector.count);
        const size_t best = place_of_largest(means.data(), actions);
        const T* following = t.at(row * actions + best);
        const size_t at = (row * actions + batch.action[row]) * n;
        const T* value = tm1.values + at;
        std::fill(losses.begin(), losses.end(), T(0));
        for (size_t j = 0; j < m; ++j)
            add_target(batch.r_t[row] + batch.discount_t[row] * following[j], value, fraction, n, kappa, losses.data(),
                       slope + at);
        each[row] = mean_of(losses.data(), n) * (static_cast<T>(n) / static_cast<T>(m));
        taken[row] = mean_of(value, n);
        size[row] = std::fabs(batch.r_t[row] + batch.discount_t[row] * mean_of(following, m) - taken[row]);
        loss += static_cast<double>(batch.weight[row] * each[row]);
        const T share = -batch.weight[row] / (static_cast<T>(batch.rows) * static_cast<T>(m));
        for (size_t i = 0; i < n; ++i) slope[at + i] *= share;
    }
    return loss / static_cast<double>(batch.rows);
}

// Probabilities [count] of logits, and the logarithm of what they were divided by, the largest logit included.
template <class T>
inline T softmax(const T* logits, size_t count, T* probability) {
    T largest = logits[0];
    for (size_t i = 1; i < count; ++i) largest = logits[i] > largest ? logits[i] : largest;
    T sum = 0;
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
template <class T>
inline double categorical_loss(const Steps<T>& batch, size_t actions, const Values<T>& tm1, const Values<T>& t,
                               const Values<T>& selector, T v_min, T v_max, T* divergence, T* taken, T* slope) {
    const size_t n = tm1.count;
    const T spacing = (v_max - v_min) / static_cast<T>(n - 1);
    std::vector<T> z(n);
    std::vector<T> p(n);
    std::vector<T> target(n);
    std::vector<T> means(actions);
    double loss = 0;
    for (size_t i = 0; i < n; ++i) z[i] = v_min + static_cast<T>(i) * spacing;
    const auto mean = [&] {
        T sum = 0;
        for (size_t i = 0; i < n; ++i) sum += z[i] * p[i];
        return sum;
    };
    std::fill_n(slope, batch.rows * actions * n, T(0));
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
        std::fill(target.begin(), target.end(), T(0));
        for (size_t i = 0; i < n; ++i) {
            const T moved = batch.r_t[row] + batch.discount_t[row] * z[i];
            // A moved value that is not a number has no place: the divergence says so.
            const T place = (std::clamp(moved, v_min, v_max) - v_min) / spacing;
            const T inside = place >= 0 ? std::min(place, static_cast<T>(n - 1)) : T(0);
            const size_t below = std::min(static_cast<size_t>(inside), n - 2);
            const T share = std::isnan(place) ? place : inside - static_cast<T>(below);
            target[below] += p[i] * (T(1) - share);
            target[below + 1] += p[i] * share;
        }
        const size_t at = (row * actions + batch.action[row]) * n;
        const T* logits = tm1.values + at;
        const T norm = softmax(logits, n, p.data());
        T sum = 0;
        for (size_t i = 0; i < n; ++i)
            if (target[i] != 0) sum += target[i] * (std::log(target[i]) - (logits[i] - norm));
        divergence[row] = sum;
        loss += static_cast<double>(batch.weight[row] * sum);
        taken[row] = mean();
        const T share = batch.weight[row] / static_cast<T>(batch.rows);
        for (size_t i = 0; i < n; ++i) slope[at + i] = (p[i] - target[i]) * share;
    }
    return loss / static_cast<double>(batch.rows);
}

// Writes size [rows], the mean over critics of |r_t + discount_t min_i q_t_i - q_tm1_i|, and slope [count, rows], the
// derivative by q_tm1 of sum_i mean_b weight_b l(error_ib), l as in `q_learning_loss`. q_tm1 [critics, rows], q_t
// [critics_t, rows]. Returns that loss.
template <class T>
inline double critics_loss(const Steps<T>& batch, size_t critics, const T* q_tm1, size_t critics_t, const T* q_t,
                           bool huber, T* size, T* slope) {
    const size_t rows = batch.rows;
    const T share = T(-1) / static_cast<T>(rows);
    double loss = 0;
    for (size_t row = 0; row < rows; ++row) {
        T least = q_t[row];
        for (size_t i = 1; i < critics_t; ++i) {
            const T q = q_t[i * rows + row];
            least = q < least || std::isnan(q) ? q : least;  // NaN stays
        }
        const T target = batch.r_t[row] + batch.discount_t[row] * least;
        T sizes = 0;
        for (size_t i = 0; i < critics; ++i) {
            const T error = target - q_tm1[i * rows + row];
            const T inside = huber ? std::clamp(error, -T(1), T(1)) : error;
            sizes += std::fabs(error);
            slope[i * rows + row] = inside * batch.weight[row] * share;
            loss += static_cast<double>(batch.weight[row] * (inside * (error - T(0.5) * inside)));
        }
        size[row] = sizes / static_cast<T>(critics);
    }
    return loss / static_cast<double>(rows);
}

}  // namespace ddrl
