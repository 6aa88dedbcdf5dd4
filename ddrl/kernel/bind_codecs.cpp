// Python's view of the codecs: bytes in, bytes out, sizes checked, the GIL released.
#include <nanobind/stl/optional.h>

#include "bind_channels.hpp"
#include "codec.hpp"

namespace {

using OptionalBytes = std::optional<ConstBytes>;

void same(size_t given, size_t wanted, const char* what) {
    if (given != wanted)
        throw nb::value_error((std::string(what) + ": " + std::to_string(given) + " bytes given, " + std::to_string(wanted) + " needed").c_str());
}

size_t whole_values(size_t bytes) {
    if (bytes % 4) throw nb::value_error("float32 values come in whole: bytes must be a multiple of 4");
    return bytes / 4;
}

}  // namespace

void bind_codecs(nb::module_& module) {
    module.def("encode_bf16", [](const Bytes& out, const ConstBytes& values) {
        const size_t count = whole_values(values.size());
        same(out.size(), 2 * count, "encode_bf16's out");
        nb::gil_scoped_release release;
        ddrl::encode_bf16(raw(out), raw(values), count);
    }, "out"_a, "values"_a, "float32 values (as bytes) to bfloat16, rounded to nearest even.");
    module.def("decode_bf16", [](const Bytes& values, const ConstBytes& data) {
        const size_t count = whole_values(values.size());
        same(data.size(), 2 * count, "decode_bf16's data");
        nb::gil_scoped_release release;
        ddrl::decode_bf16(raw(values), raw(data), count);
    }, "values"_a, "data"_a, "Back to float32 values.");
    module.def("int8_bytes", &ddrl::int8_bytes, "values"_a, "Bytes that so many float32 values take: one each, and a scale a block.");
    module.def("encode_int8", [](const Bytes& out, const ConstBytes& values) {
        const size_t count = whole_values(values.size());
        same(out.size(), ddrl::int8_bytes(count), "encode_int8's out");
        nb::gil_scoped_release release;
        ddrl::encode_int8(raw(out), raw(values), count);
    }, "out"_a, "values"_a, "float32 values (as bytes) to int8 with a float32 scale a block of 256.");
    module.def("decode_int8", [](const Bytes& values, const ConstBytes& data) {
        const size_t count = whole_values(values.size());
        same(data.size(), ddrl::int8_bytes(count), "decode_int8's data");
        nb::gil_scoped_release release;
        ddrl::decode_int8(raw(values), raw(data), count);
    }, "values"_a, "data"_a, "Back to float32 values.");
    module.def("split_planes", [](const Bytes& out, const ConstBytes& data, const OptionalBytes& base) {
        same(out.size(), data.size(), "split_planes' out");
        if (base) same(base->size(), data.size(), "split_planes' base");
        nb::gil_scoped_release release;
        ddrl::split_planes(raw(out), raw(data), base ? raw(*base) : nullptr, data.size());
    }, "out"_a, "data"_a, "base"_a.none(), "32-bit words of data XOR base, lowest bytes of all words first, highest last.");
    module.def("join_planes", [](const Bytes& out, const ConstBytes& planes, const OptionalBytes& base) {
        same(planes.size(), out.size(), "join_planes' planes");
        if (base) same(base->size(), out.size(), "join_planes' base");
        nb::gil_scoped_release release;
        ddrl::join_planes(raw(out), raw(planes), base ? raw(*base) : nullptr, out.size());
    }, "out"_a, "planes"_a, "base"_a.none(), "What split_planes took apart.");
}
