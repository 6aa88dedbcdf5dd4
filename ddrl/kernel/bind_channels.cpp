// Python's view of what processes of a host share: doorbells, lanes, step writers, mailboxes, counters and mapped
// memory. Every object works in memory that numpy holds, and keeps that memory alive. The GIL is released while a call
// waits or moves much; signals are checked several times a second while it waits.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.hpp"
#include "checksum.hpp"
#include "mailbox.hpp"
#include "ring.hpp"
#include "shared_memory.hpp"
#include "step_writer.hpp"

namespace {

std::byte* checked(const Bytes& memory, size_t needed, const char* what) {
    if (memory.size() < needed)
        throw std::invalid_argument(std::string(what) + " needs " + std::to_string(needed) + " bytes, the memory has " +
                                    std::to_string(memory.size()));
    if (reinterpret_cast<uintptr_t>(memory.data()) % 64 != 0)
        throw std::invalid_argument(std::string(what) + " needs memory aligned to 64 bytes");
    return raw(memory);
}

// Repeat attempt(seconds) without the GIL until it returns true, `timeout` (none: no limit) has passed, or the handler
// of a signal raises.
template <class Attempt>
bool wait_in_slices(std::optional<double> timeout, Attempt attempt) {
    constexpr double slice = 0.2;
    const auto begin = ddrl::Clock::now();
    for (;;) {
        const double passed = std::chrono::duration<double>(ddrl::Clock::now() - begin).count();
        const double left = timeout ? *timeout - passed : slice;
        bool done;
        {
            nb::gil_scoped_release release;
            done = attempt(left < slice ? left : slice);
        }
        if (done) return true;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (timeout && std::chrono::duration<double>(ddrl::Clock::now() - begin).count() >= *timeout) return false;
    }
}

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
            throw std::invalid_argument(std::to_string(nbytes) + " bytes are no whole number of rows of " +
                                        std::to_string(row_bytes()) + " bytes");
        return nbytes / row_bytes();
    }
    size_t push(const ConstBytes& rows, std::optional<double> timeout) {
        const size_t count = rows_of(rows.size());
        const std::byte* from = raw(rows);
        size_t written = closed() ? 0 : push_fitting_released(from, count, rows.size());
        if (written == count || closed() || (timeout && *timeout <= 0)) return written;
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
    static constexpr size_t release_bytes = 1 << 14;  // below this a copy takes less time than releasing the GIL

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
                throw std::invalid_argument("the lanes of a set must have rows of one size");
        }
        return rings;
    }
    PyLaneSet(std::vector<nb::object> objects, const std::vector<size_t>& streams)
        : ddrl::LaneSet(rings_of(objects), streams), owners(std::move(objects)) {}

    size_t drain_into(const Bytes& out) {
        if (owners.empty()) return 0;
        const size_t count = nb::cast<PyRing*>(owners[0])->rows_of(out.size());
        nb::gil_scoped_release release;
        return drain(raw(out), count);
    }
};

using ddrl::bind::column_named;
using ddrl::bind::ColumnEntry;
using ddrl::bind::Field;
using ddrl::bind::field_of;
using ddrl::bind::View;
using Form = std::pair<std::string, std::vector<Py_ssize_t>>;  // buffer format and shape of one array, without N

constexpr unsigned STATE = 0;  // ColumnRole

// An array of a further column, beside those that every row has.
struct Further {
    nb::str name;
    Field field;
    size_t place;  // in the arrays of VectorStep, next_columns behind columns
};

struct PyStepWriter : ddrl::StepWriter {
    static constexpr size_t FEW = 6;  // arrays that every vector step has
    nb::object ring_owner;
    Field observation, action, reward, flag{"?", {}, 1};
    std::vector<Further> further;
    size_t further_columns = 0;
    std::string env_id;

    static bool is_observation(const std::string& name) { return name == "state" || name.starts_with("state."); }
    static bool is_standard(const std::string& name) {
        for (const char* known : {"policy_version", "stream", "step", "kind", "reward", "action"})
            if (name == known) return true;
        return is_observation(name);
    }
    static ddrl::Place place_of(const ColumnEntry& entry) { return {std::get<2>(entry), std::get<3>(entry)}; }

    static ddrl::RowFormat format_of(size_t row_bytes, const std::vector<ColumnEntry>& table, size_t stack) {
        ddrl::RowFormat format{};
        format.row_bytes = row_bytes;
        format.policy_version = std::get<2>(column_named(table, "policy_version"));
        format.stream = std::get<2>(column_named(table, "stream"));
        format.step = std::get<2>(column_named(table, "step"));
        format.kind = std::get<2>(column_named(table, "kind"));
        format.reward = place_of(column_named(table, "reward"));
        format.action = place_of(column_named(table, "action"));
        for (const ColumnEntry& entry : table) {
            const auto& [name, role, offset, bytes, code, shape, frames] = entry;
            if (!is_observation(name)) {
                if (!is_standard(name)) format.columns.push_back({place_of(entry), role == STATE});
                continue;
            }
            if (format.state.bytes == 0) format.state.offset = offset;
            const size_t width = code == "f" ? 4 : code == "d" ? 8 : code == "e" ? 2 : 0;
            if (width) format.floats.push_back({offset - format.state.offset, bytes / width, width});
            format.state.bytes = offset + bytes - format.state.offset;
        }
        format.observation_bytes = format.state.bytes * stack;
        return format;
    }

    PyStepWriter(nb::object ring, size_t row_bytes, const std::vector<ColumnEntry>& table, const Form& observations,
                 size_t stack, uint32_t first_stream, std::string id, bool drop_nonfinite, uint32_t first_step)
        : ddrl::StepWriter(nb::cast<PyRing*>(ring), format_of(row_bytes, table, stack), first_stream, drop_nonfinite,
                           first_step),
          ring_owner(std::move(ring)),
          observation{observations.first, observations.second, 0},
          action(field_of(column_named(table, "action"))),
          reward(field_of(column_named(table, "reward"))),
          env_id(std::move(id)) {
        if (nb::cast<PyRing*>(ring_owner)->row_bytes() != row_bytes)
            throw std::invalid_argument("the lane's rows have " +
                                        std::to_string(nb::cast<PyRing*>(ring_owner)->row_bytes()) +
                                        " bytes, this environment's have " + std::to_string(row_bytes));
        for (const ColumnEntry& entry : table) further_columns += !is_standard(std::get<0>(entry));
        size_t column = 0;
        for (const ColumnEntry& entry : table) {
            const std::string& name = std::get<0>(entry);
            if (is_standard(name)) continue;
            further.push_back({nb::str(name.c_str()), field_of(entry), column});
            if (std::get<1>(entry) == STATE)
                further.push_back({nb::str((name + "_next").c_str()), field_of(entry), further_columns + column});
            ++column;
        }
    }

    size_t write(nb::handle state, nb::handle actions, nb::handle rewards, nb::handle terminated, nb::handle truncated,
                 nb::handle next_state, uint64_t policy_version, nb::handle columns, std::optional<double> timeout) {
        View views[FEW];
        if (num_envs() == 0) {
            if (!views[3].open(terminated.ptr(), PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) || !views[3].bytes())
                throw nb::type_error("StepWriter.write: terminated must be a bool array [N], N at least 1");
        }
        const size_t count = num_envs() ? num_envs() : views[3].bytes();
        ddrl::VectorStep given{};
        given.state = read(state, views[0], observation, count, "state");
        given.action = read(actions, views[1], action, count, "action");
        given.reward = read(rewards, views[2], reward, count, "reward");
        given.terminated = reinterpret_cast<const bool*>(read(terminated, views[3], flag, count, "terminated"));
        given.truncated = reinterpret_cast<const bool*>(read(truncated, views[4], flag, count, "truncated"));
        given.next_state = read(next_state, views[5], observation, count, "next_state");
        given.policy_version = policy_version;
        std::vector<View> further_views(further.size());
        std::vector<const std::byte*> data(2 * further_columns);
        read_further(columns, further_views, data, count);
        given.columns = data.data();
        given.next_columns = data.data() + further_columns;
        if (pending() != 0)
            throw std::invalid_argument(
                "StepWriter.write: rows of the step before still wait for room; call flush() until it is True");
        if (num_envs() == 0) start(count);
        size_t rows;
        try {
            rows = ddrl::StepWriter::write(given);
        } catch (const ddrl::NonFiniteValue& value) {
            refuse(value);
        }
        if (pending() != 0) flush_waiting(timeout);
        return rows;
    }
    bool flush_waiting(std::optional<double> timeout) {
        if (flush()) return true;
        if (timeout && *timeout <= 0) return false;
        ring().count_wait();
        return wait_in_slices(timeout, [&](double seconds) { return ring().wait_room(seconds) && flush(); });
    }

private:
    static const std::byte* read(nb::handle array, View& view, const Field& field, size_t count, const char* name) {
        const bool opened = view.open(array.ptr(), PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
        if (opened && view.fits(field, static_cast<Py_ssize_t>(count))) return view.data();
        std::string words = std::string("StepWriter.write: ") + name +
                            " must be a C-contiguous array of the environment's dtype with shape [" +
                            std::to_string(count);
        for (const Py_ssize_t extent : field.shape) words += ", " + std::to_string(extent);
        words += opened ? "], got shape " + view.shape() + (view.of_format(field.format) ? "" : " of another dtype")
                        : std::string("], got ") + nb::type_name(array.type()).c_str();
        throw nb::type_error(words.c_str());
    }
    void read_further(nb::handle columns, std::vector<View>& views, std::vector<const std::byte*>& data, size_t count) {
        if (columns.is_none() && further.empty()) return;
        const nb::object type = nb::borrow(reinterpret_cast<PyObject*>(&PyDict_Type));
        const nb::dict given = nb::cast<nb::dict>(columns.is_none()             ? type()
                                                  : PyDict_Check(columns.ptr()) ? nb::borrow(columns)
                                                                                : type(columns));
        for (size_t i = 0; i < further.size(); ++i) {
            const Further& column = further[i];
            PyObject* value = PyDict_GetItem(given.ptr(), column.name.ptr());
            if (!value) refuse_columns("columns lacks " + std::string(column.name.c_str()) + "; rows have ");
            data[column.place] = read(value, views[i], column.field, count, column.name.c_str());
        }
        if (given.size() == further.size()) return;
        for (const auto& [name, value] : given) {
            const auto is_name = [&](const Further& column) { return name.equal(column.name); };
            if (std::none_of(further.begin(), further.end(), is_name))
                refuse_columns("rows have no further column " + std::string(nb::repr(name).c_str()) + "; they have ");
        }
    }
    [[noreturn]] void refuse_columns(const std::string& what) const {
        std::string names;
        for (const Further& column : further) names += (names.empty() ? "" : ", ") + std::string(column.name.c_str());
        throw nb::type_error(("StepWriter.write: " + what + (names.empty() ? "none" : names)).c_str());
    }
    [[noreturn]] void refuse(const ddrl::NonFiniteValue& value) const {
        const std::string words = "env.id = " + env_id + ": environment " + std::to_string(value.env) + " gave a " +
                                  value.what + " that is NaN or infinite at step " + std::to_string(value.step) +
                                  " of its episode; mend the environment, or set env.nonfinite = \"drop\"";
        const nb::object kind = nb::module_::import_("ddrl.core.errors").attr("EnvError");
        PyErr_SetString(kind.ptr(), words.c_str());
        throw nb::python_error();
    }
};

using Table = Memory<double, 2>;
using ConstTable = Memory<const double, 2>;

struct PyMailbox : ddrl::Mailbox {
    Bytes memory;

    explicit PyMailbox(Bytes given)
        : ddrl::Mailbox(checked(given, sizeof(ddrl::MailboxHeader), "a mailbox")), memory(std::move(given)) {
        checked(memory, bytes(slots(), readers(), data_bytes()), "a mailbox");
    }
    int64_t wait_newer_sliced(int64_t version, std::optional<double> timeout) {
        wait_in_slices(timeout, [&](double seconds) { return wait_newer(version, seconds) > version; });
        return newest_version();
    }
};

struct Counter {
    Table memory;
    double* value;

    Counter(Table table, size_t row, size_t column) : memory(std::move(table)) {
        if (row >= memory.shape(0) || column >= memory.shape(1))
            throw std::out_of_range("no such counter in the table");
        value = memory.data() + row * memory.shape(1) + column;
    }
};

}  // namespace

static void bind_lanes(nb::module_& module) {
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
            [](const Bytes& memory, size_t capacity, size_t row_nbytes) {
                ddrl::Ring::initialize(checked(memory, ddrl::Ring::bytes(capacity, row_nbytes), "a ring"), capacity,
                                       row_nbytes);
            },
            "memory"_a, "capacity"_a, "row_nbytes"_a, "Make a fresh ring.")
        .def("push", &PyRing::push, "rows"_a, "timeout"_a.none() = nb::none(),
             "Append rows; waits for room at most `timeout` [s] (None: for ever). Returns rows written.")
        .def("pop", &PyRing::pop_into, "out"_a, "Move the oldest rows to `out`; returns how many.")
        .def("close", &ddrl::Ring::close, "End all waiting, now and later.")
        .def("hand_over", &ddrl::Ring::hand_over,
             "The producer's process has ended: make the ring ready for the next one. False: the ring was damaged.")
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
        .def_prop_ro("closed", &ddrl::Ring::closed)
        .def_prop_ro("pushed", &ddrl::Ring::pushed)
        .def_prop_ro("popped", &ddrl::Ring::popped)
        .def_prop_ro("waits", &ddrl::Ring::waits)
        .def_prop_ro("wait_seconds", &ddrl::Ring::wait_seconds);

    nb::class_<PyLaneSet>(module, "LaneSet", "Rings drained by one consumer.")
        .def(nb::init<std::vector<nb::object>, std::vector<size_t>>(), "rings"_a, "streams"_a)
        .def("drain", &PyLaneSet::drain_into, "out"_a, "Move rows of all rings to `out`; returns how many.")
        .def_prop_ro("pending", &ddrl::LaneSet::pending);
}

static void bind_step_writer(nb::module_& module) {
    nb::class_<PyStepWriter>(module, "StepWriter", "Turns vector steps into rows of a ring.")
        .def(nb::init<nb::object, size_t, const std::vector<ColumnEntry>&, const Form&, size_t, uint32_t, std::string,
                      bool, uint32_t>(),
             nb::kw_only(), "ring"_a, "row_nbytes"_a, "table"_a, "observation"_a, "stack"_a, "first_stream"_a,
             "env_id"_a, "drop_nonfinite"_a, "first_step"_a = 0)
        .def("write", &PyStepWriter::write, "state"_a, "action"_a, "reward"_a, "terminated"_a, "truncated"_a,
             "next_state"_a, "policy_version"_a, "columns"_a.none() = nb::none(), "timeout"_a.none() = nb::none(),
             nb::sig("def write(self, state: object, action: object, reward: object, terminated: object, truncated: "
                     "object, next_state: object, policy_version: int, columns: typing.Mapping[str, typing.Any] | None "
                     "= None, timeout: float | None = None) -> int"),
             "Record one vector step; returns the rows made. Waits for room at most `timeout` [s] (None: for ever).")
        .def("flush", &PyStepWriter::flush_waiting, "timeout"_a.none() = nb::none(),
             "Move waiting rows to the ring; True: none is left.")
        .def("cut", &ddrl::StepWriter::cut, "Drop the running episodes; call it when the environments are reset.")
        .def_prop_ro("pending", &ddrl::StepWriter::pending)
        .def_prop_ro("nonfinite", &ddrl::StepWriter::nonfinite_rows,
                     "Rows dropped because a reward or state was NaN or infinite.");
}

void bind_channels(nb::module_& module) {
    module.def(
        "map_memory",
        [](int descriptor, size_t nbytes) {
            ddrl::Mapping* mapping = nullptr;
            try {
                mapping = new ddrl::Mapping(descriptor, nbytes);
            } catch (const std::system_error& error) {
                errno = error.code().value();
                PyErr_SetFromErrno(PyExc_OSError);
                throw nb::python_error();
            }
            nb::capsule owner(mapping, [](void* held) noexcept { delete static_cast<ddrl::Mapping*>(held); });
            return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>, nb::c_contig>(mapping->memory, {nbytes}, owner);
        },
        "descriptor"_a, "nbytes"_a,
        "Map a file's bytes, shared (-1: anonymous memory that forks share); unmapped with the last view.");

    bind_lanes(module);
    bind_step_writer(module);

    nb::class_<ddrl::Sealed>(module, "Sealed", "What is known of a pinned version.")
        .def_ro("word", &ddrl::Sealed::word)
        .def_ro("version", &ddrl::Sealed::version)
        .def_ro("checksum", &ddrl::Sealed::checksum)
        .def_ro("time_ns", &ddrl::Sealed::time_ns)
        .def_prop_ro("slot", [](const ddrl::Sealed& self) { return ddrl::Mailbox::slot_of(self.word); })
        .def_ro("values", &ddrl::Sealed::values);

    nb::class_<PyMailbox>(module, "Mailbox", "Slots of bytes: one writer, many readers in place.")
        .def(nb::init<Bytes>(), "memory"_a, "View of a mailbox that `initialize` made.")
        .def_static("nbytes", &ddrl::Mailbox::bytes, "slots"_a, "readers"_a, "data_nbytes"_a,
                    "Memory that a mailbox takes [bytes].")
        .def_static(
            "initialize",
            [](const Bytes& memory, size_t slots, size_t readers, size_t data_nbytes) {
                if (slots < 2 || slots > ddrl::Mailbox::max_slots)
                    throw std::invalid_argument("a mailbox has 2 to 255 slots");
                ddrl::Mailbox::initialize(
                    checked(memory, ddrl::Mailbox::bytes(slots, readers, data_nbytes), "a mailbox"), slots, readers,
                    data_nbytes);
            },
            "memory"_a, "slots"_a, "readers"_a, "data_nbytes"_a)
        .def(
            "data_offset",
            [](const PyMailbox& self, size_t slot) {
                if (slot >= self.slots()) throw std::out_of_range("no such slot");
                return self.data(slot) - raw(self.memory);
            },
            "slot"_a, "Where the data of a slot begin in the memory.")
        .def("begin", &ddrl::Mailbox::begin, "revoke"_a, "Take a slot to write into; -1: none.")
        .def("seal", &ddrl::Mailbox::seal, "slot"_a, "version"_a, "checksum"_a, "time_ns"_a, "values"_a,
             "Hand over a slot; returns whether it is the newest.")
        .def("abandon", &ddrl::Mailbox::abandon, "slot"_a)
        .def("wait_newer", &PyMailbox::wait_newer_sliced, "version"_a, "timeout"_a.none())
        .def("claim", &ddrl::Mailbox::claim, "reader"_a, "pid"_a, "start"_a, "firm"_a)
        .def("release", &ddrl::Mailbox::release, "reader"_a)
        .def("reader_process", &ddrl::Mailbox::reader_process, "reader"_a,
             "Process id (0: none) and start time of a reader.")
        .def("pin", &ddrl::Mailbox::pin, "reader"_a, "Pin the newest version for a reader; word 0: none yet.")
        .def(
            "wait_pin",
            [](PyMailbox& self, size_t reader, int64_t version, std::optional<double> timeout) {
                self.wait_newer_sliced(version, timeout);
                return self.pin(reader);
            },
            "reader"_a, "version"_a, "timeout"_a.none(),
            "Wait for a version above `version`, at most `timeout` [s] (None: for ever), then pin the newest.")
        .def("unpin", &ddrl::Mailbox::unpin, "reader"_a)
        .def("valid", &ddrl::Mailbox::valid, "word"_a)
        .def_prop_ro("newest_word", &ddrl::Mailbox::newest_word)
        .def_prop_ro("slots", &ddrl::Mailbox::slots)
        .def_prop_ro("readers", &ddrl::Mailbox::readers)
        .def_prop_ro("data_nbytes", &ddrl::Mailbox::data_bytes)
        .def_prop_ro("newest", &ddrl::Mailbox::newest_version)
        .def_prop_ro("last_version", &ddrl::Mailbox::last_version)
        .def_prop_ro("revoked", &ddrl::Mailbox::revoked);

    nb::class_<Counter>(module, "Counter", "One float64 in shared memory: one writer, many readers.")
        .def(nb::init<Table, size_t, size_t>(), "table"_a, "row"_a, "column"_a)
        .def(
            "add", [](Counter& self, double x) { ddrl::add_value(self.value, x); }, "x"_a,
            "Add to it; a fresh one counts from 0.")
        .def(
            "set", [](Counter& self, double x) { ddrl::store_value(self.value, x); }, "x"_a)
        .def_prop_ro("value", [](const Counter& self) { return ddrl::read_value(self.value); });

    module.def(
        "read_table",
        [](const Table& out, const ConstTable& table) {
            if (out.size() != table.size()) throw std::invalid_argument("tables of different sizes");
            ddrl::read_table(out.data(), table.data(), table.size());
        },
        "out"_a, "table"_a, "Copy a table that others write, value by value.");
    module.def(
        "store_table",
        [](const Table& table, const ConstTable& values) {
            if (values.size() != table.size()) throw std::invalid_argument("tables of different sizes");
            ddrl::store_table(table.data(), values.data(), values.size());
        },
        "table"_a, "values"_a, "Write a whole table that others read, value by value.");

    module.def(
        "checksum",
        [](const ConstBytes& data) {
            nb::gil_scoped_release release;
            return ddrl::checksum(raw(data), data.size());
        },
        "data"_a, "64-bit checksum of bytes.");
    module.def(
        "copy_with_checksum",
        [](const Bytes& out, const ConstBytes& data) {
            if (out.size() != data.size())
                throw std::invalid_argument("copy_with_checksum: out and data must have the same size");
            nb::gil_scoped_release release;
            return ddrl::copy_with_checksum(raw(out), raw(data), data.size());
        },
        "out"_a, "data"_a, "Copy bytes and return their checksum, in one pass.");
}
