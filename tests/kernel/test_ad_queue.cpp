#include "ad_queue.hpp"

#include <cmath>
#include <limits>

#include "expect.hpp"

using namespace ddrl::admix;

// Two contracts and two slots for bids, two windows, two cells; a row of `ad` is kind, ecpm, ctr, cap.
struct Fixture {
    static constexpr size_t SLOTS = 4, FIELDS = 4, REQUESTS = 4;
    int64_t ids[2] = {7, 9};
    double demand[2] = {10, 10}, cap[2] = {3, 100}, past_rate[2] = {1, 1};
    bool eligible[4] = {true, true, true, false};  // cell 1: contract 7 alone
    double curve[6] = {0, 0, 0.5, 0.25, 1, 1};
    float rows[2 * FIELDS] = {1, 0, 0, 1, 1, 0, 0, 1}, bid_row[FIELDS] = {0, 0, 0, 1};
    float traffic_rows[4] = {1, 0, 0, 1};
    double rate[2] = {1, 1}, theta[2] = {1, 1}, shown[2] = {}, billed[2] = {}, seen_shown[2] = {}, seen_billed[2] = {};
    double sums[5] = {}, due[2] = {}, estimate[2] = {}, today_rate[2] = {}, billed_rate[4] = {0.5, 0.5, 0.5, 0.5};
    int64_t events[5] = {}, chosen[1] = {}, logged_slot[1] = {};
    double value[3] = {}, gain[2] = {}, revenue[1] = {}, score[1] = {};
    float prior[2] = {4, 5};
    // The state.
    bool mask[SLOTS] = {};
    float ad[SLOTS * FIELDS] = {}, overall[5] = {}, traffic[2] = {}, prior_seen[SLOTS] = {};
    int32_t ad_id[SLOTS] = {};
    // Requests as arrays: bids of 2 and 1, contract 9 does not target the second.
    double time[REQUESTS] = {0.1, 0.3, 0.6, 0.9};
    int64_t window[REQUESTS] = {0, 0, 1, 1}, zero[REQUESTS] = {}, logged[REQUESTS] = {-1, -1, -1, 0};
    int64_t bid_ad[2 * REQUESTS] = {11, 12, 13, 14, 15, 16, 17, 18};
    float ecpm[2 * REQUESTS] = {2, 1, 2, 1, 2, 1, 2, 1}, bid_ctr[2 * REQUESTS] = {};
    float ctr[2 * REQUESTS] = {0.02f, 0.03f, 0.02f, 0.03f, 0.02f, 0.03f, 0.02f, 0.03f};
    bool dense_eligible[2 * REQUESTS] = {true, true, true, false, true, true, true, true};
    float billing[REQUESTS] = {0.1f, 0.9f, 0.1f, 0.9f};
    int8_t logged_billed[REQUESTS] = {-1, -1, -1, 1};
    int16_t shown_slot[REQUESTS] = {};
    float worth[REQUESTS] = {};
    bool counted[REQUESTS] = {};
    AdQueue queue;

    explicit Fixture(bool bonuses = false, size_t delay = 0) : queue(tables(bonuses, delay), 3) {
        const auto bytes = [](auto* values) { return Output{reinterpret_cast<uint8_t*>(values), 0}; };
        queue.write_into({bytes(mask), bytes(ad), bytes(ad_id), bytes(prior_seen), bytes(overall), bytes(traffic), {}});
        queue.use_requests({REQUESTS, time, window, zero, zero, logged, bid_ad, ecpm, bid_ctr, ctr, dense_eligible,
                            billing, logged_billed, shown_slot, worth, counted});
    }
    Tables tables(bool bonuses, size_t delay) {
        Tables t{};
        t.places = 1;
        t.contracts = t.bids = t.windows = t.cells = t.traffic_size = 2;
        t.fields = FIELDS;
        t.delay = delay;
        t.ad_fields = {AdField::constant, AdField::ecpm, AdField::ctr, AdField::cap};
        t.overall_fields = {OverallField::shortfall, OverallField::contract_ctr, OverallField::bidding_ctr,
                            OverallField::payment, OverallField::time};
        t.click_value = 100;
        t.per_currency = 1000;
        t.own_counts = true;
        t.bonuses = bonuses;
        t.support_gap = 0.1;
        t.ids = ids;
        t.demand = demand;
        t.past_rate = past_rate;
        t.cap = cap;
        t.curve = curve;
        t.eligible = eligible;
        t.rows = rows;
        t.bid_row = bid_row;
        t.prior = prior;
        t.traffic_rows = traffic_rows;
        t.billed_rate = billed_rate;
        t.rate = rate;
        t.theta = theta;
        t.shown = shown;
        t.billed = billed;
        t.seen_shown = seen_shown;
        t.seen_billed = seen_billed;
        t.sums = sums;
        t.due = due;
        t.estimate = estimate;
        t.today_rate = today_rate;
        t.events = events;
        t.value = value;
        t.gain = gain;
        t.revenue = revenue;
        t.score = score;
        t.chosen = chosen;
        t.logged = logged_slot;
        return t;
    }
    size_t read(const Candidates& given, size_t cell = 0, double at = 0.5) {
        const size_t cut = queue.read(given, cell, at, 0);
        queue.observe(0);
        return cut;
    }
    Choice choose(const float* scores, size_t width) const { return queue.choose(0, scores, width); }
};

static Candidates both_and_bids(std::vector<double> bids) {
    Candidates given{{7, 9}, {0, 0}, {0, 0}, {0, 0}, {0.02, 0.03}};
    for (const double bid : bids) {
        given.ad.push_back(1000 + static_cast<int64_t>(given.ad.size()));
        given.kind.push_back(1);
        given.filters.push_back(0);
        given.ecpm.push_back(bid);
        given.ctr.push_back(0.01);
    }
    return given;
}

template <typename Call>
static bool refuses(Call call) {
    try {
        call();
    } catch (const BadCandidate& bad) {
        return !bad.words.empty();
    } catch (const BadScore& bad) {
        return !std::isfinite(bad.score);
    }
    return false;
}

static void test_the_highest_score_is_shown_and_the_first_of_equal_ones() {
    Fixture f;
    EXPECT(f.read(both_and_bids({2, 1})) == 0);
    const float scores[4] = {1, 5, 5, 4};
    const Choice best = f.choose(scores, 4);
    EXPECT(best.slot == 1 && best.score == 5);
    const float contracts_alone[2] = {1, 2};  // bids at their eCPM: 2 for the first, as contract 9
    EXPECT(f.choose(contracts_alone, 2).slot == 1);
}

static void test_of_too_many_bids_the_highest_stay_in_their_order() {
    Fixture f;
    EXPECT(f.read(both_and_bids({1, 3, 0, 2, 3})) == 2);
    EXPECT(f.ad_id[2] == 1003 && f.ad_id[3] == 1006);
    EXPECT(f.queue.reasons()[2] == Reason::cut && f.queue.reasons()[4] == Reason::no_bid);
    EXPECT(f.ad[2 * Fixture::FIELDS + 1] == 3);
}

static void test_targeting_and_caps_keep_contracts_out() {
    Fixture f;
    f.shown[0] = 3;
    f.read(both_and_bids({}), 1);
    EXPECT(!f.mask[0] && !f.mask[1]);
    EXPECT(f.queue.reasons()[0] == Reason::at_cap && f.queue.reasons()[1] == Reason::not_targeted);
    const float scores[4] = {1, 1, 1, 1};
    EXPECT(f.choose(scores, 4).slot == -1);
    EXPECT(f.traffic[0] == 0 && f.traffic[1] == 1);
}

static void test_showing_counts_and_the_next_state_says_so() {
    Fixture f;
    f.read(both_and_bids({2}));
    f.queue.show(0, 1);
    f.queue.show(0, 2);
    EXPECT(f.shown[1] == 1 && f.sums[0] == 1 && f.sums[2] == 1 && f.sums[4] == 2);
    f.read(both_and_bids({2}));
    EXPECT(f.due[0] == 5 && f.due[1] == 2.5 && f.estimate[1] == 1);
    EXPECT(std::abs(f.overall[0] - 6.5 / 7.5) < 1e-6 && f.overall[3] == 2);
    EXPECT(std::abs(f.ad[Fixture::FIELDS + 3] - 0.99f) < 1e-6);
}

static void test_theta_keeps_an_ad_in_the_queue_that_may_not_play() {
    Fixture f;
    f.theta[0] = 0;
    f.rate[1] = 0;
    f.read(both_and_bids({}));
    EXPECT(f.mask[0] && !f.mask[1]);
    EXPECT(f.queue.reasons()[0] == Reason::theta && f.queue.reasons()[1] == Reason::rate);
    const float scores[2] = {1, 1};
    EXPECT(f.choose(scores, 2).slot == -1);
}

static void test_bonuses_are_added_to_the_value_of_a_click_and_states_hold_contracts_below_their_cap() {
    Fixture f(true);
    f.read(both_and_bids({6}), 1);
    EXPECT(f.queue.observed() == 2 && f.mask[0] && f.mask[1] && f.prior_seen[1] == 5);
    const float actions[2] = {5, 50};  // contract 9 does not target the visitor; a click on 7 is worth 2
    EXPECT(f.choose(actions, 2).slot == 0 && f.choose(actions, 2).score == 7);
}

static void test_broken_candidates_and_scores_are_refused() {
    Fixture f;
    Candidates given = both_and_bids({1});
    given.ad[1] = 7;
    EXPECT(refuses([&] { f.read(given); }));
    given.ad[1] = 8;
    EXPECT(refuses([&] { f.read(given); }));
    given = both_and_bids({1});
    given.ctr.pop_back();
    EXPECT(refuses([&] { f.read(given); }));
    f.read(both_and_bids({1}));
    const float scores[4] = {1, std::numeric_limits<float>::quiet_NaN(), 1, 1};
    EXPECT(refuses([&] { f.choose(scores, 4); }));
}

static void test_requests_as_arrays_are_played_one_after_the_other() {
    Fixture f(false, 2);
    f.cap[1] = 1;
    const float scores[2] = {1, 5};  // contract 9 at first; then it is not targeted, and later at its cap
    f.queue.play(0, 0, 3, scores, 2, nullptr);
    EXPECT(f.shown_slot[0] == 1 && f.shown_slot[1] == 2 && f.shown_slot[2] == 2);
    EXPECT(f.worth[0] == 3.0f / 1000 && f.worth[1] == 2.0f / 1000);
    EXPECT(f.counted[0] && !f.counted[1] && f.shown[1] == 1 && f.billed[1] == 1);
    EXPECT(f.seen_shown[1] == 1 && f.seen_billed[1] == 1);  // two requests later
    EXPECT(f.events[0] == 3 && f.events[2] == 1 && f.events[3] == 2 && f.events[4] == 1);
    const float first[2] = {9, 1};
    f.queue.play(0, 3, 1, first, 2, nullptr);
    EXPECT(f.counted[3] && f.billed[0] == 1);  // the log says that it was billed
    f.queue.begin_day(0);
    EXPECT(f.shown[0] == 0 && f.seen_shown[1] == 0 && f.sums[0] == 0);
    const float none[2] = {};
    f.queue.play(0, 1, 2, none, 2, nullptr);  // two bids: what was under way as the day ended is no news of this one
    EXPECT(f.shown_slot[1] == 2 && f.shown_slot[2] == 2 && f.seen_shown[0] == 0 && f.seen_shown[1] == 0);
}

static void test_a_request_as_arrays_and_as_lists_is_the_same() {
    Fixture arrays, lists;
    arrays.queue.take(0, 2, true, nullptr, nullptr);
    arrays.queue.observe(0);
    Candidates given = both_and_bids({2, 1});
    given.ad[2] = 15;
    given.ad[3] = 16;
    given.ctr[2] = given.ctr[3] = 0;
    lists.read(given, 0, 0.6);
    for (size_t slot = 0; slot < Fixture::SLOTS; ++slot) {
        EXPECT(arrays.mask[slot] == lists.mask[slot] && arrays.ad_id[slot] == lists.ad_id[slot]);
        for (size_t f = 0; f < Fixture::FIELDS; ++f)
            EXPECT(arrays.ad[slot * Fixture::FIELDS + f] == lists.ad[slot * Fixture::FIELDS + f]);
    }
    const float scores[4] = {1, 5, 5, 4};
    EXPECT(arrays.choose(scores, 4).slot == lists.choose(scores, 4).slot);
    EXPECT(arrays.choose(scores, 4).second == 5);
    arrays.queue.take(0, 3, false, nullptr, nullptr);  // the day is over
    arrays.queue.observe(0);
    EXPECT(!arrays.mask[0] && arrays.ad[0] == 0 && arrays.overall[4] == 1 && arrays.choose(scores, 4).slot == -1);
}

static void test_draws_decide_by_rate_and_theta() {
    Fixture f;
    f.rate[0] = 0.5;
    f.theta[1] = 0.5;
    const double rate_draws[2] = {0.6, 0.0}, theta_draws[2] = {0.0, 0.6};
    f.queue.take(0, 0, true, rate_draws, theta_draws);
    f.queue.observe(0);
    EXPECT(!f.mask[0] && f.mask[1]);  // 9 is in the queue and may not be shown
    const float scores[2] = {9, 9};
    f.queue.play(0, 0, 1, scores, 2, nullptr);
    EXPECT(f.shown_slot[0] == 2);
}

int main() {
    RUN(test_requests_as_arrays_are_played_one_after_the_other);
    RUN(test_a_request_as_arrays_and_as_lists_is_the_same);
    RUN(test_draws_decide_by_rate_and_theta);
    RUN(test_the_highest_score_is_shown_and_the_first_of_equal_ones);
    RUN(test_of_too_many_bids_the_highest_stay_in_their_order);
    RUN(test_targeting_and_caps_keep_contracts_out);
    RUN(test_showing_counts_and_the_next_state_says_so);
    RUN(test_theta_keeps_an_ad_in_the_queue_that_may_not_play);
    RUN(test_bonuses_are_added_to_the_value_of_a_click_and_states_hold_contracts_below_their_cap);
    RUN(test_broken_candidates_and_scores_are_refused);
}
