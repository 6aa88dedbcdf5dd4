// A table of float64 values in shared memory: each row has one writer, anyone reads. A value nobody stored yet is NaN.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>

namespace ddrl {

static_assert(std::atomic_ref<double>::is_always_lock_free);

inline double read_value(const double* value) {
    return std::atomic_ref<double>(*const_cast<double*>(value)).load(std::memory_order_relaxed);
}
inline void store_value(double* value, double x) {
    std::atomic_ref<double>(*value).store(x, std::memory_order_relaxed);
}

// By the row's only writer, so a load and a store are enough. A fresh value counts from 0.
inline void add_value(double* value, double x) {
    const double old = read_value(value);
    store_value(value, std::isnan(old) ? x : old + x);
}

inline void read_table(double* out, const double* table, size_t count) {
    for (size_t i = 0; i < count; ++i) out[i] = read_value(table + i);
}
inline void store_table(double* table, const double* from, size_t count) {
    for (size_t i = 0; i < count; ++i) store_value(table + i, from[i]);
}

}  // namespace ddrl
