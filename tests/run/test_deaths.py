"""Rollouts and evaluators that die, hang or fail are started again, and the run does what it was asked to."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ddrl.channels.lane import Lane, StepWriter
from ddrl.channels.mailbox import Mailbox, checksum
from ddrl.core.errors import ChannelError, MessageError
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.run.keeper import MIN_WORK, Deaths
from ddrl.telemetry import Run, attach, run_status
from ddrl.telemetry.summary import LEDGER
from tests.run.launch import (
    MPI_ENVIRONMENT,
    TINY,
    UNTIL_STOPPED,
    balances,
    mpirun,
    mpirun_command,
    processes_of,
    segments_of,
    settings,
    summary,
    wait_for_checkpoint,
)
from tests.run.preloaded import Job, forked
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

KILL, CRASH, STOP, ERROR = signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP, 0
ALL = (KILL, CRASH, STOP)  # names of processes have 15 letters: "ddrl 1 evaluato"
WORDS = {
    KILL: ["was killed by SIGKILL"],
    CRASH: ["was killed by SIGSEGV", "Fatal Python error: Segmentation fault", "environments.py"],
    STOP: ["has shown no sign of life for", "(run.silence_limit)", "is stopped by a signal"],
    ERROR: ["had an exception in its environment", "RuntimeError: the corridor collapsed"],
}


def dying(run: Path, who: str, signals: Sequence[int], *more: str, **kwargs: Any) -> list[str]:
    """The arguments of a run, one of whose processes is sent these signals in turn by its environment."""
    folder = run.with_name("sent")
    folder.mkdir()
    given = {"who": who, "signals": list(map(int, signals)), "folder": str(folder), **kwargs}
    words = ", ".join(f"{name} = {str(value).lower() if value is True else value!r}" for name, value in given.items())
    return [
        *TINY,
        *settings("env.id=tests.run.environments:mortal", "env.num_envs=1", f"env.kwargs={{{words}}}"),
        *settings(f"run.dir={run}", "run.processes=1", "run.silence_limit=6", "evaluation.episodes=1", *more),
    ]


def went_well(run: Path, said: str, output: str, signals: Sequence[int], reason: str) -> None:
    """The run ended as it was asked to, every death is counted and its cause was said."""
    document = summary(run)
    assert document["reason"] == reason
    assert document["restarts"] == len(signals)
    assert f"deaths: {len(signals)} processes were started again" in output
    for number in signals:
        for words in WORDS[number]:
            assert words in said, said
    assert segments_of(run) == []
    balances(run)


@pytest.mark.parametrize(
    "signals", [ALL, pytest.param((ERROR, ERROR), marks=pytest.mark.long)], ids=["signals", "exceptions"]
)
def test_a_local_rollout_that_dies_is_started_again_with_other_episodes(signals: Sequence[int], tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = forked(*dying(run, "rollout", signals, *(() if signals is ALL else ("rollout.on_error=restart",))))
    assert done.returncode == 0, done.stderr
    went_well(run, alarms(run), done.stdout, signals, "run.max_env_steps reached")
    assert summary(run)["env_steps"] == 3000
    assert summary(run)["episodes_cut"] == len(signals)
    assert len(list((tmp_path / "sent").glob("seed *"))) == len(signals) + 1  # a file that exists is an error


def test_a_local_evaluator_that_dies_is_started_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    endless = ("run.max_env_steps=100000000", "run.patience=2", "evaluation.period=200")
    done = forked(*dying(run, "evaluato", ALL, *endless, at=2))
    assert done.returncode == 0, done.stderr
    went_well(run, done.stderr, done.stdout, ALL, "run.patience evaluations without a better one")


@pytest.mark.parametrize("who", ["4 rollout", pytest.param("2 evaluato", marks=pytest.mark.long)])
def test_under_mpirun_members_are_started_again_too(who: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("cluster.relays=2", *(("run.max_env_steps=100000000", "run.patience=2") if "evaluato" in who else ()))
    done = mpirun(5, *dying(run, who, ALL, *more, at=2))  # rank 4 is the only rollout, on the host of relay 3
    assert done.returncode == 0, done.stderr
    reason = "run.patience evaluations without a better one" if "evaluato" in who else "run.max_env_steps reached"
    went_well(run, done.stderr, done.stdout, ALL, reason)


@pytest.mark.parametrize(
    ("number", "setting", "deaths"),
    [pytest.param(CRASH, "rollout.restarts=3", 4, marks=pytest.mark.long), (KILL, "rollout.restarts=0", 1)],
)
def test_a_rollout_that_always_dies_ends_the_run_saved(number: int, setting: str, deaths: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = forked(*dying(run, "rollout", [number], setting, forever=True))
    assert done.returncode == 1
    assert len(list((tmp_path / "sent").glob("signal *"))) == deaths
    error = done.stderr[done.stderr.rindex("ddrl: rank") :]
    assert "4 times in a row (rollout.restarts = 3)" in error if deaths > 1 else "in a row" not in error
    for words in WORDS[number]:
        assert words in error
    assert any((run / "checkpoints").glob("0*"))
    assert segments_of(run) == []


def test_without_on_error_an_exception_of_an_environment_ends_the_run(tmp_path: Path) -> None:
    done = forked(*dying(tmp_path / "run", "rollout", [ERROR]))
    assert done.returncode == 1
    assert "RuntimeError: the corridor collapsed" in done.stderr
    assert "started again" not in done.stderr


# -- which deaths are in a row -----------------------------------------------------------------------------------------


class Watch:
    """Deaths of one member, and a clock that is moved by hand."""

    def __init__(self, role: Role, limit: int = 2) -> None:
        self.now = 0.0
        self.deaths = Deaths(limit, lambda: self.now)
        self.child: Any = SimpleNamespace(role=role, rank=4)
        self.table = np.full((2, len(COLUMNS)), np.nan)
        self.set("rank", 4)
        self.set("role", list(Role).index(role))

    def set(self, name: str, value: float) -> None:
        self.table[1, COLUMNS.index(name)] = value

    def die(self, words: str = "") -> float | None:
        column = "episodes" if self.child.role is Role.EVALUATOR else "env_steps"
        return self.deaths.pause_after(self.child, words, float(np.nan_to_num(self.table[1, COLUMNS.index(column)])))

    def work(self, name: str, value: float, seconds: float) -> None:
        self.set(name, value)
        self.deaths.note_work(self.table)
        self.now += seconds


def test_pauses_double_and_after_the_limit_the_job_ends_with_what_the_first_left() -> None:
    watch = Watch(Role.ROLLOUT, 4)
    assert [watch.die(words) for words in ("", "first", "second", "", "")] == [0.0, 0.5, 1.0, 2.0, None]
    assert watch.deaths.in_row(watch.child) == (5, "first")


def test_a_rollout_that_has_recorded_for_a_while_begins_a_new_row() -> None:
    watch = Watch(Role.ROLLOUT)
    watch.die()
    watch.now += 100.0
    watch.work("env_steps", 5, MIN_WORK / 2)
    watch.work("env_steps", 6, MIN_WORK / 2)
    assert watch.die() == 0.5  # it has worked for half the time when last seen
    watch.work("env_steps", 7, MIN_WORK)
    watch.work("env_steps", 7, MIN_WORK)  # no growth is no work
    assert watch.deaths.in_row(watch.child)[0] == 2
    watch.work("env_steps", 8, 0.0)
    assert watch.deaths.in_row(watch.child) == (0, "")
    assert watch.die() == 0.0


def test_an_evaluator_that_has_played_begins_a_new_row() -> None:
    watch = Watch(Role.EVALUATOR)
    watch.die()
    watch.work("env_steps", 5, MIN_WORK)
    assert watch.deaths.in_row(watch.child)[0] == 1
    watch.work("episodes", 1, 0.0)
    assert watch.deaths.in_row(watch.child)[0] == 0


def test_a_trainer_that_has_recorded_for_a_while_begins_a_new_row() -> None:
    watch = Watch(Role.TRAINER)
    watch.work("env_steps", 1000, 0.0)
    watch.die()
    watch.work("env_steps", 5, MIN_WORK)  # its successor's counters begin at 0
    watch.work("env_steps", 6, 0.0)
    assert watch.deaths.in_row(watch.child)[0] == 0


def test_the_death_of_a_relay_ends_the_job() -> None:
    assert Watch(Role.RELAY).die() is None


# -- the lane of a rollout that dies -----------------------------------------------------------------------------------

WIDTH = 20_000  # values of a state: most of a producer's time is inside a row
SPEC = EnvSpec("deaths", ArraySpec((WIDTH,), "float32"), 2)


def produce(name: str, incarnation: int) -> None:
    """In a fork: one endless episode, in whose rows each value is the step's number."""
    schema = row_schema(SPEC)
    writer = StepWriter(Lane.attach(name, schema.dtype), schema, 0, incarnation=incarnation)
    no = np.zeros(1, np.bool_)
    for step in range(1 << 20):
        state = np.full((1, WIDTH), step, np.float32)
        reward = np.full(1, step, np.float32)
        writer.write(state, np.zeros(1, np.int64), reward, no, no, state + 1, incarnation)


def test_rows_of_a_rollout_killed_at_any_moment_are_whole_and_its_successor_begins_a_new_episode() -> None:
    schema = row_schema(SPEC)
    name = f"ddrl-test-deaths-{os.getpid()}"
    lane = Lane.create(name, schema.dtype, 8)
    rows = np.zeros(8, schema.dtype)
    expected = 0
    try:
        for incarnation in range(60):
            pid = os.fork()
            if pid == 0:
                try:
                    produce(name, incarnation)
                finally:
                    os._exit(1)
            try:
                seen = 0
                while seen < 1 + incarnation % 7 or (incarnation % 10 == 9 and len(lane) < 8):  # or it waits for room
                    count = 0 if incarnation % 10 == 9 and seen > 6 else lane.pop(rows)
                    seen += count
                    expected = check_rows(rows[:count], incarnation, expected)
            finally:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            lane.hand_over()
            while count := lane.pop(rows):
                expected = check_rows(rows[:count], incarnation, expected)
    finally:
        lane.unlink()


def check_rows(rows: np.ndarray, incarnation: int, expected: int) -> int:
    """Each row is whole and the next of its episode; the step that would follow. The first of an incarnation follows
    nothing."""
    for row in rows:
        step = int(row["step"])
        number = step % (1 << 20)
        assert row["policy_version"] == step >> 20 == incarnation
        assert step == expected if number else step != expected or step == 0
        assert row["reward"] == number
        assert (row["state"] == number).all()
        expected = step + 1
    return expected


def test_a_lane_that_its_producer_has_damaged_is_refused() -> None:
    lane = Lane.create(None, np.dtype("u8"), 4)
    lane.push(np.arange(3, dtype="u8"))
    lane.hand_over()
    memory = lane.segment.array.view(np.uint64)
    memory[(memory == 3).nonzero()[0][0]] = 1 << 40  # rows ever pushed
    with pytest.raises(ChannelError, match="was damaged"):
        lane.hand_over()


def test_members_offer_themselves_to_the_kernel_when_memory_is_short() -> None:
    from ddrl.run.keeper import Keeper, Place

    keeper = Keeper({1: Place(1, Role.ROLLOUT, lambda: signal.pause() or 0)})
    child = keeper.start(1)
    try:
        score = Path(f"/proc/{child.pid}/oom_score_adj")
        wait_until(lambda: int(score.read_text()) >= 500, "the score was not raised")
    finally:
        keeper.end(0.0)
        keeper.close()
    assert math.isfinite(child.end(0.0).cpu_seconds)


# -- the trainer -------------------------------------------------------------------------------------------------------


# Where the trainer is when it is sent a signal: function, and at which of its calls.
MOMENTS = [
    ("digest_of_file", 4, KILL),  # in the second checkpoint
]
OTHER_MOMENTS = [
    ("Training.publish", 1, KILL),  # nothing is published, the mailbox is there
    ("Checkpoints.write", 1, KILL),  # there is no checkpoint
    ("Task.accept", 1, KILL),  # an evaluation has been read
    ("Training._record", 100, STOP),
]


STEPS = 5000  # half of them after the moments above
LONGER = (f"run.max_env_steps={STEPS}", "evaluation.period=400")


def dying_trainer(run: Path, name: str, moment: tuple[str, int, int], *, once: bool = True) -> dict[str, str]:
    """The environment variables of a run whose trainer is sent a signal at a moment."""
    function, count, number = moment
    mark = run.with_name("mark") if once else ""
    fault = f"{name}:{function}:{count}:signal {int(number)}:{mark}"
    return environment(Path(__file__).parent / "faults", **MPI_ENVIRONMENT, DDRL_TEST_FAULT=fault)


def trainer_was_restarted(run: Path, done: subprocess.CompletedProcess[str], number: int) -> None:
    """The run has ended as it was asked to, with one death of its trainer, which it names; each evaluation counts
    once."""
    assert done.returncode == 0, done.stderr
    assert run.with_name("mark").exists()
    went_well(run, done.stderr, done.stdout, [number], "run.max_env_steps reached")
    assert "it was started again from the newest checkpoint (1 of 3 times in a row)" in done.stderr
    assert summary(run)["env_steps"] == STEPS
    with Run(run) as finished:
        versions = finished.evaluations()["policy_version"]
        assert np.nanmax(finished.latest().column("incarnation")) == 1.0
        counts = finished.series(["episodes", "publishes", "restarts"])
    for name in ("episodes", "publishes", "restarts"):
        assert summary(run)[name] == counts[name][-1], name
    assert len(set(versions[:-1])) == len(versions[:-1])  # the last one is of the trainer itself


@pytest.mark.parametrize(
    "moment",
    [*MOMENTS, *(pytest.param(one, marks=pytest.mark.long) for one in OTHER_MOMENTS)],
    ids=lambda moment: f"{moment[0]}-{moment[2].name}",
)
def test_a_trainer_that_dies_is_started_again(moment: tuple[str, int, int], tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1", "run.silence_limit=6", *LONGER)
    variables = dying_trainer(run, "0 trainer", moment)
    done = forked(*TINY, *more, env=variables)
    trainer_was_restarted(run, done, moment[2])
    assert summary(run)["steps_lost"] > 0 or moment == MOMENTS[0]  # before the first version there may be none


@pytest.mark.long
def test_under_mpirun_a_trainer_that_dies_is_started_again_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = mpirun_command(5, *TINY, *settings(f"run.dir={run}", "cluster.relays=2", *LONGER))
    moment = ("Training.publish", 40, KILL)
    variables = dying_trainer(run, "1 trainer", moment)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=variables, check=False)
    trainer_was_restarted(run, done, KILL)
    assert summary(run)["steps_lost"] > 0
    assert balances(run)["rows_lost"] > 0


@pytest.mark.long
def test_a_trainer_that_always_dies_ends_the_run_and_says_how_to_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1", "rollout.restarts=1", "run.checkpoint_period=50")
    moment = ("Training._record", 60, CRASH)  # long before MIN_WORK, after which the row of deaths begins anew
    variables = dying_trainer(run, "0 trainer", moment, once=False)
    done = forked(*TINY, *UNTIL_STOPPED, *more, env=variables)
    assert done.returncode == 1
    error = done.stderr[done.stderr.rindex("ddrl: rank 0 (trainer") :]
    assert "was killed by SIGSEGV, 2 times in a row (rollout.restarts = 1)" in error
    assert f"--resume {run}" in error
    assert "Segmentation fault" in error
    saved = max(int(path.name) for path in (run / "checkpoints").glob("0*"))
    went_on = forked("--resume", str(run), *settings(f"run.max_env_steps={saved + 100}"))
    assert went_on.returncode == 0, went_on.stderr
    assert summary(run)["env_steps"] == saved + 100
    assert segments_of(run) == []


@pytest.mark.long
def test_a_trainer_that_is_killed_while_the_run_is_paused_stays_paused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1", "run.checkpoint_period=0", "run.checkpoint_seconds=0.5")
    with Job([*TINY, *UNTIL_STOPPED, *more]) as job:
        wait_for_checkpoint(run, job)
        with attach(run, timeout=PATIENCE) as control:
            control.pause()
        wait_until(lambda: run_status(run).state == "paused", "the run was not paused")
        first = run_status(run).pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: run_status(run).pid != first and run_status(run).state == "paused", "it is not paused again")
        with attach(run, timeout=PATIENCE) as control:
            before = control.status()["env_steps"]
            control.resume()
            wait_until(lambda: control.status()["env_steps"] > before, "it does not continue")
            control.stop()
        assert job.wait(PATIENCE) == 0
    assert segments_of(run) == []


@pytest.mark.parametrize("moment", ["Job.hand_over:1", pytest.param("Job._use_trainer:2", marks=pytest.mark.long)])
def test_a_stop_that_comes_while_a_trainer_is_started_reaches_it(moment: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = f":{moment}:signal {int(signal.SIGINT)}:{run.with_name('mark')}"  # of the keeper, which has no name here
    variables = environment(Path(__file__).parent / "faults", DDRL_TEST_FAULT=fault)
    command = [*TINY, *UNTIL_STOPPED, *settings(f"run.dir={run}", "run.processes=1")]
    with Job(command, env=variables) as job:
        try:
            if moment.endswith("2"):
                wait_for_checkpoint(run, job)
                os.kill(run_status(run).pid, KILL)
            assert job.wait(PATIENCE) == 130
        finally:
            job.kill()
    assert run.with_name("mark").exists()
    assert summary(run)["reason"] == "interrupted"
    assert segments_of(run) == []
    balances(run)


def test_a_stop_that_comes_once_all_is_done_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    variables = environment(
        Path(__file__).parent / "faults", DDRL_TEST_FAULT=f":Job.close:1:signal {int(signal.SIGINT)}:"
    )
    done = forked(*TINY, *settings(f"run.dir={run}", "run.processes=1"), env=variables)
    assert done.returncode == 0, done.stderr
    assert summary(run)["reason"] == "run.max_env_steps reached"
    assert segments_of(run) == []


@pytest.mark.long
def test_the_ledger_of_a_run_whose_trainer_fails_while_it_counts_rows_balances(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = "0 trainer:Training._count_recorded:1000:"  # these rows are recorded, and not counted yet
    variables = environment(Path(__file__).parent / "faults", DDRL_TEST_FAULT=fault)
    done = forked(*TINY, *UNTIL_STOPPED, *settings(f"run.dir={run}", "run.processes=1"), env=variables)
    assert done.returncode == 1
    assert "the injected fault in Training._count_recorded" in done.stderr
    balances(run, ended=False)


@pytest.mark.long
def test_after_a_death_another_process_is_ready_to_be_the_next_trainer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1", "rollout.restarts=10")
    trainer = "ddrl 0 trainer"
    spare = "ddrl spare"

    def replaced(pid: int) -> bool:
        now = processes_of(run)  # one look: between two of them the killed process can leave the list
        return {trainer, spare} <= now.keys() and pid not in now.values()

    def kill(name: str) -> None:
        pid = processes_of(run)[name]
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: replaced(pid), name)

    with Job([*TINY, *UNTIL_STOPPED, *more]) as job:
        try:
            wait_for_checkpoint(run, job)
            assert spare not in processes_of(run)  # of a short run
            kill(trainer)
            first = processes_of(run)[spare]
            score = Path(f"/proc/{first}/oom_score_adj")
            wait_until(lambda: int(score.read_text()) >= 500, "the score was not raised")
            kill(trainer)
            assert processes_of(run)[trainer] == first
            assert int(score.read_text()) < 500  # no longer one whose death costs nothing
            os.kill(processes_of(run)[spare], signal.SIGKILL)
            wait_until(lambda: "taken the trainer's place was killed by SIGKILL" in alarms(run), "nobody was told")
            with attach(run, timeout=PATIENCE) as control:
                control.stop()
            assert job.wait(PATIENCE) == 0
        finally:
            job.kill()
    assert summary(run)["restarts"] == 2  # a spare's is none
    assert segments_of(run) == []
    assert processes_of(run) == {}
    balances(run)


@pytest.mark.long
def test_a_spare_removes_what_a_killed_keeper_and_its_killed_trainer_leave(tmp_path: Path) -> None:
    run = tmp_path / "run"
    names = {"ddrl 0 trainer", "ddrl spare"}
    more = settings(f"run.dir={run}", "run.processes=1")
    with Job([*TINY, *UNTIL_STOPPED, *more]) as job:
        try:
            wait_for_checkpoint(run, job)
            first = processes_of(run)["ddrl 0 trainer"]
            os.kill(first, signal.SIGKILL)
            wait_until(
                lambda: names <= processes_of(run).keys() and first not in processes_of(run).values(), "no spare"
            )
            trainer = processes_of(run)["ddrl 0 trainer"]
            os.kill(trainer, signal.SIGSTOP)
            os.kill(run_status(run).keeper, signal.SIGKILL)
            wait_until(lambda: processes_of(run).keys() == names, "others outlive their keeper")
            assert segments_of(run) != []  # with which the trainer would save
            os.kill(trainer, signal.SIGKILL)
            wait_until(lambda: segments_of(run) == [], "the segments stay")
            wait_until(lambda: processes_of(run) == {}, "the spare stays")
        finally:
            job.kill()


def alarms(run: Path) -> str:
    """What the run has told its user."""
    with Run(run) as records:
        return "\n".join(records.events(kinds=["alarm"])["text"])


def test_a_mailbox_whose_writers_are_killed_shows_whole_versions_that_never_fall() -> None:
    name = f"ddrl-test-mailbox-{os.getpid()}"
    mailbox = Mailbox.create(name, 8 * WIDTH, 4, 1)
    try:
        reader = mailbox.reader(0)
        seen = -1
        for turn in range(60):
            pid = os.fork()
            if pid == 0:
                try:
                    mine = Mailbox.attach(name)
                    vector = np.zeros(WIDTH)
                    for version in range(mine.last_version + 1, 1 << 30):
                        vector[:] = version
                        mine.publish(vector, version)
                finally:
                    os._exit(1)
            target = seen + 2 + turn % 7
            while (pin := reader.pin()) is None or pin.version < target:
                pass
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pin = reader.pin()
            assert pin is not None
            assert seen < pin.version <= mailbox.last_version
            assert (pin.data.view(np.float64) == pin.version).all()
            assert pin.valid()
            assert checksum(pin.data) == pin.checksum
            seen = pin.version
    finally:
        mailbox.unlink()


def test_the_ledger_of_a_run_whose_processes_were_all_killed_balances_once_it_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1")
    with Job([*TINY, *UNTIL_STOPPED, *more]) as job:
        wait_for_checkpoint(run, job)
        pids = (job.pid, run_status(run).pid)  # the keeper's end would be a reason for the trainer to save

        def stopped_after_a_record() -> bool:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            if steps_after_checkpoint(run) > 0:
                return True
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            return False

        wait_until(stopped_after_a_record, "nothing was recorded after a checkpoint")
        for pid in (run_status(run).pid, job.pid):
            os.kill(pid, signal.SIGKILL)
    saved = max(int(path.name) for path in (run / "checkpoints").glob("0*"))
    went_on = forked("--resume", str(run), *settings(f"run.max_env_steps={saved + 1000}"))
    assert went_on.returncode == 0, went_on.stderr
    state = balances(run)
    assert state["env_steps"] == saved + 1000
    assert state["rows_left"] > 0


def steps_after_checkpoint(run: Path) -> int:
    """Steps that the ledger knows of and that are in no checkpoint."""
    with Run(run) as running:
        entry = running.snapshot(LEDGER)
    saved = max(int(path.name) for path in (run / "checkpoints").glob("0*"))
    return entry["state"]["env_steps"] - saved if entry else 0


# -- the keeper of another host ----------------------------------------------------------------------------------------


def test_a_keeper_of_another_host_that_dies_or_falls_silent_is_started_again_with_its_members(tmp_path: Path) -> None:
    run = tmp_path / "run"
    log = tmp_path / "log"
    walk = ("env.id=tests.run.environments:walk", "env.kwargs={pause = 0.002}")
    rarely = ("replay.samples_per_insert=0.1", "evaluation.period=0")  # what is learned does not matter
    more = settings(f"run.dir={run}", "cluster.relays=2", "run.silence_limit=6", *walk, *rarely)
    command = mpirun_command(6, *TINY, *UNTIL_STOPPED, *more)  # ranks 4 and 5 are rollouts, on the host of relay 3
    with log.open("w") as output:
        job = subprocess.Popen(command, stdout=output, stderr=output, env=environment(**MPI_ENVIRONMENT))
    names = ("ddrl keeper 1", "ddrl 4 rollout", "ddrl 5 rollout")
    try:
        wait_for_checkpoint(run, job)
        for number in (KILL, STOP):
            before = processes_of(run)
            os.kill(before[names[0]], number)
            wait_until(
                lambda before=before: all(processes_of(run).get(name, before[name]) != before[name] for name in names),
                "the host's processes were not started again",
            )
            steps = last(run, "env_steps")
            wait_until(lambda steps=steps: (last(run, "env_steps") > steps + 100).all(), "they do not step")
        assert last(run, "incarnation").tolist() == [2.0, 2.0]
        with attach(run, timeout=PATIENCE) as control:
            control.stop()
        assert job.wait(PATIENCE) == 0
    finally:
        job.kill()
    said = log.read_text()
    assert "was killed by SIGKILL, and with it the host's rollouts: it was started again" in said
    assert "no sign of life for 6 s (run.silence_limit) and was killed, and with it the host's rollouts: it was" in said
    assert summary(run)["restarts"] == 4
    balances(run)
    assert segments_of(run) == []


def last(run: Path, column: str, ranks: int = 2) -> np.ndarray:
    """Of the last ranks."""
    with Run(run) as running:
        return running.latest().column(column)[-1, -ranks:]


# -- places ------------------------------------------------------------------------------------------------------------


def test_rollouts_are_added_and_taken_away_while_a_run_continues(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1", "run.max_processes=3", "rollout.max_policy_lag=5")
    with Job([*TINY, *UNTIL_STOPPED, *more]) as job:
        wait_for_checkpoint(run, job)
        assert run_status(run).keeper == job.pid
        with attach(run, timeout=PATIENCE) as control:
            assert rollouts_of(run) == 1  # nobody waits for the places that are empty
            control.set("run.processes", 3)
            wait_until(lambda: rollouts_of(run) == 3, "no rollout was added")
            wait_until(lambda: (last(run, "env_steps", 3) > 0).all(), "it does not step")
            control.set("run.processes", 1)
            wait_until(lambda: rollouts_of(run) == 1, "no rollout was taken away")
            control.set("run.processes", 2)
            wait_until(lambda: rollouts_of(run) == 2, "no rollout was added again")
            with pytest.raises(MessageError, match=r"places for 3 rollouts.*run\.max_processes"):
                control.set("run.processes", 4)
            control.stop()
        assert job.wait(PATIENCE) == 0
    with Run(run) as finished:
        steps = finished.latest().column("env_steps")[-1, -3:]
        incarnations = finished.latest().column("incarnation")[-1, -3:]
    assert (steps > 0).all()
    assert incarnations.tolist() == [0.0, 1.0, 0.0]
    assert summary(run)["restarts"] == 0
    assert segments_of(run) == []


def rollouts_of(run: Path) -> int:
    """Rollouts that run now."""
    return sum("rollout" in name for name in processes_of_children(run))


def processes_of_children(run: Path) -> list[str]:
    """Names of the keeper's children."""
    keeper = run_status(run).keeper
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    names: list[str] = []
    for pid in children:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            names.append(Path(f"/proc/{pid}/comm").read_text())
    return names


def test_rows_that_wait_in_lanes_are_learned_when_the_run_is_told_to_end_at_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = settings(f"run.dir={run}", "run.processes=1", "channels.lane_rows=4096", "replay.samples_per_insert=2000")
    with Job([*TINY, *UNTIL_STOPPED, *more]) as job:
        wait_until(lambda: steps_ahead(run) > 2000, "the lane did not fill")
        job.send_signal(signal.SIGTERM)
        assert job.wait(PATIENCE) == 130
    assert summary(run)["steps_lost"] < 1000


def steps_ahead(run: Path) -> float:
    """Steps that rollouts have taken and training has not recorded."""
    if not (run / "status.json").exists():
        return 0.0
    with Run(run) as running:
        steps = running.latest().column("env_steps")
    return float(steps[-1, -1] - steps[-1, 0]) if len(steps) else 0.0


@pytest.mark.parametrize(
    "later", [False, pytest.param(True, marks=pytest.mark.long)], ids=["at the start", "after a death"]
)
def test_under_mpirun_the_limit_on_processes_is_named(later: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fault = f"keeper 1:Keeper._start_fork:{3 if later else 1}:{errno.EAGAIN}"
    arguments = dying(run, "4 rollout", [KILL]) if later else [*TINY, *settings(f"run.dir={run}")]
    done = subprocess.run(
        mpirun_command(6, *arguments, *UNTIL_STOPPED, *settings("cluster.relays=2")),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(Path(__file__).parent / "faults", **MPI_ENVIRONMENT, DDRL_TEST_FAULT=fault),
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.count("ulimit -u") == 1, done.stderr
    started = 1 if later else 0
    assert f"no process can be started for the rollout ({started} run): Resource temporarily un" in done.stderr
    assert segments_of(run) == []
