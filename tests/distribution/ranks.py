"""Programs that tests run under mpirun, one rank a host: `python ranks.py NAME ...`, and further ones after `,`, one
after another. For each rank 0 prints one JSON line of findings."""

import ctypes
import json
import sys
import time

import numpy as np
from mpi4py import MPI

from ddrl.channels.board import Board, Command, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox, checksum
from ddrl.core.config import ClusterConfig, Config
from ddrl.distribution import models as models_of_relays
from ddrl.distribution.flows import RowsIn, RowsUp, TablesUp
from ddrl.distribution.links import measure_links
from ddrl.distribution.membership import Membership
from ddrl.distribution.relay import LocalHost, host_relay, readers_needed, root_relay, slots_needed
from tests.sources import check_sources

check_sources()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
ROW = np.dtype(
    [("policy_version", np.uint64), ("stream", np.uint32), ("step", np.uint32), ("payload", np.uint8, (40,))]
)


NEVER = 1e12  # s
HOSTS = []  # made by this process


class Host:
    """Everything of one host in private memory, and its relay."""

    def __init__(
        self,
        nbytes,
        config,
        *,
        lanes=2,
        capacity=64,
        down_capacity=64,
        tables=None,
        local=None,
        failure=None,
        on_failure=None,
        trace=False,
    ):
        cluster, config = config, Config(cluster=config, tables=tables or {})
        self.board = Board.create(None)
        readers = readers_needed(cluster)
        self.mailbox = Mailbox.create(None, nbytes, slots_needed(cluster), readers + 1)
        self.reader = self.mailbox.reader(readers)
        self.counters = Counters.create(None, 3)
        self.lanes = [Lane.create(None, ROW, capacity) for _ in range(lanes if RANK else 0)]
        self.down = [Lane.create(None, ROW, down_capacity) for _ in range(SIZE - 1 if RANK == 0 else 0)]
        self.mirrors = [Counters.create(None, 3) for _ in self.down]
        side = LocalHost(
            self.mailbox,
            [self.mailbox.reader(index, firm=True) for index in range(readers)],
            self.board,
            self.counters.row(0),
            ROW,
            **(local or {}),
        )
        self.membership = Membership(WORLD)
        HOSTS.append(self)
        if RANK == 0:
            self.relay = root_relay(
                self.membership, config, side, lanes=self.down, mirrors=self.mirrors, on_failure=on_failure, trace=trace
            )
        else:
            lanes = LaneSet(self.lanes)
            self.relay = host_relay(
                self.membership, config, side, lanes=lanes, table=self.counters, failure=failure, trace=trace
            )

    def publish(self, version):
        self.mailbox.publish(model(version, self.mailbox.nbytes), version, [version * 0.5, 2.0])

    def problems(self):
        return [*filter(None, [self.rows().problem] if RANK == 0 else []), *self.relay.models.problems]

    def rows(self):
        """The duty that receives rows, at the root; elsewhere that which sends them."""
        return next(duty for duty in self.relay.duties if isinstance(duty, RowsUp if RANK else RowsIn))

    def stop(self):
        self.board.command = Command.STOP


def model(version, nbytes):
    return np.random.default_rng(version).integers(0, 256, nbytes, dtype=np.uint8)


def report(**findings):
    for host in HOSTS:
        host.membership.leave()
        assert (host.membership.data, host.membership.control) == (MPI.COMM_NULL, MPI.COMM_NULL), "communicators stay"
    HOSTS.clear()
    everyone = WORLD.gather(findings)
    if RANK == 0:
        print(json.dumps(everyone), flush=True)


def run_all(programs):
    """Those of the command line, each with its own arguments in sys.argv."""
    words = " ".join(sys.argv[1:]).split(" , ")
    for name, *arguments in map(str.split, words):
        sys.argv[1:] = [name, *arguments]
        programs[name]()


def models():
    """Many versions of a model; every host checks each one it sees against the one that was published."""
    scheme, nbytes, versions = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    host = Host(nbytes, ClusterConfig(scheme=scheme, chunk_bytes=4096, versions_in_flight=3))
    seen, wrong, published, unheard = [], 0, -1, 0
    bell = host.board.rollout_bell
    heard = bell.value
    while not host.relay.finished:
        host.relay.progress()
        if RANK == 0:
            if published < versions - 1 and (published < 0 or host.relay.models.executor.next_sequence > published - 2):
                published += 1
                host.publish(published)
            if published == versions - 1 and host.relay.models.sent_version == published and host.relay.models.settled:
                host.stop()
            continue
        pin = host.reader.pin()
        if pin is not None and (not seen or pin.version != seen[-1]):
            seen.append(pin.version)
            unheard, heard = unheard + (bell.value == heard), bell.value
            good = np.array_equal(pin.data, model(pin.version, nbytes)) and checksum(pin.data) == pin.checksum
            wrong += not (good and pin.values[0] == pin.version * 0.5 and pin.values[1] == 2.0)
    report(seen=seen, wrong=wrong, unheard=unheard, problems=host.problems())


def traffic():
    """One version: bytes by the counters, and when the first forward left."""
    scheme, shards, chunk_bytes = (
        (sys.argv[2], int(sys.argv[3]), int(sys.argv[4])) if len(sys.argv) > 2 else ("sharded", 0, 1 << 16)
    )
    nbytes = 1 << 22
    host = Host(
        nbytes, ClusterConfig(scheme=scheme, shards=shards, chunk_bytes=chunk_bytes, versions_in_flight=1), trace=True
    )
    if RANK == 0:
        host.publish(0)
    trace = host.relay.models.executor.traffic.trace if RANK == 0 else None
    while not host.relay.finished:
        host.relay.progress()
        trace = (
            trace
            if trace is not None or host.relay.models.executor is None
            else host.relay.models.executor.traffic.trace
        )
        if RANK == 0 and host.relay.models.confirms and host.relay.models.settled:
            host.stop()
    row = host.counters.row(0)
    sends = [moment for moment, what, *_ in trace if what == "send"]
    report(
        sent=row["model_bytes_sent"].value,
        received=row["model_bytes_received"].value,
        first_send=min(sends, default=0),
        last_send=max(sends, default=0),
        chunks=host.relay.models.executor.plan.chunks,
        sources=host.relay.models.in_force.sources if RANK == 0 else [],
        sealed=row["versions_sealed"].value,
        mirrored=[mirror.row(0)["versions_sealed"].value for mirror in host.mirrors],
    )


def replanned():
    """The pace of models looks suspicious twice: the relays measure, plan anew, and go on with the next version; or
    with the same one, where the last has just left."""
    from ddrl.distribution.models import PaceWatch

    class Suspect(PaceWatch):
        cases = 0

        @property
        def suspicious(self):
            return self.cases < 2 and host.relay.models.sent_version >= (3, 9)[self.cases]

        def restart(self):
            if hasattr(self, "_begun"):
                self.cases += self.suspicious
                super().restart()

    host = Host(4_000_000, ClusterConfig(scheme="auto", versions_in_flight=2))
    seen, wrong, published = [], 0, -1
    if RANK == 0:
        host.relay.models._watch = Suspect()
    while not host.relay.finished:
        host.relay.progress()
        if RANK == 0 and host.relay.models.sent_version == published:
            if published < 9:
                published += 1
                host.publish(published)
            elif host.relay.models._watch.cases == 2 and host.relay.models.settled and not host.relay.models._refused:
                host.stop()  # a host that was silent for a while is waited for before links are measured
        pin = host.reader.pin() if RANK else None
        if pin is not None and (not seen or pin.version != seen[-1]):
            seen.append(pin.version)
            wrong += not np.array_equal(pin.data, model(pin.version, host.mailbox.nbytes))
    report(
        copies=host.counters.row(0)["model_bytes_sent"].value / host.mailbox.nbytes,
        epoch=host.relay.models._epoch,
        seen=seen,
        wrong=wrong,
        problems=host.problems(),
        sealed=host.counters.row(0)["versions_sealed"].value,
        measured=[host.relay.models.links.up, host.relay.models.links.down],
        said=[host.relay.models.in_force.up, host.relay.models.in_force.down] if RANK == 0 else [],
    )


def flipped():
    """A byte flips on the root after its checksum was taken: all hosts refuse it, and
    the root sends the version again."""
    nbytes = 100_000
    host = Host(nbytes, ClusterConfig(scheme="chain", chunk_bytes=8192, versions_in_flight=1))
    starts = []
    if RANK == 0:
        host.publish(0)
    sealed = []
    while not host.relay.finished:
        executor = host.relay.models.executor
        if RANK == 0 and executor is not None and not hasattr(executor, "spoiled"):
            executor.spoiled, start, handles = True, executor.start, executor._packing.handles

            def flip(data):  # in chunk 5, bytes 38592..46272
                ctypes.c_uint8.from_address(data.ctypes.data + 40_000).value ^= 1

            def started(held, base=None, start=start):
                starts.append(held.version)
                if len(starts) == 2:
                    flip(held.data)
                return start(held, base)

            def handled(flight, messages, handles=handles):  # headers are written by now
                if len(starts) == 1 and messages:  # that it sends; it receives none
                    flip(flight.data)
                return handles(flight, messages)

            executor.start, executor._packing.handles = started, handled
        host.relay.progress()
        if host.mailbox.newest >= 0 and not sealed:
            sealed.append(bool(np.array_equal(host.reader.pin().data, model(0, nbytes))))
        if RANK == 0 and host.relay.models.settled and len(host.relay.models.confirms) == 2 * (SIZE - 1):
            host.stop()
    report(sealed=sealed, problems=host.problems(), failures=host.counters.row(0)["checksum_failures"].value)


def control():
    """Board commands and values reach every host, tables come back; run() ends on STOP."""
    import threading

    host = Host(1000, ClusterConfig(scheme="direct"))
    host.counters.row(1)["env_steps"].set(100.0 + RANK)
    watched = {}

    def watch():
        if RANK == 0:
            host.board.values[:3] = (1.5, np.inf, -2.0)
            host.publish(0)
            while not all(
                mirror.row(1)["env_steps"].value >= 100 and mirror.row(0)["versions_sealed"].value == 1
                for mirror in host.mirrors
            ):
                host.board.trainer_bell.wait(host.board.trainer_bell.value, 0.01)
            host.stop()
        else:
            host.board.wait_command(Command.RUN, 60)
            watched["values"] = host.board.values[:3].tolist()

    thread = threading.Thread(target=watch)
    thread.start()
    host.relay.run()
    thread.join()
    report(
        values=watched.get("values", [1.5, float("inf"), -2.0]),
        env_steps=[mirror.row(1)["env_steps"].value for mirror in host.mirrors],
        finished=host.relay.finished,
    )


def failing():
    """A process of host 1 fails while producers of all hosts go on pushing: every host ends, the root has the text
    once."""
    texts = []
    host = Host(
        1000,
        ClusterConfig(),
        local={"quiet": lambda: False},
        failure=lambda: "the environment broke",
        on_failure=texts.append,
    )
    batch = np.zeros(16, ROW)
    turns = 0
    while not host.relay.finished:
        turns += host.relay.progress()
        for lane in host.lanes:
            lane.push(batch, timeout=0)
        if RANK == 0:
            host.down[0].pop(np.empty(64, ROW))
            host.down[1].pop(np.empty(64, ROW))
        if RANK == 1 and turns == 100:
            host.board.command = Command.FAIL
    report(texts=texts, command=int(host.board.command))


def closed():
    """Closed loop: rollouts of every host take a version only now and then, those of the root's host last of all, and
    none leaves before all have taken the last."""
    using, sealed, used, early, sent, turn, waits, published = {"version": -1}, [], [], 0, -1, 0, 0, -1
    host = Host(
        1000,
        ClusterConfig(scheme="postal", versions_in_flight=3, closed_loop=True),
        local={"in_use": lambda version: using["version"] >= version},
    )
    while not host.relay.finished:
        host.relay.progress()
        turn += 1
        if host.mailbox.newest >= 0 and (not sealed or sealed[-1] != host.mailbox.newest):
            sealed.append(host.mailbox.newest)
        elsewhere = RANK > 0 or len(host.relay.models.confirms) == len(used_by_all) * (SIZE - 1)
        waits = waits + 1 if elsewhere and host.mailbox.newest > using["version"] else 0
        if waits >= (500 if RANK else 40):
            using["version"] = host.mailbox.newest
            used.append(host.mailbox.newest)
        if RANK == 0:
            if turn % 7 == 0 and len(used_by_all) < 15:
                published += 1
                host.publish(published)
            if host.relay.models.sent_version > sent:
                early += not (
                    using["version"] >= sent and len(host.relay.models.confirms) == len(used_by_all) * (SIZE - 1)
                )
                used_by_all.append(sent := host.relay.models.sent_version)
            if len(used_by_all) >= 15 and sent == published and host.relay.models.settled:
                host.stop()
    report(sealed=sealed, used=used, early=early, sent=used_by_all)


used_by_all = []  # versions that the root sent, each after the last was in use everywhere


def replaced():
    """Twice while models and rows travel, all relays leave their membership and join another one, in which other ranks
    are hosts 1 and 2."""
    host = Host(20_000, ClusterConfig(scheme="stripes", versions_in_flight=2))
    pushed, popped, seen, wrong, published, members = 0, {1: [], 2: []}, [], 0, -1, 0
    out = np.empty(64, ROW)
    began = time.monotonic()
    while not host.relay.finished:
        host.relay.progress()
        if members < 2 and time.monotonic() - began > 0.3 * (members + 1):
            members += 1
            WORLD.Barrier()
            assert host.membership.withdraw()
            order = [0, 2, 1] if members == 1 else [0, 1, 2]
            host.membership = Membership(WORLD.Split(0, order.index(RANK)), ids=order)
            host.relay.reset(host.membership)
        if RANK and host.board.command == Command.RUN and members < 2:
            row = np.zeros(1, ROW)
            row["step"] = pushed
            pushed += host.lanes[0].push(row, timeout=0)
        if RANK == 0:
            for lane, steps in zip(host.down, popped.values(), strict=True):
                steps += out["step"][: lane.pop(out)].tolist()
            going = members < 2 or published < 2
            arrived = {one for one, message in host.relay.models.confirms if message.version == published}
            if (host.relay.models.sent_version == published and going) or published < 0:
                published += 1
                host.publish(published)
            elif not going and arrived == {1, 2}:  # what was under way at the change has left again by then
                host.stop()
        pin = host.reader.pin() if RANK else None
        if pin is not None and (not seen or pin.version != seen[-1]):
            seen.append(pin.version)
            wrong += not np.array_equal(pin.data, model(pin.version, host.mailbox.nbytes))
    for lane, steps in zip(host.down, popped.values() if RANK == 0 else (), strict=True):
        steps += out["step"][: lane.pop(out)].tolist()
    report(
        pushed=pushed,
        in_order={one: steps == list(range(len(steps))) for one, steps in popped.items()},
        popped={one: len(steps) for one, steps in popped.items()},
        last=seen[-1] if seen else published,
        wrong=wrong,
        problems=host.problems(),
    )


def last_rows():
    """The root takes the last rows of a host within the turn in which they leave."""
    host = Host(1000, ClusterConfig())
    if RANK:
        host.lanes[0].push(np.zeros(3, ROW))  # too few for a block before STOP
        sender = next(duty for duty in host.relay.duties if isinstance(duty, RowsUp))
        leave = sender._send

        def taken_at_once(index):
            leave(index)
            sender._requests[index].Wait()

        sender._period, sender._send = NEVER, taken_at_once
    else:
        host.publish(0)
    while not host.relay.finished:
        host.relay.progress()
        if RANK == 0 and host.relay.models.settled:
            host.stop()
    report(
        received=host.rows().rows if RANK == 0 else 0,
        forwarded=[mirror.row(0)["rows_forwarded"].value for mirror in host.mirrors],
    )


def measuring():
    """Links take long to measure: until the root has seen two signs of life of every relay since."""
    seen = {}

    def slow(comm, guard, known=None):
        host = HOSTS[0]
        rows = [host.counters, *host.mirrors]
        deadline = time.monotonic() + 20.0
        while RANK == 0 and min(map(len, seen.values()), default=0) < 3 and time.monotonic() < deadline:
            for number, one in enumerate(rows):
                seen.setdefault(number, set()).add(float(np.nan_to_num(one.row(0)["heartbeat"].value)))
            guard.poll()
            time.sleep(0.01)
        guard.exchange.barrier()
        return measure_links(comm, guard, known)

    models_of_relays.measure_links = slow
    host = Host(1000, ClusterConfig(scheme="auto"))
    if RANK == 0:
        host.publish(0)
    known = [duty.models.links for duty in host.relay.duties if isinstance(duty, TablesUp)]
    while not host.relay.finished:
        host.relay.progress()
        if RANK == 0 and host.relay.models.sent_version == 0 and host.relay.models.settled:
            host.stop()
    assert known == [host.relay.models.links] * (RANK > 0), "the links that set the pace of tables"
    report(seen={number: len(values) for number, values in seen.items()})


def alone():
    """One host: nothing to send, and the end comes at once."""
    host = Host(1000, ClusterConfig())
    host.publish(0)
    for _ in range(10):
        host.relay.progress()
    host.stop()
    host.relay.run()
    report(finished=host.relay.finished)


if __name__ == "__main__":
    run_all(
        {
            "models": models,
            "traffic": traffic,
            "replanned": replanned,
            "flipped": flipped,
            "control": control,
            "failing": failing,
            "closed": closed,
            "replaced": replaced,
            "last_rows": last_rows,
            "measuring": measuring,
            "alone": alone,
        }
    )
