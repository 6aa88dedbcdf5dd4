// Masses at dense indices, their sum, and draws in proportion: a tree of fan-out 16 instead of 2, so five levels hold a
// million leaves.
//
// Leaves are float, sums double. A node is always the sum of its children, added in one fixed order: rounding errors do
// not accumulate, and a rebuilt tree is bit-equal. A write changes its leaf and marks its group of 16; the next draw
// recomputes the marked paths, so a burst of writes costs little. A batch descends level by level, all draws together:
// their cache misses overlap.
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <span>
#include <utility>
#include <vector>

#include "memory.hpp"

namespace ddrl::replay {

class SumTree {
public:
    static constexpr u32 FAN = 16;

    explicit SumTree(size_t capacity) : leaves_(round_up(capacity + 1, FAN)), marked_(leaves_.capacity() / FAN) {
        for (size_t width = leaves_.capacity() / FAN;; width = (width + FAN - 1) / FAN) {
            sums_.emplace_back(round_up(width, FAN));
            if (width == 1) break;
        }
    }

    float mass(u32 index) const { return leaves_[index]; }
    void set(u32 index, float mass) {
        leaves_.set(index, mass);
        const u32 group = index / FAN;
        if (!marked_[group]) marked_[group] = 1, pending_.push_back(group);
    }
    void fill(u32 first, u32 count, float mass) {
        for (u32 i = first; i < first + count; ++i) set(i, mass);
        used_ = std::max(used_, first + count);
    }
    double total() {
        repair();
        return sums_.back()[0];
    }

    // For each target in [0, total): the index whose mass spans it. Targets are used up; an index of mass 0 is never
    // found.
    void find(std::span<double> target, std::span<u32> index) {
        repair();
        for (u32& node : index) node = 0;
        const auto descend_all = [&](const auto* children) {
            for (size_t i = 0; i < index.size(); ++i) {
                if (i + 8 < index.size()) prefetch_group(children, index[i + 8]);
                index[i] = descend(children, index[i], target[i]);
            }
        };
        for (size_t level = sums_.size() - 1; level > 0; --level) descend_all(sums_[level - 1].data());
        descend_all(leaves_.data());
    }

    size_t nbytes() const {
        return used_ * sizeof(float) + used_ / (FAN - 1) * sizeof(double) + used_ / FAN +
               pending_.capacity() * sizeof(u32);
    }

    // The first `size` masses (or those written since mark_saved) for a snapshot; load returns their number.
    void save(Writer& out, u32 size, bool whole) const { leaves_.save(out, size, whole); }
    void mark_saved() { leaves_.clear_written(); }
    u32 load(Reader& in) {
        const u32 before = std::exchange(used_, static_cast<u32>(leaves_.capacity()) - 1);  // should reading throw
        const u32 count = static_cast<u32>(leaves_.load(in));
        if (count < before) fill(count, before - count, 0.0f);
        used_ = count;
        for (u32 group = 0; group * FAN < count; ++group)
            if (!marked_[group]) marked_[group] = 1, pending_.push_back(group);
        return count;
    }

    // Throws what is wrong; masses at and after `size` must be 0. O(size).
    void check(u32 size) {
        repair();
        for (u32 i = 0; i < used_; ++i) {
            fail_if(!(leaves_[i] >= 0.0f && leaves_[i] <= FLT_MAX), "a mass is no number of at least 0");
            fail_if(i >= size && leaves_[i] != 0.0f, "a dropped pick still has mass");
        }
        for (size_t level = 0; level < sums_.size(); ++level)
            for (size_t node = 0; node < (used_ >> (4 * (level + 1))) + 1; ++node)
                fail_if(sums_[level][node] != (level ? sum(sums_[level - 1].data(), node) : sum(leaves_.data(), node)),
                        "a sum differs from its parts");
    }

private:
    // Asks for the lines of a node's children.
    template <class Number>
    static void prefetch_group(const Number* children, u32 node) {
        const Number* first = children + size_t{node} * FAN;
        for (size_t i = 0; i < FAN; i += 64 / sizeof(Number)) __builtin_prefetch(first + i);
    }

    // The sums of each four of a node's children.
    template <class Number>
    static std::array<double, 4> quarters(const Number* c) {
        std::array<double, 4> q;
        for (size_t k = 0; k < 4; ++k)
            q[k] = (double(c[4 * k]) + double(c[4 * k + 1])) + (double(c[4 * k + 2]) + double(c[4 * k + 3]));
        return q;
    }

    template <class Number>
    static double sum(const Number* children, size_t node) {
        const auto q = quarters(children + node * FAN);
        return (q[0] + q[1]) + (q[2] + q[3]);
    }

    // The child of `node` that spans `target`, which becomes the rest within it: first the quarter, then the child,
    // without branches.
    template <class Number>
    static u32 descend(const Number* children, u32 node, double& target) {
        const Number* c = children + size_t{node} * FAN;
        const auto q = quarters(c);
        const double q1 = q[0], q2 = q[0] + q[1], q3 = q2 + q[2];
        const unsigned quarter = unsigned(target >= q1) + unsigned(target >= q2) + unsigned(target >= q3);
        const double start[4] = {0.0, q1, q2, q3};
        double rest = target - start[quarter];
        const Number* d = c + 4 * quarter;
        const double d1 = double(d[0]), d2 = d1 + double(d[1]), d3 = d2 + double(d[2]);
        const unsigned part = unsigned(rest >= d1) + unsigned(rest >= d2) + unsigned(rest >= d3);
        const double within[4] = {0.0, d1, d2, d3};
        rest -= within[part];
        unsigned child = 4 * quarter + part;
        if (!(double(c[child]) > rest)) {  // rounding at the edge: stay in the nearest child that has mass
            for (unsigned back = child + 1; back-- > 0;)
                if (c[back] > Number{0}) return target = double(c[back]) * 0.99999999999999, node * FAN + back;
            while (child + 1 < FAN && !(c[child] > Number{0})) ++child;
            rest = 0.0;
        }
        target = rest;
        return node * FAN + child;
    }

    void repair() {
        if (pending_.empty()) return;
        for (size_t level = 0; level < sums_.size(); ++level) {
            double* sums = sums_[level].data();
            size_t groups = 0;
            for (const u32 group : pending_) {
                if (level == 0)
                    marked_[group] = 0, sums[group] = sum(leaves_.data(), group);
                else
                    sums[group] = sum(sums_[level - 1].data(), group);
                if (!groups || pending_[groups - 1] != group / FAN) pending_[groups++] = group / FAN;
            }
            pending_.resize(groups);
        }
        pending_.clear();
    }

    Tracked<float> leaves_;
    Reserved<u8> marked_;
    std::vector<Reserved<double>> sums_;
    std::vector<u32> pending_;
    u32 used_ = 0;
};

}  // namespace ddrl::replay
