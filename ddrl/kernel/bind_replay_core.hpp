// ReplayCore: checks and converts arguments, hands out recycled output arrays, and lets the GIL go around everything
// that takes the replay's lock. For bind_replay.cpp alone.
#pragma once

#include <array>
#include <deque>

#include "bind_arrays.hpp"
#include "bind_replay_columns.hpp"
#include "bind_replay_outputs.hpp"
#include "bind_replay_snapshots.hpp"
#include "bind_replay_strategies.hpp"
#include "replay/eviction_kinds.hpp"
#include "replay/files.hpp"
#include "replay/gather.hpp"
#include "replay/replay.hpp"
#include "replay/selector_kinds.hpp"
#include "replay/snapshot.hpp"

#include <nanobind/ndarray.h>

namespace ddrl::replay {

using bind::column_named;
using bind::field_of;
using bind::Views;

class ReplayCore {
public:
    // `table`: the columns that are stored, those of role STATE first and among them the `observations` arrays of an
    // observation. `row`: bytes of a row, and where stream, step and kind stand in it.
    ReplayCore(std::vector<ColumnEntry> table, u32 observations, const std::array<std::size_t, 4>& row, u64 capacity,
               u32 pick_len, bool short_picks, u32 n_step, u32 burn_in, nb::object eviction, u64 seed, u32 shift,
               const std::string& file)
        : seed_(seed),
          observations_(observations),
          replay_(Options{columns_of(table), capacity, pick_len, n_step, burn_in, short_picks, shift, file},
                  eviction_of(eviction)),
          rows_{row[0], row[1], row[2], row[3], {}} {
        for (const ColumnEntry& entry : table) {
            const std::string& name = std::get<0>(entry);
            const u32 column = static_cast<u32>(columns_.size());
            if (name == "action") action_ = column;
            if (name == "reward") reward_ = column;
            if (name == "policy_version") version_ = column;
            const bool further =
                column >= observations && name != "action" && name != "reward" && name != "policy_version";
            columns_.push_back({nb::str(name.c_str()), nb::str((name + "_next").c_str()), field_of(entry), further});
            rows_.columns.push_back(std::get<2>(entry));
        }
        column_named(table, "action"), column_named(table, "reward"), column_named(table, "policy_version");
    }

    u64 new_episode() {
        Unlocked unlocked(strategies_);
        return replay_.new_episode();
    }

    // One record. Every array must fit its field, else Misfit: the Python side then converts and calls again.
    u64 record(u64 handle, nb::handle state, nb::handle action, nb::handle reward, nb::handle final_state, int ending,
               u64 version, nb::handle further) {
        const bool ends = ending != 0;
        Views held(columns_.size() * (ends ? 2 : 1));
        View *const views = held.begin(), *const last_views = views + columns_.size();
        const byte *data[MAX_COLUMNS], *last[MAX_COLUMNS];
        const std::size_t stride[MAX_COLUMNS] = {};
        read_observation(state, views, data, -1);
        long long integer;
        if (const Field& field = columns_[action_].field; field.bytes == 8 && field.shape.empty() &&
                                                          PyLong_CheckExact(action.ptr()) &&
                                                          (field.format == "l" || field.format == "q")) {
            integer = PyLong_AsLongLong(action.ptr());
            if (integer == -1 && PyErr_Occurred()) throw nb::python_error();
            data[action_] = reinterpret_cast<const byte*>(&integer);
        } else {
            data[action_] = fitted(action, views[action_], field, -1);
        }
        float number;
        if (const Field& field = columns_[reward_].field; field.shape.empty()) {
            const double value = PyFloat_AsDouble(reward.ptr());
            if (value == -1.0 && PyErr_Occurred()) {
                PyErr_Clear();
                throw Misfit("a reward is a number");
            }
            number = static_cast<float>(value);
            data[reward_] = reinterpret_cast<const byte*>(&number);
        } else {
            data[reward_] = fitted(reward, views[reward_], field, -1);
        }
        data[version_] = reinterpret_cast<const byte*>(&version);
        read_further(further, views, data, -1, ends ? last_views : nullptr, last);
        if (ends) read_observation(final_state, last_views, last, -1);
        Unlocked unlocked(strategies_);
        return replay_.record(handle, {data, stride, 1}, static_cast<Ending>(ending), ends ? last : nullptr);
    }

    // Many records of one episode: arrays with a leading axis of `count`; otherwise as `record`.
    u64 record_steps(u64 handle, u32 count, nb::handle state, nb::handle action, nb::handle reward,
                     nb::handle final_state, int ending, nb::handle version, nb::handle further) {
        const bool ends = ending != 0;
        Views held(columns_.size() * (ends ? 2 : 1));
        View *const views = held.begin(), *const last_views = views + columns_.size();
        const byte *data[MAX_COLUMNS], *last[MAX_COLUMNS];
        std::size_t stride[MAX_COLUMNS];
        for (std::size_t c = 0; c < columns_.size(); ++c) stride[c] = columns_[c].field.bytes;
        read_observation(state, views, data, count);
        data[action_] = fitted(action, views[action_], columns_[action_].field, count);
        data[reward_] = fitted(reward, views[reward_], columns_[reward_].field, count);
        u64 one_version = 0;
        if (PyLong_CheckExact(version.ptr())) {
            one_version = nb::cast<u64>(version);
            data[version_] = reinterpret_cast<const byte*>(&one_version);
            stride[version_] = 0;
        } else {
            data[version_] = fitted(version, views[version_], columns_[version_].field, count);
        }
        read_further(further, views, data, count, ends ? last_views : nullptr, last);
        if (ends) read_observation(final_state, last_views, last, -1);
        Unlocked unlocked(strategies_);
        return replay_.record(handle, {data, stride, count}, static_cast<Ending>(ending), ends ? last : nullptr);
    }

    void cut(u64 handle) {
        Unlocked unlocked(strategies_);
        replay_.cut(handle);
    }
    u32 record_rows(nb::handle rows) {
        View view;
        if (!view.open(rows.ptr(), PyBUF_C_CONTIGUOUS) || view.bytes() % rows_.row_bytes)
            throw nb::type_error("rows must be a contiguous array of this replay's row dtype");
        Unlocked unlocked(strategies_);
        return replay_.record_rows(view.data(), static_cast<u32>(view.bytes() / rows_.row_bytes), rows_);
    }
    void cut_streams() {
        Unlocked unlocked(strategies_);
        replay_.cut_streams();
    }

    static Parameters selector_defaults(const std::string& kind) { return find_selector_kind(kind).defaults; }
    u32 add_selector(const std::string& kind, const Parameters& parameters) {
        auto selector = find_selector_kind(kind).make(Random(seed_, 1 + replay_.selector_count()),
                                                      replay_.options().capacity, parameters);
        Unlocked unlocked(strategies_);
        return replay_.add_selector(std::move(selector));
    }
    u32 add_foreign_selector(nb::object selector) {
        auto foreign = std::make_unique<ForeignSelector>(std::move(selector), strategies_);
        Unlocked unlocked(strategies_);
        return replay_.add_selector(std::move(foreign));
    }
    void keep_selectors(u32 count) {
        Unlocked unlocked(strategies_);
        replay_.keep_selectors(count);
    }
    void set_importance_exponent(u32 selector, double exponent) {
        Unlocked unlocked(strategies_);
        std::lock_guard lock(replay_.mutex());
        replay_.selector(selector).set_importance_exponent(exponent);
    }

    // The outputs of a batch come as `make` lists them: an array or None for each column, then the next states, then
    // the others in the order below.
    nb::object get_batch(u32 size, u32 selector, const nb::callable& make) {
        const OutputPool::Entry entry = windows_.take(size, make);
        byte* const* column = entry.data.data();
        byte* const* next = column + columns_.size();
        byte* const* rest = next + replay_.store().state_count();  // seq_len, seq_len_next, handles, positions
        const bool drawn = [&] {
            Unlocked unlocked(strategies_);
            return replay_.draw(selector, size, at<u64>(rest[2]), at<u32>(rest[3]), nullptr,
                                [&](std::span<const Window> windows) {
                                    const WindowOutputs outputs{column, next, at<u32>(rest[0]), at<u32>(rest[1])};
                                    gather(replay_, windows, [&](const auto& loops) { loops.windows(outputs); });
                                });
        }();
        if (!drawn) nothing_to_draw();
        return entry.batch;
    }

    nb::object sample(u32 size, u32 selector, float discount, const nb::callable& make) {
        const OutputPool::Entry entry = transitions_.take(size, make);
        byte* const* column = entry.data.data();
        byte* const* next = column + columns_.size();
        byte* const* rest = next + replay_.store().state_count();  // discount, handles, positions, weights
        const bool drawn = [&] {
            Unlocked unlocked(strategies_);
            return replay_.draw(selector, size, at<u64>(rest[1]), at<u32>(rest[2]), at<float>(rest[3]),
                                [&](std::span<const Window> windows) {
                                    const TransitionOutputs outputs{column, next, at<float>(rest[0])};
                                    gather(replay_, windows,
                                           [&](const auto& loops) { loops.transitions(discount, outputs); });
                                });
        }();
        if (!drawn) nothing_to_draw();
        return entry.batch;
    }

    nb::object sample_sequences(u32 size, u32 selector, float discount, const nb::callable& make) {
        const OutputPool::Entry entry = sequences_.take(size, make);
        byte* const* column = entry.data.data();
        byte* const* at_pick = column + columns_.size();
        byte* const* rest = at_pick + columns_.size();  // discount, ahead, burn, length, handles, positions, weights
        const bool drawn = [&] {
            Unlocked unlocked(strategies_);
            return replay_.draw(
                selector, size, at<u64>(rest[4]), at<u32>(rest[5]), at<float>(rest[6]),
                [&](std::span<const Window> windows) {
                    const SequenceOutputs outputs{column,           at_pick,          at<float>(rest[0]),
                                                  at<u32>(rest[1]), at<u32>(rest[2]), at<u32>(rest[3])};
                    gather(replay_, windows, [&](const auto& loops) { loops.sequences(discount, outputs); });
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
        Unlocked unlocked(strategies_);
        return replay_.set_priority(selector, {handles.data(), count}, {positions.data(), count},
                                    {priorities.data(), count});
    }

    void list_picks(nb::ndarray<u64, nb::ndim<1>, nb::c_contig, nb::device::cpu> handles,
                    nb::ndarray<u32, nb::ndim<1>, nb::c_contig, nb::device::cpu> positions) {
        Unlocked unlocked(strategies_);
        replay_.list_picks(handles.data(), positions.data(),
                           static_cast<u32>(std::min(handles.shape(0), positions.shape(0))));
    }
    void law(u32 selector, nb::ndarray<double, nb::ndim<1>, nb::c_contig, nb::device::cpu> probability) {
        Unlocked unlocked(strategies_);
        replay_.law(selector, {probability.data(), probability.shape(0)});
    }
    u64 records() {
        Unlocked unlocked(strategies_);
        return replay_.records();
    }
    u64 episodes() {
        Unlocked unlocked(strategies_);
        return replay_.episodes();
    }
    u64 picks() {
        Unlocked unlocked(strategies_);
        return replay_.pick_count();
    }
    std::size_t nbytes() {
        const std::size_t outputs = windows_.nbytes() + transitions_.nbytes() + sequences_.nbytes();
        Unlocked unlocked(strategies_);
        return replay_.nbytes() + outputs;
    }
    std::string check() {
        Unlocked unlocked(strategies_);
        return replay_.check();
    }

    nb::object serialize(const std::string& configuration, nb::object progress) {
        BytesSink sink;
        {
            Unlocked unlocked(strategies_);
            Snapshot::write(replay_, configuration, SnapshotKind::COPY, sink, ProgressCall(progress));
        }
        return sink.take();
    }
    void unserialize(nb::handle data, const std::string& configuration, nb::object progress) {
        View view;
        if (!view.open(data.ptr(), PyBUF_C_CONTIGUOUS)) throw nb::type_error("a snapshot is bytes");
        Unlocked unlocked(strategies_);
        const std::span<const byte> source(view.data(), view.bytes());
        Snapshot::read(replay_, configuration, {&source, 1}, ProgressCall(progress));
    }
    void save(const std::string& path, const std::string& configuration, bool increment, nb::object progress) {
        Unlocked unlocked(strategies_);
        FileSink sink(path);
        Snapshot::write(replay_, configuration, increment ? SnapshotKind::INCREMENT : SnapshotKind::WHOLE, sink,
                        ProgressCall(progress));
    }
    void load(const std::vector<std::string>& paths, const std::string& configuration, nb::object progress) {
        Unlocked unlocked(strategies_);
        std::deque<MappedFile> files;
        std::vector<std::span<const byte>> sources;
        for (const std::string& path : paths) sources.push_back(files.emplace_back(path).bytes());
        Snapshot::read(replay_, configuration, sources, ProgressCall(progress));
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
    void read_observation(nb::handle state, View* views, const byte** data, Py_ssize_t count) {
        if (!PyTuple_CheckExact(state.ptr())) {
            if (observations_ != 1) throw Misfit("a state of several arrays comes as a tuple of them");
            data[0] = fitted(state, views[0], columns_[0].field, count);
            return;
        }
        if (PyTuple_GET_SIZE(state.ptr()) != static_cast<Py_ssize_t>(observations_))
            throw Misfit("a state has another number of arrays");
        for (u32 c = 0; c < observations_; ++c)
            data[c] =
                fitted(PyTuple_GET_ITEM(state.ptr(), static_cast<Py_ssize_t>(c)), views[c], columns_[c].field, count);
    }
    // The further columns by name, and where an episode ends (last_views) those of its final state by name_next.
    void read_further(nb::handle given, View* views, const byte** data, Py_ssize_t count, View* last_views,
                      const byte** last) {
        for (u32 c = 0; c < columns_.size(); ++c) {
            if (!columns_[c].further) continue;
            data[c] = fitted(item(given, columns_[c].name), views[c], columns_[c].field, count);
            if (last_views && c < replay_.store().state_count())
                last[c] = fitted(item(given, columns_[c].next_name), last_views[c], columns_[c].field, -1);
        }
    }
    std::unique_ptr<Eviction> eviction_of(const nb::object& given) {
        if (PyUnicode_Check(given.ptr())) return make_eviction(nb::cast<std::string>(given));
        return std::make_unique<ForeignEviction>(given, strategies_);
    }

    struct Stored {
        nb::str name, next_name;
        Field field;
        bool further;  // beside observation, action, reward and policy_version
    };
    Strategies strategies_;
    u64 seed_;
    u32 observations_, action_ = 0, reward_ = 0, version_ = 0;
    std::vector<Stored> columns_;
    Replay replay_;
    RowLayout rows_;
    OutputPool windows_, transitions_, sequences_;
};

}  // namespace ddrl::replay
