#include "transfers.hpp"

#include <array>
#include <numeric>
#include <random>

#include "expect.hpp"

using ddrl::HostPlan;
using ddrl::MpiCalls;
using ddrl::Outbox;
using ddrl::Transfers;

// An MPI of one process, with handles that are ints: messages are matched by (source, target, tag) in the order in
// which they were sent, and end in any order.
namespace fake {

struct Type {  // a datatype: where its chunks stand
    std::vector<int>* chunks;
    int first, count;
};
struct Request {
    bool receive, asks, ended, given;
    int source, target, tag, type;
    std::vector<int> carried;
};

static std::vector<Type> types;
static std::vector<Request> requests;
static std::mt19937 random_numbers;
static int me = 0, asked = 0, most_bytes_under_way = 0;
constexpr int NONE = -1;

static void match() {
    for (Request& send : requests) {
        if (send.receive || send.given) continue;
        for (Request& taker : requests) {
            if (!taker.receive || taker.ended || taker.source != send.source || taker.target != send.target ||
                taker.tag != send.tag)
                continue;
            const Type& type = types[static_cast<size_t>(taker.type)];
            std::copy(send.carried.begin(), send.carried.end(), type.chunks->begin() + type.first);
            taker.ended = send.ended = send.given = true;
            break;
        }
    }
}

static int send(int type, int target, int tag, int* request, bool asks) {
    const Type& what = types[static_cast<size_t>(type)];
    const auto begin = what.chunks->begin() + what.first;
    requests.push_back({false, asks, !asks && random_numbers() % 2 == 0, false, me, target, tag, type,
                        std::vector<int>(begin, begin + what.count)});
    *request = static_cast<int>(requests.size()) - 1;
    asked += asks;
    int under_way = 0;
    for (const Request& each : requests)
        under_way += each.source == me && each.asks && !each.ended ? static_cast<int>(each.carried.size()) : 0;
    most_bytes_under_way = std::max(most_bytes_under_way, under_way);
    return 0;
}
static int isend(const void*, int, int type, int target, int tag, int, int* request) {
    return send(type, target, tag, request, false);
}
static int issend(const void*, int, int type, int target, int tag, int, int* request) {
    return send(type, target, tag, request, true);
}
static int irecv(void*, int, int type, int source, int tag, int, int* request) {
    requests.push_back({true, false, false, false, source, me, tag, type, {}});
    *request = static_cast<int>(requests.size()) - 1;
    return 0;
}
static int testsome(int count, int* given, int* ended, int* indices, void*) {
    match();
    *ended = 0;
    for (int index = count - 1; index >= 0; --index) {
        const Request& request = requests[static_cast<size_t>(given[index])];
        if (!request.ended || (request.type != NONE && random_numbers() % 3 == 0)) continue;
        given[index] = NONE;
        indices[(*ended)++] = index;
    }
    return 0;
}
// A request of the caller's own: one that has ended is always found.
static int grequest_start(int (*)(void*, void*), int (*)(void*), int (*)(void*, int), void*, int* request) {
    requests.push_back({true, false, false, false, NONE, NONE, NONE, NONE, {}});
    *request = static_cast<int>(requests.size()) - 1;
    return 0;
}
static int grequest_complete(int request) {
    requests[static_cast<size_t>(request)].ended = true;
    return 0;
}
static int broken(int, int*, int*, int*, void*) { return 15; }

static MpiCalls<int> calls() { return {isend, issend, irecv, testsome, grequest_start, grequest_complete, 0, nullptr}; }

}  // namespace fake

// A chain 0 -> 1 -> 2: message i carries chunk i over the first link, message CHUNKS + i the chunks 2 i and 2 i + 1
// over the second one.
constexpr int CHUNKS = 40, MESSAGES = CHUNKS + CHUNKS / 2, HOSTS = 3, VERSIONS = 3;

static HostPlan chain(int host) {
    HostPlan plan;
    plan.chunks = CHUNKS;
    for (int message = 0; message < MESSAGES; ++message) {
        const int link = message / CHUNKS;
        plan.source.push_back(link);
        plan.target.push_back(link + 1);
        plan.first.push_back((link + 1) * (message % CHUNKS));
        plan.count.push_back(link + 1);
        if (plan.source.back() == host) plan.outgoing.push_back(message);
        if (plan.target.back() == host) plan.incoming.push_back(message);
    }
    return plan;
}

static std::vector<int64_t> sizes() {
    const HostPlan plan = chain(0);
    return {plan.count.begin(), plan.count.end()};
}

struct Chain {
    std::array<std::array<std::vector<int>, HOSTS>, VERSIONS> models;
    std::vector<Transfers<int>> hosts;

    Chain(int64_t window, uint32_t seed) {
        fake::types.clear();
        fake::requests.clear();
        fake::random_numbers.seed(seed);
        fake::asked = fake::most_bytes_under_way = 0;
        for (int host = 0; host < HOSTS; ++host)
            hosts.emplace_back(fake::calls(), chain(host), sizes(), window, window, 2 * VERSIONS, 4, true);
    }
    void open(int version) {
        for (int host = HOSTS - 1; host >= 0; --host) {
            std::vector<int>& model = models[static_cast<size_t>(version)][static_cast<size_t>(host)];
            model.assign(CHUNKS, 0);
            if (host == 0) std::iota(model.begin(), model.end(), 1000 * (version + 1));
            const HostPlan plan = chain(host);
            fake::me = host;
            hosts[static_cast<size_t>(host)].open(version, made(plan, plan.outgoing, model),
                                                  made(plan, plan.incoming, model), host == 0, {});
        }
    }
    bool move() {
        bool moved = false;
        for (int host = 0; host < HOSTS; ++host) {
            fake::me = host;
            moved |= hosts[static_cast<size_t>(host)].move();
        }
        return moved;
    }
    // Until nothing has moved for a while: an MPI that ends requests in any order may leave one for some turns.
    void move_all() {
        for (int turn = 0, still = 0; turn < 5000 && still < 30; ++turn) still = move() ? 0 : still + 1;
    }
    bool whole(int version) const {
        const auto& model = models[static_cast<size_t>(version)];
        return model[1] == model[0] && model[2] == model[0];
    }

private:
    static std::vector<uint64_t> made(const HostPlan& plan, const std::vector<int>& messages, std::vector<int>& model) {
        std::vector<uint64_t> handles;
        for (int message : messages) {
            handles.push_back(fake::types.size());
            const auto place = static_cast<size_t>(message);
            fake::types.push_back({&model, plan.first[place], plan.count[place]});
        }
        return handles;
    }
};

static void versions_that_travel_together_reach_every_host_whole() {
    for (uint32_t seed = 0; seed < 30; ++seed) {
        Chain chain(6, seed);
        for (int version = 0; version < VERSIONS; ++version) chain.open(version);
        chain.move_all();
        for (int version = 0; version < VERSIONS; ++version) EXPECT(chain.whole(version));
        EXPECT(fake::most_bytes_under_way <= 7);  // the window, and the message that crosses it
        EXPECT(fake::asked > 0 && fake::asked < MESSAGES * VERSIONS);
        for (size_t host = 0; host < HOSTS; ++host) {
            const auto& totals = chain.hosts[host].totals();
            EXPECT(totals.messages_sent == VERSIONS * (host == 0 ? CHUNKS : host == 1 ? CHUNKS / 2 : 0));
            EXPECT(totals.bytes_received == (host > 0 ? CHUNKS * VERSIONS : 0));
            EXPECT(chain.hosts[host].due() == true);
            EXPECT(chain.hosts[host].take_arrivals().size() == static_cast<size_t>(totals.messages_received));
            EXPECT(chain.hosts[host].take_sent().size() == (host < 2 ? VERSIONS : 0));
            EXPECT(!chain.hosts[host].due());
            for (int version = 0; version < VERSIONS; ++version) chain.hosts[host].forget(version);
        }
    }
}

static void a_chunk_goes_on_only_once_it_has_come_and_old_versions_go_first() {
    Chain chain(4, 7);
    for (int version = 0; version < VERSIONS; ++version) chain.open(version);
    chain.move_all();
    std::array<bool, CHUNKS * VERSIONS> come{};
    int64_t newest = -1;
    for (const ddrl::TransferNote& note : chain.hosts[1].take_notes()) {
        const size_t place = static_cast<size_t>(note.sequence * CHUNKS + note.message % CHUNKS);
        if (note.what == 2) come[place] = true;
        if (note.what == 0)
            EXPECT(come[place + static_cast<size_t>(note.message % CHUNKS)] &&
                   come[place + static_cast<size_t>(note.message % CHUNKS) + 1]);
    }
    for (const ddrl::TransferNote& note : chain.hosts[0].take_notes()) {
        if (note.what != 0) continue;
        const int64_t order = note.sequence * CHUNKS + note.message;
        EXPECT(order > newest);
        newest = order;
    }
    EXPECT(newest == CHUNKS * VERSIONS - 1);
}

static void what_stands_is_handed_back() {
    Chain chain(6, 1);
    chain.open(0);
    fake::me = 2;
    EXPECT(chain.hosts[2].give_up(true).size() == 4);  // as many as are posted for a source
    EXPECT(chain.hosts[2].give_up(true).empty());
    EXPECT(chain.hosts[2].give_up(false).empty());
    EXPECT(!chain.hosts[2].move());
    EXPECT(!chain.hosts[0].give_up(false).empty());
}

static void an_error_of_mpi_is_said() {
    Chain chain(6, 1);
    MpiCalls<int> calls = fake::calls();
    calls.testsome = fake::broken;
    Transfers<int> host(calls, ::chain(0), sizes(), 6, 6, 2, 4, false);
    std::vector<int> model(CHUNKS, 1);
    fake::types.push_back({&model, 0, 1});
    bool said = false;
    try {
        host.open(0, std::vector<uint64_t>(CHUNKS, fake::types.size() - 1), {}, true, {});
        host.move();
    } catch (const std::runtime_error& error) {
        said = std::string(error.what()).find("MPI_Testsome failed with MPI's error 15") == 0;
    }
    EXPECT(said);
}

using Entries = std::vector<Outbox::Entry>;

// Everything that may go now, in order.
static Entries taken(Outbox& outbox) {
    Entries found;
    while (const auto entry = outbox.take()) found.push_back(*entry);
    return found;
}

static void the_earliest_message_goes_first_old_versions_before_new_ones() {
    Outbox outbox(1000, 1000);
    for (const Outbox::Entry& entry : Entries{{1, 0}, {0, 2}, {0, 1}, {1, 3}}) outbox.add(entry, 1);
    EXPECT((taken(outbox) == Entries{{0, 1}, {0, 2}, {1, 0}, {1, 3}}));
}

static void a_target_that_has_its_share_holds_up_only_its_own_messages() {
    Outbox outbox(1000, 100);
    outbox.add({0, 0}, 1);
    outbox.add({0, 1}, 1);
    outbox.add({0, 2}, 2);
    EXPECT((outbox.take() == Outbox::Entry{0, 0}));
    const int64_t ended = outbox.sent({0, 0}, 1, 100);
    EXPECT((taken(outbox) == Entries{{0, 2}}));
    outbox.taken({0, 0}, 1, ended);
    EXPECT((taken(outbox) == Entries{{0, 1}}));
}

static void no_more_goes_once_the_window_is_full() {
    Outbox outbox(150, 100);
    for (int place = 0; place < 3; ++place) outbox.add({0, place}, place);
    EXPECT((outbox.take() == Outbox::Entry{0, 0}));
    const int64_t first = outbox.sent({0, 0}, 0, 100);
    EXPECT((outbox.take() == Outbox::Entry{0, 1}));
    outbox.sent({0, 1}, 1, 100);
    EXPECT(!outbox.take());
    outbox.taken({0, 0}, 0, first);
    EXPECT((outbox.take() == Outbox::Entry{0, 2}));
}

static void copied_messages_count_until_one_that_asks_was_received() {
    Outbox outbox(1000, 100);
    EXPECT(!outbox.asks(1, 30));
    outbox.copied(1, 30);
    EXPECT(outbox.asks(1, 30));  // more than half of the share would be unasked
    EXPECT(!outbox.asks(2, 30));
    const int64_t ended = outbox.sent({0, 0}, 1, 70);
    EXPECT(ended == 100);
    outbox.add({0, 1}, 1);
    EXPECT(!outbox.take());
    outbox.taken({0, 0}, 1, ended);
    EXPECT((outbox.take() == Outbox::Entry{0, 1}));
    EXPECT(!outbox.asks(1, 30));
}

static void copied_messages_alone_never_stop_a_host() {
    Outbox outbox(100, 100);
    for (int place = 0; place < 200; ++place) {
        const int target = place % 50;
        outbox.add({0, place}, target);
        EXPECT((outbox.take() == Outbox::Entry{0, place}));
        if (outbox.asks(target, 10))
            outbox.taken({0, place}, target, outbox.sent({0, place}, target, 10));
        else
            outbox.copied(target, 10);
    }
}

static void a_little_to_each_of_many_targets_is_no_more_than_the_window() {
    Outbox outbox(100, 50);
    for (int target = 0; target < 50; ++target) outbox.add({0, target}, target);
    int gone = 0;
    while (const auto entry = outbox.take()) {
        EXPECT(entry->second == gone++);
        if (outbox.asks(entry->second, 10))
            outbox.sent(*entry, entry->second, 10);
        else
            outbox.copied(entry->second, 10);
    }
    EXPECT(gone == 10);
}

// A receiver that takes messages in order waits for it, and takes none of the others before.
static void a_message_before_all_that_are_under_way_goes_although_nothing_has_room() {
    Outbox outbox(100, 50);
    outbox.add({0, 5}, 1);
    EXPECT((outbox.take() == Outbox::Entry{0, 5}));
    const int64_t ended = outbox.sent({0, 5}, 1, 100);
    outbox.add({0, 6}, 1);
    outbox.add({0, 3}, 1);
    EXPECT((taken(outbox) == Entries{{0, 3}}));
    outbox.sent({0, 3}, 1, 50);
    outbox.add({0, 4}, 1);
    EXPECT(!outbox.take());
    outbox.taken({0, 3}, 1, 50);
    EXPECT((taken(outbox) == Entries{{0, 4}}));
    outbox.taken({0, 5}, 1, ended);
    EXPECT((taken(outbox) == Entries{{0, 6}}));
}

static void what_waits_for_one_target_goes_once_it_is_before_all_that_is_under_way() {
    Outbox outbox(1000, 50);
    const int64_t ended = outbox.sent({0, 1}, 1, 50);
    outbox.sent({0, 5}, 2, 50);
    outbox.add({0, 3}, 2);
    EXPECT(!outbox.take());  // (0, 1) is before it
    outbox.taken({0, 1}, 1, ended);
    EXPECT((taken(outbox) == Entries{{0, 3}}));
}

int main() {
    RUN(versions_that_travel_together_reach_every_host_whole);
    RUN(a_chunk_goes_on_only_once_it_has_come_and_old_versions_go_first);
    RUN(what_stands_is_handed_back);
    RUN(an_error_of_mpi_is_said);
    RUN(the_earliest_message_goes_first_old_versions_before_new_ones);
    RUN(a_target_that_has_its_share_holds_up_only_its_own_messages);
    RUN(no_more_goes_once_the_window_is_full);
    RUN(copied_messages_count_until_one_that_asks_was_received);
    RUN(copied_messages_alone_never_stop_a_host);
    RUN(a_little_to_each_of_many_targets_is_no_more_than_the_window);
    RUN(a_message_before_all_that_are_under_way_goes_although_nothing_has_room);
    RUN(what_waits_for_one_target_goes_once_it_is_before_all_that_is_under_way);
}
