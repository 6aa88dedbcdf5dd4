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
    // `table`: the columns that are stored, those of role STATE first. `row`: bytes of a row, and where stream, step
    // and kind stand in it.
    ReplayCore(const std::vector<ColumnEntry>& table, const std::array<std::size_t, 4>& row, u64 capacity, u32 pick_len,
               bool short_picks, u32 n_step, u32 burn_in, nb::object eviction, u64 seed, u32 shift,
               const std::string& file)
        : seed_(seed),
          replay_(Options{columns_of(table), capacity, pick_len, n_step, burn_in, short_picks, shift, file},
                  eviction_of(eviction)),
          rows_{row[0], row[1], row[2], row[3], {}} {
        for (const ColumnEntry& entry : table) {
            if (std::get<0>(entry) == "policy_version") version_ = columns_.size();
            columns_.push_back(field_of(entry));
            rows_.columns.push_back(std::get<2>(entry));
        }
        column_named(table, "policy_version");
    }

    u64 new_episode() {
        Unlocked unlocked(strategies_);
        return replay_.new_episode();
    }

    // Records of one episode: for each column an array of `count` of them, or of one record where it is -1 (then a
    // number will do, as it will for the version of many). `finals`: the columns of role STATE after the last one,
    // where the episode ends. An array that does not fit its column is a Misfit: the Python side then converts and
    // calls again.
    u64 record(u64 handle, Py_ssize_t count, const nb::tuple& values, nb::handle finals, int ending) {
        const bool ends = ending != 0;
        const u32 states = replay_.store().state_count();
        if (values.size() != columns_.size()) throw Misfit("a record has another number of columns");
        Views held(columns_.size() + (ends ? states : 0));
        const byte *data[MAX_COLUMNS], *last[MAX_COLUMNS];
        std::size_t stride[MAX_COLUMNS];
        u64 numbers[MAX_COLUMNS];
        for (std::size_t c = 0; c < columns_.size(); ++c) {
            const bool one = (count < 0 || c == version_) && number(values[c], columns_[c], numbers[c]);
            data[c] = one ? reinterpret_cast<const byte*>(&numbers[c])
                          : fitted(values[c], held.begin()[c], columns_[c], count);
            stride[c] = one ? 0 : columns_[c].bytes;
        }
        if (ends) {
            const nb::tuple final_states = nb::cast<nb::tuple>(finals);
            if (final_states.size() != states) throw Misfit("a final state has another number of arrays");
            for (u32 c = 0; c < states; ++c)
                last[c] = fitted(final_states[c], held.begin()[columns_.size() + c], columns_[c], -1);
        }
        Unlocked unlocked(strategies_);
        const Rows rows{data, stride, count < 0 ? 1 : static_cast<u32>(count)};
        return replay_.record(handle, rows, static_cast<Ending>(ending), ends ? last : nullptr);
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
    // Draws a batch into the arrays that `make` lists: handles, positions and weights of the picks, then one for each
    // column, one for each next state (sequences: what is given of the pick's first record alone, one for each
    // column), and what copy(loops, columns, next, rest) takes beside them. None: not wanted.
    template <class Copy>
    nb::object draw(OutputPool& pool, u32 size, u32 selector, const nb::callable& make, Copy copy) {
        const OutputPool::Entry entry = pool.take(size, make);
        byte* const* picks = entry.data.data();
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
        return entry.batch;
    }
    std::unique_ptr<Eviction> eviction_of(const nb::object& given) {
        if (PyUnicode_Check(given.ptr())) return make_eviction(nb::cast<std::string>(given));
        return std::make_unique<ForeignEviction>(given, strategies_);
    }

    Strategies strategies_;
    u64 seed_;
    std::size_t version_ = 0;  // the column policy_version
    std::vector<Field> columns_;
    Replay replay_;
    RowLayout rows_;
    OutputPool windows_, transitions_, sequences_;
};

}  // namespace ddrl::replay
