"""The keeper: programs and forks that it starts, watches, restarts and ends."""

from __future__ import annotations

import os
import random
import resource
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ddrl.channels.segment import SHM, Segment, segment_name
from ddrl.core.config import Config
from ddrl.core.errors import EnvError, KeeperError, NetworkError
from ddrl.core.roles import Role
from ddrl.core.settings import load_config
from ddrl.core.specs import Declaration, EnvSpec
from ddrl.learner.algorithms.dqn import DQN
from ddrl.run import hosts
from ddrl.run.keeper import MAX_WORDS, Child, Ended, Keeper, Place, without_launcher
from ddrl.run.preparation import probe_in_fork
from ddrl.run.topology import JOB, KeepHost, Link, Result
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

PROGRAM = """
import os, sys, time
from ddrl.run.keeper import report_stacks
from ddrl.core.forks import die_with
report_stacks(int(sys.argv[-2]))
die_with(int(sys.argv[-1]))
os.write(int(sys.argv[-2]), b"here")
def deep_inside(): time.sleep(1000)
deep_inside()
"""


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    made = Keeper({}, seed=3)
    yield made
    made.end(0.0)
    made.close()


def fork(keeper: Keeper, work, place: int = 1, incarnation: int = 0) -> Child:
    keeper.places[place] = Place(place, Role.ROLLOUT, work)
    return keeper.start(place, incarnation)


def end_of(keeper: Keeper) -> tuple[Child, Ended]:
    gone: list[tuple[Child, Ended]] = []
    deadline = time.monotonic() + PATIENCE
    while not gone and time.monotonic() < deadline:
        gone = keeper.look(1.0)
    return gone[0]


def hang() -> int:
    def deep_inside() -> None:
        time.sleep(1000)

    deep_inside()
    return 0


def test_the_end_of_a_fork_has_its_status_and_its_last_words(keeper: Keeper) -> None:
    def work() -> int:
        print("the corridor collapsed", file=sys.stderr)
        return 3

    child = fork(keeper, work)
    gone, ended = end_of(keeper)
    assert gone is child
    assert (ended.status, ended.words, ended.how) == (3, "the corridor collapsed", "ended early with status 3")
    assert str(child.pid) in child.name
    assert "rank 1 (rollout" in child.name
    assert keeper.children == {}


def test_an_exception_in_a_fork_is_among_its_words_and_goes_no_further(keeper: Keeper) -> None:
    fork(keeper, lambda: 1 // 0)
    _, ended = end_of(keeper)
    assert ended.status == 1
    assert "ZeroDivisionError" in ended.words


def test_words_are_bounded_and_a_talkative_fork_never_waits(keeper: Keeper) -> None:
    def work() -> int:
        os.write(2, b"x" * 3_000_000 + b"the end")
        return 0

    fork(keeper, work)
    _, ended = end_of(keeper)
    assert ended.status == 0
    assert len(ended.words) == MAX_WORDS
    assert ended.words.endswith("the end")


def test_a_killed_fork_is_named_by_its_signal(keeper: Keeper) -> None:
    child = fork(keeper, hang)
    os.kill(child.pid, signal.SIGKILL)
    _, ended = end_of(keeper)
    assert ended.how == "was killed by SIGKILL"


def test_the_stacks_of_a_fork_that_hangs_name_the_function(keeper: Keeper) -> None:
    child = fork(keeper, hang)
    wait_until(lambda: "deep_inside" in child.stacks(), "no stacks came")
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: "is stopped by a signal" in child.stacks(), "its state was not named")


def test_a_program_has_a_session_of_its_own_and_writes_its_stacks(keeper: Keeper) -> None:
    keeper.places[0] = Place(0, Role.TRAINER, program=[sys.executable, "-c", PROGRAM])
    child = keeper.start(0)
    wait_until(lambda: "here" in child.words(), "the program did not start")
    assert os.getsid(child.pid) == child.pid
    assert "deep_inside" in child.stacks()


def test_the_next_incarnation_of_a_fork_has_another_seed_and_the_same_place(keeper: Keeper) -> None:
    def draw() -> int:
        os.write(2, f"{random.random()} {np.random.random()}\n".encode())
        return hang()

    first = fork(keeper, draw)
    drawn = wait_until(first.words, "nothing was drawn")
    first.end(0.0)
    keeper.look(0.0)
    second = keeper.start(1, first.incarnation + 1)
    assert (second.place, second.incarnation) == (1, 1)
    assert first.ended() is not None
    other = wait_until(second.words, "nothing was drawn again")
    assert set(other.split()).isdisjoint(drawn.split())
    again = Keeper({1: Place(1, Role.ROLLOUT, draw)}, seed=3)
    assert wait_until(again.start(1).words, "nothing was drawn") == drawn  # by seed, place and incarnation alone
    again.end(0.0)


def test_descriptors_are_watched_in_the_same_sleep(keeper: Keeper) -> None:
    reading, writing = os.pipe()
    heard: list[bytes] = []
    keeper.watch(reading, lambda: heard.append(os.read(reading, 10)))
    os.write(writing, b"order")
    keeper.look(PATIENCE)
    assert heard == [b"order"]
    keeper.unwatch(reading)


def test_nothing_outlives_a_keeper_that_is_killed(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from ddrl.core.roles import Role
from ddrl.run.keeper import Keeper, Place
keeper = Keeper({place: Place(place, Role.ROLLOUT, lambda: time.sleep(1000) or 0) for place in (1, 2)})
pids = [keeper.start(place).pid for place in (1, 2)]
Path(sys.argv[1]).write_text(" ".join(map(str, pids)))
time.sleep(1000)
"""
    said = tmp_path / "pids"
    parent = subprocess.Popen([sys.executable, "-c", code, str(said)], env=environment())
    pids = wait_until(lambda: said.exists() and said.read_text().split(), "nothing was started")
    time.sleep(0.2)  # the forks ask the kernel to be killed
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(alive(int(pid)) for pid in pids), "forks outlive their keeper")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_where_the_machine_allows_no_more_processes_the_error_names_the_limit(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(KeeperError, match=r"ulimit -u.*pids\.max"):
        fork(keeper, hang)
    assert resource.getrlimit(resource.RLIMIT_NPROC)


def test_programs_have_no_variables_of_a_launcher() -> None:
    variables = {"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3", "PRTE_X": "", "PATH": "/bin"}
    assert without_launcher(variables) == {"PATH": "/bin"}


class Endless(DQN):
    """Its description never ends, or fails."""

    name = "endless"
    fails = False

    @classmethod
    def describe(cls, config: Config, spec: EnvSpec) -> Declaration:
        if cls.fails:
            raise KeyError("unit")
        return asking_for_ever(config, spec)


class Failing(Endless):
    fails = True


def asking_for_ever(config: Config, spec: EnvSpec) -> Declaration:
    while True:
        time.sleep(1.0)


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("env.id=tests.run.environments:endless", "endless"),
        (f"learner.algorithm={__name__}:Endless", "asking_for_ever"),
    ],
    ids=["constructor", "description"],
)
def test_what_never_says_what_it_needs_is_named_with_its_stacks(setting: str, place: str) -> None:
    name, _, value = setting.partition("=")
    config = load_config(None, [setting, "run.start_limit=3"])
    with pytest.raises(EnvError, match=rf"(?s){name} = {value} .*run\.start_limit.*process \d+ on .*in {place}"):
        probe_in_fork(config)


def test_an_algorithm_whose_description_fails_is_named_not_the_environment() -> None:
    config = load_config(None, [f"learner.algorithm={__name__}:Failing"])
    with pytest.raises(EnvError, match=rf"(?s)^learner\.algorithm = {__name__}:Failing.*KeyError: 'unit'"):
        probe_in_fork(config)


SELECTS = ("23 ", "270 ")  # numbers of system calls (x86-64)


@pytest.mark.parametrize("spare", [False, True])
def test_a_trainer_whose_keeper_died_before_it_had_begun_removes_what_that_one_had_made(spare: bool) -> None:
    """A spare waits until its trainer has ended, which may still save."""
    run_id = uuid.uuid4().hex[:8]
    segment = Segment.create(segment_name(run_id, 0, "board"), "board", 64)
    other = Segment.create(segment_name(uuid.uuid4().hex[:8], 0, "board"), "board", 64)

    def left() -> set[str]:
        return {path.name for path in SHM.iterdir()} & {segment.name, other.name}

    trainer = subprocess.Popen(["sleep", "1000"])
    words = ["spare", str(trainer.pid)] * spare + [run_id, "0", "2", str(os.getppid())]  # this process is its parent
    started = subprocess.Popen([sys.executable, "-m", "ddrl.run.trainer", *words], env=environment())
    try:
        if spare:
            call = Path(f"/proc/{started.pid}/syscall")
            wait_until(lambda: started.poll() is not None or call.read_text().startswith(SELECTS), "it does not wait")
            assert left() == {segment.name, other.name}
            trainer.kill()
        assert started.wait(PATIENCE) == 1
        assert left() == {other.name}
    finally:
        started.kill()
        trainer.kill()
        trainer.wait()
        segment.unlink()
        other.unlink()


def test_what_the_keeper_of_another_host_cannot_import_or_make_is_told_to_its_parent_in_a_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse() -> None:
        raise NetworkError("ONNX Runtime cannot be loaded: install onnxruntime")

    monkeypatch.setattr(hosts, "import_for_members", refuse)
    monkeypatch.setattr(hosts, "ignore_interrupts", lambda: None)
    ours, theirs = Link.pair(JOB)
    parent = hosts.Parent(theirs, [])
    status = hosts._keep("1a2b3c4d", 3, parent, KeepHost(b"", []))
    (told,) = ours.receive(wait=True)
    os.close(parent.pidfd)
    ours.close()
    theirs.close()
    assert status == 1
    assert isinstance(told, Result)
    assert told.error == "the keeper of host 3: ONNX Runtime cannot be loaded: install onnxruntime"
