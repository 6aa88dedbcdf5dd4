// Python's view of the step writer. Arrays are checked against the row's column table and read in place.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_arrays.hpp"
#include "bind_lanes.hpp"
#include "step_writer.hpp"

namespace {

using ddrl::bind::column_named;
using ddrl::bind::ColumnEntry;
using ddrl::bind::Field;
using ddrl::bind::field_of;
using ddrl::bind::View;
using Form = std::pair<std::string, std::vector<Py_ssize_t>>;  // buffer format and shape of one array, without N

constexpr unsigned STATE = 0;  // ColumnRole

struct Further {  // a column beside those that every row has
    nb::str name, next_name;
    Field field;
    bool state;
};

struct PyStepWriter : ddrl::StepWriter {
    static constexpr size_t FEW = 6;  // arrays that every vector step has
    nb::object ring_owner;
    Field observation, action, reward, flag{"?", {}, 1};
    std::vector<Further> further;
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
                 size_t stack, uint32_t first_stream, std::string id, bool drop_nonfinite)
        : ddrl::StepWriter(nb::cast<PyRing*>(ring), format_of(row_bytes, table, stack), first_stream,
                           drop_nonfinite ? ddrl::NonFinite::drop : ddrl::NonFinite::refuse),
          ring_owner(std::move(ring)),
          observation{observations.first, observations.second, 0},
          action(field_of(column_named(table, "action"))),
          reward(field_of(column_named(table, "reward"))),
          env_id(std::move(id)) {
        if (nb::cast<PyRing*>(ring_owner)->row_bytes() != row_bytes)
            throw nb::value_error(("the lane's rows have " +
                                   std::to_string(nb::cast<PyRing*>(ring_owner)->row_bytes()) +
                                   " bytes, this environment's have " + std::to_string(row_bytes))
                                      .c_str());
        for (const ColumnEntry& entry : table) {
            const std::string& name = std::get<0>(entry);
            if (!is_standard(name))
                further.push_back({nb::str(name.c_str()), nb::str((name + "_next").c_str()), field_of(entry),
                                   std::get<1>(entry) == STATE});
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
        std::vector<View> further_views(2 * further.size());
        std::vector<const std::byte*> data(2 * further.size());
        read_further(columns, further_views, data, count);
        given.columns = data.data(), given.next_columns = data.data() + further.size();
        if (pending() != 0)
            throw nb::value_error(
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
    // The further columns' arrays in the order of the table, then those of the next states.
    void read_further(nb::handle columns, std::vector<View>& views, std::vector<const std::byte*>& data, size_t count) {
        if (columns.is_none() && further.empty()) return;
        nb::dict given;
        if (PyDict_Check(columns.ptr())) {
            given = nb::borrow<nb::dict>(columns);
        } else if (!columns.is_none()) {
            PyObject* made = PyObject_CallOneArg(reinterpret_cast<PyObject*>(&PyDict_Type), columns.ptr());
            if (!made) throw nb::python_error();
            given = nb::steal<nb::dict>(made);
        }
        size_t wanted = 0;
        for (size_t c = 0; c < further.size(); ++c) {
            const Further& column = further[c];
            data[c] = read(item(given, column.name), views[c], column.field, count, column.name.c_str());
            ++wanted;
            if (!column.state) continue;
            const size_t next = further.size() + c;
            data[next] =
                read(item(given, column.next_name), views[next], column.field, count, column.next_name.c_str());
            ++wanted;
        }
        if (given.size() == wanted) return;
        for (const auto& [name, value] : given) {
            bool known = false;
            for (const Further& column : further)
                known = known || name.equal(column.name) || (column.state && name.equal(column.next_name));
            if (!known)
                throw nb::type_error(("StepWriter.write: rows have no further column " +
                                      std::string(nb::repr(name).c_str()) + "; they have " + names())
                                         .c_str());
        }
    }
    nb::handle item(const nb::dict& given, const nb::str& name) const {
        PyObject* value = PyDict_GetItem(given.ptr(), name.ptr());
        if (!value)
            throw nb::type_error(
                ("StepWriter.write: columns lacks " + std::string(name.c_str()) + "; rows have " + names()).c_str());
        return value;
    }
    std::string names() const {
        std::string all;
        for (const Further& column : further) {
            all += (all.empty() ? "" : ", ") + std::string(column.name.c_str());
            if (column.state) all += ", " + std::string(column.next_name.c_str());
        }
        return all.empty() ? "none" : all;
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

}  // namespace

void bind_step_writer(nb::module_& module) {
    nb::class_<PyStepWriter>(module, "StepWriter", "Turns vector steps into rows of a ring.")
        .def(nb::init<nb::object, size_t, const std::vector<ColumnEntry>&, const Form&, size_t, uint32_t, std::string,
                      bool>(),
             nb::kw_only(), "ring"_a, "row_nbytes"_a, "table"_a, "observation"_a, "stack"_a, "first_stream"_a,
             "env_id"_a, "drop_nonfinite"_a)
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
