// Python's view of the replay kernel: ddrl._kernel.ReplayCore, which ddrl/replay/replay.py uses. It checks and converts
// arguments, hands out recycled output arrays, and releases the GIL around everything that takes the replay's lock.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "bind_arrays.hpp"
#include "bind_replay_strategies.hpp"
#include "finite.hpp"
#include "replay/gather.hpp"
#include "replay/replay.hpp"
#include "replay/snapshot.hpp"

namespace ddrl::replay {
namespace {

using namespace nb::literals;
using bind::column_named;
using bind::ColumnEntry;
using bind::Field;
using bind::field_of;
using bind::View;
using bind::Views;

// Thrown where an array does not fit its column, before anything is recorded. It is a type of its own because an
// eviction in Python may raise a TypeError when part of the record has been made.
struct Misfit : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The columns of the store that a table describes.
Columns columns_of(const std::vector<ColumnEntry>& table) {
    Columns columns;
    for (const auto& [name, role, offset, bytes, format, shape, stack] : table) {
        if (role > static_cast<unsigned>(Role::REWARD)) throw nb::value_error("a column has no such role");
        columns.push_back({static_cast<u32>(bytes), static_cast<Role>(role), stack});
    }
    return columns;
}

// The bytes of an array that fits its field: `count` rows, or one value where it is -1.
const byte* fitted(PyObject* object, View& view, const Field& field, Py_ssize_t count) {
    if (!view.open(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) || !view.fits(field, count))
        throw Misfit("an array does not fit");
    return view.data();
}

// The width of a column's numbers, where they are floats; else 0.
size_t float_width(const Field& field) {
    return field.format == "e" ? 2 : field.format == "f" ? 4 : field.format == "d" ? 8 : 0;
}

// Converts a Python number that is given in place of an array of one value; false where it is not of the column's kind.
bool convert_number(PyObject* object, const Field& field, u64& out) {
    if (!field.shape.empty() || field.format.size() != 1) return false;
    const char code = field.format[0];
    if (code == 'f' && (PyFloat_Check(object) || PyLong_CheckExact(object))) {
        const double number = PyFloat_CheckExact(object) ? PyFloat_AS_DOUBLE(object) : PyFloat_AsDouble(object);
        if (number == -1.0 && PyErr_Occurred()) throw nb::python_error();
        const float value = static_cast<float>(number);
        std::memcpy(&out, &value, sizeof value);
        return true;
    }
    if (field.bytes != 8 || !PyLong_CheckExact(object)) return false;
    if (code == 'l' || code == 'q')
        out = static_cast<u64>(PyLong_AsLongLong(object));
    else if (code == 'L' || code == 'Q')
        out = PyLong_AsUnsignedLongLong(object);
    else
        return false;
    if (out == ~u64{0} && PyErr_Occurred()) throw nb::python_error();
    return true;
}

// Output arrays that Python made, handed out again when nothing else refers to them: fresh pages would cost as much as
// the copy into them.
class OutputPool {
public:
    struct Entry {
        nb::object batch;  // a tuple of arrays, None, and tuples or dicts of arrays
        std::vector<byte*> data;  // of its arrays, in the kernel's order; null for None
        size_t bytes = 0;  // of its arrays
    };
    // A batch that nothing else refers to, made by make(size) -> (batch, its arrays in the kernel's order) where there
    // is none. The caller holds the GIL.
    std::shared_ptr<const Entry> take(u32 size, const nb::callable& make) {
        if (const auto entries = by_size_.find(size); entries != by_size_.end())
            for (const auto& entry : entries->second)
                if (entry.use_count() == 1 && unused(entry->batch.ptr())) return entry;
        auto fresh = std::make_shared<Entry>();
        const nb::tuple made = nb::cast<nb::tuple>(make(size));
        fresh->batch = nb::borrow(made[0]);
        for (const nb::handle array : nb::cast<nb::tuple>(made[1])) {
            View view;
            if (!array.is_none() && !view.open(array.ptr(), PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS))
                throw nb::type_error("an output array is not writable and contiguous");
            fresh->data.push_back(array.is_none() ? nullptr : const_cast<byte*>(view.data()));
            if (!array.is_none()) fresh->bytes += view.bytes();
        }
        // Python code ran meanwhile, perhaps another thread's call of this: search again.
        if (by_size_.size() >= MAX_SIZES && !by_size_.contains(size))
            by_size_.clear();  // batches in use stay with their users
        auto& entries = by_size_[size];
        if (entries.size() >= MAX_BATCHES) entries.erase(entries.begin());
        entries.push_back(fresh);
        return fresh;
    }
    size_t nbytes() const {
        size_t bytes = 0;
        for (const auto& [size, entries] : by_size_)
            for (const auto& entry : entries) bytes += entry->bytes;
        return bytes;
    }

private:
    static constexpr size_t MAX_BATCHES = 8;  // of one size that are reused
    static constexpr size_t MAX_SIZES = 16;
    // Whether nothing else refers to a batch or to anything in it.
    static bool unused(PyObject* object) {
        if (object == Py_None) return true;
        if (Py_REFCNT(object) != 1) return false;
        if (PyTuple_Check(object))
            for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i)
                if (!unused(PyTuple_GET_ITEM(object, i))) return false;
        PyObject *key, *array;
        if (PyDict_CheckExact(object))
            for (Py_ssize_t at = 0; PyDict_Next(object, &at, &key, &array);)
                if (!unused(array)) return false;
        return true;
    }
    std::map<u32, std::vector<std::shared_ptr<Entry>>> by_size_;
};

// Writes a snapshot into a Python bytes object of its size.
class BytesSink {
public:
    void begin(size_t bytes) {
        nb::gil_scoped_acquire acquire;
        bytes_ = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
        if (!bytes_.is_valid()) throw nb::python_error();
        to_ = PyBytes_AS_STRING(bytes_.ptr());
    }
    void put(const void* data, size_t bytes) {
        std::memcpy(to_, data, bytes);
        to_ += bytes;
    }
    void finish() {}
    nb::object take() { return std::move(bytes_); }

private:
    nb::object bytes_;
    char* to_ = nullptr;
};

// Calls Python's progress function (or None) from code that runs without the GIL.
struct ProgressCall {
    PyObject* function;

    void operator()(u64 done, u64 total) const {
        if (function == Py_None) return;
        nb::gil_scoped_acquire acquire;
        nb::borrow(function)(done, total);
    }
};

template <class T>
using Array = Memory<const T, 1>;

class ReplayCore {
public:
    // `table`: the columns that are stored, those of role STATE first. `row`: bytes of a row, and the offsets of
    // stream, step and kind in it.
    ReplayCore(const std::vector<ColumnEntry>& table, const std::array<size_t, 4>& row, u64 capacity, u32 pick_len,
               bool short_picks, u32 n_step, u32 burn_in, nb::object eviction, u64 seed, u32 shift,
               const std::string& file)
        : seed_(seed),
          replay_(Options{columns_of(table), capacity, pick_len, n_step, burn_in, short_picks, shift, file},
                  eviction_of(eviction)),
          rows_{row[0], row[1], row[2], row[3], {}} {
        for (const ColumnEntry& entry : table) {
            if (std::get<0>(entry) == "policy_version") version_ = columns_.size();
            columns_.push_back(field_of(entry));
            names_.push_back(std::get<0>(entry));
            float_widths_.push_back(float_width(columns_.back()));
            rows_.columns.push_back(std::get<2>(entry));
        }
        column_named(table, "policy_version");
    }

    // A method of the replay as a function of this class, called without the GIL.
    template <class Result, class... Arguments>
    static auto without_gil(Result (Replay::*method)(Arguments...)) {
        return [method](ReplayCore& self, Arguments... arguments) -> Result {
            Unlocked unlocked(self.strategies_);
            return (self.replay_.*method)(arguments...);
        };
    }
    template <class Result>
    static auto without_gil(Result (Replay::*method)() const) {
        return [method](ReplayCore& self) -> Result {
            Unlocked unlocked(self.strategies_);
            return (self.replay_.*method)();
        };
    }

    // Records of one episode: for each column an array of `count` of them, or of one record where it is -1 (then a
    // number is accepted, as it is for the version of many). `finals`: the columns of role STATE after the last record,
    // where the episode ends. Throws Misfit for an array that does not fit: Python then converts it and calls again.
    u64 record(u64 handle, Py_ssize_t count, const nb::tuple& values, nb::handle finals, int ending) {
        const bool ends = ending != 0;
        const u32 states = replay_.store().state_count();
        if (values.size() != columns_.size()) throw Misfit("a record has another number of columns");
        Views held(columns_.size() + (ends ? states : 0));
        const byte *data[MAX_COLUMNS], *last[MAX_COLUMNS];
        size_t stride[MAX_COLUMNS];
        u64 numbers[MAX_COLUMNS];
        for (size_t c = 0; c < columns_.size(); ++c) {
            PyObject* value = PyTuple_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(c));
            const bool one = (count < 0 || c == version_) && convert_number(value, columns_[c], numbers[c]);
            data[c] =
                one ? reinterpret_cast<const byte*>(&numbers[c]) : fitted(value, held.begin()[c], columns_[c], count);
            stride[c] = one ? 0 : columns_[c].bytes;
            if (c < version_) require_finite(data[c], c, count < 0 ? 1 : static_cast<size_t>(count));
        }
        if (ends) {
            const nb::tuple final_states = nb::cast<nb::tuple>(finals);
            if (final_states.size() != states) throw Misfit("a final state has another number of arrays");
            for (u32 c = 0; c < states; ++c) {
                last[c] =
                    fitted(PyTuple_GET_ITEM(final_states.ptr(), c), held.begin()[columns_.size() + c], columns_[c], -1);
                require_finite(last[c], c, 1);
            }
        }
        Unlocked unlocked(strategies_);
        const Rows rows{data, stride, count < 0 ? 1 : static_cast<u32>(count)};
        return replay_.record(handle, rows, static_cast<Ending>(ending), ends ? last : nullptr);
    }

    // Refuses states, actions and rewards of which a network would learn nothing but NaN; further columns may hold any.
    void require_finite(const byte* from, size_t column, size_t rows) const {
        const size_t width = float_widths_[column];
        if (width == 0 || finite(from, rows * (columns_[column].bytes / width), width)) return;
        throw nb::value_error((names_[column] + " holds a number that is NaN or infinite").c_str());
    }

    u32 record_rows(nb::handle rows) {
        View view;
        if (!view.open(rows.ptr(), PyBUF_C_CONTIGUOUS) || view.bytes() % rows_.row_bytes)
            throw nb::type_error("rows must be a contiguous array of this replay's row dtype");
        Unlocked unlocked(strategies_);
        return replay_.record_rows(view.data(), static_cast<u32>(view.bytes() / rows_.row_bytes), rows_);
    }

    // `given`: the name of a kind, or a selector in Python.
    u32 add_selector(nb::object given, const Parameters& parameters) {
        std::unique_ptr<PickSelector> selector;
        if (PyUnicode_Check(given.ptr()))
            selector = find_selector_kind(nb::cast<std::string>(given))
                           .make(Random(seed_, 1 + replay_.selector_count()), replay_.options().capacity, parameters);
        else
            selector = std::make_unique<ForeignSelector>(std::move(given), strategies_);
        Unlocked unlocked(strategies_);
        return replay_.add_selector(std::move(selector));
    }

    nb::object get_batch(u32 size, u32 selector, const nb::callable& make) {
        return draw(windows_, size, selector, make,
                    [](const auto& loops, byte* const* column, byte* const* next, byte* const* rest) {
                        loops.windows({column, next, at<u32>(rest[0]), at<u32>(rest[1])});  // seq_len, seq_len_next
                    });
    }
    nb::object sample(u32 size, u32 selector, float discount, const nb::callable& make) {
        return draw(transitions_, size, selector, make,
                    [=](const auto& loops, byte* const* column, byte* const* next, byte* const* rest) {
                        loops.transitions(discount, {column, next, at<float>(rest[0])});
                    });
    }
    nb::object sample_sequences(u32 size, u32 selector, float discount, const nb::callable& make) {
        return draw(sequences_, size, selector, make,
                    [=](const auto& loops, byte* const* column, byte* const* at_pick, byte* const* rest) {
                        loops.sequences(discount, {column, at_pick, at<float>(rest[0]), at<u32>(rest[1]),
                                                   at<u32>(rest[2]), at<u32>(rest[3])});  // ahead, burn_len, length
                    });
    }

    u32 set_priority(u32 selector, Array<u64> handles, Array<u32> positions, Array<float> priorities) {
        const size_t count = handles.size();
        if (positions.size() != count || priorities.size() != count)
            throw std::invalid_argument("pick_epi, pick_pos and priority must be of one length");
        Unlocked unlocked(strategies_);
        return replay_.set_priority(selector, {handles.data(), count}, {positions.data(), count},
                                    {priorities.data(), count});
    }
    std::pair<OwnedArray<u64>, OwnedArray<u32>> list_picks() {
        auto [handles, positions] = without_gil(&Replay::list_picks)(*this);
        return {array_of(std::move(handles)), array_of(std::move(positions))};
    }
    OwnedArray<double> probabilities(u32 selector) {
        return array_of(without_gil(&Replay::probabilities)(*this, selector));
    }
    size_t nbytes() {
        const size_t outputs = windows_.nbytes() + transitions_.nbytes() + sequences_.nbytes();
        Unlocked unlocked(strategies_);
        return replay_.nbytes() + outputs;
    }

    nb::object serialize(const std::string& configuration, nb::handle progress) {
        BytesSink sink;
        {
            Unlocked unlocked(strategies_);
            Snapshot::write(replay_, configuration, SnapshotKind::COPY, sink, ProgressCall{progress.ptr()});
        }
        return sink.take();
    }
    void save(const std::string& path, const std::string& configuration, bool increment, nb::handle progress) {
        Unlocked unlocked(strategies_);
        FileSink sink(path);
        Snapshot::write(replay_, configuration, increment ? SnapshotKind::INCREMENT : SnapshotKind::WHOLE, sink,
                        ProgressCall{progress.ptr()});
    }
    void load(const std::vector<Array<u8>>& snapshots, const std::string& configuration, nb::handle progress) {
        std::vector<std::span<const byte>> sources;
        for (const Array<u8>& each : snapshots) sources.push_back(std::as_bytes(std::span(each.data(), each.size())));
        Unlocked unlocked(strategies_);
        Snapshot::read(replay_, configuration, sources, ProgressCall{progress.ptr()});
    }

private:
    template <class T>
    static T* at(byte* data) {
        return reinterpret_cast<T*>(data);
    }
    // Draws a batch into the arrays that `make` lists: handles, positions and weights of the picks, then one for each
    // column, one for each next state (sequences: values of the pick's first record alone, one for each column), and
    // the further ones that copy(loops, columns, next, rest) fills. None: not wanted.
    template <class Copy>
    nb::object draw(OutputPool& pool, u32 size, u32 selector, const nb::callable& make, Copy copy) {
        const auto entry = pool.take(size, make);
        byte* const* picks = entry->data.data();
        byte* const* column = picks + 3;
        byte* const* next = column + columns_.size();
        byte* const* rest = next + (&pool == &sequences_ ? columns_.size() : replay_.store().state_count());
        const bool drawn = [&] {
            Unlocked unlocked(strategies_);
            return replay_.draw(selector, size, at<u64>(picks[0]), at<u32>(picks[1]), at<float>(picks[2]),
                                [&](std::span<const Window> windows) {
                                    gather(replay_, windows,
                                           [&](const auto& loops) { copy(loops, column, next, rest); });
                                });
        }();
        if (!drawn)
            throw std::invalid_argument(
                "no pick can be drawn yet: record more steps, or episodes of at least pick_len (and some priority "
                "above 0)");
        return entry->batch;
    }
    std::unique_ptr<Eviction> eviction_of(const nb::object& given) {
        if (PyUnicode_Check(given.ptr())) return make_eviction(nb::cast<std::string>(given));
        return std::make_unique<ForeignEviction>(given, strategies_);
    }

    Strategies strategies_;
    u64 seed_;
    size_t version_ = 0;  // the column policy_version
    std::vector<Field> columns_;
    std::vector<std::string> names_;
    std::vector<size_t> float_widths_;  // of their numbers; 0: no floats
    Replay replay_;
    RowLayout rows_;
    OutputPool windows_, transitions_, sequences_;
};

}  // namespace
}  // namespace ddrl::replay

void bind_replay(nb::module_& module) {
    using namespace ddrl::replay;
    const auto without_gil = [](auto method) { return ReplayCore::without_gil(method); };
    nb::exception<Misfit>(module, "Misfit", PyExc_TypeError);
    nb::class_<ReplayCore>(module, "ReplayCore", "The replay kernel, used by ddrl.replay.ExperienceReplay.")
        .def(nb::init<const std::vector<ColumnEntry>&, const std::array<size_t, 4>&, u64, u32, bool, u32, u32,
                      nb::object, u64, u32, const std::string&>(),
             nb::kw_only(), "table"_a, "row"_a, "capacity"_a, "pick_len"_a, "short_picks"_a, "n_step"_a, "burn_in"_a,
             "eviction"_a, "seed"_a, "shift"_a, "file"_a)
        .def("new_episode", without_gil(&Replay::new_episode))
        .def("record", &ReplayCore::record, "handle"_a, "count"_a, "values"_a, "finals"_a.none(), "ending"_a,
             nb::sig("def record(self, handle: int, count: int, values: tuple[typing.Any, ...], "
                     "finals: typing.Any | None, ending: int) -> int"))
        .def("cut", without_gil(&Replay::cut), "handle"_a)
        .def("record_rows", &ReplayCore::record_rows, "rows"_a)
        .def("cut_streams", without_gil(&Replay::cut_streams))
        .def_static(
            "selector_defaults", [](const std::string& kind) { return find_selector_kind(kind).defaults; }, "kind"_a)
        .def("add_selector", &ReplayCore::add_selector, "selector"_a, "parameters"_a)
        .def("keep_selectors", without_gil(&Replay::keep_selectors), "count"_a)
        .def("set_importance_exponent", without_gil(&Replay::set_importance_exponent), "selector"_a, "exponent"_a)
        .def("get_batch", &ReplayCore::get_batch, "batch_size"_a, "selector"_a, "make"_a,
             nb::sig("def get_batch(self, batch_size: int, selector: int, make: typing.Callable[[int], object]) -> "
                     "typing.Any"))
        .def("sample", &ReplayCore::sample, "batch_size"_a, "selector"_a, "discount"_a, "make"_a,
             nb::sig("def sample(self, batch_size: int, selector: int, discount: float, make: typing.Callable[[int], "
                     "object]) -> typing.Any"))
        .def("sample_sequences", &ReplayCore::sample_sequences, "batch_size"_a, "selector"_a, "discount"_a, "make"_a,
             nb::sig("def sample_sequences(self, batch_size: int, selector: int, discount: float, make: "
                     "typing.Callable[[int], object]) -> typing.Any"))
        .def("set_priority", &ReplayCore::set_priority, "selector"_a, "pick_epi"_a, "pick_pos"_a, "priority"_a)
        .def("list_picks", &ReplayCore::list_picks)
        .def("probabilities", &ReplayCore::probabilities, "selector"_a)
        .def_prop_ro("records", without_gil(&Replay::records))
        .def_prop_ro("episodes", without_gil(&Replay::episodes))
        .def_prop_ro("picks", without_gil(&Replay::pick_count))
        .def_prop_ro("evicted", without_gil(&Replay::evicted))
        .def_prop_ro("evicted_unseen", without_gil(&Replay::evicted_unseen))
        .def_prop_ro("nbytes", &ReplayCore::nbytes)
        .def("check", without_gil(&Replay::check))
        .def("serialize", &ReplayCore::serialize, "configuration"_a, "progress"_a.none())
        .def("save", &ReplayCore::save, "path"_a, "configuration"_a, "increment"_a, "progress"_a.none())
        .def("load", &ReplayCore::load, "snapshots"_a, "configuration"_a, "progress"_a.none());
}
