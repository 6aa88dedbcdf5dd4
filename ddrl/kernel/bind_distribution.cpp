// Python's view of how models travel: codecs, headers of chunks, and the transfers of a plan. Sizes are checked, and
// the GIL is released around work on a model's bytes.
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "bind_arrays.hpp"
#include "codec.hpp"
#include "transfers.hpp"

namespace {

using OptionalBytes = std::optional<ConstBytes>;

void same(size_t given, size_t wanted, const char* what) {
    if (given != wanted)
        throw std::invalid_argument(std::string(what) + ": " + std::to_string(given) + " bytes given, " +
                                    std::to_string(wanted) + " needed");
}

size_t whole_values(size_t bytes) {
    if (bytes % 4) throw std::invalid_argument("float32 values come in whole: bytes must be a multiple of 4");
    return bytes / 4;
}

using Edges = Memory<const int64_t, 1>;

ddrl::Chunks chunks_of(const Bytes& headers, const ConstBytes& data, const Edges& edges) {
    const int64_t* ends = edges.data() + edges.size();
    if (edges.size() < 2 || edges(0) < 0 || !std::is_sorted(edges.data(), ends) ||
        ends[-1] > static_cast<int64_t>(data.size()))
        throw std::invalid_argument("edges of chunks must rise, and end within the data");
    const size_t nbytes = (edges.size() - 1) * sizeof(ddrl::ChunkHeader);
    if (headers.size() < nbytes) throw std::invalid_argument("each chunk needs a header");
    return {raw(headers), headers.size() - nbytes, raw(data), edges.data()};
}

using ddrl::TransfersBase;
using Clock = TransfersBase::Clock;
using Nanoseconds = std::chrono::nanoseconds;
// Longest wait after a wake-up by MPI that moved nothing, since the last move: MPI may have read a part of a message.
constexpr Nanoseconds max_idle{50000000};

using Prepare = std::optional<std::function<std::pair<uint64_t, int64_t>(int)>>;
using Arrived = std::optional<std::function<int64_t(int)>>;

// MPICH names the absence of statuses by the address 1, Open MPI, whose handles are pointers, by 0.
template <class Handle>
std::unique_ptr<TransfersBase> made(const std::vector<uint64_t>& calls, uint64_t comm, ddrl::HostPlan plan,
                                    std::vector<int64_t> bytes, int64_t window, int64_t share, int tags, int posted,
                                    bool noted) {
    ddrl::MpiCalls<Handle> mpi;
    mpi.isend = reinterpret_cast<decltype(mpi.isend)>(calls.at(0));
    mpi.issend = reinterpret_cast<decltype(mpi.issend)>(calls.at(1));
    mpi.irecv = reinterpret_cast<decltype(mpi.irecv)>(calls.at(2));
    mpi.testsome = reinterpret_cast<decltype(mpi.testsome)>(calls.at(3));
    mpi.grequest_start = reinterpret_cast<decltype(mpi.grequest_start)>(calls.at(4));
    mpi.grequest_complete = reinterpret_cast<decltype(mpi.grequest_complete)>(calls.at(5));
    mpi.comm = (Handle)(comm);
    mpi.ignored = reinterpret_cast<void*>(sizeof(Handle) == sizeof(int) ? uintptr_t{1} : uintptr_t{0});
    return std::make_unique<ddrl::Transfers<Handle>>(mpi, std::move(plan), std::move(bytes), window, share, tags,
                                                     posted, noted);
}

}  // namespace

static void bind_codecs(nb::module_& module) {
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
                throw std::invalid_argument("encode_int8: values beyond the tensor's end");
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

static void bind_chunks(nb::module_& module) {
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
                if (index + 1 >= edges.size()) throw std::invalid_argument("there is no such chunk");
            nb::gil_scoped_release release;
            return std::all_of(chunks.begin(), chunks.end(),
                               [&](size_t index) { return model.sound(index, epoch, sequence); });
        },
        "headers"_a, "data"_a, "edges"_a, "chunks"_a, "epoch"_a, "sequence"_a,
        "Whether these chunks are of this model, as the root sent them.");
}

static void bind_transfers(nb::module_& module) {
    nb::class_<TransfersBase>(module, "Transfers",
                              "Moves the messages of one plan on one host; "
                              "used by ddrl.distribution.executor.")
        .def_static(
            "make",
            [](const std::vector<uint64_t>& calls, int handle_bytes, uint64_t comm, std::vector<int> source,
               std::vector<int> target, std::vector<int> first, std::vector<int> count, std::vector<int> outgoing,
               std::vector<int> incoming, int chunks, std::vector<int64_t> nbytes, int64_t window, int64_t share,
               int tags, int posted, bool noted) {
                ddrl::HostPlan plan{std::move(source),
                                    std::move(target),
                                    std::move(first),
                                    std::move(count),
                                    std::move(outgoing),
                                    std::move(incoming),
                                    chunks};
                return (handle_bytes == static_cast<int>(sizeof(int)) ? made<int>
                                                                      : made<void*>)(calls, comm, std::move(plan),
                                                                                     std::move(nbytes), window, share,
                                                                                     tags, posted, noted);
            },
            "calls"_a, "handle_bytes"_a, "comm"_a, "source"_a, "target"_a, "first"_a, "count"_a, "outgoing"_a,
            "incoming"_a, "chunks"_a, "nbytes"_a, "window"_a, "share"_a, "tags"_a, "posted"_a, "noted"_a,
            "Addresses of MPI_Isend, MPI_Issend, MPI_Irecv, MPI_Testsome, MPI_Grequest_start and "
            "MPI_Grequest_complete; "
            "the plan; bytes of each message.")
        .def(
            "open",
            [](TransfersBase& self, int64_t sequence, const std::vector<uint64_t>& sends,
               const std::vector<uint64_t>& receives, bool holds, Prepare prepare, Arrived arrived) {
                self.open(sequence, sends, receives, holds,
                          {prepare ? *prepare : nullptr, arrived ? *arrived : nullptr});
            },
            "sequence"_a, "sends"_a, "receives"_a, "holds"_a, "prepare"_a.none() = nb::none(),
            "arrived"_a.none() = nb::none(), "A version may move from now on, by these datatypes.")
        .def(
            "move",
            [](TransfersBase& self) {
                const bool moved = self.move();
                std::vector<std::pair<int64_t, int>> arrivals;
                for (const auto& arrival : self.take_arrivals())
                    arrivals.emplace_back(arrival.sequence, arrival.message);
                return nb::make_tuple(moved, arrivals, self.take_sent());
            },
            nb::sig("def move(self) -> tuple[bool, list[tuple[int, int]], list[int]]"),
            "Move whatever can be moved: whether anything moved, what has arrived (sequence, message), and versions "
            "all "
            "sent.")
        .def(
            "wait",
            [](TransfersBase& self, int bell, const std::vector<int>& mpi, double seconds) {
                std::vector<pollfd> watched{{bell, POLLIN, 0}};
                for (int descriptor : mpi) watched.push_back({descriptor, POLLIN, 0});
                auto end =
                    Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
                for (bool woken = false;;) {
                    const auto left = std::chrono::duration_cast<Nanoseconds>(end - Clock::now());
                    if (left <= left.zero()) return woken;
                    int ready;
                    {
                        nb::gil_scoped_release release;
                        const timespec time{static_cast<time_t>(left.count() / 1000000000),
                                            static_cast<long>(left.count() % 1000000000)};
                        ready = ppoll(watched.data(), watched.size(), &time, nullptr);
                    }
                    if (ready < 0 && PyErr_CheckSignals() != 0) throw nb::python_error();
                    const bool rung = ready > 0 && watched[0].revents;
                    const bool by_mpi = ready > int{rung};
                    woken = woken || by_mpi;
                    const bool moved = self.move();
                    if (self.due() || rung) return woken;
                    if (by_mpi && !moved) end = std::min(end, std::max(Clock::now(), self.moved_at() + max_idle));
                }
            },
            "bell"_a, "mpi"_a, "seconds"_a,
            "Sleep and move in turn until there is something to fetch, the bell's descriptor can be read, or `seconds` "
            "have "
            "passed; whether MPI's descriptors ended a sleep.")
        .def("give_up", &TransfersBase::give_up, "receives"_a, "Hand over the open requests, receives or sends.")
        .def("forget", &TransfersBase::forget, "sequence"_a, "The version is no longer needed.")
        .def(
            "take_notes",
            [](TransfersBase& self) {
                std::vector<nb::tuple> notes;
                for (const auto& note : self.take_notes())
                    notes.push_back(nb::make_tuple(note.time_ns, note.what, note.sequence, note.message, note.peer));
                return notes;
            },
            nb::sig("def take_notes(self) -> list[tuple[int, int, int, int, int]]"),
            "(ns, 0 handed to MPI, 1 left, 2 arrived, sequence, message, peer) since the last call.")
        .def_prop_ro(
            "totals",
            [](const TransfersBase& self) {
                const auto& totals = self.totals();
                return nb::make_tuple(totals.bytes_sent, totals.bytes_received, totals.messages_sent,
                                      totals.messages_received);
            },
            nb::sig("def totals(self) -> tuple[int, int, int, int]"),
            "Bytes sent and received, messages sent and received.");
}

void bind_distribution(nb::module_& module) {
    bind_codecs(module);
    bind_chunks(module);
    bind_transfers(module);
}
