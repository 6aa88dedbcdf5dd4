// The accumulator of one rollout: turns vector steps of N environments into rows of a ring, in one call.
//
// Written by the rollout alone. Rows go straight into the ring; only what does not fit is staged here, and must be
// flushed before the next step. Environments follow next-step reset: after a step that ended an episode, the next step
// carries no transition.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "ring.hpp"

namespace ddrl {

// Byte offsets of a row's fields (ddrl.core.layouts.row_dtype) and how observations and actions lie in memory.
struct RowFormat {
    size_t row_bytes;
    size_t policy_version, stream, step, reward, kind, action, state;
    size_t action_bytes;
    size_t state_bytes;  // of one frame
    size_t observation_bytes;  // of the stack of frames; its last frame is the newest
};

enum class RowKind : uint32_t { step = 0, terminated = 1, truncated = 2 };

class StepWriter {
public:
    StepWriter(Ring* ring, const RowFormat& format, uint32_t first_stream)
        : ring_(ring), format_(format), first_stream_(first_stream) {}

    size_t num_envs() const { return step_.size(); }

    // Rows that wait here for room in the ring.
    size_t pending() const { return (staged_.size() - staged_begin_) / format_.row_bytes; }

    // Begin with N environments, all at the first observation of an episode.
    void start(size_t num_envs) {
        step_.assign(num_envs, 0);
        done_.assign(num_envs, 0);
    }

    // Forget the running episodes: with the environments reset, the next step is step 0 of new ones.
    void cut() { start(num_envs()); }

    // Record one vector step; arrays are C-contiguous with N = num_envs() leading. Returns rows made. O(N * row_bytes).
    size_t write(const std::byte* state, const std::byte* action, const float* reward, const bool* terminated,
                 const bool* truncated, const std::byte* next_state, uint64_t policy_version) {
        const size_t count = rows_of(terminated, truncated);
        const size_t room = ring_->room(count);
        const bool straight = pending() == 0 && room >= count && !ring_->closed();
        if (!straight) {
            staged_.erase(staged_.begin(), staged_.begin() + static_cast<std::ptrdiff_t>(staged_begin_));
            staged_begin_ = 0;
            staged_.resize(staged_.size() + count * format_.row_bytes);
        }
        std::byte* stage = staged_.data() + staged_.size() - (straight ? 0 : count * format_.row_bytes);
        size_t made = 0;
        const auto next_row = [&] {
            std::byte* row = straight ? ring_->vacant(made) : stage + made * format_.row_bytes;
            ++made;
            return row;
        };
        const size_t newest = format_.observation_bytes - format_.state_bytes;
        for (size_t env = 0; env < num_envs(); ++env) {
            if (done_[env]) {  // its reset step
                done_[env] = 0;
                step_[env] = 0;
                continue;
            }
            fill(next_row(), env, RowKind::step, reward[env], action + env * format_.action_bytes,
                 state + env * format_.observation_bytes + newest, policy_version);
            ++step_[env];
            if (terminated[env] || truncated[env]) {
                fill(next_row(), env, terminated[env] ? RowKind::terminated : RowKind::truncated, 0.0f, nullptr,
                     next_state + env * format_.observation_bytes + newest, policy_version);
                done_[env] = 1;
            }
        }
        if (straight) ring_->publish(made);
        return made;
    }

    // Move staged rows into the ring as far as they fit; a ring that drops turns the others away, a closed one all.
    // Returns whether none is left.
    bool flush() {
        const size_t count = pending();
        if (count == 0) return true;
        const bool closed = ring_->closed();
        const size_t taken = closed ? 0 : ring_->push_fitting(staged_.data() + staged_begin_, count);
        staged_begin_ += taken * format_.row_bytes;
        if (ring_->drops() && !closed) ring_->count_dropped(count - taken);
        if (ring_->drops() || closed) staged_begin_ = staged_.size();
        if (pending() == 0) {
            staged_.clear();
            staged_begin_ = 0;
        }
        return pending() == 0;
    }

    Ring& ring() { return *ring_; }

private:
    size_t rows_of(const bool* terminated, const bool* truncated) const {
        size_t count = 0;
        for (size_t env = 0; env < num_envs(); ++env) {
            if (!done_[env]) count += terminated[env] || truncated[env] ? 2 : 1;
        }
        return count;
    }

    void fill(std::byte* row, size_t env, RowKind kind, float reward, const std::byte* action, const std::byte* frame,
              uint64_t policy_version) const {
        const auto put = [row](size_t offset, const auto& value) { std::memcpy(row + offset, &value, sizeof value); };
        put(format_.policy_version, policy_version);
        put(format_.stream, static_cast<uint32_t>(first_stream_ + env));
        put(format_.step, step_[env]);
        put(format_.reward, reward);
        put(format_.kind, static_cast<uint32_t>(kind));
        if (action) {
            std::memcpy(row + format_.action, action, format_.action_bytes);
        } else {
            std::memset(row + format_.action, 0, format_.action_bytes);
        }
        std::memcpy(row + format_.state, frame, format_.state_bytes);
        const size_t end = format_.state + format_.state_bytes;  // the state is the last field; what follows is padding
        std::memset(row + end, 0, format_.row_bytes - end);
    }

    Ring* ring_;
    RowFormat format_;
    uint32_t first_stream_;
    std::vector<uint32_t> step_;  // [N], step of each environment's episode
    std::vector<uint8_t> done_;  // [N], 1: the next step is this environment's reset step
    std::vector<std::byte> staged_;
    size_t staged_begin_ = 0;  // bytes of staged_ that were moved already
};

}  // namespace ddrl
