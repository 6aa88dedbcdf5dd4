// Python's view of the headers of a model's chunks: all of them sealed, or some verified, in one call.
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind_channels.hpp"
#include "chunks.hpp"

namespace {

using Edges = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ddrl::Chunks chunks_of(const Bytes& headers, const ConstBytes& data, const Edges& edges) {
    const int64_t* ends = edges.data() + edges.size();
    if (edges.size() < 2 || edges(0) < 0 || !std::is_sorted(edges.data(), ends) ||
        ends[-1] > static_cast<int64_t>(data.size()))
        throw nb::value_error("edges of chunks must rise, and end within the data");
    const size_t nbytes = (edges.size() - 1) * sizeof(ddrl::ChunkHeader);
    if (headers.size() < nbytes) throw nb::value_error("each chunk needs a header");
    return {raw(headers), headers.size() - nbytes, raw(data), edges.data()};
}

}  // namespace

void bind_chunks(nb::module_& module) {
    module.def(
        "seal_chunks",
        [](const Bytes& headers, const ConstBytes& data, const Edges& edges) {
            auto chunks = chunks_of(headers, data, edges);
            nb::gil_scoped_release release;
            for (size_t index = 0; index + 1 < edges.size(); ++index) chunks.seal(index);
        },
        "headers"_a, "data"_a, "edges"_a, "Lengths and checksums of all chunks of a model.");
    module.def(
        "sound_chunks",
        [](const Bytes& headers, const ConstBytes& data, const Edges& edges, const std::vector<size_t>& chunks,
           uint16_t epoch, uint32_t sequence) {
            const auto model = chunks_of(headers, data, edges);
            for (size_t index : chunks)
                if (index + 1 >= edges.size()) throw nb::value_error("there is no such chunk");
            nb::gil_scoped_release release;
            return std::all_of(chunks.begin(), chunks.end(),
                               [&](size_t index) { return model.sound(index, epoch, sequence); });
        },
        "headers"_a, "data"_a, "edges"_a, "chunks"_a, "epoch"_a, "sequence"_a,
        "Whether these chunks are of this model, as the root sealed them.");
}
