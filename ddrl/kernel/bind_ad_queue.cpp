// Python's view of the queue of ad mixing: tables are numpy arrays by name, candidates are lists as msgspec makes them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "ad_queue.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using ddrl::AdQueue;
using ddrl::AdState;
using ddrl::AdTables;
using Dict = nb::typed<nb::dict, nb::str, nb::any>;
using Integers = nb::typed<nb::list, int>;
using Floats = nb::typed<nb::list, double>;

// The array `name` of a dict as T [size], in place.
template <typename T>
T* array(const nb::dict& tables, const char* name, size_t size) {
    if (!tables.contains(name)) throw nb::key_error(name);
    nb::ndarray<T, nb::c_contig, nb::device::cpu> values;
    if (!nb::try_cast(tables[name], values, false) || values.size() != size)
        throw nb::value_error((std::string(name) + " must be a contiguous array of " + std::to_string(size) +
                               " numbers of the kernel's type")
                                  .c_str());
    return values.data();
}

AdState state_of(const nb::dict& tables, size_t observed, size_t fields, size_t traffic) {
    return {array<bool>(tables, "queue_mask", observed), array<float>(tables, "ad", observed * fields),
            array<int32_t>(tables, "ad_id", observed),   array<float>(tables, "prior", observed),
            array<float>(tables, "overall", 5),          array<float>(tables, "traffic", traffic)};
}

AdTables tables_of(const nb::dict& tables, const nb::dict& sizes) {
    const auto size = [&](const char* name) { return nb::cast<size_t>(sizes[name]); };
    const auto column = [&](const char* name) { return sizes.contains(name) ? nb::cast<int>(sizes[name]) : -1; };
    AdTables t{};
    t.contracts = size("contracts"), t.bids = size("bids"), t.cells = size("cells"), t.windows = size("windows");
    t.fields = size("fields"), t.traffic_size = size("traffic");
    const size_t count = t.contracts;
    t.ids = array<const int64_t>(tables, "ids", count);
    t.demand = array<const double>(tables, "demand", count);
    t.limit = array<const double>(tables, "limit", count);
    t.billed_rate = array<const double>(tables, "billed_rate", count);
    t.eligible = array<const bool>(tables, "eligible", t.cells * count);
    t.curve = array<const double>(tables, "curve", (t.windows + 1) * count);
    t.rows = array<const float>(tables, "rows", count * t.fields);
    t.bid_row = array<const float>(tables, "bid_row", t.fields);
    t.traffic_rows = array<const float>(tables, "traffic_rows", t.cells * t.traffic_size);
    t.columns = {column("ecpm"), column("ctr"),  column("value"), column("impressions"), column("pace"),
                 column("cap"),  column("late"), column("need"),  column("rate")};
    t.click_value = nb::cast<double>(sizes["click_value"]);
    t.own_counts = nb::cast<bool>(sizes["own_counts"]);
    t.support = static_cast<ddrl::Support>(nb::cast<int>(sizes["support"]));
    t.support_gap = nb::cast<double>(sizes["support_gap"]);
    t.bonuses = nb::cast<bool>(sizes["bonuses"]);
    t.prior = array<const float>(tables, "prior", count);
    t.rate = array<double>(tables, "rate", count), t.theta = array<double>(tables, "theta", count);
    t.shown = array<double>(tables, "shown", count);
    t.seen_shown = array<double>(tables, "seen_shown", count);
    t.seen_billed = array<double>(tables, "seen_billed", count);
    t.sums = array<double>(tables, "sums", 5);
    return t;
}

void numbers(const nb::list& list, const char* field, std::vector<int64_t>& out) {
    const Py_ssize_t count = PyList_GET_SIZE(list.ptr());
    out.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        out[static_cast<size_t>(i)] = PyLong_AsLongLong(PyList_GET_ITEM(list.ptr(), i));
        if (out[static_cast<size_t>(i)] == -1 && PyErr_Occurred()) {
            PyErr_Clear();
            throw nb::value_error((std::string(field) + "[" + std::to_string(i) + "] is not an integer").c_str());
        }
    }
}

void numbers(const nb::list& list, const char* field, std::vector<double>& out) {
    const Py_ssize_t count = PyList_GET_SIZE(list.ptr());
    out.resize(static_cast<size_t>(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        out[static_cast<size_t>(i)] = PyFloat_AsDouble(PyList_GET_ITEM(list.ptr(), i));
        if (out[static_cast<size_t>(i)] == -1.0 && PyErr_Occurred()) {
            PyErr_Clear();
            throw nb::value_error((std::string(field) + "[" + std::to_string(i) + "] is not a number").c_str());
        }
    }
}

// The queue with the Python objects whose memory it uses.
class BoundQueue {
public:
    BoundQueue(const Dict& tables, const Dict& sizes, uint64_t seed)
        : held_(nb::borrow<nb::dict>(nb::module_::import_("builtins").attr("dict")(tables))),
          tables_(tables_of(tables, sizes)),
          queue_(tables_, seed) {}

    void write_into(const Dict& state) {
        out_ = state_of(state, queue_.observed(), tables_.fields, tables_.traffic_size);
        state_ = nb::borrow<nb::dict>(nb::module_::import_("builtins").attr("dict")(state));
    }

    size_t read(const Integers& ad, const Integers& kind, const Floats& ecpm, const Floats& ctr,
                const Integers& filters, size_t cell, double time) {
        if (out_.mask == nullptr) throw nb::value_error("write_into first");
        if (cell >= tables_.cells) throw nb::value_error("cell is outside the tables");
        numbers(ad, "ad", given_.ad), numbers(kind, "kind", given_.kind);
        numbers(ecpm, "ecpm", given_.ecpm), numbers(ctr, "ctr", given_.ctr);
        if (PyList_GET_SIZE(filters.ptr()) || given_.ad.empty())
            numbers(filters, "filters", given_.filters);
        else
            given_.filters.assign(given_.ad.size(), 0);
        try {
            return queue_.read(given_, cell, time, out_);
        } catch (const ddrl::BadCandidate& bad) {
            throw nb::value_error(bad.words.c_str());
        }
    }

    double score_of(const nb::ndarray<const float, nb::c_contig, nb::device::cpu>& scores, size_t slot) const {
        if (slot >= queue_.slots()) throw nb::value_error("there is no such slot");
        return queue_.score_of(scores.data(), scores.size(), slot);
    }

    std::pair<int, double> choose(const nb::ndarray<const float, nb::c_contig, nb::device::cpu>& scores) {
        if (scores.size() != tables_.contracts && scores.size() != queue_.slots())
            throw nb::value_error("there must be a score for each contract, or for each slot");
        try {
            const ddrl::AdChoice choice = queue_.choose(scores.data(), scores.size());
            return {choice.slot, choice.score};
        } catch (const ddrl::BadCandidate& bad) {
            throw nb::value_error(bad.words.c_str());
        }
    }

    void show(size_t slot) {
        if (slot >= queue_.slots()) throw nb::value_error("there is no such slot");
        queue_.show(slot);
    }

    const AdQueue& queue() const { return queue_; }

private:
    nb::dict held_, state_;
    AdTables tables_;
    AdQueue queue_;
    AdState out_{};
    ddrl::Candidates given_;
};

}  // namespace

void bind_ad_queue(nb::module_& module) {
    nb::class_<BoundQueue>(module, "AdQueue",
                           "The queue of one display request of ad mixing; ddrl.serve.Mixer is its face.")
        .def(nb::init<const Dict&, const Dict&, uint64_t>(), "tables"_a, "sizes"_a, "seed"_a)
        .def("write_into", &BoundQueue::write_into, "state"_a, "Arrays that `read` writes the state of a request to.")
        .def("read", &BoundQueue::read, "ad"_a, "kind"_a, "ecpm"_a, "ctr"_a, "filters"_a, "cell"_a, "time"_a,
             "Take over a request; the number of bids that found no slot. ValueError names a broken candidate.")
        .def("choose", &BoundQueue::choose, "scores"_a,
             "Slot (-1: none) and score of the ad to show; ValueError for a score that is not a number.")
        .def("score_of", &BoundQueue::score_of, "scores"_a, "slot"_a, "The score that `choose` compares.")
        .def("show", &BoundQueue::show, "slot"_a, "Count the ad in a slot as shown.")
        .def_prop_ro("origin", [](const BoundQueue& self) { return self.queue().origin(); })
        .def_prop_ro("value", [](const BoundQueue& self) { return self.queue().value(); })
        .def_prop_ro("estimate", [](const BoundQueue& self) { return self.queue().estimate(); })
        .def_prop_ro("due", [](const BoundQueue& self) { return self.queue().due(); })
        .def(
            "origin_of", [](const BoundQueue& self, size_t slot) { return self.queue().origin().at(slot); }, "slot"_a,
            "The candidate that stands in a slot; -1: none.")
        .def_prop_ro("reasons", [](const BoundQueue& self) {
            std::vector<int> reasons;
            for (const ddrl::Reason reason : self.queue().reasons()) reasons.push_back(static_cast<int>(reason));
            return reasons;
        });
}
