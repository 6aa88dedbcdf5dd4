// Python's view of the transfers of a plan, and of the outbox that orders them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <poll.h>

#include <chrono>
#include <memory>

#include "transfers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ddrl::Outbox;
using ddrl::TransfersBase;
using Clock = TransfersBase::Clock;
using Nanoseconds = std::chrono::nanoseconds;
// While messages follow each other: after which what MPI has read for others is seen to. It may be a part of a message.
constexpr Nanoseconds others{50000000};

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

void bind_transfers(nb::module_& module) {
    nb::class_<Outbox>(module, "Outbox", "Which of a host's ready messages goes next, within a window of bytes.")
        .def(nb::init<int64_t, int64_t>(), "window"_a, "share"_a)
        .def("add", &Outbox::add, "entry"_a, "target"_a, "A message (sequence, place) may go.")
        .def("take", &Outbox::take, "The next message that has room.")
        .def("asks", &Outbox::asks, "target"_a, "nbytes"_a,
             "Whether this message must end only when it has been taken.")
        .def("copied", &Outbox::copied, "target"_a, "nbytes"_a,
             "A message has gone, and nothing will say when it has been taken.")
        .def("sent", &Outbox::sent, "entry"_a, "target"_a, "nbytes"_a,
             "A message has gone whose end will be known; the bytes that will have been taken then.")
        .def("taken", &Outbox::taken, "entry"_a, "target"_a, "nbytes"_a, "It has been taken, and those bytes with it.");

    nb::class_<TransfersBase>(module, "Transfers",
                              "Moves the messages of one plan on one host; "
                              "ddrl.distribution.executor is its face.")
        .def_static(
            "make",
            [](const std::vector<uint64_t>& calls, int handle_bytes, uint64_t comm, std::vector<int> source,
               std::vector<int> target, std::vector<int> first, std::vector<int> count, std::vector<int> mine,
               std::vector<int> incoming, int chunks, std::vector<int64_t> nbytes, int64_t window, int64_t share,
               int tags, int posted, bool noted) {
                ddrl::HostPlan plan{std::move(source),
                                    std::move(target),
                                    std::move(first),
                                    std::move(count),
                                    std::move(mine),
                                    std::move(incoming),
                                    chunks};
                return (handle_bytes == static_cast<int>(sizeof(int)) ? made<int>
                                                                      : made<void*>)(calls, comm, std::move(plan),
                                                                                     std::move(nbytes), window, share,
                                                                                     tags, posted, noted);
            },
            "calls"_a, "handle_bytes"_a, "comm"_a, "source"_a, "target"_a, "first"_a, "count"_a, "mine"_a, "incoming"_a,
            "chunks"_a, "nbytes"_a, "window"_a, "share"_a, "tags"_a, "posted"_a, "noted"_a,
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
                    const bool rung = ready > 0 && watched[0].revents, told = ready > int{rung};
                    woken = woken || told;
                    const bool moved = self.move();
                    if (self.due() || rung) return woken;
                    if (told && !moved) end = std::min(end, std::max(Clock::now(), self.moved_at() + others));
                }
            },
            "bell"_a, "mpi"_a, "seconds"_a,
            "Sleep and move in turn until there is something to hear of, the bell's descriptor can be read, or "
            "`seconds` "
            "have passed; whether MPI's descriptors ended a sleep.")
        .def("give_up", &TransfersBase::give_up, "receives"_a, "Hand over the requests that stand, receives or sends.")
        .def("forget", &TransfersBase::forget, "sequence"_a, "Nothing of the version is needed any more.")
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
