// Python's view of the codecs: bytes in, bytes out, sizes checked, the GIL released.
#include <nanobind/stl/optional.h>

#include "bind_channels.hpp"
#include "codec.hpp"

namespace {

using OptionalBytes = std::optional<ConstBytes>;

void same(size_t given, size_t wanted, const char* what) {
    if (given != wanted)
        throw nb::value_error(
            (std::string(what) + ": " + std::to_string(given) + " bytes given, " + std::to_string(wanted) + " needed")
                .c_str());
}

size_t whole_values(size_t bytes) {
    if (bytes % 4) throw nb::value_error("float32 values come in whole: bytes must be a multiple of 4");
    return bytes / 4;
}

}  // namespace

void bind_codecs(nb::module_& module) {
    module.def(
        "encode_bf16",
        [](const Bytes& out, const ConstBytes& values) {
            const size_t count = whole_values(values.size());
            same(out.size(), 2 * count, "encode_bf16's out");
            nb::gil_scoped_release release;
            ddrl::encode_bf16(raw(out), raw(values), count);
        },
        "out"_a, "values"_a, "float32 values (as bytes) to bfloat16, rounded to nearest even.");
    module.def(
        "decode_bf16",
        [](const Bytes& values, const ConstBytes& data) {
            const size_t count = whole_values(values.size());
            same(data.size(), 2 * count, "decode_bf16's data");
            nb::gil_scoped_release release;
            ddrl::decode_bf16(raw(values), raw(data), count);
        },
        "values"_a, "data"_a, "Back to float32 values.");
    module.def("int8_bytes", &ddrl::int8_bytes, "first"_a, "count"_a,
               "Bytes of values first .. first + count of a tensor as int8 with their scales.");
    module.def(
        "encode_int8",
        [](const Bytes& out, const ConstBytes& tensor, size_t first, size_t count) {
            const size_t values = whole_values(tensor.size());
            if (first > values || count > values - first)
                throw nb::value_error("encode_int8: values beyond the tensor's end");
            same(out.size(), ddrl::int8_bytes(first, count), "encode_int8's out");
            nb::gil_scoped_release release;
            ddrl::encode_int8(raw(out), raw(tensor), values, first, count);
        },
        "out"_a, "tensor"_a, "first"_a, "count"_a,
        "Some float32 values of a tensor (as bytes) to int8 with a float32 scale for 256 of them.");
    module.def(
        "decode_int8",
        [](const Bytes& values, const ConstBytes& data, size_t first) {
            const size_t count = whole_values(values.size());
            same(data.size(), ddrl::int8_bytes(first, count), "decode_int8's data");
            nb::gil_scoped_release release;
            ddrl::decode_int8(raw(values), raw(data), first, count);
        },
        "values"_a, "data"_a, "first"_a, "Back to float32 values, the tensor's from `first` on.");
    module.def(
        "split_planes",
        [](const Bytes& out, const ConstBytes& data, const OptionalBytes& base) {
            same(out.size(), data.size(), "split_planes' out");
            if (base) same(base->size(), data.size(), "split_planes' base");
            nb::gil_scoped_release release;
            ddrl::split_planes(raw(out), raw(data), base ? raw(*base) : nullptr, data.size());
        },
        "out"_a, "data"_a, "base"_a.none(),
        "32-bit words of data XOR base, lowest bytes of all words first, highest last.");
    module.def(
        "join_planes",
        [](const Bytes& out, const ConstBytes& planes, const OptionalBytes& base) {
            same(planes.size(), out.size(), "join_planes' planes");
            if (base) same(base->size(), out.size(), "join_planes' base");
            nb::gil_scoped_release release;
            ddrl::join_planes(raw(out), raw(planes), base ? raw(*base) : nullptr, out.size());
        },
        "out"_a, "planes"_a, "base"_a.none(), "What split_planes took apart.");
}
