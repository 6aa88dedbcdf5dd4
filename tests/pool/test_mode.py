"""Several tasks on fewer devices: each learns what it learns alone, and each ends alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddrl.pool.__main__ import main as pool_main
from ddrl.pool.devices import parse_devices
from ddrl.pool.mode import setup_of
from ddrl.pool.policies import BetweenGradients, Fifo, Policy
from ddrl.pool.task import Lender
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun, run_serial
from ddrl.run.task import Outcome
from ddrl.run.training import Move
from tests.pool.alternate import Alternate
from tests.pool.conftest import Lending
from tests.run.launch import TINY, segments_of, settings, summary
from tests.run.preloaded import Job, forked, serial
from tests.run.test_serial import learned, newest, recorded
from tests.run.test_turns import DROPOUT
from tests.waiting import PATIENCE, wait_until

CORES = sorted(os.sched_getaffinity(0))
TWO = f"pool.devices=cpu:{CORES[0]},cpu:{CORES[-1]}"
ONE = f"pool.devices=cpu:{CORES[0]}"
SHORT = settings("run.max_env_steps=1200", "run.checkpoint_period=500")
LONG = settings("run.max_env_steps=100_000_000")
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="two whole slots need two cores")


def task_file(folder: Path, name: str, text: str = "") -> str:
    path = folder / f"{name}.toml"
    path.write_text(text or f"[run]\nseed = {sum(name.encode())}\n")
    return str(path)


def leases(pool: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (pool / "pool" / "leases.jsonl").read_text().splitlines()]


def start(*arguments: str) -> subprocess.Popen[str]:
    return Job(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def status(pool: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, Any]]:
    """The tasks of a living pool by name; none while it does not answer."""
    capsys.readouterr()
    if pool_main([str(pool), "--json"]):
        return {}
    return {task["task"]: task for task in json.loads(capsys.readouterr().out)["tasks"]}


# -- the same result -----------------------------------------------------------------------------------------------


@needs_two_cores
def test_three_tasks_on_two_slots_that_change_every_round_equal_their_runs_alone(tmp_path):
    names, pool = ("red", "green", "blue"), tmp_path / "pool"
    files = [task_file(tmp_path, name) for name in names]
    for name, file in zip(names, files, strict=True):
        alone = [file, "--serial", *TINY, *SHORT, *settings(f"run.dir={tmp_path / name}", "learner.device=cpu")]
        run_serial(Preparation(parse([*alone, *DROPOUT]), uuid.uuid4().hex[:8]))
    policy = settings(TWO, "pool.policy=tests.pool.alternate:Alternate", f"run.dir={pool}")
    done = serial("--tasks", *files, *TINY, *SHORT, *DROPOUT, *policy)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert learned(newest(pool / name)) == learned(newest(tmp_path / name))
        assert recorded(newest(pool / name)) == recorded(newest(tmp_path / name))
        assert segments_of(pool / name) == []
    history = leases(pool)
    for name in names:
        own = [lease for lease in history if lease["task"] == name]
        assert [lease["round"] for lease in own] == list(range(len(own)))
        assert len(own) > 20
        assert all(one["device"] != other["device"] for one, other in pairwise(own))
    for device in (0, 1):
        held = sorted((lease["granted"], lease["released"]) for lease in history if lease["device"] == device)
        assert all(one[1] <= other[0] for one, other in pairwise(held)), "two tasks held one device"
    figures = summary(pool)
    assert {name: figures["tasks"][name]["rounds"] for name in names} == {
        name: sum(lease["task"] == name for lease in history) for name in names
    }
    assert figures["held_seconds"] == pytest.approx(sum(lease["released"] - lease["granted"] for lease in history))
    assert 0 < figures["busy_seconds"] <= figures["held_seconds"] + 0.01 * len(history)
    assert figures["held_seconds"] <= 2 * figures["makespan_seconds"]


@pytest.mark.long
def test_tasks_with_rollouts_of_their_own_share_a_device(tmp_path):
    pool, files = tmp_path / "pool", [task_file(tmp_path, name) for name in ("one", "two")]
    more = settings(ONE, f"run.dir={pool}", "run.processes=1", "evaluation.period=0")
    done = forked("--tasks", *files, *TINY, *SHORT, *more)
    assert done.returncode == 0, done.stderr
    for name in ("one", "two"):
        assert summary(pool / name)["updates"] > 20
        assert segments_of(pool / name) == []
    held = sorted((lease["granted"], lease["released"]) for lease in leases(pool))
    assert all(one[1] <= other[0] for one, other in pairwise(held)), "two tasks held one device"


# -- leases around the moves ---------------------------------------------------------------------------------------


class OneTask(Lending):
    """A serial run in this process, on leases of a pool."""

    def __init__(self, folder: Path, policy: Policy, devices: str) -> None:
        super().__init__(devices, policy)
        arguments = [*TINY, *SHORT, *settings("run.seed=5", f"run.dir={folder}", "learner.device=cpu"), "--serial"]
        self.run = SerialRun(Preparation(parse(arguments), f"one{self.pool_id}"))
        self.training = self.run.task.training
        self.lend(self.run.task)

    def drive(self) -> None:
        while self.run.turn() is not Outcome.DONE:
            pass
        self.run.finish()


def test_the_device_is_back_before_the_parameters_are_published_and_another_task_gets_it(tmp_path):
    one, turns = OneTask(tmp_path / "run", Fifo(), ONE.partition("=")[2]), []
    publish = one.training.publish

    def look_and_publish() -> None:
        device = one.other.acquire(len(turns), timeout=PATIENCE)  # the only one
        assert device == 0, "the task publishes while it holds the device"
        turns.append(device)
        one.other.release()
        publish()

    one.training.publish = look_and_publish  # type: ignore[method-assign]
    try:
        one.drive()
    finally:
        one.close()
    assert len(turns) > 20
    mine = [lease for lease in one.leases if lease.task == "task"]
    assert [lease.round for lease in mine] == list(range(len(mine)))  # one lease a round
    assert one.lender.rounds == len(mine)
    assert one.lender.switch_seconds > 0
    assert sum(lease.busy for lease in mine) > 0


def test_the_device_is_taken_before_the_first_gradient_and_kept_through_the_round(tmp_path):
    one, moves = OneTask(tmp_path / "run", Fifo(), ONE.partition("=")[2]), list[tuple[Move, bool, bool, Move]]()
    turn = one.training.turn

    def note() -> bool:
        move = one.training.next_move
        before = one.lender._lease is not None
        result = turn()
        moves.append((move, before, one.lender._lease is not None, one.training.next_move))
        return result

    one.training.turn = note  # type: ignore[method-assign]
    try:
        one.drive()
    finally:
        one.close()
    for move, before, after, following in moves:
        if move in (Move.DRAIN, Move.PUBLISH):
            assert not before
        assert after == (following in (Move.GRADIENT, Move.APPLY) and move in (Move.GRADIENT, Move.APPLY))
    assert {Move.DRAIN, Move.GRADIENT, Move.APPLY, Move.PUBLISH} == {move for move, *_ in moves}


@needs_two_cores
@pytest.mark.parametrize("policy", [Alternate, BetweenGradients])
def test_another_device_or_many_leases_a_round_change_no_bit(policy, tmp_path):
    arguments = [*TINY, *SHORT, *settings("run.seed=5", f"run.dir={tmp_path / 'alone'}", "learner.device=cpu")]
    run_serial(Preparation(parse([*arguments, "--serial"]), uuid.uuid4().hex[:8]))
    one = OneTask(tmp_path / "lent", policy(), TWO.partition("=")[2])
    try:
        one.drive()
    finally:
        one.close()
    assert learned(newest(tmp_path / "lent")) == learned(newest(tmp_path / "alone"))
    if policy is BetweenGradients:
        assert max(lease.part for lease in one.leases) > 1
        updates = summary(tmp_path / "lent")["updates"]
        assert len(one.leases) >= updates, "one lease an update"
    else:
        assert all(a.device != b.device for a, b in pairwise(one.leases))


# -- each task ends alone ------------------------------------------------------------------------------------------


def test_a_task_that_is_broken_diverges_or_is_killed_ends_alone_and_the_pool_goes_on(tmp_path, capsys):
    pool = tmp_path / "pool"
    files = [
        task_file(tmp_path, "mistyped", "[learner]\nbatchsize = 3\n"),
        task_file(tmp_path, "no_env", '[env]\nid = "Nonsense-v0"\n'),
        task_file(tmp_path, "diverges", "[learner]\nlr = 1e30\nmax_grad_norm = 1e30\n[replay]\nselector = 'uniform'\n"),
        task_file(tmp_path, "victim", "[run]\nmax_env_steps = 100_000_000\n"),
        task_file(tmp_path, "good", "[run]\nmax_env_steps = 1200\n"),
    ]
    common = [word for word in TINY if "max_env_steps" not in word and word != "--set"]
    arguments = [*settings(*common, ONE, f"run.dir={pool}")]
    process = start("--serial", "--tasks", *files, *arguments)
    try:
        victim = wait_until(
            lambda: any((pool / "victim" / "checkpoints").glob("[0-9]*")) and status(pool, capsys)["victim"]["pid"],
            "the victim has no checkpoint",
        )
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 1
    ends = {name: (task["ok"], task["reason"]) for name, task in summary(pool)["tasks"].items()}
    assert ends["good"] == (True, "run.max_env_steps reached")
    assert not any(ok for name, (ok, _) in ends.items() if name != "good")
    for name, words in {
        "mistyped": "did you mean 'learner.batch_size'",
        "no_env": "Nonsense",
        "diverges": "learning has diverged",
        "victim": "killed by SIGKILL",
    }.items():
        assert words in ends[name][1]
        assert f"task {name}: failed: " in err
    assert "1 of 5 tasks ended well" in out
    assert "Traceback" not in err
    before = newest(pool / "victim").name
    task_file(tmp_path, "mistyped", "[learner]\nbatch_size = 16\n")  # mended
    again = forked("--resume", str(pool), *settings(f"run.max_env_steps={int(before) + 600}"))
    assert again.returncode == 1, "the one without an environment fails again"
    ends = summary(pool)["tasks"]
    assert ends["victim"]["ok"]
    assert ends["mistyped"]["ok"]
    assert summary(pool / "mistyped")["env_steps"] == int(before) + 600
    assert int(newest(pool / "victim").name) >= int(before) + 600
    assert ends["good"]["rounds"] == 0, "it had ended and did not run again"
    assert len(list((pool / "victim" / "checkpoints").glob("[0-9]*"))) > 0


def test_status_reweight_and_cancel_of_a_living_pool_and_ctrl_c_saves_all(tmp_path, capsys):
    pool, files = tmp_path / "pool", [task_file(tmp_path, name) for name in ("first", "second")]
    process = start("--serial", "--tasks", *files, *TINY, *LONG, *settings(ONE, f"run.dir={pool}"))
    try:
        wait_until(
            lambda: (tasks := status(pool, capsys)) and all(task["rounds"] > 5 for task in tasks.values()),
            "the tasks do not get along",
        )
        assert forked("--resume", str(pool)).stderr.startswith(f"ddrl: the pool {pool} still runs")
        assert pool_main([str(pool), "--reweight", "first", "2.5"]) == 0
        assert status(pool, capsys)["first"]["weight"] == 2.5
        for wrong in (["--reweight", "first", "-1"], ["--reweight", "first", "much"], ["--cancel", "third"]):
            assert pool_main([str(pool), *wrong]) == 1
        complaints = capsys.readouterr().err.splitlines()
        assert len(complaints) == 3
        assert "name one of those that run: first, second" in complaints[2]
        assert pool_main([str(pool), "--cancel", "first"]) == 0
        wait_until(lambda: status(pool, capsys)["first"]["state"] == "ended", "the task was not cancelled")
        assert pool_main([str(pool)]) == 0
        assert "cancelled" in capsys.readouterr().out
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    ends = summary(pool)["tasks"]
    assert {name: end["reason"] for name, end in ends.items()} == {"first": "cancelled", "second": "interrupted"}
    for name in ("first", "second"):
        assert summary(pool / name)["env_steps"] == int(newest(pool / name).name)
    assert pool_main([str(pool)]) == 0  # its summary
    shown = capsys.readouterr().out
    assert "the pool has ended, after " in shown
    assert [line.split()[:2] for line in shown.splitlines()[1:3]] == [["first", "ended"], ["second", "ended"]]
    assert status(pool, capsys)["first"]["rounds"] == ends["first"]["rounds"] > 5
    assert pool_main([str(pool), "--cancel", "first"]) == 1
    assert "does not run: it has ended; go on with" in capsys.readouterr().err
    steps = summary(pool / "second")["env_steps"] + 400
    again = forked("--resume", str(pool), *settings(f"run.max_env_steps={steps}"))
    assert again.returncode == 0, again.stderr
    ends = summary(pool)["tasks"]
    assert {name: end["reason"] for name, end in ends.items()} == {
        "first": "cancelled",
        "second": "run.max_env_steps reached",
    }
    once_more = forked("--resume", str(pool))
    assert once_more.returncode == 1
    assert "start a new pool" in once_more.stderr


@pytest.mark.long
def test_a_task_added_to_a_living_pool_learns_what_it_learns_alone(tmp_path, capsys):
    pool, devices = tmp_path / "pool", ONE.partition("=")[2]
    first = task_file(tmp_path, "first", f'[run]\nmax_env_steps = 100_000_000\n[pool]\ndevices = "{devices}"\n')
    late = task_file(tmp_path, "late", "[run]\nmax_env_steps = 1200\n")
    other = task_file(tmp_path, "other", '[pool]\ndevices = "cpu:77"\n')
    broken = task_file(tmp_path, "broken", "[learner]\nlr = -1.0\n")
    common = settings(*(text for text in TINY[1::2] if not text.startswith("run.max_env_steps")))
    process = start("--serial", "--tasks", first, *common, *settings(f"run.dir={pool}"))
    try:
        wait_until(lambda: status(pool, capsys).get("first", {}).get("rounds", 0) > 5, "the pool does not get along")
        assert pool_main([str(pool), "--add", late]) == 0
        wait_until(lambda: status(pool, capsys)["late"]["state"] == "ended", "the added task does not end")
        capsys.readouterr()
        for wrong in (late, other, broken, str(tmp_path / "none.toml")):
            assert pool_main([str(pool), "--add", wrong]) == 1
        complaints = capsys.readouterr().err.splitlines()
        for complaint, words in zip(
            complaints, ("have the name 'late'", "this pool has 'cpu:", "learner.lr", "none.toml"), strict=True
        ):
            assert words in complaint
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert summary(pool)["tasks"].keys() == {"first", "late"}
    alone = serial(late, *common, *settings(f"run.dir={tmp_path / 'alone'}"))
    assert alone.returncode == 0, alone.stderr
    assert learned(newest(pool / "late")) == learned(newest(tmp_path / "alone"))


def test_a_task_whose_run_is_outside_the_pool_is_said(tmp_path, capsys):
    here, there = tmp_path / "pool", tmp_path / "elsewhere"
    files = [task_file(tmp_path, "inside"), task_file(tmp_path, "outside", f'[run]\ndir = "{there}"\n')]
    setup_of(parse(["--tasks", *files, *settings(ONE, f"run.dir={here}")]))
    said = capsys.readouterr().err
    assert said == f"ddrl: task outside: its run.dir is {there}, outside the pool {here}, and its run is there\n"


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "more", "words"),
    [
        (["a", "sub/a"], [ONE], "two tasks of the pool have the name 'a'"),
        (["a", "b"], [], "pool.devices is empty"),
        (["a", "b"], ["pool.devices=cpu:9999"], "there is no core 9999"),
        (["a", "b"], ["pool.devices=cuda:99"], "pool.devices names cuda:99: torch sees"),
        (["a", "b"], ["pool.devices=cpu:zero"], "'cpu:zero' is no device"),
        (["a", "b"], ["pool.devices=cpu:0,cpu:0"], "gives away 2 of core 0"),
        (["a", "b"], [ONE, "pool.policy=fare"], "did you mean 'fair'?"),
        (["a", "b"], [ONE, "pool.weight=0"], "pool.weight (0.0) must be above 0"),
        (["a", "b"], [ONE, "pool.fair.patients=1"], "there is no setting 'pool.fair.patients'"),
        (["pool", "b"], [ONE], "cannot be called 'pool'"),
        (["a", "n" * 70], [ONE], "is longer than 64 bytes"),
    ],
)
def test_a_pool_that_cannot_start_says_so_in_one_line_and_makes_nothing(names, more, words, tmp_path, capsys):
    from ddrl.run.__main__ import main

    (tmp_path / "sub").mkdir()
    files, pool = [task_file(tmp_path, name) for name in names], tmp_path / "runs"
    assert main(["--serial", "--tasks", *files, *settings(*more, f"run.dir={pool}")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert words in lines[0]
    assert not pool.exists()


def test_two_tasks_of_one_directory_or_with_different_devices_are_refused(tmp_path, capsys):
    from ddrl.run.__main__ import main

    pool = tmp_path / "runs"
    same = [task_file(tmp_path, name, f'[run]\ndir = "{tmp_path}/same"\n') for name in ("a", "b")]
    assert main(["--tasks", *same, *settings(ONE, f"run.dir={pool}")]) == 1
    assert "two tasks of the pool have the directory" in capsys.readouterr().err
    other = [task_file(tmp_path, name, f'[pool]\ndevices = "cpu:{name}"\n') for name in ("0", "1")]
    assert main(["--tasks", *other, *settings(f"run.dir={pool}")]) == 1
    assert "do not agree on pool.devices" in capsys.readouterr().err
    assert main(["--tasks", *same, "--resume", str(pool)]) == 1
    assert "--tasks takes no other task" in capsys.readouterr().err
    assert main(["--tasks", *same, "--print-config"]) == 1
    assert "without --tasks" in capsys.readouterr().err
    assert not pool.exists()


class Ledger:
    """Stands for a learner and a holder: notes what is called, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.device = "cpu"
        self.busy, self.computed = self, 0.0

    def to(self, device: str) -> None:
        self.calls.append(f"to {device}")
        self.device = device

    def acquire(self, round: int, *, part: int, remaining: float) -> int:
        self.calls.append(f"acquire {round}.{part}, {remaining:g} left")
        return 0

    def seconds(self) -> float:
        self.computed += 1.0
        return self.computed

    def release(self, busy: float) -> None:
        assert busy == 1.0  # what was computed in this lease alone
        self.calls.append("release")

    def close(self) -> None:
        self.calls.append("close")


def test_on_a_torch_device_the_learner_moves_there_and_off_again_within_the_lease() -> None:
    ledger = Ledger()
    state, run = SimpleNamespace(env_steps=100, updates=0), SimpleNamespace(max_env_steps=400)
    training: Any = SimpleNamespace(learner=ledger, state=state, config=SimpleNamespace(run=run), rounds=None)
    lender = Lender(training, ledger, parse_devices("cuda:0"), "unused")  # type: ignore[arg-type]
    for _ in range(2):
        lender.take()
        lender.take()  # of the next move in the same round
        lender.give_back(Move.APPLY)
        lender.give_back(Move.PUBLISH)
        state.env_steps += 50
    lender.take()
    lender.close()
    leave = ["to cpu", "release"]
    assert ledger.calls == [
        *("acquire 0.0, nan left", "to cuda:0", *leave),
        *("acquire 1.0, 5 left", "to cuda:0", *leave),
        *("acquire 2.0, 4 left", "to cuda:0", *leave),
        "close",
    ]


def test_a_pool_that_is_killed_leaves_no_process_and_no_segment(tmp_path, capsys):
    """Tasks that wait for a device end without saving, others save."""
    pool, files = tmp_path / "pool", [task_file(tmp_path, name) for name in ("one", "two")]
    more = settings(ONE, f"run.dir={pool}", "run.processes=1", "evaluation.period=0")
    process = start("--tasks", *files, *TINY, *LONG, *more)
    try:
        wait_until(
            lambda: (tasks := status(pool, capsys)) and all(task["rounds"] > 2 for task in tasks.values()),
            "the tasks do not get along",
        )
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 6, "each task has a process, a keeper and a rollout"
        process.kill()
        process.communicate()
        assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    finally:
        process.kill()
    for name in ("one", "two"):
        assert segments_of(pool / name) == []
    run_id = json.loads((pool / "pool" / "plan.json").read_text())["run_id"]
    assert list(Path("/dev/shm").glob(f"ddrl-{run_id}-*")) == []
