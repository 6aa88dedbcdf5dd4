// Arrays on their way between Python and the replay kernel: buffers that are read in place, and recycled output
// batches. For bind_replay.cpp alone.
#pragma once

#include <nanobind/nanobind.h>

#include <map>
#include <string>
#include <vector>

#include "replay/memory.hpp"

namespace ddrl::replay {

namespace nb = nanobind;

// One column as Python gives it: the buffer format of its dtype, its shape, and its bytes.
struct Field {
    std::string format;
    std::vector<Py_ssize_t> shape;
    std::size_t bytes;
};

// The buffer of an object, held while it is read.
class View {
public:
    View() = default;
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    ~View() { release(); }
    bool open(PyObject* object, int flags) {
        release();
        if (PyObject_GetBuffer(object, &buffer_, flags) != 0) {
            PyErr_Clear();
            return false;
        }
        return held_ = true;
    }
    // Whether it is C-contiguous, of `field`'s dtype, and of `count` (none: a single one) times its shape.
    bool fits(const Field& field, Py_ssize_t count) const {
        const int lead = count >= 0;
        if (buffer_.ndim != static_cast<int>(field.shape.size()) + lead ||
            field.format != (buffer_.format ? buffer_.format : "B"))
            return false;
        if (lead && buffer_.shape[0] != count) return false;
        for (std::size_t axis = 0; axis < field.shape.size(); ++axis)
            if (buffer_.shape[axis + static_cast<std::size_t>(lead)] != field.shape[axis]) return false;
        return true;
    }
    const byte* data() const { return static_cast<const byte*>(buffer_.buf); }
    std::size_t bytes() const { return static_cast<std::size_t>(buffer_.len); }

private:
    void release() {
        if (held_) PyBuffer_Release(&buffer_);
        held_ = false;
    }
    Py_buffer buffer_{};
    bool held_ = false;
};

// Output arrays that Python made, handed out again when nobody else holds them: fresh pages would cost as much as the
// copy into them.
class OutputPool {
public:
    struct Entry {
        nb::object batch;  // a tuple of arrays, None, or dicts of arrays
        std::vector<byte*> data;
    };
    // A batch nobody holds, made by make(size) where there is none. The caller holds the GIL.
    const Entry& take(u32 size, const nb::callable& make) {
        if (const auto found = by_size_.find(size); found != by_size_.end())
            for (Entry& entry : found->second)
                if (unused(entry.batch.ptr())) return entry;
        Entry fresh{make(size), {}};
        each(fresh.batch.ptr(), [&](PyObject* array) {
            if (array == Py_None) return fresh.data.push_back(nullptr);
            View view;
            if (!view.open(array, PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS))
                throw nb::type_error("an output array is not writable and contiguous");
            fresh.data.push_back(const_cast<byte*>(view.data()));
        });
        // Python ran meanwhile, perhaps another thread's call of this: look again.
        if (by_size_.size() >= MOST_SIZES && !by_size_.contains(size))
            by_size_.clear();  // what is held stays its holder's
        std::vector<Entry>& entries = by_size_[size];
        if (entries.size() >= MOST) entries.erase(entries.begin());
        entries.push_back(std::move(fresh));
        return entries.back();
    }
    std::size_t nbytes() const {
        std::size_t bytes = 0;
        for (const auto& [size, entries] : by_size_)
            for (const Entry& entry : entries)
                each(entry.batch.ptr(), [&](PyObject* array) {
                    View view;
                    if (array != Py_None && view.open(array, PyBUF_C_CONTIGUOUS)) bytes += view.bytes();
                });
        return bytes;
    }

private:
    static constexpr std::size_t MOST = 8;  // batches of one size that are remembered; more are simply the caller's
    static constexpr std::size_t MOST_SIZES = 16;
    template <class Visit>
    static void each(PyObject* batch, Visit visit) {
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(batch); ++i) {
            PyObject* item = PyTuple_GET_ITEM(batch, i);
            if (!PyDict_Check(item)) {
                visit(item);
                continue;
            }
            PyObject *key, *value;
            for (Py_ssize_t at = 0; PyDict_Next(item, &at, &key, &value);) visit(value);
        }
    }
    static bool unused(PyObject* batch) {
        if (Py_REFCNT(batch) != 1) return false;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(batch); ++i)
            if (PyObject* item = PyTuple_GET_ITEM(batch, i); item != Py_None && Py_REFCNT(item) != 1) return false;
        bool free = true;
        each(batch, [&](PyObject* array) { free = free && (array == Py_None || Py_REFCNT(array) == 1); });
        return free;
    }
    std::map<u32, std::vector<Entry>> by_size_;
};

}  // namespace ddrl::replay
