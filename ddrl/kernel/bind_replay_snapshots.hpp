// Snapshots on their way between Python and the replay kernel: bytes objects, and calls of a progress function. For
// bind_replay.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <utility>

#include "replay/memory.hpp"

namespace ddrl::replay {

namespace nb = nanobind;

// Where a snapshot goes: a Python bytes object of its size.
class BytesSink {
public:
    void begin(std::size_t bytes) {
        nb::gil_scoped_acquire acquire;
        bytes_ = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
        if (!bytes_.is_valid()) throw nb::python_error();
        to_ = PyBytes_AS_STRING(bytes_.ptr());
    }
    void put(const void* data, std::size_t bytes) {
        std::memcpy(to_, data, bytes);
        to_ += bytes;
    }
    void finish() {}
    nb::object take() { return std::move(bytes_); }

private:
    nb::object bytes_;
    char* to_ = nullptr;
};

// A progress function for the kernel, which runs without the GIL: calls a Python one, or does nothing.
class ProgressCall {
public:
    explicit ProgressCall(const nb::object& progress) : function_(progress.is_none() ? nullptr : progress.ptr()) {}
    void operator()(u64 done, u64 total) const {
        if (!function_) return;
        nb::gil_scoped_acquire acquire;
        nb::borrow(function_)(done, total);
    }

private:
    PyObject* function_;
};

}  // namespace ddrl::replay
