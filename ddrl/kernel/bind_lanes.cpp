// Python's view of doorbells, lanes and the step writer.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bind_channels.hpp"
#include "lane_set.hpp"
#include "ring.hpp"
#include "step_writer.hpp"

namespace {

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Rewards = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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

struct PyRing : ddrl::Ring {
    Bytes memory;
    std::optional<nb::object> bell_owner;

    explicit PyRing(Bytes given) : ddrl::Ring(checked(given, header_bytes, "a ring")), memory(std::move(given)) {
        checked(memory, bytes(capacity(), row_bytes()), "a ring");
    }
    size_t rows_of(size_t nbytes) const {
        if (nbytes % row_bytes() != 0)
            throw nb::value_error((std::to_string(nbytes) + " bytes are no whole number of rows of " +
                                   std::to_string(row_bytes()) + " bytes")
                                      .c_str());
        return nbytes / row_bytes();
    }
    size_t push(const ConstBytes& rows, std::optional<double> timeout) {
        const size_t count = rows_of(rows.size());
        const std::byte* from = raw(rows);
        size_t written = closed() ? 0 : push_fitting_released(from, count, rows.size());
        if (written == count || closed()) return written;
        if (drops()) {
            count_dropped(count - written);
            return written;
        }
        if (timeout && *timeout <= 0) return written;
        count_wait();
        wait_in_slices(timeout, [&](double seconds) {
            if (wait_room(seconds) && !closed()) written += push_fitting(from + written * row_bytes(), count - written);
            return written == count || closed();
        });
        return written;
    }
    size_t pop_into(const Bytes& out) {
        const size_t count = rows_of(out.size());
        if (filled(count) * row_bytes() < release_bytes) return pop(raw(out), count);
        nb::gil_scoped_release release;
        return pop(raw(out), count);
    }

private:
    static constexpr size_t release_bytes = 1 << 14;  // below this a copy is cheaper than letting the GIL go

    size_t push_fitting_released(const std::byte* from, size_t count, size_t nbytes) {
        if (nbytes < release_bytes) return push_fitting(from, count);
        nb::gil_scoped_release release;
        return push_fitting(from, count);
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

struct ArrayForm {  // dtype and shape of one array without its leading N
    nb::dlpack::dtype dtype;
    std::vector<size_t> shape;

    explicit ArrayForm(const AnyArray& prototype) : dtype(prototype.dtype()) {
        for (size_t i = 1; i < prototype.ndim(); ++i) shape.push_back(prototype.shape(i));
    }
    size_t bytes() const {
        size_t count = dtype.bits / 8;
        for (const size_t extent : shape) count *= extent;
        return count;
    }
    const std::byte* check(const AnyArray& array, size_t num_envs, const char* name) const {
        bool fits = array.dtype() == dtype && array.ndim() == shape.size() + 1 && array.shape(0) == num_envs;
        for (size_t i = 0; fits && i < shape.size(); ++i) fits = array.shape(i + 1) == shape[i];
        if (fits) return static_cast<const std::byte*>(array.data());
        std::string words = std::string("StepWriter.write: ") + name +
                            " must be a C-contiguous array of the environment's dtype with shape [" +
                            std::to_string(num_envs);
        for (const size_t extent : shape) words += ", " + std::to_string(extent);
        words += "], got shape [";
        for (size_t i = 0; i < array.ndim(); ++i) words += (i ? ", " : "") + std::to_string(array.shape(i));
        throw nb::type_error((words + "]" + (array.dtype() == dtype ? "" : " of another dtype")).c_str());
    }
};

struct PyStepWriter : ddrl::StepWriter {
    nb::object ring_owner;
    ArrayForm state_form, action_form;

    static ddrl::RowFormat format_of(size_t row_bytes, const std::array<size_t, 7>& offsets, size_t frame_bytes,
                                     const AnyArray& state, const AnyArray& action) {
        return {row_bytes,
                offsets[0],
                offsets[1],
                offsets[2],
                offsets[3],
                offsets[4],
                offsets[5],
                offsets[6],
                ArrayForm(action).bytes(),
                frame_bytes,
                ArrayForm(state).bytes()};
    }
    PyStepWriter(nb::object ring, size_t row_bytes, const std::array<size_t, 7>& offsets, size_t frame_bytes,
                 const AnyArray& state, const AnyArray& action, uint32_t first_stream)
        : ddrl::StepWriter(nb::cast<PyRing*>(ring), format_of(row_bytes, offsets, frame_bytes, state, action),
                           first_stream),
          ring_owner(std::move(ring)),
          state_form(state),
          action_form(action) {
        if (nb::cast<PyRing*>(ring_owner)->row_bytes() != row_bytes)
            throw nb::value_error(("the lane's rows have " +
                                   std::to_string(nb::cast<PyRing*>(ring_owner)->row_bytes()) +
                                   " bytes, this environment's have " + std::to_string(row_bytes))
                                      .c_str());
    }
    size_t write(const AnyArray& state, const AnyArray& action, const Rewards& reward, const Flags& terminated,
                 const Flags& truncated, const AnyArray& next_state, uint64_t policy_version,
                 std::optional<double> timeout) {
        const size_t count = num_envs() ? num_envs() : reward.size();
        if (reward.size() != count || terminated.size() != count || truncated.size() != count)
            throw nb::type_error(
                ("StepWriter.write: reward, terminated and truncated must have shape [" + std::to_string(count) + "]")
                    .c_str());
        const std::byte* from = state_form.check(state, count, "state");
        const std::byte* chosen = action_form.check(action, count, "action");
        const std::byte* to = state_form.check(next_state, count, "next_state");
        if (pending() != 0)
            throw nb::value_error(
                "StepWriter.write: rows of the step before still wait for room; call flush() until it is True");
        if (num_envs() == 0) start(count);
        const size_t rows = ddrl::StepWriter::write(from, chosen, reward.data(), terminated.data(), truncated.data(),
                                                    to, policy_version);
        if (pending() != 0) flush_waiting(timeout);
        return rows;
    }
    bool flush_waiting(std::optional<double> timeout) {
        if (flush()) return true;
        if (timeout && *timeout <= 0) return false;
        ring().count_wait();
        return wait_in_slices(timeout, [&](double seconds) { return ring().wait_room(seconds) && flush(); });
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

    nb::class_<PyStepWriter>(module, "StepWriter", "Turns vector steps into rows of a ring.")
        .def(nb::init<nb::object, size_t, const std::array<size_t, 7>&, size_t, const AnyArray&, const AnyArray&,
                      uint32_t>(),
             "ring"_a, "row_nbytes"_a, "offsets"_a, "frame_nbytes"_a, "state"_a, "action"_a, "first_stream"_a)
        .def("write", &PyStepWriter::write, "state"_a, "action"_a, "reward"_a, "terminated"_a, "truncated"_a,
             "next_state"_a, "policy_version"_a, "timeout"_a.none() = nb::none(),
             "Record one vector step; returns the rows made. Waits for room at most `timeout` [s] (None: for ever).")
        .def("flush", &PyStepWriter::flush_waiting, "timeout"_a.none() = nb::none(),
             "Move waiting rows to the ring; True: none is left.")
        .def("cut", &ddrl::StepWriter::cut, "Forget the running episodes; call it when the environments are reset.")
        .def_prop_ro("pending", &ddrl::StepWriter::pending);
}
