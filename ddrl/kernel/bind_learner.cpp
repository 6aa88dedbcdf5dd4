// Python's view of what the learner computes outside torch: arrays are numpy's, in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "adam.hpp"
#include "linear_layers.hpp"
#include "q_learning.hpp"
#include "quantile_regression.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Vector = nb::ndarray<float, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<1>>;
using Matrix = nb::ndarray<float, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<2>>;
using Floats = nb::ndarray<const float, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<1>>;
using Table = nb::ndarray<const float, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<2>>;
using Cube = nb::ndarray<float, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<3>>;
using Quantiles = nb::ndarray<const float, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<3>>;
using Integers = nb::ndarray<const int64_t, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<1>>;
using Layer = std::tuple<std::optional<Vector>, Matrix, Matrix, Matrix, bool>;
using Step = std::tuple<Matrix, std::optional<Matrix>, Matrix, std::optional<Matrix>, std::optional<Vector>,
                        std::optional<Matrix>>;

void require(bool fits, const char* what) {
    if (!fits) throw nb::value_error(what);
}

bool has_shape(const Matrix& matrix, size_t rows, size_t columns) {
    return matrix.shape(0) == rows && matrix.shape(1) == columns;
}

ddrl::LinearForward forward_of(const Layer& layer) {
    const auto& [bias, below, weight, out, relu] = layer;
    const size_t rows = below.shape(0), in = below.shape(1), width = weight.shape(0);
    require(weight.shape(1) == in && has_shape(out, rows, width) && (!bias || bias->shape(0) == width),
            "a layer is (bias [width] or None, below [rows, in], weight [width, in], out [rows, width], relu)");
    return {bias ? bias->data() : nullptr,
            below.data(),
            weight.data(),
            out.data(),
            static_cast<int64_t>(rows),
            static_cast<int64_t>(in),
            static_cast<int64_t>(width),
            relu};
}

ddrl::LinearBackward backward_of(const Step& step) {
    const auto& [slope, below, weight, weight_gradient, bias_gradient, slope_below] = step;
    const size_t rows = slope.shape(0), width = weight.shape(0), in = weight.shape(1);
    bool fits = rows > 0 && slope.shape(1) == width && (!slope_below || has_shape(*slope_below, rows, in));
    fits = fits && (!below || has_shape(*below, rows, in)) && bool(weight_gradient) == bool(bias_gradient);
    if (weight_gradient)
        fits = fits && below && has_shape(*weight_gradient, width, in) && bias_gradient->shape(0) == width;
    require(fits,
            "a step is (slope [rows, width], below [rows, in] or None, weight [width, in], weight_gradient [width, in] "
            "and bias_gradient [width], or neither, slope_below [rows, in] or None)");
    return {slope.data(),
            below ? below->data() : nullptr,
            weight.data(),
            weight_gradient ? weight_gradient->data() : nullptr,
            weight_gradient ? bias_gradient->data() : nullptr,
            slope_below ? slope_below->data() : nullptr,
            static_cast<int64_t>(rows),
            static_cast<int64_t>(in),
            static_cast<int64_t>(width)};
}

// The layers with the arrays that they point into.
class LinearLayers {
public:
    LinearLayers(uintptr_t gemm, std::vector<Layer> forward, std::vector<Step> backward)
        : forward_(std::move(forward)), backward_(std::move(backward)) {
        require(gemm != 0, "gemm is the address of a BLAS library's sgemm");
        std::vector<ddrl::LinearForward> layers;
        std::vector<ddrl::LinearBackward> steps;
        for (const Layer& layer : forward_) layers.push_back(forward_of(layer));
        for (const Step& step : backward_) steps.push_back(backward_of(step));
        passes_.emplace(reinterpret_cast<ddrl::Gemm>(gemm), std::move(layers), std::move(steps));
    }
    void forward() const { passes_->forward(); }
    void backward() const { passes_->backward(); }

private:
    std::vector<Layer> forward_;
    std::vector<Step> backward_;
    std::optional<ddrl::LinearLayers> passes_;
};

void q_slopes(const Table& q_tm1, const Integers& action, const Floats& r_t, const Floats& discount_t, const Table& q_t,
              const Table& selector, const Floats& weight, bool huber, const Vector& td_error, const Vector& td_size,
              const Vector& q_taken, const Matrix& slope) {
    const size_t rows = q_tm1.shape(0), actions = q_tm1.shape(1);
    for (const Table* table : {&q_t, &selector})
        require(table->shape(0) == rows && table->shape(1) == actions, "action values are [rows, actions] each");
    for (size_t size : {action.shape(0), r_t.shape(0), discount_t.shape(0), weight.shape(0), td_error.shape(0),
                        td_size.shape(0), q_taken.shape(0)})
        require(size == rows, "everything but action values is [rows]");
    require(has_shape(slope, rows, actions) && actions > 0, "slope is [rows, actions], of one action at least");
    const ddrl::QBatch batch{rows,       actions,         q_tm1.data(), action.data(), r_t.data(), discount_t.data(),
                             q_t.data(), selector.data(), weight.data()};
    if (!ddrl::q_slopes(batch, huber, td_error.data(), td_size.data(), q_taken.data(), slope.data()))
        throw nb::index_error("an action is not in [0, actions)");
}

void quantile_slopes(const Quantiles& value_tm1, const Floats& fraction, const Integers& action, const Floats& r_t,
                     const Floats& discount_t, const Quantiles& value_t, const Quantiles& selector,
                     const Floats& weight, float kappa, const Vector& loss, const Vector& size, const Vector& taken,
                     const Cube& slope) {
    const size_t rows = value_tm1.shape(0), actions = value_tm1.shape(1), count = value_tm1.shape(2);
    for (const Quantiles* values : {&value_tm1, &value_t, &selector})
        require(values->shape(0) == rows && values->shape(1) == actions && values->shape(2) > 0,
                "quantiles are [rows, actions, some] each");
    for (size_t each : {action.shape(0), r_t.shape(0), discount_t.shape(0), weight.shape(0), loss.shape(0),
                        size.shape(0), taken.shape(0)})
        require(each == rows, "everything but quantiles and fractions is [rows]");
    require(fraction.shape(0) == count, "there is a fraction for each quantile of value_tm1");
    require(slope.shape(0) == rows && slope.shape(1) == actions && slope.shape(2) == count && actions > 0,
            "slope is as value_tm1, of one action at least");
    const ddrl::QuantileBatch batch{rows,
                                    actions,
                                    count,
                                    value_t.shape(2),
                                    selector.shape(2),
                                    value_tm1.data(),
                                    fraction.data(),
                                    action.data(),
                                    r_t.data(),
                                    discount_t.data(),
                                    value_t.data(),
                                    selector.data(),
                                    weight.data()};
    if (!ddrl::quantile_slopes(batch, kappa, loss.data(), size.data(), taken.data(), slope.data()))
        throw nb::index_error("an action is not in [0, actions)");
}

float adam_step(const Vector& parameters, const Floats& gradient, const Vector& first, const Vector& second, double lr,
                double beta1, double beta2, double epsilon, double max_norm, int count) {
    const size_t size = parameters.shape(0);
    for (size_t other : {gradient.shape(0), first.shape(0), second.shape(0)})
        require(other == size, "parameters, gradient and both moments are [size] each");
    require(count > 0, "count is that of this step, from 1");
    nb::gil_scoped_release release;
    return ddrl::adam_step(parameters.data(), gradient.data(), first.data(), second.data(), size,
                           {lr, beta1, beta2, epsilon, max_norm, count});
}

}  // namespace

void bind_learner(nb::module_& module) {
    nb::class_<LinearLayers>(module, "LinearLayers",
                             "Passes of linear layers with relu between them, in arrays that stay in place.")
        .def(nb::init<uintptr_t, std::vector<Layer>, std::vector<Step>>(), "gemm"_a, "forward"_a.noconvert(),
             "backward"_a.noconvert(),
             "`gemm`: address of a BLAS library's sgemm. ValueError where shapes do not fit each other.")
        .def("forward", &LinearLayers::forward, nb::call_guard<nb::gil_scoped_release>(),
             "Compute every layer's `out`, in order.")
        .def("backward", &LinearLayers::backward, nb::call_guard<nb::gil_scoped_release>(),
             "Compute gradients from the first step's `slope`, in order.");
    module.def("q_slopes", &q_slopes, "q_tm1"_a, "action"_a, "r_t"_a, "discount_t"_a, "q_t"_a, "selector"_a, "weight"_a,
               "huber"_a, "td_error"_a.noconvert(), "td_size"_a.noconvert(), "q_taken"_a.noconvert(),
               "slope"_a.noconvert(),
               "Write TD errors, their sizes, the values taken, and the loss's derivative by q_tm1 into the last four "
               "arrays.");
    module.def("quantile_slopes", &quantile_slopes, "value_tm1"_a, "fraction"_a, "action"_a, "r_t"_a, "discount_t"_a,
               "value_t"_a, "selector"_a, "weight"_a, "kappa"_a, "loss"_a.noconvert(), "size"_a.noconvert(),
               "taken"_a.noconvert(), "slope"_a.noconvert(),
               "Write the losses of quantile regression, the sizes of the mean errors, the means of the values taken, "
               "and the weighted mean loss's derivative by value_tm1 into the last four arrays.");
    module.def("adam_step", &adam_step, "parameters"_a.noconvert(), "gradient"_a.noconvert(), "first"_a.noconvert(),
               "second"_a.noconvert(), "lr"_a, "beta1"_a, "beta2"_a, "epsilon"_a, "max_norm"_a, "count"_a,
               "One step of Adam in place, along the gradient scaled down to the norm; the norm before that.");
}
