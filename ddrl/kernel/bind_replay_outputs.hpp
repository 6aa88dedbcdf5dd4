// Recycled output batches of the replay kernel. For bind_replay.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <vector>

#include "bind_arrays.hpp"
#include "replay/memory.hpp"

namespace ddrl::replay {

namespace nb = nanobind;
using bind::View;

// Output arrays that Python made, handed out again when nobody else holds them: fresh pages would cost as much as the
// copy into them.
class OutputPool {
public:
    struct Entry {
        nb::object batch;  // a tuple of arrays, None, and tuples or dicts of arrays
        std::vector<byte*> data;  // of its arrays, in the kernel's order; null for None
        std::size_t bytes = 0;  // of its arrays
    };
    // A batch nobody holds, made by make(size) -> (batch, its arrays in the kernel's order) where there is none. The
    // caller holds the GIL.
    const Entry& take(u32 size, const nb::callable& make) {
        if (const auto entries = by_size_.find(size); entries != by_size_.end())
            for (Entry& entry : entries->second)
                if (unused(entry.batch.ptr())) return entry;
        Entry fresh;
        {
            const nb::tuple made = nb::cast<nb::tuple>(make(size));
            fresh.batch = nb::borrow(made[0]);
            for (const nb::handle array : nb::cast<nb::tuple>(made[1])) {
                View view;
                if (!array.is_none() && !view.open(array.ptr(), PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS))
                    throw nb::type_error("an output array is not writable and contiguous");
                fresh.data.push_back(array.is_none() ? nullptr : const_cast<byte*>(view.data()));
                if (!array.is_none()) fresh.bytes += view.bytes();
            }
        }
        // Python ran meanwhile, perhaps another thread's call of this: search again.
        if (by_size_.size() >= MAX_SIZES && !by_size_.contains(size))
            by_size_.clear();  // a batch in use stays its user's
        std::vector<Entry>& entries = by_size_[size];
        if (entries.size() >= MAX_BATCHES) entries.erase(entries.begin());
        entries.push_back(std::move(fresh));
        return entries.back();
    }
    std::size_t nbytes() const {
        std::size_t bytes = 0;
        for (const auto& [size, entries] : by_size_)
            for (const Entry& entry : entries) bytes += entry.bytes;
        return bytes;
    }

private:
    static constexpr std::size_t MAX_BATCHES = 8;  // of one size that are reused; further ones are simply the caller's
    static constexpr std::size_t MAX_SIZES = 16;
    // Whether nobody else refers to a batch or to anything in it.
    static bool unused(PyObject* object) {
        if (object == Py_None) return true;
        if (Py_REFCNT(object) != 1) return false;
        if (PyTuple_Check(object))
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i)
                if (!unused(PyTuple_GET_ITEM(object, i))) return false;
        PyObject *key, *array;
        if (PyDict_CheckExact(object))
            for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &array);)
                if (!unused(array)) return false;
        return true;
    }
    std::map<u32, std::vector<Entry>> by_size_;
};

}  // namespace ddrl::replay
