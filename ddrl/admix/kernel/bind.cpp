// Python's view of the rules of ad mixing: tables are numpy arrays by name, used in place.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ad_queue.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using namespace ddrl::admix;
using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using Integers = nb::typed<nb::list, int>;
using Floats = nb::typed<nb::list, double>;
using Scores = nb::ndarray<const float, nb::c_contig, nb::device::cpu>;
using Places = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Flags = nb::ndarray<const bool, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Draws = nb::ndarray<const double, nb::c_contig, nb::device::cpu>;

// The array `name` of a dict as T [size], in place; nullptr where the dict lacks it and it is optional.
template <typename T>
T* array(const nb::dict& tables, const char* name, size_t size, bool optional = false) {
    if (!tables.contains(name)) {
        if (optional) return nullptr;
        throw nb::key_error(name);
    }
    nb::ndarray<T, nb::c_contig, nb::device::cpu> values;
    if (!nb::try_cast(tables[name], values, false) || values.size() != size)
        throw nb::value_error((std::string(name) + " must be a contiguous array of " + std::to_string(size) +
                               " numbers of the kernel's type")
                                  .c_str());
    return values.data();
}

Tables tables_of(const nb::dict& tables, const nb::dict& sizes) {
    const auto size = [&](const char* name) { return nb::cast<size_t>(sizes[name]); };
    const auto number = [&](const char* name) { return nb::cast<double>(sizes[name]); };
    Tables t{};
    t.places = size("places");
    t.contracts = size("contracts");
    t.bids = size("bids");
    t.windows = size("windows");
    t.cells = size("cells");
    t.traffic_size = size("traffic");
    t.delay = size("delay");
    for (const int field : nb::cast<std::vector<int>>(sizes["ad_fields"]))
        t.ad_fields.push_back(static_cast<AdField>(field));
    for (const int field : nb::cast<std::vector<int>>(sizes["overall_fields"]))
        t.overall_fields.push_back(static_cast<OverallField>(field));
    t.fields = t.ad_fields.size();
    t.click_value = static_cast<float>(number("click_value"));
    t.per_currency = static_cast<float>(number("per_currency"));
    t.own_counts = nb::cast<bool>(sizes["own_counts"]);
    t.bonuses = nb::cast<bool>(sizes["bonuses"]);
    t.support = static_cast<Support>(nb::cast<int>(sizes["support"]));
    t.support_gap = number("support_gap");
    t.ctr_weight = number("ctr_weight");
    t.bid_weight = number("bid_weight");
    t.relative = nb::cast<bool>(sizes["relative"]);
    const size_t count = t.contracts, all = t.places * count;
    t.demand = array<const double>(tables, "demand", count);
    t.past_rate = array<const double>(tables, "past_rate", count);
    t.cap = array<const double>(tables, "cap", all);
    t.curve = array<const double>(tables, "curve", t.places * (t.windows + 1) * count);
    t.rate = array<const double>(tables, "rate", all);
    t.theta = array<const double>(tables, "theta", all);
    t.shown = array<double>(tables, "shown", all);
    t.billed = array<double>(tables, "billed", all);
    t.seen_shown = array<double>(tables, "seen_shown", all);
    t.seen_billed = array<double>(tables, "seen_billed", all);
    t.sums = array<double>(tables, "sums", 5 * t.places);
    t.due = array<double>(tables, "due", all);
    t.estimate = array<double>(tables, "estimate", all);
    t.today_rate = array<double>(tables, "today_rate", all);
    t.events = array<int64_t>(tables, "events", 5);
    t.ids = array<const int64_t>(tables, "ids", count, true);
    t.eligible = array<const bool>(tables, "eligible", t.cells * count, true);
    t.rows = array<const float>(tables, "rows", all * t.fields, true);
    t.bid_row = array<const float>(tables, "bid_row", t.fields, true);
    t.prior = array<const float>(tables, "prior", all, true);
    t.traffic_rows = array<const float>(tables, "traffic_rows", t.cells * t.traffic_size, true);
    t.billed_rate = array<const double>(tables, "billed_rate", all * t.windows, true);
    t.value = array<double>(tables, "value", all + t.places, true);
    if (t.value != nullptr) {
        t.gain = array<double>(tables, "gain", all);
        t.revenue = array<double>(tables, "revenue", t.places);
        t.score = array<double>(tables, "score", t.places);
        t.chosen = array<int64_t>(tables, "chosen", t.places);
        t.logged = array<int64_t>(tables, "logged", t.places);
    }
    return t;
}

Requests requests_of(const nb::dict& given, const Tables& t, size_t length) {
    const size_t all = t.places * length;
    Requests r{};
    r.length = length;
    r.time = array<const double>(given, "time", all);
    r.window = array<const int64_t>(given, "window", all);
    r.cell = array<const int64_t>(given, "cell", all);
    r.slot = array<const int64_t>(given, "slot", all);
    r.logged = array<const int64_t>(given, "logged", all);
    r.bid_ad = array<const int64_t>(given, "bid_ad", all * t.bids);
    r.ecpm = array<const float>(given, "ecpm", all * t.bids);
    r.bid_ctr = array<const float>(given, "bid_ctr", all * t.bids);
    r.ctr = array<const float>(given, "ctr", all * t.contracts);
    r.eligible = array<const bool>(given, "eligible", all * t.contracts);
    r.billing = array<const float>(given, "billing", all);
    r.logged_billed = array<const int8_t>(given, "logged_billed", all);
    r.shown_slot = array<int16_t>(given, "shown_slot", all, true);
    if (r.shown_slot != nullptr) {
        r.worth = array<float>(given, "worth", all);
        r.billed = array<bool>(given, "billed", all);
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

template <typename T, typename Read>
void numbers(const nb::list& list, const char* field, const char* kind, std::vector<T>& out, Read read) {
    const Py_ssize_t count = PyList_GET_SIZE(list.ptr());
    out.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        const T value = read(PyList_GET_ITEM(list.ptr(), i));
        if (value == T(-1) && PyErr_Occurred()) {
            PyErr_Clear();
            throw nb::value_error((std::string(field) + "[" + std::to_string(i) + "] is not " + kind).c_str());
        }
        out[static_cast<size_t>(i)] = value;
    }
}

void integers(const nb::list& list, const char* field, std::vector<int64_t>& out) {
    numbers(list, field, "an integer", out, [](PyObject* item) -> int64_t { return PyLong_AsLongLong(item); });
}

void floats(const nb::list& list, const char* field, std::vector<double>& out) {
    numbers(list, field, "a number", out, [](PyObject* item) { return PyFloat_AsDouble(item); });
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
            queue_.take(i, static_cast<size_t>(at.data()[i]), present.data()[i], rate, rate ? rate + all : nullptr);
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
            if (draws && drawn < static_cast<size_t>(own) * t.contracts) throw nb::value_error("too few draws");
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

    size_t read(const Integers& ad, const Integers& kind, const Floats& ecpm, const Floats& ctr,
                const Integers& filters, size_t cell, double time, int64_t slot) {
        if (cell >= queue_.tables().cells) throw nb::value_error("cell is outside the tables");
        integers(ad, "ad", given_.ad);
        integers(kind, "kind", given_.kind);
        floats(ecpm, "ecpm", given_.ecpm);
        floats(ctr, "ctr", given_.ctr);
        if (PyList_GET_SIZE(filters.ptr()) || given_.ad.empty())
            integers(filters, "filters", given_.filters);
        else
            given_.filters.assign(given_.ad.size(), 0);
        try {
            return queue_.read(given_, cell, time, slot);
        } catch (const BadCandidate& bad) {
            throw nb::value_error(bad.words.c_str());
        }
    }

    double score_of(const Scores& scores, size_t slot) const {
        check_slot(slot);
        return queue_.score_of(0, scores.data(), scores.size(), slot);
    }

    std::pair<int, double> choose(const Scores& scores) const {
        check_width(scores.size());
        try {
            const Choice choice = queue_.choose(0, scores.data(), scores.size());
            return {choice.slot, choice.score};
        } catch (const BadScore& bad) {
            throw nb::value_error(("the policy scores ad[" + std::to_string(queue_.origin()[bad.slot]) + "] as " +
                                   written(bad.score) + ", which is not a number")
                                      .c_str());
        }
    }

    void show(size_t slot) {
        check_slot(slot);
        queue_.show(0, slot);
    }

    int origin_of(size_t slot) const {
        check_slot(slot);
        return queue_.origin()[slot];
    }

    const AdQueue& queue() const { return queue_; }

private:
    static std::string written(double score) { return std::isnan(score) ? "nan" : score < 0 ? "-inf" : "inf"; }
    void check_slot(size_t slot) const {
        if (slot >= queue_.slots()) throw nb::value_error("there is no such slot");
    }
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
    Candidates given_;
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
        .def("read", &BoundQueue::read, "ad"_a, "kind"_a, "ecpm"_a, "ctr"_a, "filters"_a, "cell"_a, "time"_a, "slot"_a,
             "Take over a request given as lists; the number of bids that found no slot. ValueError names a broken "
             "candidate.")
        .def("choose", &BoundQueue::choose, "scores"_a,
             "Slot (-1: none) and score of the ad to show; ValueError for a score that is not a number.")
        .def("score_of", &BoundQueue::score_of, "scores"_a, "slot"_a, "The score that `choose` compares.")
        .def("show", &BoundQueue::show, "slot"_a, "Count the ad in a slot as shown.")
        .def("origin_of", &BoundQueue::origin_of, "slot"_a, "The candidate in a slot; -1: none.")
        .def_prop_ro("origin", [](const BoundQueue& self) { return self.queue().origin(); })
        .def_prop_ro("reasons", [](const BoundQueue& self) {
            std::vector<int> reasons;
            for (const Reason reason : self.queue().reasons()) reasons.push_back(static_cast<int>(reason));
            return reasons;
        });
}
