// The passes of linear layers with relu between them, each one call: products by a BLAS that the caller gives, and
// plain loops between the products. Written for the learner's mlp, whose layers are so small that calling them one by
// one costs as much as computing them. Memory is the caller's and stays in place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace ddrl {

// sgemm of BLAS, column by column: C = alpha op(A) op(B) + beta C. Its integers have 4 bytes or 8, by the library; a
// small number of 8 bytes reads the same in both on little-endian processors.
using Gemm = void (*)(const char* op_a, const char* op_b, const int64_t* m, const int64_t* n, const int64_t* k,
                      const float* alpha, const float* a, const int64_t* lda, const float* b, const int64_t* ldb,
                      const float* beta, float* c, const int64_t* ldc);

// out [rows, width] = below [rows, in] weight^T [in, width] + bias, then relu where it is asked for.
struct LinearForward {
    const float* bias;  // null: none
    const float* below;
    const float* weight;  // [width, in]
    float* out;
    int64_t rows, in, width;
    bool relu;
};

// From the slope by a layer's output: those by its weight and bias, and by what is below it (the output of a relu).
struct LinearBackward {
    const float* slope;  // [rows, width]
    const float* below;  // null: a fixed map, without gradients and with no relu below it
    const float* weight;
    float* weight_gradient;  // with `below` alone; null: neither this nor bias_gradient is asked for
    float* bias_gradient;
    float* slope_below;  // null: the first layer
    int64_t rows, in, width;
};

class LinearLayers {
public:
    LinearLayers(Gemm gemm, std::vector<LinearForward> forward, std::vector<LinearBackward> backward)
        : gemm_(gemm), forward_(std::move(forward)), backward_(std::move(backward)) {}

    void forward() const {
        for (const LinearForward& layer : forward_) {
            if (layer.bias)
                for (int64_t row = 0; row < layer.rows; ++row)
                    for (int64_t i = 0; i < layer.width; ++i) layer.out[row * layer.width + i] = layer.bias[i];
            product('T', 'N', layer.width, layer.rows, layer.in, layer.weight, layer.in, layer.below, layer.in,
                    layer.bias ? 1.0f : 0.0f, layer.out);
            if (layer.relu)
                for (int64_t i = 0; i < layer.rows * layer.width; ++i)
                    layer.out[i] = layer.out[i] <= 0 ? 0.0f : layer.out[i];  // NaN stays
        }
    }

    void backward() const {
        for (const LinearBackward& layer : backward_) {
            if (layer.weight_gradient) {
                product('N', 'T', layer.in, layer.width, layer.rows, layer.below, layer.in, layer.slope, layer.width,
                        0.0f, layer.weight_gradient);
                for (int64_t i = 0; i < layer.width; ++i) layer.bias_gradient[i] = layer.slope[i];
                for (int64_t row = 1; row < layer.rows; ++row)
                    for (int64_t i = 0; i < layer.width; ++i)
                        layer.bias_gradient[i] += layer.slope[row * layer.width + i];
            }
            if (!layer.slope_below) continue;
            product('N', 'N', layer.in, layer.rows, layer.width, layer.weight, layer.in, layer.slope, layer.width, 0.0f,
                    layer.slope_below);
            if (layer.below)
                for (int64_t i = 0; i < layer.rows * layer.in; ++i)
                    layer.slope_below[i] = layer.below[i] <= 0 ? 0.0f : layer.slope_below[i];
        }
    }

private:
    void product(char op_a, char op_b, int64_t m, int64_t n, int64_t k, const float* a, int64_t lda, const float* b,
                 int64_t ldb, float beta, float* c) const {
        const float alpha = 1.0f;
        gemm_(&op_a, &op_b, &m, &n, &k, &alpha, a, &lda, b, &ldb, &beta, c, &m);
    }

    Gemm gemm_;
    std::vector<LinearForward> forward_;
    std::vector<LinearBackward> backward_;
};

}  // namespace ddrl
