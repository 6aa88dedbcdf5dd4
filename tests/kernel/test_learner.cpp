// The learner's inner loops against the same sums written out in double.
#include "adam.hpp"
#include "losses.hpp"
#include "plain_networks.hpp"
#include "regression.hpp"

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

// [rows, width] numbers with their derivatives.
struct Numbers {
    Floats value, slope;
    int64_t rows, width;
    Numbers(int64_t row_count, int64_t columns, unsigned seed)
        : value(random_floats(static_cast<size_t>(row_count * columns), seed)),
          slope(random_floats(static_cast<size_t>(row_count * columns), seed + 100)),
          rows(row_count),
          width(columns) {}
    ddrl::Rows all() { return {value.data(), slope.data(), rows, rows, width}; }
    ddrl::Rows constant() { return {value.data(), nullptr, rows, 0, width}; }
};

static void passes_of_two_layers_are_those_of_their_equations() {
    Numbers x(5, 3, 1), h(5, 4, 7), y(5, 2, 8);
    const Floats w1 = random_floats(12, 2), b1 = random_floats(4, 3), w2 = random_floats(8, 4),
                 b2 = random_floats(2, 5);
    Floats w1_slope(12), b1_slope(4), w2_slope(8), b2_slope(2);
    ddrl::PlainNetworks networks(plain_gemm);
    networks.add(ddrl::Linear{x.constant(), h.all(), {w1.data(), w1_slope.data()}, {b1.data(), b1_slope.data()}, true});
    networks.add(ddrl::Linear{h.all(), y.all(), {w2.data(), w2_slope.data()}, {b2.data(), b2_slope.data()}, false});
    networks.forward();
    const Floats slope = y.slope;
    networks.backward();
    std::vector<double> before(20);  // the derivatives by what relu is given
    for (size_t row = 0; row < 5; ++row) {
        for (size_t j = 0; j < 4; ++j) {
            double sum = b1[j];
            for (size_t i = 0; i < 3; ++i) sum += static_cast<double>(x.value[row * 3 + i]) * w1[j * 3 + i];
            EXPECT(near(h.value[row * 4 + j], std::max(sum, 0.0)));
            double back = 0;
            for (size_t i = 0; i < 2; ++i) back += static_cast<double>(slope[row * 2 + i]) * w2[i * 4 + j];
            before[row * 4 + j] = sum > 0 ? back : 0.0;
            EXPECT(near(h.slope[row * 4 + j], before[row * 4 + j]));
        }
        for (size_t j = 0; j < 2; ++j) {
            double sum = b2[j];
            for (size_t i = 0; i < 4; ++i) sum += static_cast<double>(h.value[row * 4 + i]) * w2[j * 4 + i];
            EXPECT(near(y.value[row * 2 + j], sum));
        }
    }
    for (size_t j = 0; j < 4; ++j) {
        double bias = 0;
        for (size_t row = 0; row < 5; ++row) bias += before[row * 4 + j];
        EXPECT(near(b1_slope[j], bias));
        for (size_t i = 0; i < 3; ++i) {
            double sum = 0;
            for (size_t row = 0; row < 5; ++row) sum += before[row * 4 + j] * x.value[row * 3 + i];
            EXPECT(near(w1_slope[j * 3 + i], sum));
        }
    }
}

// The loss is the sum of output * coefficient, so that the derivatives by the outputs are the coefficients.
template <class Layer>
static void expect_differences(Layer layer, Numbers& below, Numbers& out) {
    const Floats coefficient = out.slope;
    const auto loss = [&] {
        layer.forward(plain_gemm);
        double sum = 0;
        for (size_t i = 0; i < out.value.size(); ++i) sum += static_cast<double>(out.value[i]) * coefficient[i];
        return sum;
    };
    loss();
    layer.backward(plain_gemm);
    const Floats slope = below.slope;
    for (size_t i = 0; i < below.value.size(); ++i) {
        const float middle = below.value[i];
        below.value[i] = middle + 0.01f;
        const double above = loss();
        below.value[i] = middle - 0.01f;
        const double difference = (above - loss()) / 0.02;
        below.value[i] = middle;
        EXPECT(std::fabs(slope[i] - difference) <= 2e-2 * (1 + std::fabs(difference)));
    }
}

static void derivatives_of_every_layer_are_its_differences() {
    Numbers x(4, 6, 1), same(4, 6, 2), narrow(4, 4, 3);
    const Floats weight = random_floats(6, 4), bias = random_floats(6, 5);
    ddrl::LayerNorm norm{x.all(), same.all(), {weight.data(), nullptr, false}, {bias.data(), nullptr, false},
                         1e-5f,   false};
    expect_differences(norm, x, same);
    expect_differences(ddrl::Activation{x.all(), same.all(), true}, x, same);
    expect_differences(ddrl::Dueling{x.all(), narrow.all(), 2, 2}, x, narrow);
    const Floats low(6, -2), high(6, 4);
    expect_differences(ddrl::Bounds{x.all(), same.all(), low.data(), high.data(), nullptr}, x, same);
}

static void derivatives_of_a_layer_norm_s_weights_are_sums_over_rows_and_may_be_added() {
    Numbers x(3, 5, 1), y(3, 5, 2);
    const Floats weight(5, 1), bias(5, 0), slope = y.slope;
    Floats weight_slope(5, 7), bias_slope(5, 7), once(5);
    for (const bool add : {false, true}) {
        y.slope = slope;
        ddrl::LayerNorm norm{
            x.constant(), y.all(), {weight.data(), weight_slope.data(), add}, {bias.data(), bias_slope.data(), add},
            1e-5f,        false};
        norm.forward(plain_gemm);
        norm.backward(plain_gemm);
        for (size_t i = 0; i < 5; ++i) {
            double of_weight = 0, of_bias = 0;
            for (size_t row = 0; row < 3; ++row) {
                of_weight += static_cast<double>(slope[row * 5 + i]) * y.value[row * 5 + i];
                of_bias += slope[row * 5 + i];
            }
            EXPECT(near(weight_slope[i], of_weight * (1 + add)) && near(bias_slope[i], of_bias * (1 + add)));
        }
    }
}

static void operations_with_the_same_parameter_or_input_add_their_derivatives() {
    const Floats w = random_floats(6, 2), b = random_floats(2, 3);
    for (const bool add : {false, true}) {
        Numbers x(3, 3, 1), one(3, 2, 4), other(3, 2, 5);
        Floats w_slope(6, 7), b_slope(2, 7);
        const auto gradients = [&](bool both) {
            ddrl::PlainNetworks networks(plain_gemm, add && both);
            const auto layer = [&](Numbers& out) {
                networks.add(
                    ddrl::Linear{x.all(), out.all(), {w.data(), w_slope.data()}, {b.data(), b_slope.data()}, false});
            };
            layer(one);
            if (both) layer(other);
            networks.forward();
            networks.backward();
            return std::pair(w_slope, x.slope);
        };
        const auto [first_w, first_x] = gradients(false);
        std::swap(one.slope, other.slope);
        const auto [second_w, second_x] = gradients(false);
        w_slope = Floats(6, 7);
        const auto [both_w, both_x] = gradients(true);
        for (size_t i = 0; i < 6; ++i) EXPECT(near(both_w[i], first_w[i] + second_w[i] + (add ? 7 : 0)));
        for (size_t i = 0; i < 9; ++i) EXPECT(near(both_x[i], first_x[i] + second_x[i]));
    }
}

static void noise_is_added_within_the_bounds() {
    Numbers x(1, 3, 1), y(1, 3, 2);
    x.value = {0, 0.5f, -1};
    const Floats low{-2, -2, -2}, high{2, 2, 2}, noise{0.25f, 3, -3};
    const ddrl::Bounds bounds{x.constant(), y.constant(), low.data(), high.data(), noise.data()};
    bounds.forward(plain_gemm);
    EXPECT(y.value == Floats({0.5f, 2, -2}));
}

static void columns_of_another_network_get_their_derivative_added() {
    Numbers from(2, 2, 1), to(2, 5, 2);
    const Floats before = from.slope;
    const ddrl::Columns columns{from.all(), to.all(), 3};
    columns.forward(plain_gemm);
    columns.backward(plain_gemm);
    for (size_t row = 0; row < 2; ++row)
        for (size_t i = 0; i < 2; ++i) {
            EXPECT(to.value[row * 5 + 3 + i] == from.value[row * 2 + i]);
            EXPECT(from.slope[row * 2 + i] == before[row * 2 + i] + to.slope[row * 5 + 3 + i]);
        }
}

static void relu_lets_what_is_not_a_number_through() {
    Numbers x(1, 1, 1), y(1, 1, 2);
    x.value[0] = std::numeric_limits<float>::quiet_NaN();
    const float w[1] = {1}, b[1] = {0};
    for (const float* bias : {b, static_cast<const float*>(nullptr)}) {
        ddrl::PlainNetworks networks(plain_gemm);
        networks.add(ddrl::Linear{x.constant(), y.constant(), {w, nullptr}, {bias, nullptr}, true});
        networks.forward();
        networks.backward();  // there is nothing to differentiate
        EXPECT(std::isnan(y.value[0]));
    }
}

static void tanh_is_that_of_the_library() {
    for (float x = -12; x < 12; x += 0.37f) EXPECT(std::fabs(ddrl::hyperbolic_tangent(x) - std::tanh(x)) < 1e-6f);
    EXPECT(std::isnan(ddrl::hyperbolic_tangent(std::numeric_limits<float>::quiet_NaN())));
}

static void slopes_are_the_loss_s_derivative_at_the_action_taken() {
    const float q_tm1[6] = {1, 2, 3, 4, 5, 6}, q_t[6] = {0, 1, 7, 2, 9, 1}, selector[6] = {5, 1, 5, 0, 1, 2};
    const float r_t[2] = {0.5f, 1}, discount_t[2] = {1, 0.5f}, weight[2] = {1, 2};
    const int64_t action[2] = {0, 2};
    float size[2], taken[2], slope[6];
    const ddrl::Steps steps{2, action, r_t, discount_t, weight};
    const auto loss = [&](bool huber) {
        return ddrl::q_learning_loss(steps, 3, q_tm1, q_t, selector, huber, size, taken, slope);
    };
    EXPECT(near(static_cast<float>(loss(true)), (0.125 + 2 * 4.0) / 2));
    EXPECT(taken[0] == 1 && taken[1] == 6);
    EXPECT(size[0] == 0.5f);  // the first of equal values is chosen
    EXPECT(size[1] == 4.5f);
    const float wanted[6] = {0.25f, 0, 0, 0, 0, 1};  // -weight clamp(error) / rows
    EXPECT(std::memcmp(slope, wanted, sizeof wanted) == 0);
    loss(false);
    EXPECT(slope[5] == 4.5f);
    EXPECT(ddrl::actions_fit(action, 2, 3));
    for (const int64_t wrong : {int64_t{-1}, int64_t{3}, std::numeric_limits<int64_t>::min()}) {
        const int64_t actions[2] = {0, wrong};
        EXPECT(!ddrl::actions_fit(actions, 2, 3));
    }
}

static void slopes_of_quantiles_are_the_loss_s_derivative_by_the_action_s_quantiles() {
    const float value[4] = {9, 9, 1, 3}, value_t[4] = {9, 9, 0, 4}, selector[2] = {1, 2};  // two actions each
    const float fraction[2] = {0.25f, 0.75f}, r_t[1] = {1}, discount_t[1] = {0.5f}, weight[1] = {2};
    const int64_t action[1] = {1};
    float each[1], size[1], taken[1], slope[4];
    const ddrl::Steps steps{1, action, r_t, discount_t, weight};
    const auto loss = [&](float kappa) {
        ddrl::quantile_loss(steps, 2, {2, value}, {2, value_t}, {1, selector}, fraction, kappa, each, size, taken,
                            slope);
    };
    loss(1.0f);  // targets 1 and 3
    EXPECT(taken[0] == 2 && size[0] == 0);
    EXPECT(near(each[0], (0.25 * 1.5 + 0.25 * 1.5) / 2));  // errors 0 and 2, -2 and 0
    EXPECT(slope[0] == 0 && slope[1] == 0 && near(slope[2], -0.25) && near(slope[3], 0.25));
    loss(0.0f);
    EXPECT(near(each[0], 0.5));
}

static void a_distribution_that_is_its_own_target_has_no_divergence_and_no_slope() {
    const Floats logits = random_floats(7, 1);
    const float r_t[1] = {0}, discount_t[1] = {1}, weight[1] = {1};
    const int64_t action[1] = {0};
    float divergence[1], taken[1];
    Floats slope(7);
    const ddrl::Values values{7, logits.data()};
    ddrl::categorical_loss({1, action, r_t, discount_t, weight}, 1, values, values, values, -3, 3, divergence, taken,
                           slope.data());
    EXPECT(std::fabs(divergence[0]) < 1e-6f);
    for (const float each : slope) EXPECT(std::fabs(each) < 1e-6f);
}

static void the_smallest_critic_is_the_target_of_all() {
    const float q_tm1[4] = {1, 2, 3, 4}, q_t[4] = {5, 1, 4, 9}, r_t[2] = {1, 0}, discount_t[2] = {1, 1},
                weight[2] = {1, 1};
    float size[2], slope[4];
    ddrl::critics_loss({2, nullptr, r_t, discount_t, weight}, 2, q_tm1, 2, q_t, false, size, slope);
    const float wanted[4] = {-2, 0.5f, -1, 1.5f};  // targets 5 and 1; -error / rows
    EXPECT(std::memcmp(slope, wanted, sizeof wanted) == 0);
    EXPECT(size[0] == 3 && size[1] == 2);
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

// A linear network's regression on 7 steps: some steps are taken twice, some never.
static void updates_in_one_call_are_those_one_by_one() {
    constexpr size_t STEPS = 7, ROWS = 3, UPDATES = 4, WIDTH = 2, ACTIONS = 3, SIZE = WIDTH * ACTIONS;
    const Floats state = random_floats(STEPS * WIDTH, 1), target = random_floats(STEPS, 2);
    const int64_t action[STEPS] = {0, 1, 2, 0, 1, 2, 1};
    const int64_t order[UPDATES * ROWS] = {0, 1, 2, 6, 5, 3, 2, 1, 0, 3, 3, 6};
    const ddrl::AdamStep adam{0.05, 0.9, 0.999, 1e-8, 0.5, 3};
    Floats wanted;
    for (const bool at_once : {false, true}) {
        Floats weight = random_floats(SIZE, 3), slope(SIZE), first(SIZE), second(SIZE);
        Numbers x(ROWS, WIDTH, 4), q(ROWS, ACTIONS, 5);
        ddrl::PlainNetworks networks(plain_gemm);
        networks.add(ddrl::Linear{x.constant(), q.all(), {weight.data(), slope.data()}, {nullptr, nullptr}, false});
        double figures[UPDATES * 4];
        const ddrl::Learned learned{weight.data(), slope.data(), first.data(), second.data(), SIZE};
        const ddrl::Taken taken{state.data(), WIDTH, action, target.data()};
        if (at_once) {
            ddrl::regress(networks, x.constant(), q.all(), taken, order, UPDATES, learned, adam, figures);
            EXPECT(weight == wanted);
            break;
        }
        for (size_t update = 0; update < UPDATES; ++update) {
            int64_t chosen[ROWS];
            float aim[ROWS], size[ROWS], value[ROWS];
            const float zeros[ROWS] = {}, ones[ROWS] = {1, 1, 1};
            for (size_t row = 0; row < ROWS; ++row) {
                const auto step = static_cast<size_t>(order[update * ROWS + row]);
                std::copy_n(state.data() + step * WIDTH, WIDTH, x.value.data() + row * WIDTH);
                chosen[row] = action[step], aim[row] = target[step];
            }
            networks.forward();
            ddrl::q_learning_loss({ROWS, chosen, aim, zeros, ones}, ACTIONS, q.value.data(), q.value.data(),
                                  q.value.data(), false, size, value, q.slope.data());
            networks.backward();
            ddrl::AdamStep step = adam;
            step.count += static_cast<int>(update);
            ddrl::adam_step(weight.data(), slope.data(), first.data(), second.data(), SIZE, step);
        }
        wanted = weight;
    }
}

static void figures_of_updates_in_one_call_are_those_of_their_steps() {
    const float state[2] = {1, 2}, target[2] = {5, 1};
    const int64_t action[2] = {0, 1}, order[4] = {0, 1, 1, 0};
    Floats weight{1, 3}, slope(2), first(2), second(2);  // q = (1, 3) and (2, 6): errors 4 and -5
    Numbers x(2, 1, 4), q(2, 2, 5);
    ddrl::PlainNetworks networks(plain_gemm);
    networks.add(ddrl::Linear{x.constant(), q.all(), {weight.data(), slope.data()}, {nullptr, nullptr}, false});
    double figures[8];
    ddrl::regress(networks, x.constant(), q.all(), {state, 1, action, target}, order, 2,
                  {weight.data(), slope.data(), first.data(), second.data(), 2}, {0, 0.9, 0.999, 1e-8, 10, 1}, figures);
    const double wanted[4] = {(8 + 12.5) / 2, std::sqrt(29), 4.5, 3.5};  // slopes by the weights: -4 / 2 and 5 x 2 / 2
    for (size_t i = 0; i < 4; ++i) EXPECT(near(static_cast<float>(figures[i]), wanted[i]));
    for (size_t i = 0; i < 4; ++i) EXPECT(near(static_cast<float>(figures[4 + i]), wanted[i]));  // a step size of 0
}

int main() {
    RUN(passes_of_two_layers_are_those_of_their_equations);
    RUN(derivatives_of_every_layer_are_its_differences);
    RUN(derivatives_of_a_layer_norm_s_weights_are_sums_over_rows_and_may_be_added);
    RUN(operations_with_the_same_parameter_or_input_add_their_derivatives);
    RUN(noise_is_added_within_the_bounds);
    RUN(columns_of_another_network_get_their_derivative_added);
    RUN(relu_lets_what_is_not_a_number_through);
    RUN(tanh_is_that_of_the_library);
    RUN(slopes_are_the_loss_s_derivative_at_the_action_taken);
    RUN(slopes_of_quantiles_are_the_loss_s_derivative_by_the_action_s_quantiles);
    RUN(a_distribution_that_is_its_own_target_has_no_divergence_and_no_slope);
    RUN(the_smallest_critic_is_the_target_of_all);
    RUN(a_value_that_is_not_a_number_is_the_largest);
    RUN(steps_of_adam_are_those_of_its_equations);
    RUN(updates_in_one_call_are_those_one_by_one);
    RUN(figures_of_updates_in_one_call_are_those_of_their_steps);
    return 0;
}
