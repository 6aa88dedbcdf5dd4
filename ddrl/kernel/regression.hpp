// Many updates in one call: each fits the values of the actions taken, of some steps of experience, to targets that
// stay. Update by update, Python costs several times what a small network does.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

#include "adam.hpp"
#include "losses.hpp"
#include "plain_networks.hpp"

namespace ddrl {

// Steps of experience: states [steps, width], the actions taken and what their values should be [steps].
struct Taken {
    const float* state;
    int64_t width;
    const int64_t* action;
    const float* target;
};

// What learns: vectors [size]. The gradient is where the networks write it.
struct Learned {
    float* parameters;
    const float* gradient;
    float* first;
    float* second;
    size_t size;
};

// `order` [updates, x.rows] names the steps of each update. x is the networks' input and q their output [x.rows,
// actions], with its slope. Each update is a forward pass, `q_learning_loss` without a bootstrap (half the mean
// square), a backward pass and `adam_step`, whose first is `adam.count`: the same bits as these one by one. Writes
// figures [updates, 4]: the loss, the gradient's norm, the mean size of errors and the mean of the values taken.
inline void regress(PlainNetworks& networks, const Rows& x, const Rows& q, const Taken& taken, const int64_t* order,
                    size_t updates, const Learned& learned, AdamStep adam, double* figures) {
    const size_t rows = static_cast<size_t>(x.rows);
    const size_t actions = static_cast<size_t>(q.width);
    const std::vector<float> zeros(rows, 0.0f);
    const std::vector<float> ones(rows, 1.0f);
    std::vector<int64_t> action(rows);
    std::vector<float> target(rows);
    std::vector<float> size(rows);
    std::vector<float> value(rows);
    const auto mean = [rows](const std::vector<float>& each) {
        return std::accumulate(each.begin(), each.end(), 0.0) / static_cast<double>(rows);
    };
    const Steps steps{rows, action.data(), target.data(), zeros.data(), ones.data()};
    for (size_t update = 0; update < updates; ++update, ++adam.count) {
        for (size_t row = 0; row < rows; ++row) {
            const int64_t step = order[update * rows + row];
            std::copy_n(taken.state + step * taken.width, taken.width,
                        x.value + row * static_cast<size_t>(taken.width));
            action[row] = taken.action[step];
            target[row] = taken.target[step];
        }
        networks.forward();
        double* figure = figures + 4 * update;
        figure[0] =
            q_learning_loss(steps, actions, q.value, q.value, q.value, false, size.data(), value.data(), q.slope);
        networks.backward();
        figure[1] = static_cast<double>(
            adam_step(learned.parameters, learned.gradient, learned.first, learned.second, learned.size, adam));
        figure[2] = mean(size);
        figure[3] = mean(value);
    }
}

}  // namespace ddrl
