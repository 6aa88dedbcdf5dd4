// From the column table of Python to the columns of the store, and arrays that must fit them. For bind_replay.cpp
// alone.
#pragma once

#include "bind_arrays.hpp"
#include "replay/store.hpp"

namespace ddrl::replay {

using bind::ColumnEntry;
using bind::Field;
using bind::View;

// Thrown where an array does not fit its column, before anything is recorded: a TypeError of its own, because an
// eviction from outside may raise a TypeError when the record is half made.
struct Misfit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The columns of the store that a table describes.
inline Columns columns_of(const std::vector<ColumnEntry>& table) {
    Columns columns;
    for (const auto& [name, role, offset, bytes, format, shape, stack] : table) {
        if (role > static_cast<unsigned>(Role::REWARD)) throw bind::nb::value_error("a column has no such role");
        columns.push_back({static_cast<u32>(bytes), static_cast<Role>(role), stack});
    }
    return columns;
}

// The bytes of an array that fits its field: `count` rows, or one value where it is -1.
inline const byte* fitted(bind::nb::handle object, View& view, const Field& field, Py_ssize_t count) {
    if (!view.open(object.ptr(), PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) || !view.fits(field, count))
        throw Misfit("an array does not fit");
    return view.data();
}

// A column of one record, as a Python number given in place of an array.
inline bool number(bind::nb::handle object, const Field& field, u64& out) {
    if (!field.shape.empty()) return false;
    const char code = field.format.size() == 1 ? field.format[0] : '?';
    if (code == 'f' && (PyFloat_Check(object.ptr()) || PyLong_CheckExact(object.ptr()))) {
        const float value = static_cast<float>(PyFloat_AsDouble(object.ptr()));
        std::memcpy(&out, &value, sizeof value);
    } else if (field.bytes == 8 && PyLong_CheckExact(object.ptr()) && (code == 'l' || code == 'q')) {
        const long long value = PyLong_AsLongLong(object.ptr());
        std::memcpy(&out, &value, sizeof value);
    } else if (field.bytes == 8 && PyLong_CheckExact(object.ptr()) && (code == 'L' || code == 'Q')) {
        out = PyLong_AsUnsignedLongLong(object.ptr());
    } else {
        return false;
    }
    if (PyErr_Occurred()) throw bind::nb::python_error();
    return true;
}

}  // namespace ddrl::replay
