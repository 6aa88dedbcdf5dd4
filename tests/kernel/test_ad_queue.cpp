#include "ad_queue.hpp"

#include <cmath>
#include <limits>

#include "expect.hpp"

using ddrl::AdChoice;
using ddrl::AdQueue;
using ddrl::AdState;
using ddrl::AdTables;
using ddrl::BadCandidate;
using ddrl::Candidates;
using ddrl::Reason;

// Two contracts and two slots for bids, two windows, two cells; a row of `ad` is kind, ecpm, ctr, cap.
struct Fixture {
    static constexpr size_t SLOTS = 4, FIELDS = 4;
    int64_t ids[2] = {7, 9};
    double demand[2] = {10, 10}, limit[2] = {3, 100}, billed_rate[2] = {1, 1};
    bool eligible[4] = {true, true, true, false};  // cell 1: contract 7 alone
    double curve[6] = {0, 0, 0.5, 0.25, 1, 1};
    float rows[2 * FIELDS] = {1, 0, 0, 1, 1, 0, 0, 1}, bid_row[FIELDS] = {0, 0, 0, 1};
    float traffic_rows[4] = {1, 0, 0, 1};
    double rate[2] = {1, 1}, theta[2] = {1, 1}, shown[2] = {}, seen_shown[2] = {}, seen_billed[2] = {}, sums[5] = {};
    bool mask[SLOTS] = {};
    float ad[SLOTS * FIELDS] = {}, overall[5] = {}, traffic[2] = {};
    int32_t ad_id[SLOTS] = {};
    float prior[2] = {4, 5}, prior_seen[SLOTS] = {};
    bool bonuses;
    AdQueue queue;

    explicit Fixture(bool with_bonuses = false) : bonuses(with_bonuses), queue(tables(), 3) {}
    AdTables tables() {
        return {2,
                2,
                2,
                2,
                FIELDS,
                2,
                ids,
                demand,
                limit,
                billed_rate,
                eligible,
                curve,
                rows,
                bid_row,
                prior,
                traffic_rows,
                {1, 2, -1, -1, -1, 3, -1, -1, -1},
                0.1,
                true,
                ddrl::Support::off,
                0.1,
                bonuses,
                rate,
                theta,
                shown,
                seen_shown,
                seen_billed,
                sums};
    }
    AdState state() { return {mask, ad, ad_id, prior_seen, overall, traffic}; }
    size_t read(const Candidates& given, size_t cell = 0, double time = 0.5) {
        return queue.read(given, cell, time, state());
    }
};

static Candidates both_and_bids(std::vector<double> bids) {
    Candidates given{{7, 9}, {0, 0}, {0, 0}, {0, 0}, {0.02, 0.03}};
    for (const double bid : bids) {
        given.ad.push_back(1000 + static_cast<int64_t>(given.ad.size()));
        given.kind.push_back(1), given.filters.push_back(0), given.ecpm.push_back(bid), given.ctr.push_back(0.01);
    }
    return given;
}

template <typename Call>
static bool refuses(Call call) {
    try {
        call();
    } catch (const BadCandidate& bad) {
        return !bad.words.empty();
    }
    return false;
}

static void test_the_highest_score_is_shown_and_the_first_of_equal_ones() {
    Fixture f;
    EXPECT(f.read(both_and_bids({2, 1})) == 0);
    const float scores[4] = {1, 5, 5, 4};
    const AdChoice best = f.queue.choose(scores, 4);
    EXPECT(best.slot == 1 && best.score == 5);
    const float contracts_alone[2] = {1, 2};  // bids at their eCPM: 2 for the first, as contract 9
    EXPECT(f.queue.choose(contracts_alone, 2).slot == 1);
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
    EXPECT(f.queue.choose(scores, 4).slot == -1);
    EXPECT(f.traffic[0] == 0 && f.traffic[1] == 1);
}

static void test_showing_counts_and_the_next_state_says_so() {
    Fixture f;
    f.read(both_and_bids({2}));
    f.queue.show(1), f.queue.show(2);
    EXPECT(f.shown[1] == 1 && f.sums[0] == 1 && f.sums[2] == 1 && f.sums[4] == 2);
    f.read(both_and_bids({2}));
    EXPECT(f.queue.due()[0] == 5 && f.queue.due()[1] == 2.5 && f.queue.estimate()[1] == 1);
    EXPECT(std::abs(f.overall[0] - 6.5 / 7.5) < 1e-6 && f.overall[3] == 2);
    EXPECT(std::abs(f.ad[Fixture::FIELDS + 3] - 0.99f) < 1e-6);
}

static void test_theta_keeps_an_ad_in_the_queue_that_may_not_play() {
    Fixture f;
    f.theta[0] = 0, f.rate[1] = 0;
    f.read(both_and_bids({}));
    EXPECT(f.mask[0] && !f.mask[1]);
    EXPECT(f.queue.reasons()[0] == Reason::theta && f.queue.reasons()[1] == Reason::rate);
    const float scores[2] = {1, 1};
    EXPECT(f.queue.choose(scores, 2).slot == -1);
}

static void test_bonuses_are_added_to_the_value_of_a_click_and_states_hold_contracts_below_their_cap() {
    Fixture f(true);
    f.read(both_and_bids({6}), 1);
    EXPECT(f.queue.observed() == 2 && f.mask[0] && f.mask[1] && f.prior_seen[1] == 5);
    const float actions[2] = {5, 50};  // contract 9 does not target the visitor; a click on 7 is worth 2
    EXPECT(f.queue.choose(actions, 2).slot == 0 && f.queue.choose(actions, 2).score == 7);
}

static void test_broken_candidates_and_scores_are_refused() {
    Fixture f;
    const double nan = std::numeric_limits<double>::quiet_NaN();
    EXPECT(refuses([&] { f.read(both_and_bids({nan})); }));
    EXPECT(refuses([&] { f.read(both_and_bids({-1})); }));
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
    EXPECT(refuses([&] { f.queue.choose(scores, 4); }));
}

int main() {
    RUN(test_the_highest_score_is_shown_and_the_first_of_equal_ones);
    RUN(test_of_too_many_bids_the_highest_stay_in_their_order);
    RUN(test_targeting_and_caps_keep_contracts_out);
    RUN(test_showing_counts_and_the_next_state_says_so);
    RUN(test_theta_keeps_an_ad_in_the_queue_that_may_not_play);
    RUN(test_bonuses_are_added_to_the_value_of_a_click_and_states_hold_contracts_below_their_cap);
    RUN(test_broken_candidates_and_scores_are_refused);
}
