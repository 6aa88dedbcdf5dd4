// The messages of one plan on one host: receives are posted ahead, and what has arrived is forwarded at once, in the
// plan's order. A message is an MPI datatype, made by the caller, that gathers its bytes from wherever they are; this
// file knows no models.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <queue>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace ddrl {

// MPI's C functions, by the addresses that mpi4py has loaded: nothing is linked. A handle of MPI is a pointer in some
// libraries and an int in others, so what uses it is a template.
template <class Handle>
struct MpiCalls {
    int (*isend)(const void*, int, Handle, int, int, Handle, Handle*);
    int (*issend)(const void*, int, Handle, int, int, Handle, Handle*);
    int (*irecv)(void*, int, Handle, int, int, Handle, Handle*);
    int (*testsome)(int, Handle*, int*, int*, void*);
    int (*grequest_start)(int (*)(void*, void*), int (*)(void*), int (*)(void*, int), void*, Handle*);
    int (*grequest_complete)(Handle);
    Handle comm;
    void* ignored;  // MPI_STATUSES_IGNORE
};

// Which of a host's ready messages is sent next: the first in the plan's order, old versions before new ones.
//
// At most `window` bytes are handed to MPI and not yet received, so that this order decides and not the socket's, and
// at most `share` of them to one target, so that a slow target delays only its own messages. MPI reports a small
// message as sent when it has copied it; so from time to time one is sent synchronously, which is complete only when it
// has been received, and with it all messages before it. Up to half of a share, and of the window over all targets, may
// be under way without such a report: otherwise a host with very many targets could have a little under way to each,
// and far too much in all.
//
// A receiver takes messages in the plan's order. One that became ready late may precede all that are under way, and
// these may wait for it to be received first: so it is sent even where the window is full.
class Outbox {
public:
    using Entry = std::pair<int64_t, int>;  // (sequence, place among the host's own messages): the smaller goes first

    // Bytes under way from this host, and of these to one target, at which no more are sent.
    Outbox(int64_t window, int64_t share) : window_(window), share_(share) {}

    // A message may be sent.
    void add(Entry entry, int target) { ready_.emplace(entry, target); }

    // The next message that has room.
    std::optional<Entry> take() {
        while (!ready_.empty()) {
            const auto [entry, target] = ready_.top();
            const bool first = before_all(entry);
            if (under_way_ + unasked_ >= window_ && !first) break;
            ready_.pop();
            Target& to = targets_[target];
            if (to.under_way < share_ || first) return entry;
            to.waits.insert(entry);
        }
        return std::nullopt;
    }

    // Whether this message must be sent synchronously.
    bool asks(int target, int64_t bytes) {
        return 2 * (targets_[target].unasked + bytes) > share_ || 2 * (unasked_ + bytes) > window_;
    }

    // A message was sent, and MPI will not report when it is received.
    void copied(int target, int64_t bytes) {
        targets_[target].under_way += bytes;
        targets_[target].unasked += bytes;
        unasked_ += bytes;
    }

    // A message was sent whose completion will be reported; returns the bytes that will have been received then.
    int64_t sent(Entry entry, int target, int64_t bytes) {
        Target& to = targets_[target];
        to.under_way += bytes;
        unasked_ -= to.unasked;
        bytes += std::exchange(to.unasked, 0);
        under_way_ += bytes;
        gone_.insert(entry);
        return bytes;
    }

    // Such a message, and with it `bytes`, have been received.
    void taken(Entry entry, int target, int64_t bytes) {
        under_way_ -= bytes;
        targets_[target].under_way -= bytes;
        gone_.erase(entry);
        for (auto& [each, to] : targets_) {
            if (to.waits.empty() || (each != target && !before_all(*to.waits.begin()))) continue;
            for (const Entry& waiting : std::exchange(to.waits, {})) ready_.emplace(waiting, each);
        }
    }

private:
    struct Target {
        int64_t under_way = 0;
        int64_t unasked = 0;  // of these, those whose receipt will not be reported
        std::set<Entry> waits;  // ready too, but the target has its share
    };
    using Ready = std::pair<Entry, int>;  // with the target

    bool before_all(const Entry& entry) const { return gone_.empty() || entry < *gone_.begin(); }

    int64_t window_, share_;
    int64_t under_way_ = 0;  // bytes whose receipt will be reported
    int64_t unasked_ = 0;  // bytes whose receipt will not be reported, over all targets
    std::priority_queue<Ready, std::vector<Ready>, std::greater<>> ready_;
    std::unordered_map<int, Target> targets_;
    std::set<Entry> gone_;  // sent, receipt to be reported
};

// A plan as one host sees it. `source`, `target`, `first`, `count` of every message (its chunks); `outgoing`,
// `incoming`: messages that this host sends and receives, in the plan's order.
struct HostPlan {
    std::vector<int> source, target, first, count, outgoing, incoming;
    int chunks;
};

// What happened to a message: 0 it was handed to MPI, 1 it has left, 2 it has arrived. Nanoseconds of the steady clock.
struct TransferNote {
    int64_t time_ns;
    int what;
    int64_t sequence;
    int message, peer;
};

struct TransferTotals {
    int64_t bytes_sent = 0, bytes_received = 0, messages_sent = 0, messages_received = 0;
};

class TransfersBase {
public:
    using Clock = std::chrono::steady_clock;

    struct Arrival {
        int64_t sequence;
        int message;
    };
    // For versions whose messages differ in size: `prepare` gives the datatype and bytes of a message before it is
    // sent, `arrived` is called as soon as one has arrived, before it is forwarded, and gives its bytes.
    struct Hooks {
        std::function<std::pair<uint64_t, int64_t>(int)> prepare;
        std::function<int64_t(int)> arrived;
    };

    virtual ~TransfersBase() = default;
    // A version may move from now on. Datatypes and bytes of the messages that this host sends and receives, in the
    // order of `outgoing` and `incoming`; `holds`: this host has all of it.
    virtual void open(int64_t sequence, const std::vector<uint64_t>& sends, const std::vector<uint64_t>& receives,
                      bool holds, Hooks hooks) = 0;
    // Move what can be moved, without waiting; whether anything moved. Afterwards this object has seen every completion
    // that MPI has: what comes next is still in MPI's sockets.
    virtual bool move() = 0;
    // Hand all open requests, receives or sends, to the caller.
    virtual std::vector<uint64_t> give_up(bool receives) = 0;
    // Nothing of the version is needed any more.
    virtual void forget(int64_t sequence) = 0;

    // Whether there is something that the caller should fetch soon.
    bool due() const { return arrivals_.size() >= batch || !sent_.empty() || whole_; }
    // Since the last call: messages that have arrived; versions of which this host has sent all.
    std::vector<Arrival> take_arrivals() {
        whole_ = false;
        return std::exchange(arrivals_, {});
    }
    std::vector<int64_t> take_sent() { return std::exchange(sent_, {}); }
    std::vector<TransferNote> take_notes() { return std::exchange(notes_, {}); }
    const TransferTotals& totals() const { return totals_; }
    Clock::time_point moved_at() const { return moved_at_; }

protected:
    static constexpr size_t batch = 64;  // arrivals that the caller fetches together, so that caches stay warm

    bool whole_ = false;  // all messages of some version have arrived
    std::vector<Arrival> arrivals_;
    std::vector<int64_t> sent_;
    std::vector<TransferNote> notes_;
    TransferTotals totals_;
    Clock::time_point moved_at_;
};

template <class Handle>
class Transfers : public TransfersBase {
public:
    // `bytes` of each message; `tags`: twice the versions that may travel at once; `posted`: receives posted for each
    // source at a time; `noted`: keep notes.
    Transfers(MpiCalls<Handle> mpi, HostPlan plan, std::vector<int64_t> bytes, int64_t window, int64_t share, int tags,
              int posted, bool noted)
        : mpi_(mpi),
          plan_(std::move(plan)),
          bytes_(std::move(bytes)),
          outbox_(window, share),
          tags_(tags),
          posted_(posted),
          noted_(noted),
          waiters_(plan_.chunks) {
        for (size_t place = 0; place < plan_.outgoing.size(); ++place)
            each_chunk(plan_.outgoing[place],
                       [&](size_t chunk) { waiters_[chunk].push_back(static_cast<int>(place)); });
    }

    void open(int64_t sequence, const std::vector<uint64_t>& sends, const std::vector<uint64_t>& receives, bool holds,
              Hooks hooks) override {
        Flight& flight = flights_[sequence];
        for (uint64_t type : sends) flight.sends.push_back(handle(type));
        for (uint64_t type : receives) flight.receives.push_back(handle(type));
        flight.unsent = plan_.outgoing.size();
        flight.unreceived = plan_.incoming.size();
        flight.hooks = std::move(hooks);
        if (holds) {
            for (size_t place = 0; place < plan_.outgoing.size(); ++place) ready(sequence, static_cast<int>(place));
            issue();
            return;
        }
        for (int message : plan_.outgoing) flight.missing.push_back(plan_.count[message]);
        for (size_t place = 0; place < plan_.incoming.size(); ++place) {
            Source& source = sources_[plan_.source[plan_.incoming[place]]];
            source.due.emplace_back(sequence, static_cast<int>(place));
        }
        for (auto& [rank, source] : sources_)
            while (source.posted < posted_ && post(source)) {
            }
    }

    bool move() override {
        indices_.resize(requests_.size() + 1);
        // Where nothing has completed, this call lets MPI make progress.
        int ended = requests_.empty() ? 0 : testsome(requests_.data(), requests_.size());
        bool moved = false;
        for (;; moved = true, indices_.resize(requests_.size() + 1), ended = 0) {
            if (ended <= 0) ended = seen();
            if (ended > 0) {
                complete(ended);
            } else if (!issue()) {
                break;
            }
        }
        if (moved) moved_at_ = Clock::now();
        return moved;
    }

    std::vector<uint64_t> give_up(bool receives) override {
        std::vector<uint64_t> given;
        size_t kept = 0;
        for (size_t index = 0; index < requests_.size(); ++index) {
            if ((what_[index].bytes == 0) == receives) {
                given.push_back(number(requests_[index]));
            } else {
                requests_[kept] = requests_[index];
                what_[kept++] = what_[index];
            }
        }
        requests_.resize(kept);
        what_.resize(kept);
        return given;
    }

    void forget(int64_t sequence) override { flights_.erase(sequence); }

private:
    struct Flight {
        std::vector<Handle> sends, receives;
        std::vector<int> missing;  // chunks that each own message still waits for
        size_t unsent = 0, unreceived = 0;
        Hooks hooks;
    };
    struct Source {
        int posted = 0;  // receives
        std::deque<std::pair<int64_t, int>> due;  // receives to post, in the plan's order
    };
    struct What {
        int64_t sequence;
        int place;  // in `outgoing` or `incoming`
        int64_t bytes;  // of a send, that will have been taken; 0: a receive
    };

    static Handle handle(uint64_t number) { return (Handle)(number); }
    static uint64_t number(Handle handle) { return (uint64_t)(handle); }
    int tag(int64_t sequence, int message) const {
        return static_cast<int>(sequence % tags_) * plan_.chunks + plan_.first[message];
    }
    template <class Visit>
    void each_chunk(int message, Visit visit) const {
        for (int chunk = plan_.first[message], end = chunk + plan_.count[message]; chunk < end; ++chunk) visit(chunk);
    }
    static void check(int code, const char* call) {
        if (code != 0) throw std::runtime_error(std::string(call) + " failed with MPI's error " + std::to_string(code));
    }
    int testsome(Handle* requests, size_t count) {
        int ended = 0;
        check(mpi_.testsome(static_cast<int>(count), requests, &ended, indices_.data(), mpi_.ignored), "MPI_Testsome");
        return ended;
    }
    // How many requests have completed, without letting MPI make progress: Open MPI's MPI_Testsome makes progress only
    // when it finds nothing completed, and completions that follow from it would not be noticed while the caller
    // sleeps. So a request that is complete already is added for the call.
    int seen() {
        Handle over;
        check(mpi_.grequest_start([](void*, void*) { return 0; }, [](void*) { return 0; }, [](void*, int) { return 0; },
                                  nullptr, &over),
              "MPI_Grequest_start");
        check(mpi_.grequest_complete(over), "MPI_Grequest_complete");
        requests_.push_back(over);
        const int place = static_cast<int>(requests_.size()) - 1;
        int ended = 0;
        const int code = mpi_.testsome(place + 1, requests_.data(), &ended, indices_.data(), mpi_.ignored);
        requests_.pop_back();
        check(code, "MPI_Testsome");
        indices_.erase(std::find(indices_.begin(), indices_.end(), place));
        return ended - 1;
    }
    void note(int what, int64_t sequence, int message, int peer) {
        if (noted_)
            notes_.push_back(
                {Clock::now().time_since_epoch() / std::chrono::nanoseconds(1), what, sequence, message, peer});
    }
    void ready(int64_t sequence, int place) { outbox_.add({sequence, place}, plan_.target[plan_.outgoing[place]]); }

    // Post the next receive from a source; false: none is due.
    bool post(Source& source) {
        if (source.due.empty()) return false;
        const auto [sequence, place] = source.due.front();
        source.due.pop_front();
        const int message = plan_.incoming[place];
        Handle request;
        check(mpi_.irecv(nullptr, 1, flights_.at(sequence).receives[place], plan_.source[message],
                         tag(sequence, message), mpi_.comm, &request),
              "MPI_Irecv");
        requests_.push_back(request);
        what_.push_back({sequence, place, 0});
        ++source.posted;
        return true;
    }

    void complete(size_t ended) {
        finished_.clear();
        for (size_t i = 0; i < ended; ++i) finished_.push_back(what_[indices_[i]]);
        std::sort(indices_.begin(), indices_.begin() + ended, std::greater<>());
        for (size_t i = 0; i < ended; ++i) {
            requests_[indices_[i]] = requests_.back();
            what_[indices_[i]] = what_.back();
            requests_.pop_back();
            what_.pop_back();
        }
        for (const What& what : finished_) {
            if (what.bytes) {
                outbox_.taken({what.sequence, what.place}, plan_.target[plan_.outgoing[what.place]], what.bytes);
                left(what.sequence, what.place);
            } else {
                arrived(what.sequence, plan_.incoming[what.place]);
            }
        }
    }

    void arrived(int64_t sequence, int message) {
        Source& source = sources_[plan_.source[message]];
        --source.posted;
        post(source);
        Flight& flight = flights_.at(sequence);
        totals_.bytes_received += flight.hooks.arrived ? flight.hooks.arrived(message) : bytes_[message];
        ++totals_.messages_received;
        note(2, sequence, message, plan_.source[message]);
        each_chunk(message, [&](size_t chunk) {
            for (int place : waiters_[chunk])
                if (--flight.missing[place] == 0) ready(sequence, place);
        });
        issue();
        arrivals_.push_back({sequence, message});
        if (--flight.unreceived == 0) whole_ = true;
    }

    // Hand ready messages to MPI while there is room; whether any was sent.
    bool issue() {
        bool issued = false;
        while (const auto entry = outbox_.take()) {
            const auto [sequence, place] = *entry;
            Flight& flight = flights_.at(sequence);
            const int message = plan_.outgoing[place], target = plan_.target[message];
            int64_t bytes = bytes_[message];
            Handle type;
            if (flight.hooks.prepare) {
                const auto [made, size] = flight.hooks.prepare(message);
                type = handle(made);
                bytes = size;
            } else {
                type = flight.sends[place];
            }
            const bool asks = outbox_.asks(target, bytes);
            Handle request;
            check((asks ? mpi_.issend : mpi_.isend)(nullptr, 1, type, target, tag(sequence, message), mpi_.comm,
                                                    &request),
                  "MPI_Isend");
            totals_.bytes_sent += bytes;
            ++totals_.messages_sent;
            note(0, sequence, message, target);
            int index = 0, ended = 0;
            if (!asks) check(mpi_.testsome(1, &request, &ended, &index, mpi_.ignored), "MPI_Testsome");
            if (ended > 0) {
                outbox_.copied(target, bytes);
                left(sequence, place);
            } else {
                requests_.push_back(request);
                what_.push_back({sequence, place, outbox_.sent(*entry, target, bytes)});
            }
            issued = true;
        }
        return issued;
    }

    void left(int64_t sequence, int place) {
        note(1, sequence, plan_.outgoing[place], plan_.target[plan_.outgoing[place]]);
        if (--flights_.at(sequence).unsent == 0) sent_.push_back(sequence);
    }

    MpiCalls<Handle> mpi_;
    HostPlan plan_;
    std::vector<int64_t> bytes_;
    Outbox outbox_;
    int64_t tags_;
    int posted_;
    bool noted_;
    std::vector<std::vector<int>> waiters_;  // of each chunk: places in `outgoing`
    std::unordered_map<int64_t, Flight> flights_;
    std::map<int, Source> sources_;
    std::vector<Handle> requests_;
    std::vector<What> what_, finished_;  // `what_` beside `requests_`
    std::vector<int> indices_;
};

}  // namespace ddrl
