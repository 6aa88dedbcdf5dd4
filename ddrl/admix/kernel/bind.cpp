// Python's view of the rules of ad mixing: tables are numpy arrays by name, used in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "ad_queue.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace ddrl::admix;
using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using Scores = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Draws = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;

// Point `to` at the array `name` of a dict, of `size` numbers, in place.
template <typename T>
void find(T*& to, const nb::dict& tables, const char* name, size_t size) {
    nb::ndarray<T, nb::c_contig, nb::device::cpu> values;
    if (!tables.contains(name)) throw nb::key_error(name);
    if (!nb::try_cast(tables[name], values, false) || values.size() != size)
        throw nb::value_error((std::string(name) + " must be a contiguous array of " + std::to_string(size) +
                               " numbers of the kernel's type")
                                  .c_str());
    to = values.data();
}

Tables tables_of(const nb::dict& tables, const nb::dict& sizes) {
    Tables t{};
    const auto set = [&](auto& to, const char* name) {
        to = nb::cast<std::remove_reference_t<decltype(to)>>(sizes[name]);
    };
    set(t.places, "places");
    set(t.contracts, "contracts");
    set(t.bids, "bids");
    set(t.windows, "windows");
    set(t.cells, "cells");
    set(t.traffic_size, "traffic");
    set(t.delay, "delay");
    set(t.click_value, "click_value");
    set(t.per_currency, "per_currency");
    set(t.own_counts, "own_counts");
    set(t.bonuses, "bonuses");
    set(t.support_gap, "support_gap");
    set(t.ctr_weight, "ctr_weight");
    set(t.bid_weight, "bid_weight");
    set(t.relative, "relative");
    t.support = static_cast<Support>(nb::cast<int>(sizes["support"]));
    for (const int field : nb::cast<std::vector<int>>(sizes["ad_fields"]))
        t.ad_fields.push_back(static_cast<AdField>(field));
    for (const int field : nb::cast<std::vector<int>>(sizes["overall_fields"]))
        t.overall_fields.push_back(static_cast<OverallField>(field));
    t.fields = t.ad_fields.size();
    const size_t count = t.contracts, all = t.places * count;
    const auto at = [&](auto*& to, const char* name, size_t size) { find(to, tables, name, size); };
    at(t.ids, "ids", count);
    at(t.demand, "demand", count);
    at(t.past_rate, "past_rate", count);
    at(t.cap, "cap", all);
    at(t.curve, "curve", t.places * (t.windows + 1) * count);
    at(t.eligible, "eligible", t.cells * count);
    at(t.rows, "rows", all * t.fields);
    at(t.bid_row, "bid_row", t.fields);
    at(t.prior, "prior", all);
    at(t.traffic_rows, "traffic_rows", t.cells * t.traffic_size);
    at(t.billed_rate, "billed_rate", all * t.windows);
    at(t.rate, "rate", all);
    at(t.theta, "theta", all);
    at(t.shown, "shown", all);
    at(t.billed, "billed", all);
    at(t.seen_shown, "seen_shown", all);
    at(t.seen_billed, "seen_billed", all);
    at(t.sums, "sums", 5 * t.places);
    at(t.due, "due", all);
    at(t.estimate, "estimate", all);
    at(t.today_rate, "today_rate", all);
    at(t.events, "events", 5);
    at(t.value, "value", all + t.places);
    at(t.gain, "gain", all);
    at(t.revenue, "revenue", t.places);
    at(t.score, "score", t.places);
    at(t.chosen, "chosen", t.places);
    at(t.logged, "logged", t.places);
    return t;
}

Requests requests_of(const nb::dict& given, const Tables& t, size_t length) {
    const size_t all = t.places * length;
    const auto at = [&](auto*& to, const char* name, size_t size) { find(to, given, name, size); };
    Requests r{};
    r.length = length;
    at(r.time, "time", all);
    at(r.window, "window", all);
    at(r.cell, "cell", all);
    at(r.slot, "slot", all);
    at(r.logged, "logged", all);
    at(r.bid_ad, "bid_ad", all * t.bids);
    at(r.ecpm, "ecpm", all * t.bids);
    at(r.bid_ctr, "bid_ctr", all * t.bids);
    at(r.ctr, "ctr", all * t.contracts);
    at(r.eligible, "eligible", all * t.contracts);
    at(r.billing, "billing", all);
    at(r.logged_billed, "logged_billed", all);
    if (given.contains("shown_slot")) {
        at(r.shown_slot, "shown_slot", all);
        at(r.worth, "worth", all);
        at(r.billed, "billed", all);
    }
    return r;
}

// An output (bytes uint8 [places, stride], offset) of `size` bytes a place.
Output output_of(const nb::dict& state, const char* name, size_t places, size_t size) {
    if (!state.contains(name)) return {};
    const auto [bytes, offset] =
        nb::cast<std::pair<nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>, size_t>>(state[name]);
    if (bytes.shape(0) != places || offset + size > bytes.shape(1))
        throw nb::value_error((std::string(name) + " must have " + std::to_string(size) + " bytes a place").c_str());
    return {bytes.data() + offset, bytes.shape(1)};
}

nb::dict copied(const nb::dict& given) {
    return nb::borrow<nb::dict>(nb::module_::import_("builtins").attr("dict")(given));
}

// The rules with the Python objects whose memory they use.
class BoundQueue {
public:
    BoundQueue(const Dict& tables, const Dict& sizes, uint64_t seed)
        : held_(copied(tables)), queue_(tables_of(held_, sizes), seed) {}

    void write_into(const Dict& state) {
        const Tables& t = queue_.tables();
        const size_t n = t.places, q = queue_.observed(), number = sizeof(float);
        queue_.write_into({output_of(state, "queue_mask", n, q), output_of(state, "ad", n, q * t.fields * number),
                           output_of(state, "ad_id", n, q * number), output_of(state, "prior", n, q * number),
                           output_of(state, "overall", n, t.overall_fields.size() * number),
                           output_of(state, "traffic", n, t.traffic_size * number),
                           output_of(state, "slot_id", n, number)});
        state_ = copied(state);
    }

    void use_requests(const Dict& requests, size_t length) {
        requests_ = copied(requests);
        length_ = length;
        queue_.use_requests(requests_of(requests_, queue_.tables(), length));
    }

    void begin_day(size_t place) {
        if (place >= queue_.tables().places) throw nb::value_error("there is no such place");
        queue_.begin_day(place);
    }

    void look(const nb::ndarray<const double, nb::ndim<1>, nb::c_contig, nb::device::cpu>& time) {
        if (time.size() != queue_.tables().places) throw nb::value_error("there must be a time for each place");
        for (size_t i = 0; i < time.size(); ++i) queue_.look(i, time.data()[i]);
    }

    void take(const Places& at, const Flags& present, const std::optional<Draws>& draws) {
        const Tables& t = queue_.tables();
        const size_t all = t.places * t.contracts;
        if (at.size() != t.places || present.size() != t.places || (draws && draws->size() != 2 * all))
            throw nb::value_error("at, present and draws must hold a value for each place");
        for (size_t i = 0; i < t.places; ++i) {
            check_range(at.data()[i], 1);
            const double* rate = draws ? draws->data() + i * t.contracts : nullptr;
            queue_.take(i, at.data()[i], present.data()[i], rate, rate ? rate + all : nullptr);
        }
    }

    void play(const Scores& scores, const Places& at, const Places& count, const std::optional<Draws>& draws) {
        const Tables& t = queue_.tables();
        const size_t width = t.places ? scores.size() / t.places : 0;
        if (at.size() != t.places || count.size() != t.places || width * t.places != scores.size())
            throw nb::value_error("scores, at and count must hold a row for each place");
        check_width(width);
        const size_t drawn = draws ? draws->size() / t.places : 0;
        for (size_t i = 0; i < t.places; ++i) {
            const int64_t own = count.data()[i];
            if (own <= 0) continue;
            check_range(at.data()[i], own);
            if (draws && drawn < own * t.contracts) throw nb::value_error("too few draws");
            try {
                queue_.play(i, static_cast<size_t>(at.data()[i]), static_cast<size_t>(own), scores.data() + i * width,
                            width, draws ? draws->data() + i * drawn : nullptr);
            } catch (const BadScore& bad) {
                throw nb::value_error(("the score of environment " + std::to_string(bad.place) + ", ad slot " +
                                       std::to_string(bad.slot) + " is " + written(bad.score) + ", not a number")
                                          .c_str());
            }
        }
    }

    void observe() {
        for (size_t i = 0; i < queue_.tables().places; ++i) queue_.observe(i);
    }

    size_t read(Candidates given, size_t cell, double time, int64_t slot) {
        if (cell >= queue_.tables().cells) throw nb::value_error("cell is outside the tables");
        try {
            return queue_.read(given, cell, time, slot);
        } catch (const BadCandidate& bad) {
            throw nb::value_error(bad.words.c_str());
        }
    }

    void take_back() { queue_.take_back(); }

    std::tuple<int, double, int> choose(const Scores& scores) const {
        check_width(scores.size());
        try {
            const Choice choice = queue_.choose(0, scores.data(), scores.size());
            return {choice.slot, choice.score, choice.slot < 0 ? -1 : queue_.origin()[choice.slot]};
        } catch (const BadScore& bad) {
            throw nb::value_error(("the policy scores ad[" + std::to_string(queue_.origin()[bad.slot]) + "] as " +
                                   written(bad.score) + ", which is not a number")
                                      .c_str());
        }
    }

    std::vector<std::pair<int, double>> explain(const Scores& scores) const {
        check_width(scores.size());
        std::vector<std::pair<int, double>> candidates;
        for (const Reason reason : queue_.reasons())
            candidates.emplace_back(static_cast<int>(reason), std::numeric_limits<double>::quiet_NaN());
        for (size_t slot = 0; slot < queue_.slots(); ++slot)
            if (queue_.holds(slot))
                candidates[queue_.origin()[slot]].second = queue_.score_of(0, scores.data(), scores.size(), slot);
        return candidates;
    }

    void show(size_t slot) {
        if (slot >= queue_.slots()) throw nb::value_error("there is no such slot");
        queue_.show(0, slot);
    }

private:
    static std::string written(double score) { return std::isnan(score) ? "nan" : score < 0 ? "-inf" : "inf"; }
    void check_width(size_t width) const {
        if (width != queue_.tables().contracts && width != queue_.slots())
            throw nb::value_error("there must be a score for each contract, or for each slot");
    }
    void check_range(int64_t from, int64_t count) const {
        if (from < 0 || static_cast<size_t>(from + count) > length_)
            throw nb::value_error("requests are outside the arrays");
    }

    nb::dict held_, state_, requests_;
    size_t length_ = 0;
    AdQueue queue_;
};

}  // namespace

NB_MODULE(_kernel, module) {
    module.doc() = "The rules of ad mixing in C++ (ddrl/admix/kernel).";
    nb::class_<BoundQueue>(
        module, "AdQueue",
        "The queues of `places` days of the same contracts: what is in them, what is shown, what that changes.")
        .def(nb::init<const Dict&, const Dict&, uint64_t>(), "tables"_a, "sizes"_a, "seed"_a)
        .def("write_into", &BoundQueue::write_into, "state"_a,
             "Where `observe` writes: by name (bytes uint8 [places, stride], offset).")
        .def("use_requests", &BoundQueue::use_requests, "requests"_a, "length"_a,
             "Arrays [places, length, ...] of requests that `take` and `play` read.")
        .def("begin_day", &BoundQueue::begin_day, "place"_a,
             "Counts of a new day: nothing shown, no billing under way.")
        .def("look", &BoundQueue::look, "time"_a,
             "Set what is due, delivered and billed by what is known at `time` [places].")
        .def("take", &BoundQueue::take, "at"_a, "present"_a, "draws"_a.none(),
             "Take over request `at` of each place, where it is present; draws [2, places, contracts] decide by rate "
             "and theta.")
        .def("play", &BoundQueue::play, "scores"_a, "at"_a, "count"_a, "draws"_a.none(),
             "Play `count` requests of each place from `at` on by its scores. ValueError for a score that is not a "
             "number.")
        .def("observe", &BoundQueue::observe, "Write the states of the present requests.")
        .def(
            "read",
            [](BoundQueue& self, std::vector<int64_t> ad, std::vector<int64_t> kind, std::vector<double> ecpm,
               std::vector<double> ctr, std::vector<int64_t> filters, size_t cell, double time, int64_t slot) {
                if (filters.empty()) filters.resize(ad.size());
                return self.read({std::move(ad), std::move(kind), std::move(filters), std::move(ecpm), std::move(ctr)},
                                 cell, time, slot);
            },
            "ad"_a, "kind"_a, "ecpm"_a, "ctr"_a, "filters"_a, "cell"_a, "time"_a, "slot"_a,
            "Take over a request given as lists of checked numbers; the number of bids that found no slot. ValueError "
            "for lists of unequal length, and names a contract that is unknown or there twice.")
        .def("take_back", &BoundQueue::take_back,
             "The request that was read last is refused: the next one gets the draws that it got.")
        .def("choose", &BoundQueue::choose, "scores"_a,
             "Slot (-1: none), score and candidate of the ad to show; ValueError for a score that is not a number.")
        .def("explain", &BoundQueue::explain, "scores"_a,
             "Of each candidate the number of the reason why it may not be shown (0: it may), and its score, NaN "
             "outside "
             "the queue.")
        .def("show", &BoundQueue::show, "slot"_a, "Count the ad in a slot as shown.");
}
