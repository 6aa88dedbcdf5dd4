// Python's view of mailboxes, counters and mapped memory, and of the lanes beside them (bind_lanes.cpp). Every object
// works in memory that numpy holds, and keeps that memory alive. The GIL is released while a call waits or moves bulk;
// signals are checked several times a second while it waits.
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>

#include "bind_channels.hpp"
#include "checksum.hpp"
#include "counters.hpp"
#include "mailbox.hpp"
#include "mapping.hpp"

namespace {

using Table = nb::ndarray<double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using ConstTable = nb::ndarray<const double, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

struct PyMailbox : ddrl::Mailbox {
    Bytes memory;

    explicit PyMailbox(Bytes given)
        : ddrl::Mailbox(checked(given, sizeof(ddrl::MailboxHeader), "a mailbox")), memory(std::move(given)) {
        checked(memory, bytes(slots(), readers(), data_bytes()), "a mailbox");
    }
    size_t open_slot(size_t slot) const {
        if (slot >= slots() || !is_open(slot))
            throw nb::value_error(("slot " + std::to_string(slot) + " is not open for writing").c_str());
        return slot;
    }
    size_t reader_line(size_t reader) const {
        if (reader >= readers())
            throw nb::index_error(
                ("reader " + std::to_string(reader) + " of a mailbox made for " + std::to_string(readers())).c_str());
        return reader;
    }
    int64_t wait_newer_sliced(int64_t version, std::optional<double> timeout) {
        wait_in_slices(timeout, [&](double seconds) { return wait_newer(version, seconds) > version; });
        return newest_version();
    }
};

struct PyMailboxReader {
    nb::object owner;
    PyMailbox* mailbox;
    size_t reader;

    PyMailboxReader(nb::object given, size_t index)
        : owner(std::move(given)), mailbox(nb::cast<PyMailbox*>(owner)), reader(mailbox->reader_line(index)) {}
};

struct Counter {
    Table memory;
    double* value;

    Counter(Table table, size_t row, size_t column) : memory(std::move(table)) {
        if (row >= memory.shape(0) || column >= memory.shape(1)) throw nb::index_error("no such counter in the table");
        value = memory.data() + row * memory.shape(1) + column;
    }
};

}  // namespace

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
        .def_prop_ro("values", [](const ddrl::Sealed& self) -> nb::typed<nb::tuple, double, nb::ellipsis> {
            return nb::make_tuple(self.values[0], self.values[1], self.values[2], self.values[3], self.values[4],
                                  self.values[5], self.values[6], self.values[7]);
        });

    nb::class_<PyMailbox>(module, "Mailbox", "Slots of bytes: one writer, many readers in place.")
        .def(nb::init<Bytes>(), "memory"_a, "View of a mailbox that `initialize` made.")
        .def_static("nbytes", &ddrl::Mailbox::bytes, "slots"_a, "readers"_a, "data_nbytes"_a,
                    "Memory that a mailbox takes [bytes].")
        .def_static(
            "initialize",
            [](const Bytes& memory, size_t slots, size_t readers, size_t data_nbytes) {
                if (slots < 2 || slots > ddrl::Mailbox::max_slots)
                    throw nb::value_error("a mailbox has 2 to 255 slots");
                ddrl::Mailbox::initialize(
                    checked(memory, ddrl::Mailbox::bytes(slots, readers, data_nbytes), "a mailbox"), slots, readers,
                    data_nbytes);
            },
            "memory"_a, "slots"_a, "readers"_a, "data_nbytes"_a)
        .def(
            "data_offset",
            [](const PyMailbox& self, size_t slot) {
                if (slot >= self.slots()) throw nb::index_error("no such slot");
                return static_cast<size_t>(self.data(slot) - raw(self.memory));
            },
            "slot"_a, "Where the data of a slot begin in the memory.")
        .def("begin", &ddrl::Mailbox::begin, "revoke"_a, "Take a slot to write into; -1: none.")
        .def(
            "seal",
            [](PyMailbox& self, size_t slot, int64_t version, uint64_t sum, int64_t time_ns,
               const std::array<double, 8>& values) {
                return self.seal(self.open_slot(slot), version, sum, time_ns, values);
            },
            "slot"_a, "version"_a, "checksum"_a, "time_ns"_a, "values"_a,
            "Hand over a slot; returns whether it is the newest.")
        .def(
            "abandon", [](PyMailbox& self, size_t slot) { self.abandon(self.open_slot(slot)); }, "slot"_a)
        .def("wait_newer", &PyMailbox::wait_newer_sliced, "version"_a, "timeout"_a.none())
        .def(
            "claim",
            [](PyMailbox& self, size_t reader, uint32_t pid, uint64_t start, bool firm) {
                self.claim(self.reader_line(reader), pid, start, firm);
            },
            "reader"_a, "pid"_a, "start"_a, "firm"_a)
        .def(
            "release", [](PyMailbox& self, size_t reader) { self.release(self.reader_line(reader)); }, "reader"_a)
        .def(
            "reader_process",
            [](const PyMailbox& self, size_t reader) {
                return std::make_tuple(self.reader_pid(self.reader_line(reader)), self.reader_start(reader));
            },
            "reader"_a, "Process id (0: none) and start time of a reader.")
        .def_prop_ro("slots", &ddrl::Mailbox::slots)
        .def_prop_ro("readers", &ddrl::Mailbox::readers)
        .def_prop_ro("data_nbytes", &ddrl::Mailbox::data_bytes)
        .def_prop_ro("newest", &ddrl::Mailbox::newest_version)
        .def_prop_ro("revoked", &ddrl::Mailbox::revoked);

    nb::class_<PyMailboxReader>(module, "MailboxReader", "One reader's line of a mailbox.")
        .def(nb::init<nb::object, size_t>(), "mailbox"_a, "reader"_a)
        .def(
            "pin", [](PyMailboxReader& self) { return self.mailbox->pin(self.reader); },
            "Pin the newest version; word 0: none yet.")
        .def(
            "wait_pin",
            [](PyMailboxReader& self, int64_t version, std::optional<double> timeout) {
                self.mailbox->wait_newer_sliced(version, timeout);
                return self.mailbox->pin(self.reader);
            },
            "version"_a, "timeout"_a.none(),
            "Wait for a version above `version`, at most `timeout` [s] (None: for ever), then pin the newest.")
        .def("unpin", [](PyMailboxReader& self) { self.mailbox->unpin(self.reader); })
        .def(
            "valid", [](PyMailboxReader& self, uint64_t word) { return self.mailbox->valid(word); }, "word"_a)
        .def_prop_ro("newest_word", [](const PyMailboxReader& self) { return self.mailbox->newest_word(); });

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
            if (out.size() != table.size()) throw nb::value_error("tables of different sizes");
            ddrl::read_table(out.data(), table.data(), table.size());
        },
        "out"_a, "table"_a, "Copy a table that others write, value by value.");
    module.def(
        "store_table",
        [](const Table& table, const ConstTable& values) {
            if (values.size() != table.size()) throw nb::value_error("tables of different sizes");
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
                throw nb::value_error("copy_with_checksum: out and data must have the same size");
            nb::gil_scoped_release release;
            return ddrl::copy_with_checksum(raw(out), raw(data), data.size());
        },
        "out"_a, "data"_a, "Copy bytes and return their checksum, in one pass.");
}
