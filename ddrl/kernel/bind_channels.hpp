// What the channels' binding files share: arrays as they cross the border, memory that is checked, and waiting without
// the GIL.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <optional>
#include <string>

#include "doorbell.hpp"

namespace nb = nanobind;
using namespace nb::literals;

void bind_lanes(nb::module_& module);
void bind_step_writer(nb::module_& module);

using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

inline std::byte* raw(const Bytes& memory) { return reinterpret_cast<std::byte*>(memory.data()); }
inline const std::byte* raw(const ConstBytes& memory) { return reinterpret_cast<const std::byte*>(memory.data()); }

inline std::byte* checked(const Bytes& memory, size_t needed, const char* what) {
    if (memory.size() < needed)
        throw nb::value_error((std::string(what) + " needs " + std::to_string(needed) + " bytes, the memory has " +
                               std::to_string(memory.size()))
                                  .c_str());
    if (reinterpret_cast<uintptr_t>(memory.data()) % 64 != 0)
        throw nb::value_error((std::string(what) + " needs memory aligned to 64 bytes").c_str());
    return raw(memory);
}

// Repeat attempt(seconds) without the GIL until it returns true, `timeout` (none: for ever) is over, or a signal's
// handler raises.
template <class Attempt>
bool wait_in_slices(std::optional<double> timeout, Attempt attempt) {
    constexpr double slice = 0.2;
    const auto begin = ddrl::Clock::now();
    for (;;) {
        const double passed = std::chrono::duration<double>(ddrl::Clock::now() - begin).count();
        const double left = timeout ? *timeout - passed : slice;
        bool done;
        {
            nb::gil_scoped_release release;
            done = attempt(left < slice ? left : slice);
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (timeout && std::chrono::duration<double>(ddrl::Clock::now() - begin).count() >= *timeout) return false;
    }
}
