// Which episode each stream (one environment of one rollout) is in, and the recording of rows in which many streams
// interleave.
//
// All calls come under the replay's lock, which appending may release for a moment: a stream is looked up again after
// it.
#pragma once

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "options.hpp"

namespace ddrl::replay {

class Streams {
public:
    // Records rows in their order; returns how many were records (not final states). Step 0 of a stream begins an
    // episode, so does a step that does not follow the last one, which ends the old episode without a final state. The
    // recorder appends and ends: recorder.append(episode or NONE, rows) -> episode, recorder.end(episode, ending, final
    // state or null).
    template <class Recorder>
    u32 record(Recorder& recorder, const Store& store, const byte* rows, u32 count, const RowLayout& layout) {
        const u32 columns = store.column_count();
        const byte* data[MAX_COLUMNS];
        const std::size_t stride[MAX_COLUMNS] = {};
        const std::size_t* const offsets = layout.columns.data();
        u32 recorded = 0, key, step, kind;
        for (u32 i = 0; i < count; ++i) {
            std::memcpy(&kind, rows + i * layout.row_bytes + layout.kind, 4);
            if (kind > 2)
                throw std::invalid_argument("a row of kind " + std::to_string(kind) +
                                            " is no row of experience: it is torn or foreign");
        }
        for (u32 i = 0; i < count; ++i) {
            const byte* row = rows + i * layout.row_bytes;
            std::memcpy(&key, row + layout.stream, 4), std::memcpy(&step, row + layout.step, 4),
                std::memcpy(&kind, row + layout.kind, 4);
            Stream& stream = streams_.at(key);
            u32 episode = episode_of(stream, store);
            if (stream.handle != NO_HANDLE && step != stream.next_step) {
                if (episode != NONE) recorder.end(episode, Ending::CUT, nullptr);
                stream.handle = NO_HANDLE, episode = NONE;
            }
            for (u32 c = 0; c < columns; ++c) data[c] = row + offsets[c];
            if (kind != 0) {
                if (episode != NONE) recorder.end(episode, kind == 1 ? Ending::TERMINATED : Ending::TRUNCATED, data);
                streams_.at(key).handle = NO_HANDLE;
                continue;
            }
            episode = recorder.append(episode, {data, stride, 1});
            streams_.at(key) = {store.episode(episode).handle, step + 1, episode};
            ++recorded;
        }
        return recorded;
    }

    // Ends every live episode of the streams without a final state, in order of handles.
    template <class Recorder>
    void cut(Recorder& recorder, const Store& store) {
        std::vector<u64> handles;
        streams_.each([&](u64, const Stream& stream) { handles.push_back(stream.handle); });
        std::sort(handles.begin(), handles.end());
        for (const u64 handle : handles)
            if (const u32 episode = handle == NO_HANDLE ? NONE : store.find(handle); episode != NONE)
                recorder.end(episode, Ending::CUT, nullptr);
        streams_.clear();
    }

    std::size_t nbytes() const { return streams_.nbytes(); }
    void save(Writer& out) const {
        out.value<u64>(streams_.size());
        streams_.each([&](u64 key, const Stream& stream) { out.value(key), out.value(stream); });
    }
    void load(Reader& in) {
        streams_.clear();
        for (u64 left = in.value<u64>(); left--;) {
            const u64 key = in.value<u64>();
            if (key > NONE) throw std::runtime_error("it holds a stream that cannot be");
            streams_.at(key) = in.value<Stream>();
        }
    }
    // What is wrong with the streams, or nothing: an episode that a stream goes on with has not ended.
    std::string check(const Store& store) const {
        bool live = true;
        streams_.each([&](u64, const Stream& stream) {
            const u32 episode = episode_of(stream, store);
            live = live && (episode == NONE || store.episode(episode).ending == Ending::LIVE);
        });
        return live ? "" : "a stream is in an episode that has ended";
    }

private:
    static constexpr u64 NO_HANDLE = ~u64{0};
    struct Stream {
        u64 handle = NO_HANDLE;
        u32 next_step = 0, episode = 0;  // episode: its index, good while the handle stands there
    };
    static u32 episode_of(const Stream& stream, const Store& store) {
        return stream.handle != NO_HANDLE && store.episodes().holds(stream.episode, stream.handle) ? stream.episode
                                                                                                   : NONE;
    }
    FlatMap<Stream> streams_;
};

}  // namespace ddrl::replay
