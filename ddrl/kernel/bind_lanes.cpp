// Python's view of doorbells and lanes.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind_lanes.hpp"
#include "lane_set.hpp"

namespace {

struct PyDoorbell {
    Bytes memory;
    ddrl::Doorbell* bell;

    PyDoorbell(Bytes given, bool initialize) : memory(std::move(given)) {
        std::byte* at = checked(memory, sizeof(ddrl::Doorbell), "a doorbell");
        bell = initialize ? new (at) ddrl::Doorbell : reinterpret_cast<ddrl::Doorbell*>(at);
    }
    uint32_t value() const { return bell->value.load(std::memory_order_acquire); }
    uint32_t wait(uint32_t seen, std::optional<double> timeout) {
        wait_in_slices(timeout,
                       [&](double seconds) { return bell->wait_until([&] { return value() != seen; }, seconds); });
        return value();
    }
    bool wait_at_least(uint32_t target, std::optional<double> timeout) {
        return wait_in_slices(
            timeout, [&](double seconds) { return bell->wait_until([&] { return value() >= target; }, seconds); });
    }
};

struct PyLaneSet : ddrl::LaneSet {
    std::vector<nb::object> owners;

    static std::vector<ddrl::Ring*> rings_of(const std::vector<nb::object>& objects) {
        std::vector<ddrl::Ring*> rings;
        for (const nb::object& object : objects) rings.push_back(nb::cast<PyRing*>(object));
        for (const ddrl::Ring* ring : rings) {
            if (ring->row_bytes() != rings[0]->row_bytes())
                throw nb::value_error("the lanes of a set must have rows of one size");
        }
        return rings;
    }
    explicit PyLaneSet(std::vector<nb::object> objects)
        : ddrl::LaneSet(rings_of(objects)), owners(std::move(objects)) {}

    size_t drain_into(const Bytes& out) {
        if (owners.empty()) return 0;
        const size_t count = nb::cast<PyRing*>(owners[0])->rows_of(out.size());
        nb::gil_scoped_release release;
        return drain(raw(out), count);
    }
};

}  // namespace

void bind_lanes(nb::module_& module) {
    nb::class_<PyDoorbell>(module, "Doorbell", "64 bytes of shared memory that processes ring and wait on (futex).")
        .def(nb::init<Bytes, bool>(), "memory"_a, "initialize"_a = false,
             "View of 64 aligned bytes; `initialize` makes a fresh one of value 0.")
        .def(
            "ring", [](PyDoorbell& self) { self.bell->ring(); },
            "Add 1 to the value (modulo 2**32) and wake all who wait.")
        .def(
            "set", [](PyDoorbell& self, uint32_t value) { self.bell->set(value); }, "value"_a,
            "Store the value and wake all who wait.")
        .def_prop_ro("value", &PyDoorbell::value)
        .def("wait", &PyDoorbell::wait, "seen"_a, "timeout"_a.none(),
             "Wait until the value differs from `seen`, at most `timeout` [s] (None: for ever); returns the value.")
        .def("wait_at_least", &PyDoorbell::wait_at_least, "target"_a, "timeout"_a.none(),
             "Wait until the value is at least `target`; returns whether it is.");

    nb::class_<PyRing>(module, "Ring",
                       "Single-producer single-consumer ring of fixed-size rows in memory of the caller.")
        .def(nb::init<Bytes>(), "memory"_a, "View of a ring that `initialize` made.")
        .def_static("nbytes", &ddrl::Ring::bytes, "capacity"_a, "row_nbytes"_a, "Memory that a ring takes [bytes].")
        .def_static(
            "initialize",
            [](const Bytes& memory, size_t capacity, size_t row_nbytes, bool drop) {
                ddrl::Ring::initialize(checked(memory, ddrl::Ring::bytes(capacity, row_nbytes), "a ring"), capacity,
                                       row_nbytes, drop);
            },
            "memory"_a, "capacity"_a, "row_nbytes"_a, "drop"_a, "Make a fresh ring; `drop`: a full one drops new rows.")
        .def("push", &PyRing::push, "rows"_a, "timeout"_a.none() = nb::none(),
             "Append rows; waits for room at most `timeout` [s] (None: for ever) unless the ring drops. Returns rows "
             "written.")
        .def("pop", &PyRing::pop_into, "out"_a, "Move the oldest rows to `out`; returns how many.")
        .def("close", &ddrl::Ring::close, "End all waiting, now and later.")
        .def(
            "set_bell",
            [](PyRing& self, std::optional<nb::object> bell) {
                self.set_bell(bell ? nb::cast<PyDoorbell*>(*bell)->bell : nullptr);
                self.bell_owner = std::move(bell);
            },
            "bell"_a.none(), "Ring this doorbell after each push; None: none.")
        .def_prop_ro("size", &ddrl::Ring::size)
        .def_prop_ro("capacity", &ddrl::Ring::capacity)
        .def_prop_ro("row_nbytes", &ddrl::Ring::row_bytes)
        .def_prop_ro("drops", &ddrl::Ring::drops)
        .def_prop_ro("closed", &ddrl::Ring::closed)
        .def_prop_ro("pushed", &ddrl::Ring::pushed)
        .def_prop_ro("popped", &ddrl::Ring::popped)
        .def_prop_ro("dropped", &ddrl::Ring::dropped)
        .def_prop_ro("waits", &ddrl::Ring::waits)
        .def_prop_ro("wait_seconds", &ddrl::Ring::wait_seconds);

    nb::class_<PyLaneSet>(module, "LaneSet", "Rings drained fairly by one consumer.")
        .def(nb::init<std::vector<nb::object>>(), "rings"_a)
        .def("drain", &PyLaneSet::drain_into, "out"_a, "Move rows of all rings to `out`; returns how many.")
        .def_prop_ro("pending", &ddrl::LaneSet::pending);
}
