// A ring as Python holds it, for the binding files of lanes and of the step writer.
#pragma once

#include <nanobind/stl/optional.h>

#include "bind_channels.hpp"
#include "ring.hpp"

struct PyRing : ddrl::Ring {
    Bytes memory;
    std::optional<nb::object> bell_owner;

    explicit PyRing(Bytes given) : ddrl::Ring(checked(given, header_bytes, "a ring")), memory(std::move(given)) {
        checked(memory, bytes(capacity(), row_bytes()), "a ring");
    }
    size_t rows_of(size_t nbytes) const {
        if (nbytes % row_bytes() != 0)
            throw nb::value_error((std::to_string(nbytes) + " bytes are no whole number of rows of " +
                                   std::to_string(row_bytes()) + " bytes")
                                      .c_str());
        return nbytes / row_bytes();
    }
    size_t push(const ConstBytes& rows, std::optional<double> timeout) {
        const size_t count = rows_of(rows.size());
        const std::byte* from = raw(rows);
        size_t written = closed() ? 0 : push_fitting_released(from, count, rows.size());
        if (written == count || closed()) return written;
        if (drops()) {
            count_dropped(count - written);
            return written;
        }
        if (timeout && *timeout <= 0) return written;
        count_wait();
        wait_in_slices(timeout, [&](double seconds) {
            if (wait_room(seconds) && !closed()) written += push_fitting(from + written * row_bytes(), count - written);
            return written == count || closed();
        });
        return written;
    }
    size_t pop_into(const Bytes& out) {
        const size_t count = rows_of(out.size());
        if (filled(count) * row_bytes() < release_bytes) return pop(raw(out), count);
        nb::gil_scoped_release release;
        return pop(raw(out), count);
    }

private:
    static constexpr size_t release_bytes = 1 << 14;  // below this a copy is cheaper than letting the GIL go

    size_t push_fitting_released(const std::byte* from, size_t count, size_t nbytes) {
        if (nbytes < release_bytes) return push_fitting(from, count);
        nb::gil_scoped_release release;
        return push_fitting(from, count);
    }
};
