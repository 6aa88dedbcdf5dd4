// Python's view of what the learner computes outside torch: arrays are numpy's, in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <initializer_list>
#include <optional>

#include "adam.hpp"
#include "losses.hpp"
#include "plain_networks.hpp"
#include "regression.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T, size_t Axes>
using Given = nb::ndarray<T, nb::numpy, nb::c_contig, nb::device::cpu, nb::ndim<Axes>>;
template <size_t Axes>
using Array = Given<float, Axes>;
using Vector = Given<const float, 1>;
using Table = Given<const float, 2>;
using Cube = Given<const float, 3>;
using Integers = Given<const int64_t, 1>;

void require(bool fits, const char* what) {
    if (!fits) throw nb::value_error(what);
}

void require_rows(size_t rows, std::initializer_list<size_t> sizes, const char* what) {
    for (const size_t size : sizes) require(size == rows, what);
}

template <class A, class B>
bool same_shape(const A& one, const B& other) {
    for (size_t axis = 0; axis < one.ndim(); ++axis)
        if (one.shape(axis) != other.shape(axis)) return false;
    return true;
}

// Numbers of a pass [rows, width] and their derivatives [back, width] (back <= rows), with the arrays that hold them.
struct Rows {
    Array<2> value;
    std::optional<Array<2>> slope;

    Rows(Array<2> given, std::optional<Array<2>> derivative) : value(given), slope(derivative) {
        require(!slope || (slope->shape(0) <= value.shape(0) && slope->shape(1) == value.shape(1)),
                "value is [rows, width] and slope [at most rows, width], or None");
    }
    ddrl::Rows view() const {
        return {value.data(), slope ? slope->data() : nullptr, static_cast<int64_t>(value.shape(0)),
                slope ? static_cast<int64_t>(slope->shape(0)) : 0, static_cast<int64_t>(value.shape(1))};
    }
};

class PlainNetworks {
public:
    template <size_t Axes>
    using Maybe = std::optional<Array<Axes>>;

    PlainNetworks(uintptr_t gemm, bool add) : networks_(checked(gemm), add) {}

    void linear(const Rows& below, const Rows& out, const Array<2>& weight, const Maybe<1>& bias,
                const Maybe<2>& weight_slope, const Maybe<1>& bias_slope, bool relu) {
        const size_t in = below.value.shape(1), width = out.value.shape(1);
        require(weight.shape(0) == width && weight.shape(1) == in && (!bias || bias->shape(0) == width),
                "a linear layer has weight [out, in] and bias [out] or None");
        require((!weight_slope || same_shape(*weight_slope, weight)) &&
                    (!bias_slope || (bias && same_shape(*bias_slope, *bias))),
                "derivatives have the shapes of their parameters");
        require_same_rows(below, out);
        keep(below, out, weight, bias, weight_slope, bias_slope);
        networks_.add(ddrl::Linear{below.view(), out.view(), of(std::optional(weight), weight_slope),
                                   of(bias, bias_slope), relu});
    }

    void layer_norm(const Rows& below, const Rows& out, const Maybe<1>& weight, const Maybe<1>& bias,
                    const Maybe<1>& weight_slope, const Maybe<1>& bias_slope, double epsilon, bool relu) {
        const size_t width = out.value.shape(1);
        for (const Maybe<1>* each : {&weight, &bias, &weight_slope, &bias_slope})
            require(!*each || (*each)->shape(0) == width, "weight and bias of a layer norm are [width]");
        require_same_shape(below, out);
        keep(below, out, weight, bias, weight_slope, bias_slope);
        networks_.add(ddrl::LayerNorm{below.view(), out.view(), of(weight, weight_slope), of(bias, bias_slope),
                                      static_cast<float>(epsilon), relu});
    }

    void activation(const Rows& below, const Rows& out, bool tanh) {
        require_same_shape(below, out);
        keep(below, out);
        networks_.add(ddrl::Activation{below.view(), out.view(), tanh});
    }

    void dueling(const Rows& below, const Rows& out, int64_t atoms) {
        require(atoms > 0 && out.value.shape(1) > 0 && out.value.shape(1) % static_cast<size_t>(atoms) == 0 &&
                    below.value.shape(1) == out.value.shape(1) + static_cast<size_t>(atoms),
                "a dueling head makes [actions, atoms] of [1 + actions, atoms]");
        require_same_rows(below, out);
        require(below.slope || !out.slope, "what is below a dueling head has a slope where the head has one");
        keep(below, out);
        networks_.add(ddrl::Dueling{below.view(), out.view(), static_cast<int64_t>(out.value.shape(1)) / atoms, atoms});
    }

    void bounds(const Rows& below, const Rows& out, const Array<1>& low, const Array<1>& high, const Maybe<2>& noise) {
        require_same_shape(below, out);
        require(below.slope || !out.slope, "what is below bounds has a slope where they have one");
        require(low.shape(0) == out.value.shape(1) && same_shape(low, high), "low and high are [width]");
        require(!noise || (same_shape(*noise, out.value) && !out.slope),
                "noise is [rows, width], of outputs that are not differentiated");
        keep(below, out, low, high, noise);
        networks_.add(ddrl::Bounds{below.view(), out.view(), low.data(), high.data(), noise ? noise->data() : nullptr});
    }

    void columns(const Rows& from, const Rows& to, int64_t column) {
        require(column >= 0 && static_cast<size_t>(column) + from.value.shape(1) <= to.value.shape(1) &&
                    from.value.shape(0) == to.value.shape(0),
                "columns have equal rows and fit into their place");
        require(!from.slope || !to.slope || from.slope->shape(0) == to.slope->shape(0),
                "columns have equal rows of slopes");
        keep(from, to);
        networks_.add(ddrl::Columns{from.view(), to.view(), column});
    }

    void forward() { networks_.forward(); }
    void backward() { networks_.backward(); }

    void regress(const Rows& x, const Rows& q, const Table& state, const Integers& action, const Vector& target,
                 const Given<const int64_t, 2>& order, const Array<1>& parameters, const Vector& gradient,
                 const Array<1>& first, const Array<1>& second, double lr, double beta1, double beta2, double epsilon,
                 double max_norm, int count, const Given<double, 2>& figures) {
        const size_t rows = x.value.shape(0), steps = state.shape(0), updates = order.shape(0);
        require(q.slope && q.value.shape(0) == rows && q.slope->shape(0) == rows && q.value.shape(1) > 0,
                "q has a slope of all rows, and as many rows as x");
        require(state.shape(1) == x.value.shape(1), "a state is as wide as x");
        require_rows(steps, {action.shape(0), target.shape(0)}, "states, actions and targets are [steps]");
        require(order.shape(1) == rows && figures.shape(0) == updates && figures.shape(1) == 4,
                "order is [updates, rows of x] and figures [updates, 4]");
        require_rows(parameters.shape(0), {gradient.shape(0), first.shape(0), second.shape(0)},
                     "parameters, gradient and both moments are [size] each");
        require(count > 0, "count is that of the first step, from 1");
        if (!ddrl::actions_fit(action.data(), steps, q.value.shape(1)))
            throw nb::index_error("an action is not in [0, actions)");
        if (!ddrl::actions_fit(order.data(), updates * rows, steps)) throw nb::index_error("order names no step");
        const ddrl::Learned learned{parameters.data(), gradient.data(), first.data(), second.data(),
                                    parameters.shape(0)};
        nb::gil_scoped_release release;
        ddrl::regress(networks_, x.view(), q.view(),
                      {state.data(), static_cast<int64_t>(state.shape(1)), action.data(), target.data()}, order.data(),
                      updates, learned, {lr, beta1, beta2, epsilon, max_norm, count}, figures.data());
    }

private:
    static ddrl::Gemm checked(uintptr_t gemm) {
        require(gemm != 0, "gemm is the address of a BLAS library's product of matrices");
        return reinterpret_cast<ddrl::Gemm>(gemm);
    }

    static void require_same_rows(const Rows& below, const Rows& out) {
        require(below.value.shape(0) == out.value.shape(0), "a layer has as many rows below as above");
        require(!below.slope || !out.slope || below.slope->shape(0) == out.slope->shape(0),
                "a layer has as many rows of slopes below as above");
    }

    static void require_same_shape(const Rows& below, const Rows& out) {
        require_same_rows(below, out);
        require(below.value.shape(1) == out.value.shape(1), "this layer is as wide below as above");
    }

    template <class Value, class Slope>
    static ddrl::Weight of(const Value& value, const Slope& slope) {
        return {value ? value->data() : nullptr, slope ? slope->data() : nullptr};
    }

    // The operations point into these arrays.
    template <class... Each>
    void keep(const Each&... each) {
        (kept_.append(nb::cast(each)), ...);
    }

    ddrl::PlainNetworks networks_;
    nb::list kept_;
};

void bind_networks(nb::module_& module) {
    nb::class_<Rows>(module, "Rows", "Numbers of a pass [rows, width], and the loss's derivative by the first of them.")
        .def(nb::init<Array<2>, std::optional<Array<2>>>(), "value"_a.noconvert(), "slope"_a.noconvert() = nb::none(),
             "ValueError where the shapes do not fit each other.");
    nb::class_<PlainNetworks>(
        module, "PlainNetworks",
        "Passes of networks of plain layers, in arrays that stay in place; each method but forward and "
        "backward adds an operation.")
        .def(nb::init<uintptr_t, bool>(), "gemm"_a, "add"_a = false,
             "`gemm`: address of a BLAS library's sgemm; `add`: derivatives by parameters are added to what "
             "is there.")
        .def("linear", &PlainNetworks::linear, "below"_a, "out"_a, "weight"_a.noconvert(), "bias"_a.noconvert().none(),
             "weight_slope"_a.noconvert().none(), "bias_slope"_a.noconvert().none(), "relu"_a)
        .def("layer_norm", &PlainNetworks::layer_norm, "below"_a, "out"_a, "weight"_a.noconvert().none(),
             "bias"_a.noconvert().none(), "weight_slope"_a.noconvert().none(), "bias_slope"_a.noconvert().none(),
             "epsilon"_a, "relu"_a)
        .def("activation", &PlainNetworks::activation, "below"_a, "out"_a, "tanh"_a, "tanh, else relu.")
        .def("dueling", &PlainNetworks::dueling, "below"_a, "out"_a, "atoms"_a)
        .def("bounds", &PlainNetworks::bounds, "below"_a, "out"_a, "low"_a.noconvert(), "high"_a.noconvert(),
             "noise"_a.noconvert() = nb::none())
        .def("columns", &PlainNetworks::columns, "source"_a, "to"_a, "column"_a,
             "Copies `source` into columns of `to`.")
        .def("forward", &PlainNetworks::forward, nb::call_guard<nb::gil_scoped_release>(),
             "Compute every output, in order.")
        .def("backward", &PlainNetworks::backward, nb::call_guard<nb::gil_scoped_release>(),
             "Compute derivatives from those by the outputs, which it overwrites.")
        .def(
            "regress", &PlainNetworks::regress, "x"_a, "q"_a, "state"_a, "action"_a, "target"_a, "order"_a,
            "parameters"_a.noconvert(), "gradient"_a, "first"_a.noconvert(), "second"_a.noconvert(), "lr"_a, "beta1"_a,
            "beta2"_a, "epsilon"_a, "max_norm"_a, "count"_a, "figures"_a.noconvert(),
            "A step of Adam for each row of order [updates, rows]: half the mean square of target - q(action) of these "
            "steps, x being the input and q the output. Writes the loss, the gradient's norm, the mean size of errors "
            "and the mean value taken of each into figures [updates, 4].");
}

// Steps of a batch; `outputs` hold a number for each, too.
ddrl::Steps steps_of(size_t rows, size_t actions, const Integers& action, const Vector& r_t, const Vector& discount_t,
                     const Vector& weight, std::initializer_list<const Array<1>*> outputs) {
    require_rows(rows, {action.shape(0), r_t.shape(0), discount_t.shape(0), weight.shape(0)},
                 "actions, rewards, discounts and weights are [rows]");
    for (const Array<1>* output : outputs) require(output->shape(0) == rows, "outputs but the slope are [rows]");
    require(actions > 0, "there is at least one action");
    if (!ddrl::actions_fit(action.data(), rows, actions)) throw nb::index_error("an action is not in [0, actions)");
    return {rows, action.data(), r_t.data(), discount_t.data(), weight.data()};
}

ddrl::Values values_of(const Cube& values, size_t rows, size_t actions, size_t least) {
    require(values.shape(0) == rows && values.shape(1) == actions && values.shape(2) >= least,
            "values are [rows, actions, 1 or more] each, of a distribution on fixed values 2 or more");
    return {values.shape(2), values.data()};
}

double q_learning_loss(const Table& q_tm1, const Integers& action, const Vector& r_t, const Vector& discount_t,
                       const Table& q_t, const Table& selector, const Vector& weight, bool huber, const Array<1>& size,
                       const Array<1>& taken, const Array<2>& slope) {
    const size_t actions = q_tm1.shape(1);
    const auto steps = steps_of(q_tm1.shape(0), actions, action, r_t, discount_t, weight, {&size, &taken});
    require(same_shape(q_tm1, q_t) && same_shape(q_tm1, selector) && same_shape(q_tm1, slope),
            "action values and slope are [rows, actions] each");
    return ddrl::q_learning_loss(steps, actions, q_tm1.data(), q_t.data(), selector.data(), huber, size.data(),
                                 taken.data(), slope.data());
}

double quantile_loss(const Cube& value_tm1, const Vector& fraction, const Integers& action, const Vector& r_t,
                     const Vector& discount_t, const Cube& value_t, const Cube& selector, const Vector& weight,
                     float kappa, const Array<1>& each, const Array<1>& size, const Array<1>& taken,
                     const Array<3>& slope) {
    const size_t rows = value_tm1.shape(0), actions = value_tm1.shape(1);
    const auto steps = steps_of(rows, actions, action, r_t, discount_t, weight, {&each, &size, &taken});
    require(fraction.shape(0) == value_tm1.shape(2), "there is a fraction for each quantile of value_tm1");
    require(same_shape(value_tm1, slope), "slope is as value_tm1");
    return ddrl::quantile_loss(steps, actions, values_of(value_tm1, rows, actions, 1),
                               values_of(value_t, rows, actions, 1), values_of(selector, rows, actions, 1),
                               fraction.data(), kappa, each.data(), size.data(), taken.data(), slope.data());
}

double categorical_loss(const Cube& logits_tm1, const Integers& action, const Vector& r_t, const Vector& discount_t,
                        const Cube& logits_t, const Cube& selector, const Vector& weight, float v_min, float v_max,
                        const Array<1>& divergence, const Array<1>& taken, const Array<3>& slope) {
    const size_t rows = logits_tm1.shape(0), actions = logits_tm1.shape(1);
    const auto steps = steps_of(rows, actions, action, r_t, discount_t, weight, {&divergence, &taken});
    require(same_shape(logits_tm1, logits_t) && same_shape(logits_tm1, selector) && same_shape(logits_tm1, slope),
            "logits and slope are [rows, actions, atoms] each");
    return ddrl::categorical_loss(steps, actions, values_of(logits_tm1, rows, actions, 2),
                                  values_of(logits_t, rows, actions, 2), values_of(selector, rows, actions, 2), v_min,
                                  v_max, divergence.data(), taken.data(), slope.data());
}

double critics_loss(const Table& q_tm1, const Vector& r_t, const Vector& discount_t, const Table& q_t,
                    const Vector& weight, bool huber, const Array<1>& size, const Array<2>& slope) {
    const size_t count = q_tm1.shape(0), rows = q_tm1.shape(1);
    require(count > 0 && q_t.shape(0) > 0 && q_t.shape(1) == rows && same_shape(q_tm1, slope),
            "values are [critics, rows], slope as q_tm1");
    require_rows(rows, {r_t.shape(0), discount_t.shape(0), weight.shape(0), size.shape(0)},
                 "everything but values is [rows]");
    return ddrl::critics_loss({rows, nullptr, r_t.data(), discount_t.data(), weight.data()}, count, q_tm1.data(),
                              q_t.shape(0), q_t.data(), huber, size.data(), slope.data());
}

float adam_step(const Array<1>& parameters, const Vector& gradient, const Array<1>& first, const Array<1>& second,
                double lr, double beta1, double beta2, double epsilon, double max_norm, int count) {
    const size_t size = parameters.shape(0);
    require_rows(size, {gradient.shape(0), first.shape(0), second.shape(0)},
                 "parameters, gradient and both moments are [size] each");
    require(count > 0, "count is that of this step, from 1");
    nb::gil_scoped_release release;
    return ddrl::adam_step(parameters.data(), gradient.data(), first.data(), second.data(), size,
                           {lr, beta1, beta2, epsilon, max_norm, count});
}

void bind_losses(nb::module_& module) {
    module.def("q_learning_loss", &q_learning_loss, "q_tm1"_a, "action"_a, "r_t"_a, "discount_t"_a, "q_t"_a,
               "selector"_a, "weight"_a, "huber"_a, "size"_a.noconvert(), "taken"_a.noconvert(), "slope"_a.noconvert(),
               "The loss; writes sizes of TD errors, the values taken and the loss's derivative by q_tm1 into the last "
               "three arrays.");
    module.def("quantile_loss", &quantile_loss, "value_tm1"_a, "fraction"_a, "action"_a, "r_t"_a, "discount_t"_a,
               "value_t"_a, "selector"_a, "weight"_a, "kappa"_a, "each"_a.noconvert(), "size"_a.noconvert(),
               "taken"_a.noconvert(), "slope"_a.noconvert(),
               "The loss; writes each row's, the sizes of mean errors, the means of the values taken and the loss's "
               "derivative by value_tm1 into the last four arrays.");
    module.def("categorical_loss", &categorical_loss, "logits_tm1"_a, "action"_a, "r_t"_a, "discount_t"_a, "logits_t"_a,
               "selector"_a, "weight"_a, "v_min"_a, "v_max"_a, "divergence"_a.noconvert(), "taken"_a.noconvert(),
               "slope"_a.noconvert(),
               "The loss; writes divergences, the means of the distributions taken and the loss's derivative by "
               "logits_tm1 into the last three arrays.");
    module.def("critics_loss", &critics_loss, "q_tm1"_a, "r_t"_a, "discount_t"_a, "q_t"_a, "weight"_a, "huber"_a,
               "size"_a.noconvert(), "slope"_a.noconvert(),
               "The loss; writes mean sizes of TD errors and the loss's derivative by q_tm1 into the last two arrays.");
}

}  // namespace

void bind_learner(nb::module_& module) {
    bind_networks(module);
    bind_losses(module);
    module.def("adam_step", &adam_step, "parameters"_a.noconvert(), "gradient"_a.noconvert(), "first"_a.noconvert(),
               "second"_a.noconvert(), "lr"_a, "beta1"_a, "beta2"_a, "epsilon"_a, "max_norm"_a, "count"_a,
               "One step of Adam in place, along the gradient scaled down to the norm; the norm before that.");
}
