// The queue of one display request of ad mixing: which candidates stand in it, what a policy sees of them, which ad is
// shown, and what showing it changes.
//
// Rules and numbers are those of ddrl.admix (vector.py, state.py, delivery.py), for one request at a time; a test
// holds both to the same days. All tables belong to the caller, who reads and writes them between calls. One thread.
// Contract j stands in slot j, the bids of a request behind them. O(contracts + candidates) a request.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replay/random.hpp"

namespace ddrl {

enum class Support { off = 0, late = 1, fresh = 2 };

// Why a candidate may not be shown.
enum class Reason : uint8_t { plays, filtered, not_targeted, at_cap, rate, theta, no_bid, cut };

// Columns of `ad` that a request sets; -1: the policy does not see them.
struct AdColumns {
    int ecpm, ctr, value, impressions, pace, cap, late, need, rate;
};

struct AdTables {
    size_t contracts, bids, cells, windows, fields, traffic_size;
    // What is known before the day.
    const int64_t* ids;  // [contracts]
    const double *demand, *limit, *billed_rate;  // [contracts]; limit: the cap in impressions
    const bool* eligible;  // [cells, contracts]
    const double* curve;  // [windows + 1, contracts]
    const float *rows, *bid_row;  // [contracts, fields], [fields]: what stays of each row of `ad`
    const float* prior;  // [contracts], actions that a policy departs from
    const float* traffic_rows;  // [cells, traffic_size]
    AdColumns columns;
    double click_value;  // [currency]
    bool own_counts;
    Support support;
    double support_gap;
    bool bonuses;  // actions are added to the value of a click, and states hold contracts below their cap alone
    // What changes as display goes on.
    double *rate, *theta;  // [contracts], probabilities
    double *shown, *seen_shown, *seen_billed;  // [contracts]
    double* sums;  // contract ads shown, their ctr, bids shown, their ctr, their eCPM
};

// Where the state of a request is written.
struct AdState {
    bool* mask;  // [observed]
    float* ad;  // [observed, fields]
    int32_t* ad_id;  // [observed]
    float* prior;  // [observed]
    float *overall, *traffic;  // [5], [traffic_size]
};

struct Candidates {
    std::vector<int64_t> ad, kind, filters;
    std::vector<double> ecpm, ctr;
};

struct BadCandidate {
    std::string words;
};

struct AdChoice {
    int slot;  // -1: nothing is shown
    double score;
};

class AdQueue {
public:
    static constexpr double PRIOR_IMPRESSIONS = 50.0, MAX_PACE = 4.0;
    static constexpr int64_t CONTRACT = 0, BID = 1, FILTERED = 1;

    AdQueue(AdTables tables, uint64_t seed) : t_(std::move(tables)), random_(seed) {
        const size_t slots = t_.contracts + t_.bids;
        for (size_t j = 0; j < t_.contracts; ++j) place_of_[t_.ids[j]] = static_cast<int>(j);
        estimate_.resize(t_.contracts), due_.resize(t_.contracts), rate_.resize(t_.contracts);
        queue_.resize(slots), playable_.resize(slots), origin_.resize(slots), value_.resize(slots), ctr_.resize(slots);
    }

    size_t slots() const { return playable_.size(); }
    size_t observed() const { return t_.bonuses ? t_.contracts : slots(); }  // slots that a policy sees
    const std::vector<Reason>& reasons() const { return reasons_; }  // by candidate
    const std::vector<int>& origin() const { return origin_; }  // candidate in each slot; -1: none
    const std::vector<double>& value() const { return value_; }  // by slot: what showing it is worth [eCPM]
    const std::vector<double>& estimate() const { return estimate_; }  // billed impressions by what is known
    const std::vector<double>& due() const { return due_; }  // impressions due at the last request's time

    // Take over a request and write its state; the number of bids that found no slot. Throws BadCandidate.
    size_t read(const Candidates& given, size_t cell, double time, const AdState& out) {
        check(given);
        look_at_contracts(time);
        std::fill(out.mask, out.mask + observed(), false);
        std::memset(out.ad, 0, observed() * t_.fields * sizeof(float));
        std::memset(out.ad_id, 0, observed() * sizeof(int32_t));
        std::memset(out.prior, 0, observed() * sizeof(float));
        std::fill(queue_.begin(), queue_.end(), char{0});
        std::fill(ctr_.begin(), ctr_.end(), 0.0), std::fill(value_.begin(), value_.end(), 0.0);
        std::fill(playable_.begin(), playable_.end(), char{0});
        std::fill(origin_.begin(), origin_.end(), -1);
        reasons_.assign(given.ad.size(), Reason::plays);
        standing_bids_.clear();
        for (size_t i = 0; i < given.ad.size(); ++i) {
            if (given.kind[i] == CONTRACT)
                place_contract(given, i, cell);
            else if (given.filters[i] & FILTERED)
                reasons_[i] = Reason::filtered;
            else if (given.ecpm[i] > 0)
                standing_bids_.push_back(static_cast<int>(i));
            else
                reasons_[i] = Reason::no_bid;
        }
        const size_t cut = cut_lowest_bids(given);
        for (size_t b = 0; b < standing_bids_.size(); ++b)
            place_bid(given, static_cast<size_t>(standing_bids_[b]), t_.contracts + b, out);
        for (size_t j = 0; j < t_.contracts; ++j)
            if (t_.bonuses ? t_.shown[j] < t_.limit[j] : queue_[j] != 0) write_contract(j, out);
        write_overall(time, out.overall);
        std::memcpy(out.traffic, t_.traffic_rows + cell * t_.traffic_size, t_.traffic_size * sizeof(float));
        return cut;
    }

    // The highest of `scores` [count]; slots behind `count` hold bids at their eCPM. Throws BadCandidate for a score
    // inside the queue that is not a number.
    AdChoice choose(const float* scores, size_t count) const {
        AdChoice best{-1, 0.0};
        for (size_t slot = 0; slot < slots(); ++slot) {
            if (!queue_[slot]) continue;
            const double score = score_of(scores, count, slot);
            if (!std::isfinite(score))
                throw BadCandidate{"the policy scores " + word("ad", static_cast<size_t>(origin_[slot])) + " as " +
                                   std::to_string(score) + ", which is not a number"};
            if (playable_[slot] && (best.slot < 0 || score > best.score)) best = {static_cast<int>(slot), score};
        }
        return best;
    }

    double score_of(const float* scores, size_t count, size_t slot) const {
        if (slot >= count) return value_[slot];
        return static_cast<double>(scores[slot] + (t_.bonuses ? static_cast<float>(value_[slot]) : 0.0f));
    }

    // Count the ad in `slot` of the present request as shown.
    void show(size_t slot) {
        if (slot < t_.contracts) {
            t_.shown[slot] += 1, t_.sums[0] += 1, t_.sums[1] += ctr_[slot];
        } else {
            t_.sums[2] += 1, t_.sums[3] += ctr_[slot], t_.sums[4] += value_[slot];
        }
    }

private:
    static std::string word(const char* field, size_t place) {
        return std::string(field) + "[" + std::to_string(place) + "]";
    }

    static void check(const Candidates& given) {
        const size_t count = given.ad.size();
        const std::pair<const char*, size_t> sizes[] = {{"kind", given.kind.size()},
                                                        {"ecpm", given.ecpm.size()},
                                                        {"ctr", given.ctr.size()},
                                                        {"filters", given.filters.size()}};
        for (const auto& [field, size] : sizes)
            if (size != count)
                throw BadCandidate{std::string(field) + " has " + std::to_string(size) + " entries, ad has " +
                                   std::to_string(count) + ": give one for each candidate"};
        for (size_t i = 0; i < count; ++i) {
            if (given.kind[i] != CONTRACT && given.kind[i] != BID)
                throw BadCandidate{word("kind", i) + " must be 0 (contract) or 1 (bidding)"};
            if (!(given.ecpm[i] >= 0) || !std::isfinite(given.ecpm[i]))
                throw BadCandidate{word("ecpm", i) + " must be a number of at least 0"};
            if (!(given.ctr[i] >= 0 && given.ctr[i] <= 1)) throw BadCandidate{word("ctr", i) + " must lie in [0, 1]"};
            if (given.ad[i] < 0 || given.ad[i] > INT32_MAX)
                throw BadCandidate{word("ad", i) + " must be an id of 0 to 2147483647"};
        }
    }

    // What is due, and what has been delivered by what is known.
    void look_at_contracts(double time) {
        const double place = std::clamp(time, 0.0, 1.0) * static_cast<double>(t_.windows);
        const size_t left = std::min(static_cast<size_t>(place), t_.windows - 1);
        const double part = place - static_cast<double>(left);
        const double *from = t_.curve + left * t_.contracts, *to = from + t_.contracts;
        for (size_t j = 0; j < t_.contracts; ++j) {
            due_[j] = (from[j] * (1 - part) + to[j] * part) * t_.demand[j];
            rate_[j] =
                (t_.seen_billed[j] + PRIOR_IMPRESSIONS * t_.billed_rate[j]) / (t_.seen_shown[j] + PRIOR_IMPRESSIONS);
            estimate_[j] = t_.seen_billed[j];
            if (t_.own_counts) estimate_[j] += rate_[j] * (t_.shown[j] - t_.seen_shown[j]);
        }
    }

    bool supported(size_t j) const {
        const double gap = t_.support_gap * t_.demand[j];
        if (t_.support == Support::late) return due_[j] - estimate_[j] > gap;
        return t_.support == Support::fresh && estimate_[j] < gap;
    }

    void place_contract(const Candidates& given, size_t i, size_t cell) {
        const auto known = place_of_.find(given.ad[i]);
        if (known == place_of_.end())
            throw BadCandidate{word("ad", i) + " = " + std::to_string(given.ad[i]) +
                               " is no contract of this server; contracts of another day, or a bid of kind 1?"};
        const auto j = static_cast<size_t>(known->second);
        if (origin_[j] >= 0)
            throw BadCandidate{word("ad", i) + " = " + std::to_string(given.ad[i]) + " is there twice"};
        origin_[j] = static_cast<int>(i);
        ctr_[j] = static_cast<float>(given.ctr[i]);
        value_[j] = static_cast<float>(1000 * t_.click_value) * static_cast<float>(given.ctr[i]);
        reasons_[i] = reason_against(given.filters[i], cell, j);
        playable_[j] = reasons_[i] == Reason::plays;
        queue_[j] = playable_[j] || reasons_[i] == Reason::theta;
    }

    void write_contract(size_t j, const AdState& out) const {
        out.mask[j] = true;
        float* row = out.ad + j * t_.fields;
        std::memcpy(row, t_.rows + j * t_.fields, t_.fields * sizeof(float));
        const AdColumns& at = t_.columns;
        set(row, at.ctr, ctr_[j]);
        set(row, at.value, value_[j]);
        set(row, at.impressions, estimate_[j] / std::max(t_.demand[j], 1.0));
        set(row, at.pace, std::min(estimate_[j] / std::max(due_[j], 1.0), MAX_PACE));
        set(row, at.cap, 1 - t_.shown[j] / std::max(t_.limit[j], 1.0));
        const double demand = t_.demand[j], left = std::max(demand - due_[j], 0.02 * demand + 1e-9);
        set(row, at.late, 100 * (due_[j] - estimate_[j]) / std::max(demand, 1.0));
        set(row, at.need, std::clamp((demand - estimate_[j]) / left, 0.0, MAX_PACE));
        set(row, at.rate, rate_[j] / std::max(t_.billed_rate[j], 1e-6));
        out.ad_id[j] = static_cast<int32_t>(t_.ids[j]);
        out.prior[j] = t_.prior[j];
    }

    Reason reason_against(int64_t filters, size_t cell, size_t j) {
        if (filters & FILTERED) return Reason::filtered;
        if (!t_.eligible[cell * t_.contracts + j]) return Reason::not_targeted;
        if (t_.shown[j] >= t_.limit[j]) return Reason::at_cap;
        const bool free = (t_.rate[j] >= 1 && t_.theta[j] >= 1) || supported(j);
        if (free) return Reason::plays;
        if (random_.unit() >= t_.rate[j]) return Reason::rate;
        return random_.unit() >= t_.theta[j] ? Reason::theta : Reason::plays;
    }

    // Of more bids than slots the highest stay, of equal ones the first; in the order of the request.
    size_t cut_lowest_bids(const Candidates& given) {
        if (standing_bids_.size() <= t_.bids) return 0;
        const size_t cut = standing_bids_.size() - t_.bids;
        std::stable_sort(standing_bids_.begin(), standing_bids_.end(), [&](int a, int b) {
            return given.ecpm[static_cast<size_t>(a)] > given.ecpm[static_cast<size_t>(b)];
        });
        for (size_t b = t_.bids; b < standing_bids_.size(); ++b)
            reasons_[static_cast<size_t>(standing_bids_[b])] = Reason::cut;
        standing_bids_.resize(t_.bids);
        std::sort(standing_bids_.begin(), standing_bids_.end());
        return cut;
    }

    void place_bid(const Candidates& given, size_t i, size_t slot, const AdState& out) {
        origin_[slot] = static_cast<int>(i);
        ctr_[slot] = static_cast<float>(given.ctr[i]);
        value_[slot] = static_cast<float>(given.ecpm[i]);
        playable_[slot] = queue_[slot] = true;
        if (t_.bonuses) return;
        out.mask[slot] = true;
        float* row = out.ad + slot * t_.fields;
        std::memcpy(row, t_.bid_row, t_.fields * sizeof(float));
        set(row, t_.columns.ecpm, value_[slot]);
        set(row, t_.columns.ctr, ctr_[slot]);
        set(row, t_.columns.value, value_[slot]);
        out.ad_id[slot] = static_cast<int32_t>(given.ad[i]);
    }

    static void set(float* row, int column, double value) {
        if (column >= 0) row[column] = static_cast<float>(value);
    }

    // Shortfall, mean contract ctr, mean bidding ctr, mean payment, time of the day.
    void write_overall(double time, float* overall) const {
        double late = 0, due = 0;
        for (size_t j = 0; j < t_.contracts; ++j) late += std::max(due_[j] - estimate_[j], 0.0), due += due_[j];
        const double* sums = t_.sums;
        overall[0] = due > 0 ? static_cast<float>(late / due) : 0.0f;
        overall[1] = static_cast<float>(sums[1] / std::max(sums[0], 1.0));
        overall[2] = static_cast<float>(sums[3] / std::max(sums[2], 1.0));
        overall[3] = static_cast<float>(sums[4] / std::max(sums[2], 1.0));
        overall[4] = static_cast<float>(time);
    }

    AdTables t_;
    replay::Random random_;
    std::unordered_map<int64_t, int> place_of_;
    std::vector<double> estimate_, due_, rate_, value_, ctr_;
    std::vector<char> queue_, playable_;  // by slot: stands in the queue; may be shown
    std::vector<int> origin_, standing_bids_;
    std::vector<Reason> reasons_;
};

}  // namespace ddrl
