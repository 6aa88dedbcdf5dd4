// The learner's inner loops against the same sums written out in double.
#include "adam.hpp"
#include "linear_layers.hpp"
#include "q_learning.hpp"
#include "quantile_regression.hpp"

#include <limits>
#include <random>

#include "expect.hpp"

using Floats = std::vector<float>;

static Floats random_floats(size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    Floats values(count);
    for (float& value : values) value = normal(random);
    return values;
}

static bool near(float a, double b) { return std::fabs(static_cast<double>(a) - b) <= 1e-4 * (1 + std::fabs(b)); }

// sgemm as BLAS says it, entry by entry.
static void plain_gemm(const char* op_a, const char* op_b, const int64_t* m, const int64_t* n, const int64_t* k,
                       const float* alpha, const float* a, const int64_t* lda, const float* b, const int64_t* ldb,
                       const float* beta, float* c, const int64_t* ldc) {
    for (int64_t row = 0; row < *m; ++row)
        for (int64_t column = 0; column < *n; ++column) {
            float sum = 0;
            for (int64_t i = 0; i < *k; ++i)
                sum += (*op_a == 'T' ? a[i + row * *lda] : a[row + i * *lda]) *
                       (*op_b == 'T' ? b[column + i * *ldb] : b[i + column * *ldb]);
            float& entry = c[row + column * *ldc];
            entry = *alpha * sum + (*beta == 0 ? 0 : *beta * entry);
        }
}

static void passes_of_two_layers_are_those_of_their_equations() {
    const int64_t rows = 5, in = 3, hidden = 4, out = 2;
    const Floats x = random_floats(15, 1), w1 = random_floats(12, 2), b1 = random_floats(4, 3);
    const Floats w2 = random_floats(8, 4), b2 = random_floats(2, 5), slope = random_floats(10, 6);
    Floats h(20), y(10), w1_slope(12), b1_slope(4), w2_slope(8), b2_slope(2), h_slope(20);
    const ddrl::LinearLayers layers(
        plain_gemm,
        {{b1.data(), x.data(), w1.data(), h.data(), rows, in, hidden, true},
         {b2.data(), h.data(), w2.data(), y.data(), rows, hidden, out, false}},
        {{slope.data(), h.data(), w2.data(), w2_slope.data(), b2_slope.data(), h_slope.data(), rows, hidden, out},
         {h_slope.data(), x.data(), w1.data(), w1_slope.data(), b1_slope.data(), nullptr, rows, in, hidden}});
    layers.forward();
    layers.backward();
    for (size_t row = 0; row < 5; ++row) {
        for (size_t j = 0; j < 4; ++j) {
            double sum = b1[j];
            for (size_t i = 0; i < 3; ++i) sum += static_cast<double>(x[row * 3 + i]) * w1[j * 3 + i];
            EXPECT(near(h[row * 4 + j], std::max(sum, 0.0)));
            double back = 0;
            for (size_t i = 0; i < 2; ++i) back += static_cast<double>(slope[row * 2 + i]) * w2[i * 4 + j];
            EXPECT(near(h_slope[row * 4 + j], sum > 0 ? back : 0.0));
        }
        for (size_t j = 0; j < 2; ++j) {
            double sum = b2[j];
            for (size_t i = 0; i < 4; ++i) sum += static_cast<double>(h[row * 4 + i]) * w2[j * 4 + i];
            EXPECT(near(y[row * 2 + j], sum));
        }
    }
    for (size_t j = 0; j < 4; ++j) {
        double bias = 0;
        for (size_t row = 0; row < 5; ++row) bias += h_slope[row * 4 + j];
        EXPECT(near(b1_slope[j], bias));
        for (size_t i = 0; i < 3; ++i) {
            double sum = 0;
            for (size_t row = 0; row < 5; ++row) sum += static_cast<double>(h_slope[row * 4 + j]) * x[row * 3 + i];
            EXPECT(near(w1_slope[j * 3 + i], sum));
        }
    }
}

static void gradients_that_nobody_asks_for_are_left_out() {
    const Floats slope = random_floats(10, 1), below = random_floats(20, 2), weight = random_floats(8, 3);
    Floats weight_slope(8), bias_slope(2), with_them(20), without(20);
    ddrl::LinearBackward step{
        slope.data(), below.data(), weight.data(), weight_slope.data(), bias_slope.data(), with_them.data(), 5, 4, 2};
    ddrl::LinearLayers(plain_gemm, {}, {step}).backward();
    step.weight_gradient = step.bias_gradient = nullptr;
    step.slope_below = without.data();
    ddrl::LinearLayers(plain_gemm, {}, {step}).backward();
    EXPECT(with_them == without);
}

static void relu_lets_what_is_not_a_number_through() {
    const float x[1] = {std::numeric_limits<float>::quiet_NaN()}, w[1] = {1}, b[1] = {0};
    float y[1];
    const ddrl::LinearLayers layers(plain_gemm, {{b, x, w, y, 1, 1, 1, true}}, {});
    layers.forward();
    EXPECT(std::isnan(y[0]));
}

static void slopes_are_the_loss_s_derivative_at_the_action_taken() {
    const float q_tm1[6] = {1, 2, 3, 4, 5, 6}, q_t[6] = {0, 1, 7, 2, 9, 1}, selector[6] = {5, 1, 5, 0, 1, 2};
    const float r_t[2] = {0.5f, 1}, discount_t[2] = {1, 0.5f}, weight[2] = {1, 2};
    const int64_t action[2] = {0, 2};
    float error[2], size[2], taken[2], slope[6];
    const ddrl::QBatch batch{2, 3, q_tm1, action, r_t, discount_t, q_t, selector, weight};
    EXPECT(ddrl::q_slopes(batch, true, error, size, taken, slope));
    EXPECT(taken[0] == 1 && taken[1] == 6);
    EXPECT(error[0] == -0.5f && size[0] == 0.5f);  // the first of equal values is chosen
    EXPECT(error[1] == 1 + 0.5f - 6 && size[1] == 4.5f);
    const float wanted[6] = {0.25f, 0, 0, 0, 0, 1};  // -weight clamp(error) / rows
    EXPECT(std::memcmp(slope, wanted, sizeof wanted) == 0);
    EXPECT(ddrl::q_slopes(batch, false, error, size, taken, slope) && slope[5] == 4.5f);
    for (const int64_t wrong : {int64_t{-1}, int64_t{3}, std::numeric_limits<int64_t>::min()}) {
        const int64_t actions[2] = {0, wrong};
        const ddrl::QBatch broken{2, 3, q_tm1, actions, r_t, discount_t, q_t, selector, weight};
        EXPECT(!ddrl::q_slopes(broken, true, error, size, taken, slope));
    }
}

static void slopes_of_quantiles_are_the_loss_s_derivative_by_the_action_s_quantiles() {
    const float value[4] = {9, 9, 1, 3}, value_t[4] = {9, 9, 0, 4}, selector[2] = {1, 2};  // two actions each
    const float fraction[2] = {0.25f, 0.75f}, r_t[1] = {1}, discount_t[1] = {0.5f}, weight[1] = {2};
    const int64_t action[1] = {1}, wrong[1] = {2};
    float loss[1], size[1], taken[1], slope[4];
    ddrl::QuantileBatch batch{1, 2, 2, 2, 1, value, fraction, action, r_t, discount_t, value_t, selector, weight};
    EXPECT(ddrl::quantile_slopes(batch, 1.0f, loss, size, taken, slope));  // targets 1 and 3
    EXPECT(taken[0] == 2 && size[0] == 0);
    EXPECT(near(loss[0], (0.25 * 1.5 + 0.25 * 1.5) / 2));  // errors 0 and 2, -2 and 0
    EXPECT(slope[0] == 0 && slope[1] == 0 && near(slope[2], -0.25) && near(slope[3], 0.25));
    EXPECT(ddrl::quantile_slopes(batch, 0.0f, loss, size, taken, slope) && near(loss[0], 0.5));
    batch.action = wrong;
    EXPECT(!ddrl::quantile_slopes(batch, 1.0f, loss, size, taken, slope));
}

static void a_value_that_is_not_a_number_is_the_largest() {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    for (size_t at = 0; at < 4; ++at) {
        float values[4] = {1, 2, 3, 9};
        values[at] = nan;
        EXPECT(ddrl::place_of_largest(values, 4) == at);
    }
}

static void steps_of_adam_are_those_of_its_equations() {
    for (const size_t size : {size_t{1}, size_t{63}, size_t{64}, size_t{1000}}) {
        for (const double max_norm : {0.5, 1e9}) {
            Floats x = random_floats(size, 7), m(size), v(size);
            std::vector<double> wanted(x.begin(), x.end()), first(size), second(size);
            for (int count = 1; count <= 20; ++count) {
                const Floats g = random_floats(size, static_cast<unsigned>(count));
                double squares = 0;
                for (const float number : g) squares += static_cast<double>(number) * number;
                const double norm = std::sqrt(squares), scale = std::min(1.0, max_norm / norm);
                const ddrl::AdamStep step{0.01, 0.9, 0.999, 1e-8, max_norm, count};
                EXPECT(near(ddrl::adam_step(x.data(), g.data(), m.data(), v.data(), size, step), norm));
                for (size_t i = 0; i < size; ++i) {
                    first[i] = 0.9 * first[i] + 0.1 * scale * g[i];
                    second[i] = 0.999 * second[i] + 0.001 * scale * scale * g[i] * g[i];
                    const double m_hat = first[i] / (1 - std::pow(0.9, count));
                    wanted[i] -= 0.01 * m_hat / (std::sqrt(second[i] / (1 - std::pow(0.999, count))) + 1e-8);
                }
            }
            for (size_t i = 0; i < size; ++i) EXPECT(near(x[i], wanted[i]) && near(m[i], first[i]));
        }
    }
}

int main() {
    RUN(passes_of_two_layers_are_those_of_their_equations);
    RUN(gradients_that_nobody_asks_for_are_left_out);
    RUN(relu_lets_what_is_not_a_number_through);
    RUN(slopes_are_the_loss_s_derivative_at_the_action_taken);
    RUN(slopes_of_quantiles_are_the_loss_s_derivative_by_the_action_s_quantiles);
    RUN(a_value_that_is_not_a_number_is_the_largest);
    RUN(steps_of_adam_are_those_of_its_equations);
    return 0;
}
