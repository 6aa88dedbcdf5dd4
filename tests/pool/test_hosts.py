"""Collectors on several hosts: relays start and end them, and what is learned is what one host learns."""

from __future__ import annotations

import contextlib
import subprocess
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from ddrl.channels import Board, Counters, Lane, MessageLane
from ddrl.core.roles import assign_roles
from ddrl.distribution.membership import RELAYS, Orders, Report
from ddrl.envs import environment_seeds
from ddrl.pool.collectors import COLLECTORS, Begin, Ended, Sent, host_clock
from ddrl.pool.prewarm import Order, Start
from ddrl.pool.rounds import HostStarters
from ddrl.run.members import member_seed
from tests.pool.test_rounds import BY_WORKER, COLD, ROUNDS, lines, run
from tests.run.launch import MPI_ENVIRONMENT, TINY, mpirun_command, segments_of, settings
from tests.run.test_serial import learned, newest, recorded
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

HOSTS = settings("cluster.relays=2")


def start(
    folder: Path, *more: str, script: tuple[str, ...] = ("-m", "ddrl.run"), fault: str = "-1::0"
) -> subprocess.Popen:
    """A job on two hosts of this machine: a trainer and two relays. All that it prints goes to its standard output."""
    file = folder.with_suffix(".toml")
    file.write_text("[run]\nseed = 7\n")
    command = mpirun_command(3, str(file), *TINY, *ROUNDS, *HOSTS, *settings(f"run.dir={folder}"), *more)
    place = command.index("-m")
    command[place : place + 2] = script
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(Path(__file__).parents[1] / "run" / "faults", **MPI_ENVIRONMENT, DDRL_TEST_FAULT=fault),
    )


def finish(job: subprocess.Popen) -> str:
    """Wait for its end; what it printed."""
    try:
        return job.communicate(timeout=PATIENCE)[0]
    finally:
        job.kill()


# -- two hosts with two collectors each, beside one host with four -------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("alone") / "run", *COLD, *BY_WORKER, *settings("run.processes=4"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apart")
    job = start(folder / "run", *COLD, *BY_WORKER)
    said = finish(job)
    assert job.returncode == 0, said
    return folder / "run"


def test_two_hosts_learn_from_the_same_experience_as_one_bit_for_bit(alone, apart):
    assert learned(newest(apart)) == learned(newest(alone))
    assert recorded(newest(apart)) == recorded(newest(alone))
    assert segments_of(apart) == []


def test_every_host_has_several_collectors_which_are_new_processes_each_round(apart):
    own = lines(apart / "collectors.jsonl")
    assert {one["worker"] for one in own} == {0, 1, 2, 3}
    assert len({(one["worker"], one["start"]) for one in own}) == len(own)
    rounds = Counter(one["round"] for one in own)
    assert all(rounds[number] == 4 for number in range(max(rounds)))
    for one in own:
        assert one["parameters"] <= one["start"] <= one["ready"] <= one["sent"]
        assert one["end"] is None or one["sent"] <= one["end"]
    for worker in range(4):
        mine = [one for one in own if one["worker"] == worker]
        assert all(one["sent"] <= later["start"] for one, later in pairwise(mine)), "two collect at once"


def test_orders_for_all_hosts_are_out_before_the_first_data_of_the_round_before(apart):
    orders, own = lines(apart / "instructions.jsonl"), lines(apart / "collectors.jsonl")
    checked = 0
    for order in orders:
        assert len(order["start"]) == 4
        sent = [one["sent"] for one in own if one["round"] == order["round"] - 1]
        checked += bool(sent)
        assert not sent or order["issued"] < min(sent)
    assert checked > 3


# -- what fails ----------------------------------------------------------------------------------------------------


def test_a_killed_collector_of_another_host_is_replaced_and_nothing_that_is_learned_changes(tmp_path):
    mark = tmp_path / "killed"
    of_episodes, _ = np.random.SeedSequence(member_seed(7, 1, 1)).generate_state(2)  # worker 1 in round 1
    (victim,) = environment_seeds(int(of_episodes), 1)
    doomed = settings("env.id=tests.run.environments:doomed", "env.num_envs=1", "pool.collect_steps=40")
    doomed += settings(f'env.kwargs={{victim = {victim}, mark = "{mark}", after = "{tmp_path}"}}')
    more = [*COLD, *BY_WORKER, *doomed, *settings("run.max_env_steps=400", "replay.min_size=20")]
    job = start(tmp_path / "apart", *more, *settings("run.processes=1"))
    said = finish(job)
    assert job.returncode == 0, said
    assert mark.exists(), "no collector was killed"
    run(tmp_path / "alone", *more)
    assert learned(newest(tmp_path / "apart")) == learned(newest(tmp_path / "alone"))
    assert recorded(newest(tmp_path / "apart")) == recorded(newest(tmp_path / "alone"))


def keeper_elsewhere(job: subprocess.Popen) -> psutil.Process | None:
    """That of host 1, once it has had a collector. Its forks have the same command line."""
    for one in psutil.Process(job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a collector that has just ended
            words = one.cmdline()
            if "ddrl.run.hosts" in words and words[4] == "1" and one.children():
                return one
    return None


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ("keeper", "was killed by SIGKILL, and with it the host's rollouts"),
        pytest.param("relay", "signal 9", marks=pytest.mark.long),
    ],
)
def test_the_death_of_another_hosts_relay_or_keeper_ends_the_job_and_leaves_nothing(who, words, tmp_path):
    job = start(tmp_path / "run", *settings("pool.collectors=alive", "run.max_env_steps=10000000"))
    try:
        keeper = wait_until(lambda: keeper_elsewhere(job), "host 1 started no collector")
        family = [keeper, *psutil.Process(job.pid).children(recursive=True)]
        (keeper if who == "keeper" else keeper.parent()).kill()
        said = finish(job)
    finally:
        job.kill()
    assert job.returncode != 0
    assert said.count(words) == 1 if who == "keeper" else words in said, said
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    if who == "keeper":  # after a kill of a rank mpirun kills the others, and the next start sweeps
        assert segments_of(tmp_path / "run") == []


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "function", "count"),
    [
        ("1", "StarterLink.__init__", 1),
        ("2", "StarterLink.__init__", 1),
        ("keeper 1", "CollectorForks.__init__", 1),
        ("keeper 1", "CollectorForks._start", 3),
        ("1", "HostStarters.__init__", 1),
        ("1", "HostStarters.send", 3),
        ("1", "HostStarters.receive", 9),
        ("0", "LinesOut.progress", 99),
        ("2", "StarterLink.write", 2),
        ("2", "StarterLink.read", 99),
        ("2", "StarterLink.end", 1),
    ],
)
def test_an_exception_anywhere_ends_the_job_with_one_message(who, function, count, tmp_path):
    job = start(tmp_path / "run", *COLD, fault=f"{who}:{function}:{count}")
    said = finish(job)
    assert job.returncode != 0, said
    assert said.count("RuntimeError: the injected fault in") == 1, said
    assert segments_of(tmp_path / "run") == []


# -- what the trainer hears of other hosts -------------------------------------------------------------------------

ROW = np.dtype([("stream", "<u4"), ("value", "<f4")])


class OneHost:
    """In place of the starter of the trainer's host: keeps what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def receive(self) -> list[Any]:
        return []


class TwoHosts:
    """A trainer's end of two hosts with a worker of two environments each; host 1's clock is 1000 s behind."""

    def __init__(self) -> None:
        ranks = assign_roles([0, 0, 1], evaluator=False, collectors=1)
        config = SimpleNamespace(env=SimpleNamespace(num_envs=2))
        topology = SimpleNamespace(
            run_id="none", ranks=ranks, hosts=2, schema=SimpleNamespace(dtype=ROW), config=config,
            on_host=lambda host: ranks, row_of=ranks.index,
        )  # fmt: skip
        self.remote, self.orders, self.reports = (
            Lane.create(None, ROW, 64),
            *(MessageLane.create(None, RELAYS) for _ in "ab"),
        )
        channels = SimpleNamespace(
            topology=topology,
            board=Board.create(None),
            orders=self.orders,
            reports=self.reports,
            remote_lanes=[self.remote],
            lanes={0: Lane.create(None, ROW, 64)},
            counters=Counters.create(None, len(ranks)),
        )
        self.own = OneHost()
        self.starters = HostStarters(cast(Any, channels), cast(Any, self.own))

    def report(self, message: Any, sent: float, took: float, clock: str = "another") -> None:
        """A message of host 1, said at `sent` by its clock, is received `took` seconds later."""
        report = Report(1, COLLECTORS.encode(message).tobytes(), clock, sent, sent + 1000 + took)
        self.reports.send(report)

    def push(self, *streams: int) -> None:
        rows = np.zeros(len(streams), ROW)
        rows["stream"], rows["value"] = streams, np.arange(len(streams))
        self.remote.push(rows)


def test_what_is_said_of_a_worker_is_heard_once_its_rows_are_there():
    hosts = TwoHosts()
    hosts.report(Ended(0, 1, 9.0, -9, 0.1, "", rows=3), 9.0, 0.0)
    hosts.report(Sent(0, 1, 9.1, 9.2, 9.3, "another", rows=5), 9.3, 0.0)
    hosts.push(2, 3)
    assert hosts.starters.receive() == []
    hosts.push(2)
    (ended,) = hosts.starters.receive()
    assert isinstance(ended, Ended)
    out = np.zeros(8, ROW)
    assert hosts.starters.lanes[1].pop(out) == 3, "the rows of the killed one, to be dropped"
    hosts.push(3, 2)
    (sent,) = hosts.starters.receive()
    assert isinstance(sent, Sent)
    assert hosts.starters.lanes[1].pop(out[:1]) == 1
    assert hosts.starters.lanes[1].pop(out[1:]) == 1
    assert out["stream"][:2].tolist() == [3, 2]
    assert hosts.starters.lanes[1].pop(out) == 0


def test_times_of_another_clock_are_converted_by_the_fastest_message():
    hosts = TwoHosts()
    hosts.report(Ended(0, 1, 5.0, 0, 0.1, ""), 5.0, 0.5)
    hosts.report(Sent(1, 1, 6.0, 7.0, 8.0, "another"), 8.0, 0.01)
    hosts.report(Sent(2, 1, 6.0, 7.0, 9.0, "another"), 9.0, 0.001)
    ended, first, second = hosts.starters.receive()
    assert ended.end == 1005.5
    assert [first.start, first.ready, first.sent] == pytest.approx([1006.01, 1007.01, 1008.01])
    assert second.sent == pytest.approx(1009.001)
    assert second.start == first.start, "it is the same process"
    assert second.clock == "another", "gradients of two clocks are in the order of arrival"
    hosts.starters.send(Order(3, (Start(at=1010.0), Start(at=1010.0, after=2.0))))
    (message,) = hosts.orders.receive()
    assert isinstance(message, Orders)
    there = COLLECTORS.decode(message.line)
    assert isinstance(there, Order)
    assert there.starts[0] == Start(), "the other host's"
    assert there.starts[1].at == pytest.approx(9.999)
    assert there.starts[1].after == 2.0
    assert hosts.own.sent == [Order(3, (Start(at=1010.0), Start()))]


def test_times_of_the_same_clock_stay():
    hosts = TwoHosts()
    hosts.report(Sent(1, 1, 6.0, 7.0, 8.0, host_clock()), 8.0, 0.01, clock=host_clock())
    (sent,) = hosts.starters.receive()
    assert (sent.start, sent.ready, sent.sent) == (6.0, 7.0, 8.0)


def test_each_host_begins_with_its_own_workers():
    hosts = TwoHosts()
    hosts.starters.send(Begin(4, (0, 1)))
    (message,) = hosts.orders.receive()
    assert isinstance(message, Orders)
    assert message.host == 1
    assert COLLECTORS.decode(message.line) == Begin(4, (1,))
    assert hosts.own.sent == [Begin(4, (0,))]
