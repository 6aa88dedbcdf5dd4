// Adam (Kingma & Ba 2015, algorithm 1) over one vector, its gradient scaled down to a norm: one pass for the norm, one
// for the step. The same bits on every processor: sums have a fixed order, and products and sums are not fused (the
// build's -ffp-contract=off).
#pragma once

#include <cmath>
#include <cstddef>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_THREAD__)
#define DDRL_WIDEST __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define DDRL_WIDEST
#endif

namespace ddrl {

struct AdamStep {
    double lr, beta1, beta2, epsilon, max_norm;
    int count;  // of this step, from 1
};

// The square root of the sum of squares, in 64 partial sums.
DDRL_WIDEST inline float norm_of(const float* values, size_t size) {
    constexpr size_t LANES = 64;
    float sums[LANES] = {};
    size_t i = 0;
    for (; i + LANES <= size; i += LANES)
        for (size_t lane = 0; lane < LANES; ++lane) sums[lane] += values[i + lane] * values[i + lane];
    double whole = 0;
    for (; i < size; ++i) whole += static_cast<double>(values[i]) * static_cast<double>(values[i]);
    for (const float sum : sums) whole += static_cast<double>(sum);
    return static_cast<float>(std::sqrt(whole));
}

// m += (1 - beta1) (g - m); v = beta2 v + (1 - beta2) g^2; x -= lr m^ / (sqrt(v^) + epsilon), ^ without the bias of the
// beginning.
DDRL_WIDEST inline void adam_pass(float* __restrict x, const float* __restrict gradient, float* __restrict first,
                                  float* __restrict second, size_t size, float scale, float gain1, float beta2,
                                  float gain2, float rate, float correction, float epsilon) {
    for (size_t i = 0; i < size; ++i) {
        const float g = gradient[i] * scale;
        const float m = first[i] + gain1 * (g - first[i]);
        const float v = beta2 * second[i] + gain2 * g * g;
        first[i] = m, second[i] = v;
        x[i] -= rate * m / (std::sqrt(v) * correction + epsilon);
    }
}

// Steps `x` [size] in place; the gradient's norm before it is scaled down.
inline float adam_step(float* x, const float* gradient, float* first, float* second, size_t size,
                       const AdamStep& step) {
    const float norm = norm_of(gradient, size);
    const double bias1 = 1 - std::pow(step.beta1, step.count), bias2 = 1 - std::pow(step.beta2, step.count);
    const double scale = norm > step.max_norm ? step.max_norm / norm : 1.0;
    const auto f = [](double number) { return static_cast<float>(number); };
    adam_pass(x, gradient, first, second, size, f(scale), f(1 - step.beta1), f(step.beta2), f(1 - step.beta2),
              f(step.lr / bias1), f(1 / std::sqrt(bias2)), f(step.epsilon));
    return norm;
}

}  // namespace ddrl
