// Python face of the replay kernel: ddrl._kernel.ReplayCore. Checks and converts arguments, hands out recycled output
// arrays, and releases the GIL around everything that takes the replay's lock. ddrl.replay.experience is its only user.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>

#include "bind_replay_arrays.hpp"
#include "bind_replay_snapshots.hpp"
#include "replay/eviction_kinds.hpp"
#include "replay/files.hpp"
#include "replay/gather.hpp"
#include "replay/replay.hpp"
#include "replay/selector_kinds.hpp"
#include "replay/snapshot.hpp"

namespace nb = nanobind;
using namespace ddrl::replay;

namespace {

class ReplayCore {
public:
    ReplayCore(std::vector<std::pair<std::string, std::vector<Py_ssize_t>>> states, std::vector<u32> state_bytes,
               std::string action_format, std::vector<Py_ssize_t> action_shape, u32 action_bytes, u32 memory_bytes,
               u64 capacity, u32 pick_len, bool short_picks, u32 n_step, u32 frame_stack, u32 burn_in,
               const std::string& eviction, u64 seed, u32 shift, const std::string& file)
        : seed_(seed),
          replay_(Options{Columns{state_bytes, memory_bytes, action_bytes}, capacity, pick_len, n_step, frame_stack,
                          burn_in, short_picks, shift, file},
                  make_eviction(eviction)) {
        for (std::size_t i = 0; i < states.size(); ++i)
            fields_.push_back({states[i].first, states[i].second, state_bytes[i]});
        if (memory_bytes) fields_.push_back({"f", {memory_bytes / 4}, memory_bytes});
        fields_.push_back({std::move(action_format), std::move(action_shape), action_bytes});
    }

    u64 new_episode() {
        nb::gil_scoped_release release;
        return replay_.new_episode();
    }

    // One record. Every array must already fit its field: the Python side converts on TypeError and calls again.
    u64 record(u64 handle, nb::handle state, nb::handle action, float reward, nb::handle final_state, int ending,
               u64 version, nb::handle memory) {
        View views[MOST_COLUMNS];
        const byte* data[MOST_COLUMNS];
        std::size_t stride[MOST_COLUMNS] = {};
        const std::size_t states = replay_.store().state_count(), columns = replay_.store().column_count();
        read_states(state, views, data, -1);
        if (columns > states + 3) data[states] = read(memory.ptr(), views[states], fields_[states], -1);
        long long integer;
        const Field& field = fields_.back();
        if (field.bytes == 8 && field.shape.empty() && PyLong_CheckExact(action.ptr()) &&
            (field.format == "l" || field.format == "q")) {
            integer = PyLong_AsLongLong(action.ptr());
            if (integer == -1 && PyErr_Occurred()) throw nb::python_error();
            data[columns - 3] = reinterpret_cast<const byte*>(&integer);
        } else {
            data[columns - 3] = read(action.ptr(), views[columns - 3], field, -1);
        }
        data[columns - 2] = reinterpret_cast<const byte*>(&reward);
        data[columns - 1] = reinterpret_cast<const byte*>(&version);
        View last_views[MOST_COLUMNS];
        const byte* last[MOST_COLUMNS];
        const bool ends = ending != 0;
        if (ends) read_states(final_state, last_views, last, -1);
        nb::gil_scoped_release release;
        return replay_.record(handle, {data, stride, 1}, static_cast<Ending>(ending), ends ? last : nullptr);
    }

    // Many records of one episode: arrays with a leading axis of `count`.
    u64 record_steps(u64 handle, u32 count, nb::handle state, nb::handle action, nb::handle reward,
                     nb::handle final_state, int ending, nb::handle version, nb::handle memory) {
        View views[MOST_COLUMNS], last_views[MOST_COLUMNS];
        const byte *data[MOST_COLUMNS], *last[MOST_COLUMNS];
        std::size_t stride[MOST_COLUMNS];
        const std::size_t states = replay_.store().state_count(), columns = replay_.store().column_count();
        for (std::size_t c = 0; c < columns; ++c) stride[c] = replay_.store().column_bytes(static_cast<u32>(c));
        read_states(state, views, data, count);
        if (columns > states + 3) data[states] = read(memory.ptr(), views[states], fields_[states], count);
        data[columns - 3] = read(action.ptr(), views[columns - 3], fields_.back(), count);
        static const Field reward_field{"f", {}, 4};
        data[columns - 2] = read(reward.ptr(), views[columns - 2], reward_field, count);
        u64 one_version = 0;
        if (PyLong_CheckExact(version.ptr())) {
            one_version = nb::cast<u64>(version);
            data[columns - 1] = reinterpret_cast<const byte*>(&one_version);
            stride[columns - 1] = 0;
        } else {
            static const Field version_field{"L", {}, 8};
            data[columns - 1] = read(version.ptr(), views[columns - 1], version_field, count);
        }
        const bool ends = ending != 0;
        if (ends) read_states(final_state, last_views, last, -1);
        nb::gil_scoped_release release;
        return replay_.record(handle, {data, stride, count}, static_cast<Ending>(ending), ends ? last : nullptr);
    }

    void cut(u64 handle) {
        nb::gil_scoped_release release;
        replay_.cut(handle);
    }
    void set_row_layout(std::size_t row_bytes, std::size_t version, std::size_t stream, std::size_t step,
                        std::size_t reward, std::size_t kind, std::size_t action, std::vector<std::size_t> states) {
        rows_ = {row_bytes, version, stream, step, reward, kind, action, std::move(states)};
    }
    u32 record_rows(nb::handle rows) {
        View view;
        if (!view.open(rows.ptr(), PyBUF_C_CONTIGUOUS) || view.bytes() % rows_.row_bytes)
            throw nb::type_error("rows must be a contiguous array of this replay's row dtype");
        nb::gil_scoped_release release;
        return replay_.record_rows(view.data(), static_cast<u32>(view.bytes() / rows_.row_bytes), rows_);
    }
    void cut_streams() {
        nb::gil_scoped_release release;
        replay_.cut_streams();
    }

    // The parameters of a kind of selector with their defaults.
    static Parameters selector_defaults(const std::string& kind) { return find_selector_kind(kind).defaults; }
    u32 add_selector(const std::string& kind, const Parameters& parameters) {
        auto selector = find_selector_kind(kind).make(Random(seed_, 1 + replay_.selector_count()),
                                                      replay_.options().capacity, parameters);
        nb::gil_scoped_release release;
        return replay_.add_selector(std::move(selector));
    }
    void keep_selectors(u32 count) {
        nb::gil_scoped_release release;
        replay_.keep_selectors(count);
    }
    void set_importance_exponent(u32 selector, double exponent) {
        nb::gil_scoped_release release;
        std::lock_guard lock(replay_.mutex());
        replay_.selector(selector).set_importance_exponent(exponent);
    }

    nb::object get_batch(u32 size, u32 selector, const nb::callable& make) {
        const OutputPool::Entry entry = windows_.take(size, make);
        const std::size_t states = replay_.store().state_count();
        byte* const* out = entry.data.data();
        byte* const* rest = out + states;  // after batch_state: action, reward, then batch_state_next
        const bool drawn = [&] {
            nb::gil_scoped_release release;
            return replay_.draw(
                selector, size, at<u64>(rest[4 + states]), at<u32>(rest[5 + states]), nullptr,
                [&](std::span<const Window> windows) {
                    const WindowOutputs outputs{
                        out, rest + 2, rest[0], rest[1], at<u32>(rest[2 + states]), at<u32>(rest[3 + states])};
                    gather(replay_, windows, [&](const auto& loops) { loops.windows(outputs); });
                });
        }();
        if (!drawn) nothing_to_draw();
        return entry.batch;
    }

    nb::object sample(u32 size, u32 selector, float discount, const nb::callable& make) {
        const OutputPool::Entry entry = transitions_.take(size, make);
        const std::size_t states = replay_.store().state_count();
        byte* const* out = entry.data.data();
        byte* const* rest = out + states;  // after s_tm1: a_tm1, r_t, discount_t, then s_t
        byte* const* tail = rest + 3 + states;
        const bool drawn = [&] {
            nb::gil_scoped_release release;
            return replay_.draw(selector, size, at<u64>(tail[0]), at<u32>(tail[1]), at<float>(tail[2]),
                                [&](std::span<const Window> windows) {
                                    const TransitionOutputs outputs{
                                        out, rest + 3, rest[0], at<float>(rest[1]), at<float>(rest[2]), tail[3]};
                                    gather(replay_, windows,
                                           [&](const auto& loops) { loops.transitions(discount, outputs); });
                                });
        }();
        if (!drawn) nothing_to_draw();
        return entry.batch;
    }

    nb::object sample_sequences(u32 size, u32 selector, float discount, const nb::callable& make) {
        const OutputPool::Entry entry = sequences_.take(size, make);
        const std::size_t states = replay_.store().state_count();
        byte* const* out = entry.data.data();
        byte* const* rest =
            out +
            states;  // after state: action, reward, discount, ahead, burn, length, epi, pos, weight, version, memory
        const bool drawn = [&] {
            nb::gil_scoped_release release;
            return replay_.draw(selector, size, at<u64>(rest[6]), at<u32>(rest[7]), at<float>(rest[8]),
                                [&](std::span<const Window> windows) {
                                    const SequenceOutputs outputs{out,
                                                                  rest[0],
                                                                  at<float>(rest[1]),
                                                                  at<float>(rest[2]),
                                                                  at<u32>(rest[3]),
                                                                  at<u32>(rest[4]),
                                                                  at<u32>(rest[5]),
                                                                  rest[9],
                                                                  rest[10]};
                                    gather(replay_, windows,
                                           [&](const auto& loops) { loops.sequences(discount, outputs); });
                                });
        }();
        if (!drawn) nothing_to_draw();
        return entry.batch;
    }

    using Handles = nb::ndarray<const u64, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Positions = nb::ndarray<const u32, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    using Priorities = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
    u32 set_priority(u32 selector, Handles handles, Positions positions, Priorities priorities) {
        const std::size_t count = handles.shape(0);
        if (positions.shape(0) != count || priorities.shape(0) != count)
            throw std::invalid_argument("pick_epi, pick_pos and priority must be of one length");
        nb::gil_scoped_release release;
        return replay_.set_priority(selector, {handles.data(), count}, {positions.data(), count},
                                    {priorities.data(), count});
    }

    void list_picks(nb::ndarray<u64, nb::ndim<1>, nb::c_contig, nb::device::cpu> handles,
                    nb::ndarray<u32, nb::ndim<1>, nb::c_contig, nb::device::cpu> positions) {
        nb::gil_scoped_release release;
        replay_.list_picks(handles.data(), positions.data(),
                           static_cast<u32>(std::min(handles.shape(0), positions.shape(0))));
    }
    void law(u32 selector, nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu> probability) {
        nb::gil_scoped_release release;
        replay_.law(selector, {probability.data(), probability.shape(0)});
    }
    u64 records() {
        nb::gil_scoped_release release;
        return replay_.records();
    }
    u64 episodes() {
        nb::gil_scoped_release release;
        return replay_.episodes();
    }
    u64 picks() {
        nb::gil_scoped_release release;
        return replay_.pick_count();
    }
    std::size_t nbytes() {
        const std::size_t outputs = windows_.nbytes() + transitions_.nbytes() + sequences_.nbytes();
        nb::gil_scoped_release release;
        return replay_.nbytes() + outputs;
    }
    std::string check() {
        nb::gil_scoped_release release;
        return replay_.check();
    }

    nb::object serialize(const std::string& configuration, nb::object progress) {
        BytesSink sink;
        {
            nb::gil_scoped_release release;
            Snapshot::write(replay_, configuration, SnapshotKind::COPY, sink, Teller(progress));
        }
        return sink.take();
    }
    void unserialize(nb::handle data, const std::string& configuration, nb::object progress) {
        View view;
        if (!view.open(data.ptr(), PyBUF_C_CONTIGUOUS)) throw nb::type_error("a snapshot is bytes");
        nb::gil_scoped_release release;
        const std::span<const byte> source(view.data(), view.bytes());
        Snapshot::read(replay_, configuration, {&source, 1}, Teller(progress));
    }
    void save(const std::string& path, const std::string& configuration, bool increment, nb::object progress) {
        nb::gil_scoped_release release;
        FileSink sink(path);
        Snapshot::write(replay_, configuration, increment ? SnapshotKind::INCREMENT : SnapshotKind::WHOLE, sink,
                        Teller(progress));
    }
    void load(const std::vector<std::string>& paths, const std::string& configuration, nb::object progress) {
        nb::gil_scoped_release release;
        std::deque<MappedFile> files;
        std::vector<std::span<const byte>> sources;
        for (const std::string& path : paths) sources.push_back(files.emplace_back(path).bytes());
        Snapshot::read(replay_, configuration, sources, Teller(progress));
    }

private:
    template <class T>
    static T* at(byte* data) {
        return reinterpret_cast<T*>(data);
    }
    [[noreturn]] static void nothing_to_draw() {
        throw std::invalid_argument(
            "no pick can be drawn yet: record more steps, or episodes of at least pick_len (and some priority above "
            "0)");
    }
    const byte* read(PyObject* object, View& view, const Field& field, Py_ssize_t count) {
        if (!view.open(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) || !view.fits(field, count))
            throw nb::type_error("an array does not fit");
        return view.data();
    }
    void read_states(nb::handle state, View* views, const byte** data, Py_ssize_t count) {
        const std::size_t states = replay_.store().state_count();
        if (!PyTuple_CheckExact(state.ptr())) {
            if (states != 1) throw nb::type_error("a state of several arrays comes as a tuple of them");
            data[0] = read(state.ptr(), views[0], fields_[0], count);
            return;
        }
        if (static_cast<std::size_t>(PyTuple_GET_SIZE(state.ptr())) != states)
            throw nb::type_error("a state has another number of arrays");
        for (std::size_t i = 0; i < states; ++i)
            data[i] = read(PyTuple_GET_ITEM(state.ptr(), static_cast<Py_ssize_t>(i)), views[i], fields_[i], count);
    }

    u64 seed_;
    std::vector<Field> fields_;  // states, memory, action
    Replay replay_;
    RowLayout rows_{1, 0, 0, 0, 0, 0, 0, {}};
    OutputPool windows_, transitions_, sequences_;
};

}  // namespace

void bind_replay(nb::module_& module) {
    nb::class_<ReplayCore>(module, "ReplayCore", "The replay kernel; ddrl.replay.ExperienceReplay is its face.")
        .def(nb::init<std::vector<std::pair<std::string, std::vector<Py_ssize_t>>>, std::vector<u32>, std::string,
                      std::vector<Py_ssize_t>, u32, u32, u64, u32, bool, u32, u32, u32, const std::string&, u64, u32,
                      const std::string&>(),
             nb::kw_only(), nb::arg("states"), nb::arg("state_bytes"), nb::arg("action_format"),
             nb::arg("action_shape"), nb::arg("action_bytes"), nb::arg("memory_bytes"), nb::arg("capacity"),
             nb::arg("pick_len"), nb::arg("short_picks"), nb::arg("n_step"), nb::arg("frame_stack"), nb::arg("burn_in"),
             nb::arg("eviction"), nb::arg("seed"), nb::arg("shift"), nb::arg("file"))
        .def("new_episode", &ReplayCore::new_episode)
        .def("record", &ReplayCore::record, nb::arg("handle"), nb::arg("state"), nb::arg("action"), nb::arg("reward"),
             nb::arg("final_state").none(), nb::arg("ending"), nb::arg("policy_version"), nb::arg("memory").none())
        .def("record_steps", &ReplayCore::record_steps, nb::arg("handle"), nb::arg("count"), nb::arg("state"),
             nb::arg("action"), nb::arg("reward"), nb::arg("final_state").none(), nb::arg("ending"),
             nb::arg("policy_version"), nb::arg("memory").none())
        .def("cut", &ReplayCore::cut, nb::arg("handle"))
        .def("set_row_layout", &ReplayCore::set_row_layout, nb::arg("row_bytes"), nb::arg("version"), nb::arg("stream"),
             nb::arg("step"), nb::arg("reward"), nb::arg("kind"), nb::arg("action"), nb::arg("states"))
        .def("record_rows", &ReplayCore::record_rows, nb::arg("rows"))
        .def("cut_streams", &ReplayCore::cut_streams)
        .def_static("selector_defaults", &ReplayCore::selector_defaults, nb::arg("kind"))
        .def("add_selector", &ReplayCore::add_selector, nb::arg("kind"), nb::arg("parameters"))
        .def("keep_selectors", &ReplayCore::keep_selectors, nb::arg("count"))
        .def("set_importance_exponent", &ReplayCore::set_importance_exponent, nb::arg("selector"), nb::arg("exponent"))
        .def("get_batch", &ReplayCore::get_batch, nb::arg("batch_size"), nb::arg("selector"), nb::arg("make"),
             nb::sig("def get_batch(self, batch_size: int, selector: int, make: typing.Callable[[int], object]) -> "
                     "typing.Any"))
        .def("sample", &ReplayCore::sample, nb::arg("batch_size"), nb::arg("selector"), nb::arg("discount"),
             nb::arg("make"),
             nb::sig("def sample(self, batch_size: int, selector: int, discount: float, make: typing.Callable[[int], "
                     "object]) -> typing.Any"))
        .def("sample_sequences", &ReplayCore::sample_sequences, nb::arg("batch_size"), nb::arg("selector"),
             nb::arg("discount"), nb::arg("make"),
             nb::sig("def sample_sequences(self, batch_size: int, selector: int, discount: float, make: "
                     "typing.Callable[[int], object]) -> typing.Any"))
        .def("set_priority", &ReplayCore::set_priority, nb::arg("selector"), nb::arg("pick_epi"), nb::arg("pick_pos"),
             nb::arg("priority"))
        .def("list_picks", &ReplayCore::list_picks, nb::arg("handles"), nb::arg("positions"))
        .def("law", &ReplayCore::law, nb::arg("selector"), nb::arg("probability"))
        .def_prop_ro("records", &ReplayCore::records)
        .def_prop_ro("episodes", &ReplayCore::episodes)
        .def_prop_ro("picks", &ReplayCore::picks)
        .def_prop_ro("nbytes", &ReplayCore::nbytes)
        .def("check", &ReplayCore::check)
        .def("serialize", &ReplayCore::serialize, nb::arg("configuration"), nb::arg("progress").none())
        .def("unserialize", &ReplayCore::unserialize, nb::arg("data"), nb::arg("configuration"),
             nb::arg("progress").none())
        .def("save", &ReplayCore::save, nb::arg("path"), nb::arg("configuration"), nb::arg("increment"),
             nb::arg("progress").none())
        .def("load", &ReplayCore::load, nb::arg("paths"), nb::arg("configuration"), nb::arg("progress").none());
}
