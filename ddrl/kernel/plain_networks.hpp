// Networks of plain layers (linear, layer norm, relu, tanh, a dueling head): all layers of all networks of one update
// in one call forward and one call backward. At the sizes of reinforcement learning a call costs as much as a layer.
//
// A pass is a list of operations over matrices that the caller owns and that stay in place. Products are those of a
// BLAS that the caller gives; everything else is plain loops, whose sums have a fixed order.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <utility>
#include <variant>
#include <vector>

#include "adam.hpp"

namespace ddrl {

// sgemm of BLAS, column by column: C = alpha op(A) op(B) + beta C. Its integers have 4 bytes or 8, depending
// on the library; a small number of 8 bytes reads the same in both on little-endian processors.
using Gemm = void (*)(const char* op_a, const char* op_b, const int64_t* m, const int64_t* n, const int64_t* k,
                      const float* alpha, const float* a, const int64_t* lda, const float* b, const int64_t* ldb,
                      const float* beta, float* c, const int64_t* ldc);

// [rows, width] numbers, and the loss's derivative by the first `back` rows. slope is null where none is asked for.
struct Rows {
    float* value;
    float* slope;
    int64_t rows, back, width;
};

// A parameter and where the derivative by it goes: null where it does not learn.
struct Weight {
    const float* value;
    float* slope;
    bool add = false;  // the derivative is added to what is there; `PlainNetworks` says so
};

// ---- loops, compiled for each width of vector registers; the same bits with each
// -------------------------------------

// The sum of f(0) .. f(count - 1), in 16 partial sums that the compiler can keep in vector registers.
template <class F>
inline float lane_sum(int64_t count, F f) {
    constexpr int64_t LANES = 16;
    float sums[LANES] = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int64_t lane = 0; lane < LANES; ++lane) sums[lane] += f(i + lane);
    float whole = 0;
    for (; i < count; ++i) whole += f(i);
    for (const float sum : sums) whole += sum;
    return whole;
}

// tanh: a rational function (that of Eigen's ptanh, error below 4e-7), which vectorizes; NaN stays.
inline float hyperbolic_tangent(float x) {
    const float limit = 7.90531110763549805f;
    const float c = x > limit ? limit : x < -limit ? -limit : x;
    const float s = c * c;
    float p = -2.76076847742355e-16f;
    p = p * s + 2.00018790482477e-13f;
    p = p * s + -8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    float q = 1.19825839466702e-06f;
    q = q * s + 1.18534705686654e-04f;
    q = q * s + 2.26843463243900e-03f;
    q = q * s + 4.89352518554385e-03f;
    return c * p / q;
}

DDRL_WIDEST inline void add_bias(float* y, int64_t rows, int64_t width, const float* __restrict bias) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < width; ++i) y[row * width + i] += bias[i];
}

DDRL_WIDEST inline void add_bias_and_relu(float* y, int64_t rows, int64_t width, const float* __restrict bias) {
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < width; ++i) {
            const float x = y[row * width + i] + bias[i];
            y[row * width + i] = x <= 0 ? 0.0f : x;  // NaN stays
        }
}

DDRL_WIDEST inline void relu_of(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = x[i] <= 0 ? 0.0f : x[i];
}

// slope where y, the output of relu, is positive.
DDRL_WIDEST inline void relu_slope(const float* __restrict y, const float* slope, float* below, int64_t count) {
    for (int64_t i = 0; i < count; ++i) below[i] = y[i] <= 0 ? 0.0f : slope[i];
}

DDRL_WIDEST inline void tanh_of(const float* x, float* y, int64_t count) {
    for (int64_t i = 0; i < count; ++i) y[i] = hyperbolic_tangent(x[i]);
}

DDRL_WIDEST inline void tanh_slope(const float* __restrict y, const float* slope, float* below, int64_t count) {
    for (int64_t i = 0; i < count; ++i) below[i] = slope[i] * (1 - y[i] * y[i]);
}

// y + bias, then relu where it is asked for; bias is null where there is none.
inline void finish_layer(const Rows& out, const float* bias, bool relu) {
    if (bias && relu)
        add_bias_and_relu(out.value, out.rows, out.width, bias);
    else if (bias)
        add_bias(out.value, out.rows, out.width, bias);
    else if (relu)
        relu_of(out.value, out.value, out.rows * out.width);
}

// sums [width] = (or +=) the sum over rows.
DDRL_WIDEST inline void sum_rows(const float* __restrict x, int64_t rows, int64_t width, bool add,
                                 float* __restrict sums) {
    if (!add) std::fill_n(sums, width, 0.0f);
    for (int64_t row = 0; row < rows; ++row)
        for (int64_t i = 0; i < width; ++i) sums[i] += x[row * width + i];
}

// One row of layer normalization: y = (x - mean) scale, whose mean and scale = 1 / sqrt(variance + epsilon) it writes.
DDRL_WIDEST inline void normalize(const float* __restrict x, float* __restrict y, int64_t n, float epsilon, float& mean,
                                  float& scale) {
    const float center = lane_sum(n, [x](int64_t i) { return x[i]; }) / static_cast<float>(n);
    const float squares = lane_sum(n, [x, center](int64_t i) { return (x[i] - center) * (x[i] - center); });
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
    for (int64_t i = 0; i < n; ++i) y[i] = (x[i] - center) * factor;
    mean = center;
    scale = factor;
}

// Its derivative: by x, from that by y. below may be the same memory as slope.
DDRL_WIDEST inline void normalize_slope(const float* __restrict x, const float* slope, float* below, int64_t n,
                                        float mean, float scale) {
    const float level = lane_sum(n, [slope](int64_t i) { return slope[i]; }) / static_cast<float>(n);
    const float tilt = lane_sum(n, [slope, x, mean](int64_t i) { return slope[i] * (x[i] - mean); }) * scale * scale /
                       static_cast<float>(n);
    for (int64_t i = 0; i < n; ++i) below[i] = scale * (slope[i] - level - (x[i] - mean) * tilt);
}

DDRL_WIDEST inline void multiply_row(float* y, const float* __restrict weight, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] *= weight[i];
}

// weight_slope += slope y of one row, y = (x - mean) scale.
DDRL_WIDEST inline void add_weight_slope(const float* __restrict slope, const float* __restrict x, int64_t n,
                                         float mean, float scale, float* __restrict weight_slope) {
    for (int64_t i = 0; i < n; ++i) weight_slope[i] += slope[i] * ((x[i] - mean) * scale);
}

// q [actions, atoms] = v [atoms] + advantage [actions, atoms] - its mean over actions.
DDRL_WIDEST inline void dueling_row(const float* __restrict v, float* __restrict q, int64_t actions, int64_t atoms) {
    const float* advantage = v + atoms;
    const float share = 1.0f / static_cast<float>(actions);
    for (int64_t i = 0; i < atoms; ++i) q[i] = advantage[i];
    for (int64_t a = 1; a < actions; ++a)
        for (int64_t i = 0; i < atoms; ++i) q[i] += advantage[a * atoms + i];
    for (int64_t i = 0; i < atoms; ++i) q[i] = v[i] - q[i] * share;
    for (int64_t a = actions - 1; a >= 0; --a)
        for (int64_t i = 0; i < atoms; ++i) q[a * atoms + i] = q[i] + advantage[a * atoms + i];
}

DDRL_WIDEST inline void dueling_slope(const float* __restrict q, float* __restrict v, int64_t actions, int64_t atoms) {
    float* advantage = v + atoms;
    const float share = 1.0f / static_cast<float>(actions);
    std::fill_n(v, atoms, 0.0f);
    for (int64_t a = 0; a < actions; ++a)
        for (int64_t i = 0; i < atoms; ++i) v[i] += q[a * atoms + i];
    for (int64_t a = 0; a < actions; ++a)
        for (int64_t i = 0; i < atoms; ++i) advantage[a * atoms + i] = q[a * atoms + i] - v[i] * share;
}

// ---- operations
// ------------------------------------------------------------------------------------------------------

// out = below weight^T + bias, then relu where it is asked for. weight [out.width, below.width].
struct Linear {
    Rows below, out;
    Weight weight, bias;  // bias.value is null where there is none
    bool relu;
    bool add_below = false;  // as `Weight::add`, where several operations read `below`

    void forward(Gemm gemm) const {
        product(gemm, 'T', 'N', out.width, out.rows, below.width, weight.value, below.width, below.value, below.width,
                false, out.value);
        finish_layer(out, bias.value, relu);
    }

    void backward(Gemm gemm) const {
        if (relu) relu_slope(out.value, out.slope, out.slope, out.back * out.width);
        if (weight.slope)
            product(gemm, 'N', 'T', below.width, out.width, out.back, below.value, below.width, out.slope, out.width,
                    weight.add, weight.slope);
        if (bias.slope) sum_rows(out.slope, out.back, out.width, bias.add, bias.slope);
        if (below.slope)
            product(gemm, 'N', 'N', below.width, out.back, out.width, weight.value, below.width, out.slope, out.width,
                    add_below, below.slope);
    }

private:
    static void product(Gemm gemm, char op_a, char op_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda,
                        const float* b, int64_t ldb, bool add, float* c) {
        const float alpha = 1;
        const float beta = add ? 1 : 0;
        gemm(&op_a, &op_b, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &m);
    }
};

// out = (below - mean) / sqrt(variance + epsilon) * weight + bias over each row (Ba et al. 2016), then relu where it is
// asked for.
struct LayerNorm {
    Rows below, out;
    Weight weight, bias;  // null where there are none
    float epsilon;
    bool relu;
    std::vector<float> means{}, scales{};  // of each row; a scale is 1 / sqrt(variance + epsilon)

    void forward(Gemm) {
        const int64_t n = out.width;
        means.resize(out.rows);
        scales.resize(out.rows);
        for (int64_t row = 0; row < out.rows; ++row) {
            const size_t at = row;
            float* y = out.value + row * n;
            normalize(below.value + row * n, y, n, epsilon, means[at], scales[at]);
            if (weight.value) multiply_row(y, weight.value, n);
        }
        finish_layer(out, bias.value, relu);
    }

    void backward(Gemm) {
        const int64_t n = out.width;
        if (relu) relu_slope(out.value, out.slope, out.slope, out.back * n);
        if (bias.slope) sum_rows(out.slope, out.back, n, bias.add, bias.slope);
        if (weight.slope && !weight.add) std::fill_n(weight.slope, n, 0.0f);
        for (int64_t row = 0; row < out.back; ++row) {
            const size_t at = row;
            const float* x = below.value + row * n;
            float* slope = out.slope + row * n;
            if (weight.slope) add_weight_slope(slope, x, n, means[at], scales[at], weight.slope);
            if (!below.slope) continue;
            if (weight.value) multiply_row(slope, weight.value, n);
            normalize_slope(x, slope, below.slope + row * n, n, means[at], scales[at]);
        }
    }
};

// relu or tanh by itself; below and out may be the same memory.
struct Activation {
    Rows below, out;
    bool tanh;

    void forward(Gemm) const {
        const int64_t count = out.rows * out.width;
        if (tanh)
            tanh_of(below.value, out.value, count);
        else
            relu_of(below.value, out.value, count);
    }

    void backward(Gemm) const {
        if (!below.slope) return;
        const int64_t count = out.back * out.width;
        if (tanh)
            tanh_slope(out.value, out.slope, below.slope, count);
        else
            relu_slope(out.value, out.slope, below.slope, count);
    }
};

// Q(a) = V + A(a) - mean_a A(a) (Wang et al. 2016, eq. 9) of each atom: out [rows, actions, atoms] from below [rows,
// 1 + actions, atoms], V first.
struct Dueling {
    Rows below, out;
    int64_t actions, atoms;

    void forward(Gemm) const {
        for (int64_t row = 0; row < out.rows; ++row)
            dueling_row(below.value + row * below.width, out.value + row * out.width, actions, atoms);
    }

    void backward(Gemm) const {
        for (int64_t row = 0; row < out.back; ++row)
            dueling_slope(out.slope + row * out.width, below.slope + row * below.width, actions, atoms);
    }
};

// An actor's action within its bounds: out = low + half + half below, half = (high - low) / 2, column by column; with
// noise [out.rows, width] also + half noise, cut off at the bounds, which is not differentiated.
struct Bounds {
    Rows below, out;
    const float* low;
    const float* high;
    const float* noise;  // null: none

    void forward(Gemm) const {
        for (int64_t row = 0; row < out.rows; ++row)
            for (int64_t i = 0; i < out.width; ++i) {
                const int64_t at = row * out.width + i;
                float x = low[i] + half(i) + half(i) * below.value[at];
                if (noise) {
                    x += half(i) * noise[at];
                    x = x < low[i] ? low[i] : x > high[i] ? high[i] : x;
                }
                out.value[at] = x;
            }
    }

    void backward(Gemm) const {
        for (int64_t row = 0; row < out.back; ++row)
            for (int64_t i = 0; i < out.width; ++i)
                below.slope[row * out.width + i] = half(i) * out.slope[row * out.width + i];
    }

private:
    float half(int64_t i) const { return 0.5f * (high[i] - low[i]); }
};

// One network's output becomes columns `column` .. of another one's input; its derivative is added to what the loss
// says of that output.
struct Columns {
    Rows from, to;
    int64_t column;

    void forward(Gemm) const {
        for (int64_t row = 0; row < from.rows; ++row)
            std::copy_n(from.value + row * from.width, from.width, to.value + row * to.width + column);
    }

    void backward(Gemm) const {
        if (!from.slope) return;
        for (int64_t row = 0; row < to.back; ++row)
            for (int64_t i = 0; i < from.width; ++i)
                from.slope[row * from.width + i] += to.slope[row * to.width + column + i];
    }
};

using Operation = std::variant<Linear, LayerNorm, Activation, Dueling, Bounds, Columns>;

class PlainNetworks {
public:
    // add: derivatives by parameters are added to what is there; else the first operation of the backward pass that has
    // a derivative writes it, and the others add to that.
    explicit PlainNetworks(Gemm gemm, bool add = false) : gemm_(gemm), add_(add) {}

    template <class Op>
    void add(Op operation) {
        Op& added = std::get<Op>(operations_.emplace_back(std::move(operation)));
        if constexpr (requires { added.weight; }) {
            write(added.weight.slope, added.weight.add, add_);
            write(added.bias.slope, added.bias.add, add_);
        }
        if constexpr (requires { added.add_below; }) write(added.below.slope, added.add_below, false);
    }

    // Every operation's output, in order.
    void forward() {
        for (Operation& operation : operations_) std::visit([this](auto& each) { each.forward(gemm_); }, operation);
    }

    // Derivatives from those by the last outputs, against the order. Overwrites the derivatives by outputs.
    void backward() {
        for (auto operation = operations_.rbegin(); operation != operations_.rend(); ++operation)
            std::visit(
                [this](auto& each) {
                    if (has_slope(each)) each.backward(gemm_);
                },
                *operation);
    }

private:
    // The backward pass begins with the operation that was added last.
    void write(const float* slope, bool& adds, bool first_adds) {
        if (!slope) return;
        adds = first_adds;
        bool*& first = first_[slope];
        if (first) *first = true;
        first = &adds;
    }

    static bool has_slope(const Columns& columns) { return columns.to.slope != nullptr; }
    template <class Op>
    static bool has_slope(const Op& operation) {
        return operation.out.slope != nullptr;
    }

    Gemm gemm_;
    bool add_;
    std::deque<Operation> operations_;  // which stay in place
    std::map<const float*, bool*> first_;  // of each derivative, whether the first operation that writes it adds
};

}  // namespace ddrl
