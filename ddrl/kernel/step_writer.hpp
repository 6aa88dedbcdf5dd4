// The accumulator of one rollout: turns vector steps of N environments into rows of a ring, in one call.
//
// Used by the rollout alone. Rows are written straight into the ring; only rows that do not fit are staged here, and
// must be flushed before the next step. Environments reset on the next step: after a step that ended an episode, the
// next step carries no transition. A row that a reader will never see always leaves a gap in `step`: where the next
// row's step would be the one that the reader expects, it is raised by one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "finite.hpp"
#include "ring.hpp"

namespace ddrl {

struct Place {
    size_t offset, bytes;  // within a row
};

// Offsets of the columns within a row (ddrl.core.rows.RowSchema), and the layout of observations in memory.
struct RowFormat {
    struct Further {
        Place place;
        bool state;  // also in end rows
    };
    struct Floats {  // numbers that must be finite
        size_t offset, count, width;  // offset within a frame; width: 2, 4 or 8 bytes
    };
    size_t row_bytes;
    size_t policy_version, stream, step, kind;
    Place reward, action, state;  // state: one frame, its arrays side by side
    size_t observation_bytes;  // of the stack of frames; its last frame is the newest
    std::vector<Further> columns;
    std::vector<Floats> floats;  // of the frame
};

enum class RowKind : uint32_t { step = 0, terminated = 1, truncated = 2 };

// Thrown for a reward or state that is NaN or infinite, unless such rows are dropped; nothing of the vector step was
// written.
struct NonFiniteValue {
    size_t env;
    uint32_t step;  // of the environment's episode
    const char* what;
};

// One vector step; arrays are C-contiguous with N leading. `columns` and `next_columns` hold an array for each further
// column; those of next_columns are read where the column is also in end rows.
struct VectorStep {
    const byte *state, *action, *reward;
    const bool *terminated, *truncated;
    const byte* next_state;
    const byte *const *columns, *const *next_columns;
    uint64_t policy_version;
};

class StepWriter {
public:
    // first_step: of the first episodes. A writer that follows one that has died takes a number that no reader expects,
    // so that its first rows are never joined to an episode of the dead one.
    StepWriter(Ring* ring, RowFormat format, uint32_t first_stream, bool drop_nonfinite, uint32_t first_step = 0)
        : ring_(ring),
          format_(std::move(format)),
          first_stream_(first_stream),
          drop_nonfinite_(drop_nonfinite),
          first_step_(first_step) {
        packed_bytes_ = format_.state.offset + format_.state.bytes;
        for (const RowFormat::Further& column : format_.columns)
            packed_bytes_ = std::max(packed_bytes_, column.place.offset + column.place.bytes);
    }

    size_t num_envs() const { return environments_.size(); }

    // Rows that wait here for room in the ring.
    size_t pending() const { return (staged_.size() - staged_begin_) / format_.row_bytes; }

    // Rows that were dropped because a reward or state was not finite.
    uint64_t nonfinite_rows() const { return nonfinite_rows_; }

    // Begin with N environments, all at the first observation of an episode.
    void start(size_t num_envs) { environments_.assign(num_envs, {.step = first_step_}); }

    // Drop the running episodes: with the environments reset, the next step is step 0 of new ones.
    void cut() {
        for (Environment& environment : environments_) environment.done = false, environment.step = 0;
    }

    // Record one vector step of num_envs() environments. Returns rows made. O(N * row_bytes).
    size_t write(const VectorStep& given) {
        const size_t count = judge(given);
        const size_t room = ring_->room(count);
        const bool straight = pending() == 0 && room >= count && !ring_->closed();
        if (!straight) {
            staged_.erase(staged_.begin(), staged_.begin() + staged_begin_);
            staged_begin_ = 0;
            staged_.resize(staged_.size() + count * format_.row_bytes);
        }
        byte* stage = staged_.data() + staged_.size() - (straight ? 0 : count * format_.row_bytes);
        size_t made = 0;
        const auto next_row = [&] {
            byte* row = straight ? ring_->vacant(made) : stage + made * format_.row_bytes;
            ++made;
            return row;
        };
        for (size_t env = 0; env < num_envs(); ++env) {
            Environment& at = environments_[env];
            if (at.done) {  // its reset step
                at.done = false;
                at.step = 0;
                continue;
            }
            if (at.gap && at.step == at.expected && at.step) ++at.step;
            if (at.step_is_finite) {
                fill_step(next_row(), env, given);
                at.expected = at.step + 1;
                at.gap = false;
            } else {
                at.gap = true;
            }
            ++at.step;
            if (given.terminated[env] || given.truncated[env]) {
                if (at.end_is_finite && !at.gap)
                    fill_end(next_row(), env, given), at.expected = 0;
                else
                    at.gap = true;
                at.done = true;
            }
        }
        if (straight) ring_->publish(made);
        return made;
    }

    // Move staged rows into the ring as far as they fit; a closed ring turns all away. Returns whether none is left.
    bool flush() {
        const size_t count = pending();
        if (count == 0) return true;
        const size_t taken = ring_->closed() ? count : ring_->push_fitting(staged_.data() + staged_begin_, count);
        staged_begin_ += taken * format_.row_bytes;
        if (taken < count) return false;
        staged_.clear();
        staged_begin_ = 0;
        return true;
    }

    Ring& ring() { return *ring_; }

private:
    struct Environment {
        uint32_t step = 0;  // of its episode
        uint32_t expected = 0;  // step that would follow the last row a reader sees; 0: none would
        bool done = false;  // the next step is its reset step
        bool gap = false;  // a row after that one was dropped
        bool step_is_finite = true, end_is_finite = true;  // in the vector step at hand
    };

    // Notes which rows of a vector step are finite and returns how many will be made. Throws NonFiniteValue.
    size_t judge(const VectorStep& given) {
        size_t count = 0;
        for (size_t env = 0; env < num_envs(); ++env) {
            Environment& at = environments_[env];
            if (at.done) continue;
            const bool ends = given.terminated[env] || given.truncated[env];
            const bool reward = finite(given.reward + env * format_.reward.bytes, format_.reward.bytes / 4, 4);
            const bool state = finite_state(given.state, env);
            at.step_is_finite = reward && state;
            at.end_is_finite = !ends || finite_state(given.next_state, env);
            if (!at.step_is_finite || !at.end_is_finite) [[unlikely]] {
                if (!drop_nonfinite_)
                    throw NonFiniteValue{env, at.step, !state ? "state" : !reward ? "reward" : "final state"};
                nonfinite_rows_ += 1 + (ends && !at.step_is_finite);
            }
            // An end row after a dropped step would give another record the episode's final state.
            count += at.step_is_finite + (at.step_is_finite && ends && at.end_is_finite);
        }
        return count;
    }

    bool finite_state(const byte* observations, size_t env) const {
        const byte* frame = newest_frame(observations, env);
        for (const RowFormat::Floats& floats : format_.floats)
            if (!finite(frame + floats.offset, floats.count, floats.width)) return false;
        return true;
    }

    const byte* newest_frame(const byte* observations, size_t env) const {
        return observations + (env + 1) * format_.observation_bytes - format_.state.bytes;
    }

    void fill_step(byte* row, size_t env, const VectorStep& given) const {
        fill_header(row, env, RowKind::step, given.policy_version);
        put(row, format_.reward, given.reward, env);
        put(row, format_.action, given.action, env);
        std::memcpy(row + format_.state.offset, newest_frame(given.state, env), format_.state.bytes);
        for (size_t c = 0; c < format_.columns.size(); ++c) put(row, format_.columns[c].place, given.columns[c], env);
    }

    void fill_end(byte* row, size_t env, const VectorStep& given) const {
        fill_header(row, env, given.terminated[env] ? RowKind::terminated : RowKind::truncated, given.policy_version);
        std::memset(row + format_.reward.offset, 0, format_.reward.bytes);
        std::memset(row + format_.action.offset, 0, format_.action.bytes);
        std::memcpy(row + format_.state.offset, newest_frame(given.next_state, env), format_.state.bytes);
        for (size_t c = 0; c < format_.columns.size(); ++c) {
            const auto& [place, state] = format_.columns[c];
            if (state)
                put(row, place, given.next_columns[c], env);
            else
                std::memset(row + place.offset, 0, place.bytes);
        }
    }

    void fill_header(byte* row, size_t env, RowKind kind, uint64_t policy_version) const {
        const auto put_value = [row](size_t offset, const auto& value) {
            std::memcpy(row + offset, &value, sizeof value);
        };
        put_value(format_.policy_version, policy_version);
        put_value(format_.stream, static_cast<uint32_t>(first_stream_ + env));
        put_value(format_.step, environments_[env].step);
        put_value(format_.kind, static_cast<uint32_t>(kind));
        std::memset(row + packed_bytes_, 0, format_.row_bytes - packed_bytes_);
    }

    static void put(byte* row, const Place& place, const byte* values, size_t env) {
        std::memcpy(row + place.offset, values + env * place.bytes, place.bytes);
    }

    Ring* ring_;
    RowFormat format_;
    uint32_t first_stream_;
    bool drop_nonfinite_;
    uint32_t first_step_;
    size_t packed_bytes_;  // of a row, without the padding at its end
    std::vector<Environment> environments_;
    std::vector<byte> staged_;
    size_t staged_begin_ = 0;  // bytes of staged_ that were moved already
    uint64_t nonfinite_rows_ = 0;
};

}  // namespace ddrl
