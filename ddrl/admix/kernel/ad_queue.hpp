// The rules of ad mixing: which candidates of a request are in its queue, what a policy sees of them, which ad is
// shown, and what showing it changes. The environment, the baselines and the server all play by this code.
//
// There are `places` days that are played side by side with the same contracts; the server has one. Contract j is in
// slot j of a queue, the bids of the request behind them. The rules, in this order:
//  1. A contract is in the queue when it is targeted, not filtered, below its cap, and drawn with probability `rate`.
//  2. A contract of the queue may be shown with probability `theta`. A support policy sets both aside for some
//  contracts.
//  3. The highest score is shown; of equal scores the lowest slot, so contracts before bids.
//  4. Where no ad may be shown, nothing is shown.
//  5. Whether an impression is billed is known `delay` requests later.
// The caller owns all tables, and reads and writes them between calls. One thread. O(contracts + bids) a request.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "replay/random.hpp"

namespace ddrl::admix {

enum class Support { off = 0, late = 1, fresh = 2 };

// Why a candidate may not be shown.
enum class Reason : uint8_t { plays, filtered, not_targeted, at_cap, rate, theta, no_bid, cut };

// Columns of the array "ad" that change with the request; others keep the value of the table `rows`.
enum class AdField { constant = -1, ecpm, ctr, value, impressions, pace, cap, late, need, rate };
enum class OverallField { shortfall, contract_ctr, bidding_ctr, payment, time };

struct Tables {
    size_t places, contracts, bids, windows, cells, fields, traffic_size, delay;
    std::vector<AdField> ad_fields;
    std::vector<OverallField> overall_fields;
    float click_value;  // worth of a click on a contract ad, in the unit of bids
    float per_currency;  // units of bids in one unit of currency: 1000 for eCPM
    bool own_counts;  // impressions shown are known at once, though not yet whether they are billed
    bool bonuses;  // actions are added to the value of a click, and states hold the contracts below their cap alone
    Support support;
    double support_gap;
    // Known before the day.
    const int64_t* ids;  // [contracts]
    const double *demand, *past_rate;  // [contracts]; past_rate: billed of shown in the past
    const double* cap;  // [places, contracts], impressions
    const double* curve;  // [places, windows + 1, contracts], share of a contract's supply that has arrived
    const bool* eligible;  // [cells, contracts], targeting, of requests given as lists
    const float *rows, *bid_row;  // [places, contracts, fields], [fields]: constant values of the rows of "ad"
    const float* prior;  // [places, contracts]
    const float* traffic_rows;  // [cells, traffic_size]
    const double* billed_rate;  // [places, windows, contracts]: the day's own probability that an impression is billed
    // Changed by the caller or here.
    const double *rate, *theta;  // [places, contracts], probabilities
    double *shown, *billed, *seen_shown, *seen_billed;  // [places, contracts]; seen: of impressions of known billing
    double* sums;  // [places, 5]: contract ads shown, their ctr, bids shown, their ctr, their eCPM
    double *due, *estimate, *today_rate;  // [places, contracts], as of the request last taken
    int64_t* events;  // [5]: requests, empty queues, contracts shown, bids shown, billed
    // What `play` earns, added up over its requests.
    double ctr_weight, bid_weight;
    bool relative;  // the best bid of each request is subtracted
    double *value, *gain;  // [places, contracts + 1] by contract and of bids, [places, contracts] [currency]
    double *revenue, *score;  // [places]; score: of the ad shown last
    int64_t *chosen, *logged;  // [places], slots of the last request; -1: none
};

// Requests as arrays: `length` a place.
struct Requests {
    size_t length;
    const double* time;  // [places, length], days
    const int64_t *window, *cell, *slot, *logged;  // [places, length]
    const int64_t* bid_ad;  // [places, length, bids]
    const float *ecpm, *bid_ctr;  // [places, length, bids]
    const float* ctr;  // [places, length, contracts]
    const bool* eligible;  // [places, length, contracts]
    const float* billing;  // [places, length], uniform: an impression is billed below the contract's rate
    const int8_t* logged_billed;  // [places, length], of the logged impression; -1: unknown
    // Where `play` records what happened; nullptr: not wanted.
    int16_t* shown_slot;  // [places, length]
    float* worth;  // [places, length] [currency]
    bool* billed;  // [places, length]
};

// One named array of a state: the value of place i begins at base + i * stride. nullptr: the policy does not read it.
struct Output {
    uint8_t* base = nullptr;
    size_t stride = 0;
    uint8_t* at(size_t i) const { return base + i * stride; }
};

struct State {
    Output mask, ad, ad_id, prior, overall, traffic, slot_id;
};

// Candidates of one request as lists: ids from 0, kinds CONTRACT or BID, ecpm finite from 0, ctr in [0, 1].
struct Candidates {
    std::vector<int64_t> ad, kind, filters;
    std::vector<double> ecpm, ctr;
};

struct BadCandidate {
    std::string words;
};

struct BadScore {
    size_t place, slot;
    double score;
};

struct Choice {
    int slot = -1;  // -1: nothing is shown
    double score = -std::numeric_limits<double>::infinity();
    double second = -std::numeric_limits<double>::infinity();  // the best score of another ad that may be shown
};

class AdQueue {
public:
    static constexpr double PRIOR_IMPRESSIONS = 50.0, MAX_PACE = 4.0;
    static constexpr int64_t CONTRACT = 0, BID = 1, FILTERED = 1;

    AdQueue(Tables tables, uint64_t seed) : t_(std::move(tables)), random_(seed) {
        const size_t all = t_.places * slots();
        queue_.resize(all);
        playable_.resize(all);
        value_.resize(all);
        ctr_.resize(all);
        ad_id_.resize(all);
        row_.resize(t_.fields);
        present_.assign(t_.places, Present{});
        billing_.assign(t_.places * t_.delay, -1);
        billing_at_.assign(t_.places, 0);
        origin_.assign(slots(), -1);
        for (size_t j = 0; j < t_.contracts; ++j) place_of_[t_.ids[j]] = static_cast<int>(j);
    }

    const Tables& tables() const { return t_; }
    size_t slots() const { return t_.contracts + t_.bids; }
    size_t observed() const { return t_.bonuses ? t_.contracts : slots(); }  // slots that a policy sees
    const std::vector<Reason>& reasons() const { return reasons_; }  // by candidate of the list
    const std::vector<int>& origin() const { return origin_; }  // candidate of the list in each slot; -1: none

    bool holds(size_t slot) const { return queue_[slot] != 0; }  // place 0

    void write_into(const State& state) { out_ = state; }
    void use_requests(const Requests& requests) { r_ = requests; }

    // A new day in place i: nothing shown, no billing under way.
    void begin_day(size_t i) {
        for (double* counts : {t_.shown, t_.billed, t_.seen_shown, t_.seen_billed})
            std::fill_n(counts + i * t_.contracts, t_.contracts, 0.0);
        std::fill_n(t_.sums + i * 5, 5, 0.0);
        std::fill_n(billing_.begin() + (i * t_.delay), t_.delay, -1);
        billing_at_[i] = 0;
        present_[i].entered = false;
    }

    // What is due, and what has been delivered by what is known.
    void look(size_t i, double time) {
        const double at = std::clamp(time, 0.0, 1.0) * static_cast<double>(t_.windows);
        const size_t window = std::min(static_cast<size_t>(at), t_.windows - 1);
        const double part = at - static_cast<double>(window);
        const double* from = t_.curve + (i * (t_.windows + 1) + window) * t_.contracts;
        const double* to = from + t_.contracts;
        for (size_t j = 0; j < t_.contracts; ++j) {
            const size_t p = i * t_.contracts + j;
            t_.due[p] = (from[j] * (1 - part) + to[j] * part) * t_.demand[j];
            t_.today_rate[p] =
                (t_.seen_billed[p] + PRIOR_IMPRESSIONS * t_.past_rate[j]) / (t_.seen_shown[p] + PRIOR_IMPRESSIONS);
            t_.estimate[p] = t_.seen_billed[p];
            if (t_.own_counts) t_.estimate[p] += t_.today_rate[p] * (t_.shown[p] - t_.seen_shown[p]);
        }
    }

    // Request k of place i becomes the present one; without `present` the day is over, and its queue is empty. Draws
    // [contracts] are compared with rate and theta; nullptr: both are 1.
    void take(size_t i, size_t k, bool present, const double* rate_draws, const double* theta_draws) {
        const size_t at = i * r_.length + k;
        present_[i] = {present, present, present ? r_.time[at] : 1.0, static_cast<size_t>(r_.cell[at]), r_.slot[at]};
        look(i, present_[i].time);
        if (present) {
            enter(i, k, rate_draws, theta_draws);
            for (size_t b = 0; b < t_.bids; ++b)
                ad_id_[i * slots() + t_.contracts + b] = static_cast<int32_t>(r_.bid_ad[at * t_.bids + b]);
        } else {
            std::fill_n(queue_.begin() + (i * slots()), slots(), char{0});
        }
    }

    // Play requests from .. from + count - 1 of place i by one action, `scores` [width]. The first one may have been
    // taken already. Draws [count, contracts] as in `take`. Throws BadScore.
    void play(size_t i, size_t from, size_t count, const float* scores, size_t width, const double* draws) {
        for (size_t k = from; k < from + count; ++k) {
            const double* own = draws == nullptr ? nullptr : draws + (k - from) * t_.contracts;
            if (!present_[i].entered) enter(i, k, own, own);
            present_[i].entered = false;
            play_entered(i, k, scores, width);
        }
    }

    // A request given as lists becomes the present one of place 0; the number of bids that found no slot. Throws
    // BadCandidate, and then nothing has changed.
    size_t read(const Candidates& given, size_t cell, double time, int64_t slot) {
        drawn_before_ = random_;
        check_lengths(given);
        look(0, time);
        present_[0] = {true, true, time, cell, slot};
        std::fill(queue_.begin(), queue_.end(), char{0});
        std::fill(playable_.begin(), playable_.end(), char{0});
        std::fill(ctr_.begin(), ctr_.end(), 0.0f);
        std::fill(value_.begin(), value_.end(), 0.0f);
        std::fill(origin_.begin(), origin_.end(), -1);
        reasons_.assign(given.ad.size(), Reason::plays);
        listed_bids_.clear();
        for (size_t c = 0; c < given.ad.size(); ++c) {
            if (given.kind[c] == CONTRACT)
                enter_contract(given, c, cell);
            else if (given.filters[c] & FILTERED)
                reasons_[c] = Reason::filtered;
            else if (given.ecpm[c] > 0)
                listed_bids_.push_back(static_cast<int>(c));
            else
                reasons_[c] = Reason::no_bid;
        }
        const size_t cut = cut_lowest_bids(given);
        for (size_t b = 0; b < listed_bids_.size(); ++b) enter_bid(given, listed_bids_[b], t_.contracts + b);
        return cut;
    }

    // The request that was read last is refused: the next one gets the draws that it got.
    void take_back() { random_ = drawn_before_; }

    // Write the state of the present request of place i.
    void observe(size_t i) {
        const Present& now = present_[i];
        for (size_t slot = 0; slot < observed(); ++slot) {
            const bool seen = now.present && (t_.bonuses ? below_cap(i, slot) : queue_[i * slots() + slot] != 0);
            if (out_.mask.base != nullptr) out_.mask.at(i)[slot] = seen;
            write_slot(i, slot, seen);
        }
        if (out_.overall.base != nullptr) write_overall(i, now.time);
        if (out_.traffic.base != nullptr && t_.traffic_size) {
            uint8_t* row = out_.traffic.at(i);
            const size_t size = t_.traffic_size * sizeof(float);
            if (now.present)
                std::memcpy(row, t_.traffic_rows + now.cell * t_.traffic_size, size);
            else
                std::memset(row, 0, size);
        }
        if (out_.slot_id.base != nullptr) put<int32_t>(out_.slot_id.at(i), 0, now.slot);
    }

    // The highest of `scores` [width]; slots behind `width` hold bids at their eCPM. Throws BadScore for a score inside
    // the queue that is not a number.
    Choice choose(size_t i, const float* scores, size_t width) const {
        Choice best;
        const size_t first = i * slots();
        for (size_t slot = 0; slot < slots(); ++slot) {
            if (!queue_[first + slot]) continue;
            const double score = score_of(i, scores, width, slot);
            if (!std::isfinite(score)) throw BadScore{i, slot, score};
            if (!playable_[first + slot]) continue;
            if (score > best.score) {
                best.second = best.score;
                best.score = score;
                best.slot = static_cast<int>(slot);
            } else if (score > best.second) {
                best.second = score;
            }
        }
        if (best.slot < 0) best.score = 0.0;
        return best;
    }

    double score_of(size_t i, const float* scores, size_t width, size_t slot) const {
        const float value = value_[i * slots() + slot];
        if (slot >= width) return value;
        return t_.bonuses ? scores[slot] + value : scores[slot];
    }

    // Count the ad in `slot` of the present request of place i as shown.
    void show(size_t i, size_t slot) {
        double* sums = t_.sums + i * 5;
        const double ctr = ctr_[i * slots() + slot];
        if (slot < t_.contracts) {
            t_.shown[i * t_.contracts + slot] += 1;
            sums[0] += 1;
            sums[1] += ctr;
        } else {
            sums[2] += 1;
            sums[3] += ctr;
            sums[4] += value_[i * slots() + slot];
        }
    }

private:
    struct Present {
        bool present = false, entered = false;  // entered: its queue is known, and was not played
        double time = 1.0;
        size_t cell = 0;
        int64_t slot = 0;
    };

    template <typename T, typename V>
    static void put(uint8_t* to, size_t place, V value) {
        const T typed = static_cast<T>(value);
        std::memcpy(to + place * sizeof(T), &typed, sizeof(T));  // records of a state have no padding
    }

    bool below_cap(size_t i, size_t j) const { return t_.shown[i * t_.contracts + j] < t_.cap[i * t_.contracts + j]; }

    bool supported(size_t i, size_t j) const {
        const size_t p = i * t_.contracts + j;
        const double gap = t_.support_gap * t_.demand[j];
        if (t_.support == Support::late) return t_.due[p] - t_.estimate[p] > gap;
        return t_.support == Support::fresh && t_.estimate[p] < gap;
    }

    // Rules 1 and 2 for a contract that is targeted and not filtered. draw_rate and draw_theta give uniform numbers.
    template <typename DrawRate, typename DrawTheta>
    Reason admit(size_t i, size_t j, DrawRate draw_rate, DrawTheta draw_theta) {
        if (!below_cap(i, j)) return Reason::at_cap;
        const double rate = t_.rate[i * t_.contracts + j], theta = t_.theta[i * t_.contracts + j];
        if ((rate >= 1 && theta >= 1) || supported(i, j)) return Reason::plays;
        if (draw_rate() >= rate) return Reason::rate;
        return draw_theta() >= theta ? Reason::theta : Reason::plays;
    }

    // The queue of request k of place i.
    void enter(size_t i, size_t k, const double* rate_draws, const double* theta_draws) {
        const size_t at = i * r_.length + k;
        const size_t first = i * slots();
        const float* ctr = r_.ctr + at * t_.contracts;
        const bool* eligible = r_.eligible + at * t_.contracts;
        for (size_t j = 0; j < t_.contracts; ++j) {
            ctr_[first + j] = ctr[j];
            value_[first + j] = t_.click_value * ctr[j];
            Reason reason = Reason::not_targeted;
            if (eligible[j])
                reason = admit(
                    i, j, [&] { return rate_draws ? rate_draws[j] : 0.0; },
                    [&] { return theta_draws ? theta_draws[j] : 0.0; });
            playable_[first + j] = reason == Reason::plays;
            queue_[first + j] = reason == Reason::plays || reason == Reason::theta;
        }
        const float* ecpm = r_.ecpm + at * t_.bids;
        const float* bid_ctr = r_.bid_ctr + at * t_.bids;
        for (size_t b = 0; b < t_.bids; ++b) {
            const size_t slot = first + t_.contracts + b;
            ctr_[slot] = bid_ctr[b];
            value_[slot] = ecpm[b];
            playable_[slot] = queue_[slot] = ecpm[b] > 0;
        }
    }

    // Rules 3 to 5 for the present request, which is request k of place i.
    void play_entered(size_t i, size_t k, const float* scores, size_t width) {
        const size_t at = i * r_.length + k;
        const Choice choice = choose(i, scores, width);
        const bool shows = choice.slot >= 0;
        const size_t slot = shows ? choice.slot : 0;
        const bool is_contract = shows && slot < t_.contracts;
        bool billed = false;
        if (is_contract) {
            const size_t window = r_.window[at];
            const double rate = t_.billed_rate[(i * t_.windows + window) * t_.contracts + slot];
            const bool known = r_.logged[at] == choice.slot && r_.logged_billed[at] >= 0;
            billed = known ? r_.logged_billed[at] == 1 : static_cast<double>(r_.billing[at]) < rate;
        }
        if (shows) show(i, slot);
        deliver(i, is_contract ? choice.slot : -1, billed);
        t_.events[0] += 1;
        t_.events[1] += !shows;
        t_.events[2] += is_contract;
        t_.events[3] += shows && !is_contract;
        t_.events[4] += billed;
        const float worth = shows ? value_[i * slots() + slot] / t_.per_currency : 0.0f;
        if (r_.shown_slot != nullptr) {
            r_.shown_slot[at] = static_cast<int16_t>(choice.slot);
            r_.worth[at] = worth;
            r_.billed[at] = billed;
        }
        earn(i, at, choice, is_contract, worth);
    }

    void earn(size_t i, size_t at, const Choice& choice, bool is_contract, float worth) {
        const size_t column = is_contract ? static_cast<size_t>(choice.slot) : t_.contracts;
        double weighted = (is_contract ? t_.ctr_weight : t_.bid_weight) * worth;
        if (is_contract)
            t_.gain[i * t_.contracts + column] += weighted - std::max(choice.second, 0.0) / t_.per_currency;
        if (t_.relative && t_.bids) {
            const float* ecpm = r_.ecpm + at * t_.bids;
            weighted -= static_cast<float>(t_.bid_weight) * *std::max_element(ecpm, ecpm + t_.bids) / t_.per_currency;
        }
        t_.value[i * (t_.contracts + 1) + column] += weighted;
        t_.revenue[i] += worth;
        t_.chosen[i] = choice.slot;
        t_.score[i] = choice.score;
        t_.logged[i] = r_.logged[at];
    }

    // Count the billing of one request that showed `contract` (-1: none), and make that of `delay` requests ago known.
    void deliver(size_t i, int contract, bool billed) {
        if (billed) t_.billed[i * t_.contracts + contract] += 1;
        int32_t news = contract < 0 ? -1 : 2 * contract + billed;
        if (t_.delay) std::swap(news, billing_[i * t_.delay + billing_at_[i]++ % t_.delay]);
        if (news < 0) return;
        const size_t p = i * t_.contracts + (news >> 1);
        t_.seen_shown[p] += 1;
        t_.seen_billed[p] += news & 1;
    }

    // ---- states ---------------------------------------------------------------------------------------------------

    void write_slot(size_t i, size_t slot, bool seen) {
        const bool is_contract = slot < t_.contracts;
        const size_t p = i * t_.contracts + slot;
        if (out_.ad_id.base != nullptr) {
            const int64_t id = is_contract ? t_.ids[slot] : ad_id_[i * slots() + slot];
            put<int32_t>(out_.ad_id.at(i), slot, seen ? id : 0);
        }
        if (out_.prior.base != nullptr) put<float>(out_.prior.at(i), slot, seen && is_contract ? t_.prior[p] : 0.0f);
        if (out_.ad.base == nullptr || !t_.fields) return;
        uint8_t* row = out_.ad.at(i) + slot * t_.fields * sizeof(float);
        if (!seen) {
            std::memset(row, 0, t_.fields * sizeof(float));
            return;
        }
        const float* constant = is_contract ? t_.rows + p * t_.fields : t_.bid_row;
        for (size_t f = 0; f < t_.fields; ++f)
            row_[f] = is_contract ? contract_field(t_.ad_fields[f], i, slot, constant[f])
                                  : bid_field(t_.ad_fields[f], i, slot, constant[f]);
        std::memcpy(row, row_.data(), t_.fields * sizeof(float));
    }

    float contract_field(AdField field, size_t i, size_t j, float constant) const {
        const size_t p = i * t_.contracts + j;
        const double demand = t_.demand[j], due = t_.due[p], estimate = t_.estimate[p];
        double value = constant;
        switch (field) {
            case AdField::ctr: return ctr_[i * slots() + j];
            case AdField::value: return value_[i * slots() + j];
            case AdField::impressions: value = estimate / std::max(demand, 1.0); break;
            case AdField::pace: value = std::min(estimate / std::max(due, 1.0), MAX_PACE); break;
            case AdField::cap: value = 1 - t_.shown[p] / std::max(t_.cap[p], 1.0); break;
            case AdField::late: value = 100 * (due - estimate) / std::max(demand, 1.0); break;
            case AdField::need:
                value = std::clamp((demand - estimate) / std::max(demand - due, 0.02 * demand + 1e-9), 0.0, MAX_PACE);
                break;
            case AdField::rate: value = t_.today_rate[p] / std::max(t_.past_rate[j], 1e-6); break;
            case AdField::ecpm:
            case AdField::constant: break;
        }
        return static_cast<float>(value);
    }

    float bid_field(AdField field, size_t i, size_t slot, float constant) const {
        if (field == AdField::ctr) return ctr_[i * slots() + slot];
        return field == AdField::ecpm || field == AdField::value ? value_[i * slots() + slot] : constant;
    }

    void write_overall(size_t i, double time) {
        double late = 0, due = 0;
        for (size_t p = i * t_.contracts; p < (i + 1) * t_.contracts; ++p) {
            late += std::max(t_.due[p] - t_.estimate[p], 0.0);
            due += t_.due[p];
        }
        const double* sums = t_.sums + i * 5;
        const double values[] = {due > 0 ? late / due : 0.0, sums[1] / std::max(sums[0], 1.0),
                                 sums[3] / std::max(sums[2], 1.0), sums[4] / std::max(sums[2], 1.0), time};
        for (size_t f = 0; f < t_.overall_fields.size(); ++f)
            put<float>(out_.overall.at(i), f, values[static_cast<size_t>(t_.overall_fields[f])]);
    }

    // ---- requests as lists ----------------------------------------------------------------------------------------

    static std::string entry(const char* field, size_t place) {
        return std::string(field) + "[" + std::to_string(place) + "]";
    }

    static void check_lengths(const Candidates& given) {
        const size_t count = given.ad.size();
        const std::pair<const char*, size_t> sizes[] = {{"kind", given.kind.size()},
                                                        {"ecpm", given.ecpm.size()},
                                                        {"ctr", given.ctr.size()},
                                                        {"filters", given.filters.size()}};
        for (const auto& [field, size] : sizes)
            if (size != count)
                throw BadCandidate{std::string(field) + " has " + std::to_string(size) + " entries, ad has " +
                                   std::to_string(count) + ": give one for each candidate"};
    }

    void enter_contract(const Candidates& given, size_t c, size_t cell) {
        const auto known = place_of_.find(given.ad[c]);
        if (known == place_of_.end())
            throw BadCandidate{entry("ad", c) + " = " + std::to_string(given.ad[c]) +
                               " is no contract of this server; contracts of another day, or a bid of kind 1?"};
        const size_t j = known->second;
        if (origin_[j] >= 0)
            throw BadCandidate{entry("ad", c) + " = " + std::to_string(given.ad[c]) + " is there twice"};
        origin_[j] = static_cast<int>(c);
        ctr_[j] = static_cast<float>(given.ctr[c]);
        value_[j] = t_.click_value * ctr_[j];
        if (given.filters[c] & FILTERED)
            reasons_[c] = Reason::filtered;
        else if (!t_.eligible[cell * t_.contracts + j])
            reasons_[c] = Reason::not_targeted;
        else
            reasons_[c] = admit(0, j, [&] { return random_.unit(); }, [&] { return random_.unit(); });
        playable_[j] = reasons_[c] == Reason::plays;
        queue_[j] = playable_[j] || reasons_[c] == Reason::theta;
    }

    void enter_bid(const Candidates& given, size_t c, size_t slot) {
        origin_[slot] = static_cast<int>(c);
        ctr_[slot] = static_cast<float>(given.ctr[c]);
        value_[slot] = static_cast<float>(given.ecpm[c]);
        ad_id_[slot] = static_cast<int32_t>(given.ad[c]);
        playable_[slot] = queue_[slot] = true;
    }

    // Of more bids than slots the highest stay, of equal ones the first; in the order of the request.
    size_t cut_lowest_bids(const Candidates& given) {
        if (listed_bids_.size() <= t_.bids) return 0;
        const size_t cut = listed_bids_.size() - t_.bids;
        std::stable_sort(listed_bids_.begin(), listed_bids_.end(),
                         [&](int a, int b) { return given.ecpm[a] > given.ecpm[b]; });
        for (size_t b = t_.bids; b < listed_bids_.size(); ++b) reasons_[listed_bids_[b]] = Reason::cut;
        listed_bids_.resize(t_.bids);
        std::sort(listed_bids_.begin(), listed_bids_.end());
        return cut;
    }

    Tables t_;
    Requests r_{};
    State out_{};
    replay::Random random_;
    replay::Random drawn_before_;  // `random_` when the last request was read
    std::unordered_map<int64_t, int> place_of_;  // by ad id
    std::vector<Present> present_;  // by place
    std::vector<char> queue_, playable_;  // [places, slots]: in the queue; may be shown
    std::vector<float> value_, ctr_;  // [places, slots]; value: of showing the ad, in the unit of bids
    std::vector<int32_t> ad_id_;  // [places, slots], of bids
    std::vector<int32_t> billing_;  // [places, delay], 2 contract + billed of the last requests; -1: no contract shown
    std::vector<size_t> billing_at_;  // by place, requests delivered
    std::vector<float> row_;
    std::vector<int> origin_, listed_bids_;
    std::vector<Reason> reasons_;
};

}  // namespace ddrl::admix
