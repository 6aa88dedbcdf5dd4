"""Learning in rounds: collectors end after sending, start as predicted, and change nothing of what is learned."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

from ddrl.core.errors import ConfigError, JobFailed
from ddrl.envs import environment_seeds
from ddrl.pool import prewarm
from ddrl.pool.collectors import Sent, earliest
from ddrl.pool.policies import Fifo
from ddrl.pool.prewarm import Order, Schedule, Start
from ddrl.pool.rounds import Collectors
from ddrl.run.cli import parse
from ddrl.run.local import run_here
from ddrl.run.members import member_seed
from ddrl.run.preparation import Preparation
from ddrl.run.task import Task
from ddrl.telemetry import Run
from ddrl.testing.chaos import processes_of
from tests.pool.conftest import Lending
from tests.run.launch import TINY, balances, segments_of, settings, summary
from tests.run.preloaded import forked
from tests.run.test_serial import learned, newest, recorded
from tests.sources import ROOT
from tests.waiting import PATIENCE

CORE = min(os.sched_getaffinity(0))
ONE = f"pool.devices=cpu:{CORE}"
ROUNDS = settings(
    "run.max_env_steps=1200",
    "run.processes=2",
    "run.checkpoint_period=600",
    "evaluation.period=0",
    "telemetry.live=false",
    "pool.collect_steps=20",
)
COLD, PREWARM = settings("pool.collectors=cold"), settings("pool.collectors=prewarm")
BY_WORKER = settings("pool.gradient_order=worker")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder: Path, *more: str, equip: Callable[[Task], None] = lambda task: None) -> Path:
    file = folder.with_suffix(".toml")
    file.write_text("[run]\nseed = 7\n")
    arguments = [str(file), *TINY, *ROUNDS, *settings(f"run.dir={folder}"), *more]
    run_here(Preparation(parse(arguments), uuid.uuid4().hex[:8]), equip)
    return folder


# -- the same result, and the rules of a round ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("alone") / "cold", *COLD, *BY_WORKER)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks of one seed on one device: collectors that end, and such that a prediction starts."""
    folder = tmp_path_factory.mktemp("pool")
    for name in ("cold", "prewarm"):
        (folder / f"{name}.toml").write_text(f'[run]\nseed = 7\n[pool]\ncollectors = "{name}"\n')
    files = [str(folder / f"{name}.toml") for name in ("cold", "prewarm")]
    done = forked("--tasks", *files, *TINY, *ROUNDS, *BY_WORKER, *settings(ONE, f"run.dir={folder / 'pool'}"))
    assert done.returncode == 0, done.stderr
    return folder / "pool"


def test_parameters_and_experience_equal_those_of_the_run_alone_bit_for_bit(alone, pool):
    for name in ("cold", "prewarm"):
        assert learned(newest(pool / name)) == learned(newest(alone))
        assert recorded(newest(pool / name)) == recorded(newest(alone))
        assert segments_of(pool / name) == []


def test_a_resumed_run_collects_what_the_run_without_a_break_did(alone, tmp_path):
    run(tmp_path / "cut", *COLD, *BY_WORKER)
    shutil.rmtree(newest(tmp_path / "cut"))
    assert newest(tmp_path / "cut").name < newest(alone).name
    run_here(Preparation(parse(["--resume", str(tmp_path / "cut")]), uuid.uuid4().hex[:8]))
    assert learned(newest(tmp_path / "cut")) == learned(newest(alone))
    assert recorded(newest(tmp_path / "cut")) == recorded(newest(alone))


@pytest.mark.parametrize("mode", ["alive", pytest.param("prewarm", marks=pytest.mark.long)])
def test_whatever_collectors_are_killed_the_run_learns_the_same(mode, alone, tmp_path):
    over = threading.Event()
    killed: list[int] = []

    def kill(run_id: str) -> None:
        rng = random.Random(1)
        while not over.wait(rng.uniform(0.0, 0.2) * (1 + len(killed) / 20)):  # slow machines get through a round, too
            collectors = [one.pid for one in processes_of(run_id) if one.role == "rollout"]
            if collectors:
                killed.append(rng.choice(collectors))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(killed[-1], signal.SIGKILL)

    def equip(task: Task) -> None:
        killer.extend([threading.Thread(target=kill, args=(task.topology.run_id,))])
        killer[0].start()

    killer: list[threading.Thread] = []
    try:
        run(
            tmp_path / "run",
            *BY_WORKER,
            *settings(f"pool.collectors={mode}", "rollout.restarts=1000"),
            equip=equip,
        )
    finally:
        over.set()
        for thread in killer:
            thread.join()
    assert killed  # how many depends on how fast the machine is
    assert learned(newest(tmp_path / "run")) == learned(newest(alone))
    assert recorded(newest(tmp_path / "run")) == recorded(newest(alone))


def test_the_device_is_taken_once_a_round_when_its_first_data_are_there_and_is_back_before_the_parameters_go(pool):
    began = json.loads((pool / "pool" / "plan.json").read_text())["began"]
    leases, collectors = lines(pool / "pool" / "leases.jsonl"), lines(pool / "pool" / "collectors.jsonl")
    for name in ("cold", "prewarm"):
        own = {lease["round"]: lease for lease in leases if lease["task"] == name}
        assert len(own) == sum(lease["task"] == name for lease in leases) > 5
        assert all(lease["part"] == 0 for lease in own.values())
        times: dict[int, list[dict[str, Any]]] = {}
        for collector in collectors:
            if collector["task"] == name:
                times.setdefault(collector["round"], []).append(collector)
        assert all(len(times[number]) == 2 for number in own), "but for the round in which the task ended"
        for number, lease in own.items():
            assert lease["asked"] - began >= min(one["sent"] for one in times[number])
            if number + 1 in times:
                assert lease["released"] - began <= times[number + 1][0]["parameters"]


def test_orders_for_a_round_are_out_before_the_first_data_of_the_round_before_it(pool):
    orders, collectors = lines(pool / "pool" / "instructions.jsonl"), lines(pool / "pool" / "collectors.jsonl")
    checked = 0
    for order in orders:
        assert len(order["start"]) == 2
        sent = [one["sent"] for one in collectors if (one["task"], one["round"]) == (order["task"], order["round"] - 1)]
        checked += bool(sent)
        assert not sent or order["issued"] < min(sent)
    assert checked > 10


def test_collectors_that_end_are_new_processes_each_round_and_start_with_their_parameters(pool):
    own = [one for one in lines(pool / "pool" / "collectors.jsonl") if one["task"] == "cold"]
    assert len({one["start"] for one in own}) == len(own)
    for one in own:
        assert one["parameters"] <= one["start"] <= one["ready"] <= one["sent"] <= one["end"]
    figures = summary(pool)["tasks"]["cold"]["figures"]
    assert figures["hits"] == 0
    assert figures["collectors"] >= len(own) - 2, "all but those of the first round"
    late = sum(one["ready"] - one["parameters"] for one in own if one["round"])
    assert figures["late_seconds"] == pytest.approx(late, abs=1e-3)
    ends = {(one["worker"], one["round"]): one["end"] for one in own}
    gaps = (one["start"] - ends.get((one["worker"], one["round"] - 1), one["start"]) for one in own)
    absent = sum(max(0.0, gap) for gap in gaps)  # none at all where each process ends after the next has started
    assert figures["absent_seconds"] == pytest.approx(absent, abs=1e-3)
    assert figures["collector_cpu_seconds"] > 0


@pytest.mark.long
def test_while_a_task_learns_its_collectors_are_gone_from_the_process_table(tmp_path):
    """One that stays alive is there."""
    left: dict[str, set[int]] = {"cold": set(), "alive": set()}

    for mode, counts in left.items():

        def equip(task: Task, counts: set[int] = counts, mode: str = mode) -> None:
            starter = next(
                child for child in psutil.Process().children() if "ddrl.run.hosts" in " ".join(child.cmdline())
            )
            compute = task.training.learner.gradient

            def look(*arguments: Any) -> Any:
                deadline = time.monotonic() + 20
                while mode == "cold" and starter.children() and time.monotonic() < deadline:
                    time.sleep(0.001)
                counts.add(len(starter.children()))
                return compute(*arguments)

            task.training.learner.gradient = look  # type: ignore[method-assign]

        run(
            tmp_path / mode,
            *settings(f"pool.collectors={mode}", "run.processes=1", "run.max_env_steps=600"),
            equip=equip,
        )
    assert left == {"cold": {0}, "alive": {1}}


@pytest.mark.long  # where a round is shorter than a collector's start, nothing can be predicted
def test_collectors_start_when_the_history_of_the_rounds_says_so_and_no_later_than_their_parameters(
    tmp_path, monkeypatch
):
    """Lateness costs next to nothing here and all rounds count as alike, so that a start is predicted at any speed."""
    made: list[Collectors] = []
    monkeypatch.setattr(prewarm, "MAX_VARIATION", 100.0)

    def equip(task: Task) -> None:
        made.append(task.training.rounds.collectors)

    more = settings("pool.delay_cost=0.01", "run.max_env_steps=1800", "env.id=tests.run.environments:slow")
    folder = run(tmp_path / "run", *PREWARM, *more, equip=equip)
    orders = {one["round"]: one for one in lines(folder / "instructions.jsonl")}
    own = {(one["round"], one["worker"]): one for one in lines(folder / "collectors.jsonl")}
    timed = {(number, worker) for number, worker in own if number in orders and orders[number]["start"][worker]}
    assert len(timed) >= 4
    for number, worker in timed:
        collector, before = own[number, worker], own[number - 1, worker]
        assert collector["start"] > before["start"], "it is no new process"
        assert before["end"] is not None
        assert collector["start"] <= collector["parameters"] + 0.5
    figures = made[0].figures()
    assert figures["predicted_collectors"] == len(timed)
    assert figures["predicted_collectors"] <= figures["collectors"] == len(own) - 2
    assert figures["corrections"] <= len(timed) + 2


# -- order and sums of gradients -----------------------------------------------------------------------------------


def watched(folder: Path, clock: Callable[[Sent], str]) -> list[list[int]]:
    """By round: the workers in the order of recording, their messages delivered last first, once all are there."""
    orders: list[list[int]] = []

    def equip(task: Task) -> None:
        rounds, training = task.training.rounds, task.training
        receive, held = rounds.collectors.receive, []

        def reordered() -> list[Any]:
            held.extend(receive())
            sent = [message for message in held if isinstance(message, Sent)]
            if len(sent) < 3:
                return []
            held.clear()
            newest_first = sorted(sent, key=lambda message: -message.sent)
            orders.append([message.worker for message in newest_first])
            return [msgspec.structs.replace(message, clock=clock(message)) for message in newest_first]

        rounds.collectors.receive = reordered
        empty, lanes = training.empty, list(task.channels.lanes.values())

        def note(lane: Any, **more: Any) -> None:
            recorded_by.append(lanes.index(lane))
            empty(lane, **more)

        training.empty = note  # type: ignore[method-assign]

    recorded_by: list[int] = []
    run(folder, *COLD, *settings("run.processes=3", "run.max_env_steps=1000"), equip=equip)
    assert len(orders) > 3
    return [[*delivered, *recorded_by[3 * k : 3 * k + 3]] for k, delivered in enumerate(orders)]


def test_gradients_follow_the_send_stamps_also_where_messages_come_in_another_order(tmp_path):
    for order in watched(tmp_path / "run", lambda sent: "one clock"):
        assert order[3:] == order[:3][::-1]


def test_gradients_follow_the_arrival_where_clocks_cannot_be_compared(tmp_path):
    orders = watched(tmp_path / "run", lambda sent: f"clock {sent.worker}")
    # The last one's message is the last to come, so with it alone there is one clock again.
    for order in orders:
        assert order[3] == order[0]


def test_the_earliest_of_those_there_comes_first():
    early, late = Sent(1, 0, 0, 0, 4.0, "here"), Sent(1, 1, 0, 0, 5.0, "here")
    assert earliest([late, early]) is early
    elsewhere = Sent(1, 2, 0, 0, 3.0, "there")
    assert earliest([late, elsewhere, early]) is late


# -- collectors that fail ------------------------------------------------------------------------------------------


@pytest.fixture
def leases():
    made = Lending(ONE.partition("=")[2], Fifo())
    yield made
    made.close()


def test_a_killed_collector_gives_the_device_back_and_its_round_goes_on_with_the_same_data(tmp_path, leases):
    """Worker 1's collector of round 0 is killed once the task has computed with worker 0's data."""
    got: list[int | None] = []
    mark, after = tmp_path / "killed", tmp_path / "computed"
    of_episodes, _ = np.random.SeedSequence(member_seed(7, 1, 0)).generate_state(2)
    (victim,) = environment_seeds(int(of_episodes), 1)

    def equip(task: Task) -> None:
        leases.lend(task)
        compute, again = task.training.learner.gradient, task.training.rounds.collectors.start_again

        def computed(*arguments: Any) -> Any:
            gradient = compute(*arguments)
            after.touch()
            return gradient

        def look(round: int, worker: int) -> None:
            got.append(leases.other.acquire(len(got), timeout=PATIENCE))
            leases.other.release()
            again(round, worker)

        task.training.learner.gradient = computed  # type: ignore[method-assign]
        task.training.rounds.collectors.start_again = look  # type: ignore[method-assign]

    doomed = settings("env.id=tests.run.environments:doomed", "env.num_envs=1", "pool.collect_steps=40")
    doomed += settings(f'env.kwargs={{victim = {victim}, mark = "{mark}", after = "{after}"}}')
    more = [*COLD, *BY_WORKER, *doomed, *settings("run.max_env_steps=400", "replay.min_size=20")]
    run(tmp_path / "killed_run", *more, equip=equip)
    assert mark.exists(), "no collector was killed"
    assert got == [0], "the device was not free while the collector was replaced"
    assert Counter(lease.part for lease in leases.leases if lease.task == "task" and lease.round == 0) == {0: 1, 1: 1}
    assert balances(tmp_path / "killed_run")["rows_dropped"] > 0
    run(tmp_path / "whole_run", *more)
    assert learned(newest(tmp_path / "killed_run")) == learned(newest(tmp_path / "whole_run"))


def test_a_collector_that_is_killed_again_and_again_ends_the_task(tmp_path):
    with pytest.raises(JobFailed, match="was killed by SIGKILL, after 3 others in round 0"):
        run(tmp_path / "run", *COLD, *settings("env.id=tests.run.environments:doomed"))


def test_a_collector_whose_environment_does_not_start_ends_its_task_alone_with_its_reason(tmp_path):
    (tmp_path / "good.toml").write_text("[run]\nseed = 1\n")
    (tmp_path / "bad.toml").write_text(
        f'[run]\nseed = 1\n[env]\nid = "tests.run.environments:brittle"\nkwargs = {{ probed = "{tmp_path}/probed" }}\n'
    )
    files, pool = [str(tmp_path / "good.toml"), str(tmp_path / "bad.toml")], tmp_path / "pool"
    done = forked("--tasks", *files, *TINY, *ROUNDS, *COLD, *settings(ONE, f"run.dir={pool}"))
    assert done.returncode == 1
    tasks = summary(pool)["tasks"]
    assert tasks["good"]["ok"]
    assert not tasks["bad"]["ok"]
    assert "the corridor has no licence" in tasks["bad"]["reason"]
    assert segments_of(pool / "bad") == []


def test_a_collector_that_hangs_is_named_with_its_stacks_and_replaced(tmp_path):
    hung, folder = tmp_path / "hung", tmp_path / "run"
    hangs = settings("env.id=tests.run.environments:walk", "env.num_envs=1", "run.silence_limit=6")
    hangs += settings(f'env.kwargs={{hang_at = 30, hung = "{hung}", pause = 0.05}}', "pool.collect_steps=40")
    more = settings(f"run.dir={folder}", "run.max_env_steps=80", "replay.min_size=20", "run.processes=1")
    done = forked(*TINY, *ROUNDS, *COLD, *hangs, *more)
    assert done.returncode == 0, done.stderr
    assert hung.exists(), "no collector hung"
    with Run(folder) as finished:
        said = [text for text in finished.events()["text"] if "was started again" in text]
    # On a loaded machine others are as silent without hanging.
    silent = r"\(rollout, process \d+ on \S+\) has shown no sign of life for \d+ s \(run.silence_limit\)"
    hangs_at = (ROOT / "tests/run/environments.py").read_text().split("time.sleep(1e6)")[0].count("\n") + 1
    (named,) = [text for text in said if f'environments.py", line {hangs_at} in step' in text]
    assert re.search(silent, named)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--serial", *COLD], "--serial is one process"),
        ([*COLD, *settings("replay.samples_per_insert=0")], "a round has no end"),
        (settings("pool.collectors=warm"), "must be one of off, alive, cold, prewarm"),
    ],
)
def test_settings_that_make_no_rounds_are_refused(more, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        run(tmp_path / "run", *more)
    assert not (tmp_path / "run").exists()


# -- the starter's schedule ----------------------------------------------------------------------------------------


def test_a_start_that_counts_from_the_data_waits_for_them_and_moves_with_them():
    schedule, unsent = Schedule(), {(0, 0)}
    schedule.order(Order(1, (Start(at=10.0, after=2.0), Start(at=11.0))))
    assert schedule.next_time(unsent) == 11.0
    assert schedule.due(10.5, unsent) == []
    (corrected,) = schedule.sent(0, 0, at=10.6, now=10.7)
    assert corrected.late
    assert schedule.next_time(set()) == 11.0
    assert schedule.due(12.0, set()) == [(1, 1)]
    assert schedule.next_time(set()) == pytest.approx(12.6)
    assert schedule.due(12.7, set()) == [(1, 0)]
    assert schedule.due(99.0, set()) == []


def test_a_start_can_count_from_data_of_several_rounds_before():
    schedule = Schedule()
    schedule.order(Order(2, (Start(at=20.0, after=6.0, back=2), Start(at=21.0, after=1.0))))
    assert schedule.due(99.0, {(0, 0), (1, 1)}) == []
    assert schedule.sent(1, 0, at=15.0, now=15.0) == []
    (corrected,) = schedule.sent(0, 0, at=10.5, now=10.5)
    assert (corrected.round, corrected.worker, corrected.late) == (2, 0, False)
    assert schedule.next_time({(1, 0), (1, 1)}) == pytest.approx(16.5)


def test_what_was_planned_for_a_round_is_void_once_its_parameters_are_there():
    schedule = Schedule()
    schedule.order(Order(1, (Start(at=10.0),)))
    schedule.order(Order(2, (Start(at=20.0),)))
    schedule.begin(1)
    assert schedule.due(99.0, set()) == [(2, 0)]
