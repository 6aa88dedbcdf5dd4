// Arrays that Python hands to the kernel: buffers that are read in place, of a known dtype and shape.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

namespace nb = nanobind;
using namespace nb::literals;

template <class T, size_t Axes>
using Memory = nb::ndarray<T, nb::ndim<Axes>, nb::c_contig, nb::device::cpu>;
using Bytes = Memory<uint8_t, 1>;
using ConstBytes = Memory<const uint8_t, 1>;

inline std::byte* raw(const Bytes& memory) { return reinterpret_cast<std::byte*>(memory.data()); }
inline const std::byte* raw(const ConstBytes& memory) { return reinterpret_cast<const std::byte*>(memory.data()); }

namespace ddrl::bind {

using std::byte;

// One column as Python gives it: the buffer format of its dtype, its shape, and its bytes.
struct Field {
    std::string format;
    std::vector<Py_ssize_t> shape;
    size_t bytes;
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
        return open_ = true;
    }
    // Whether it is C-contiguous, of `field`'s dtype, and of `count` (none: a single one) times its shape.
    bool fits(const Field& field, Py_ssize_t count) const {
        const int lead = count >= 0;
        if (buffer_.ndim != static_cast<int>(field.shape.size()) + lead ||
            !same_format(field.format.c_str(), buffer_.format ? buffer_.format : "B"))
            return false;
        if (lead && buffer_.shape[0] != count) return false;
        for (size_t axis = 0; axis < field.shape.size(); ++axis)
            if (buffer_.shape[axis + static_cast<size_t>(lead)] != field.shape[axis]) return false;
        return true;
    }
    const byte* data() const { return static_cast<const byte*>(buffer_.buf); }
    size_t bytes() const { return buffer_.len; }

    // Its shape as "[2, 3]".
    std::string shape() const {
        std::string words = "[";
        for (int axis = 0; axis < buffer_.ndim; ++axis)
            words += (axis ? ", " : "") + std::to_string(buffer_.shape[axis]);
        return words + "]";
    }
    bool of_format(const std::string& format) const {
        return same_format(format.c_str(), buffer_.format ? buffer_.format : "B");
    }

private:
    // Whether two formats name one dtype. long and long long are one type of 8 bytes, and a record's numbers are marked
    // as not aligned ('=', '^') or not, as its place in memory has it.
    static bool same_format(const char* one, const char* other) {
        if (std::strcmp(one, other) == 0) return true;
        const auto next = [](const char*& at) -> char {
            while (*at == '=' || *at == '^' || *at == '@') ++at;
            const char code = *at;
            if (code) ++at;
            return code;
        };
        const bool record = *one == 'T';
        for (;;) {
            char a = next(one), b = next(other);
            if (!record) a = a == 'l' ? 'q' : a == 'L' ? 'Q' : a, b = b == 'l' ? 'q' : b == 'L' ? 'Q' : b;
            if (a != b) return false;
            if (!a) return true;
        }
    }
    void release() {
        if (open_) PyBuffer_Release(&buffer_);
        open_ = false;
    }
    Py_buffer buffer_;  // set where open_
    bool open_ = false;
};

// So many views: a few without an allocation, for calls that take less than a microsecond.
class Views {
public:
    explicit Views(size_t count) : many_(count > FEW ? new View[count] : nullptr) {}
    View* begin() { return many_ ? many_.get() : few_; }

private:
    static constexpr size_t FEW = 8;
    View few_[FEW];
    std::unique_ptr<View[]> many_;
};

// A column of rows as ddrl.core.rows.RowSchema.table lists it: name, role, offset in a row, bytes, format, shape,
// stack.
using ColumnEntry = std::tuple<std::string, unsigned, size_t, size_t, std::string, std::vector<Py_ssize_t>, unsigned>;

inline Field field_of(const ColumnEntry& entry) { return {std::get<4>(entry), std::get<5>(entry), std::get<3>(entry)}; }

inline const ColumnEntry& column_named(const std::vector<ColumnEntry>& table, const char* name) {
    for (const ColumnEntry& entry : table)
        if (std::get<0>(entry) == name) return entry;
    throw nb::value_error((std::string("a row needs the column ") + name).c_str());
}

}  // namespace ddrl::bind
