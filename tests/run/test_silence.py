"""An environment that hangs is noticed, said, and ended: nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddrl.core.metrics import COLUMNS, Phase
from ddrl.core.roles import Role
from ddrl.run.keeper import Silence, Silent
from ddrl.telemetry import Run
from tests.run.launch import TINY, mpirun, segments_of, settings
from tests.run.preloaded import forked

HANGS = settings("env.id=tests.run.environments:walk", "env.num_envs=1", "run.silence_limit=6")


class Watched:
    """A trainer, a relay, an evaluator and two rollouts, and a clock that stands until it is moved."""

    def __init__(self, limit: float = 100.0) -> None:
        self.now = 50.0
        self.found: list[Silent] = []
        self.table = np.full((5, len(COLUMNS)), np.nan)
        roles = (Role.TRAINER, Role.RELAY, Role.EVALUATOR, Role.ROLLOUT, Role.ROLLOUT)
        self.set("role", [list(Role).index(role) for role in roles])
        self.set("rank", range(5))
        self.set("host", 0)
        self.silence = Silence(limit, 600.0, lambda: self.now)

    def set(self, name: str, values: object, rows: object = slice(None)) -> None:
        self.table[rows, COLUMNS.index(name)] = values  # type: ignore[index]

    def after(self, seconds: float, beating: object) -> list[Silent]:
        """What a look finds at the end of a time in which this process was not stopped."""
        self.silence._looked += seconds
        return self.look(seconds, beating)

    def look(self, seconds: float, beating: object) -> list[Silent]:
        self.now += seconds
        self.set("heartbeat", self.now, beating)
        found = self.silence.look(self.table)
        self.found += found
        return found


def test_silence_is_said_once_and_then_at_its_limit() -> None:
    watched = Watched()
    watched.after(0, slice(None))
    watched.after(1, slice(None))
    for _ in range(20):
        watched.after(4, [0, 1, 2, 3])
    (told,) = watched.found
    assert (told.rank, told.final) == (4, False)
    assert "rank 4 (rollout of host 0) has shown no sign of life for 12 s" in told.words
    (final,) = watched.after(20, [0, 1, 2, 3])
    assert (final.rank, final.final) == (4, True)


def test_time_in_which_the_watcher_was_stopped_itself_does_not_count() -> None:
    watched = Watched()
    watched.after(5, slice(None))
    assert watched.look(1000, []) == []  # a machine that sleeps: nobody beat
    (told,) = watched.after(13, [0, 1, 2, 3])
    assert (told.rank, told.final) == (4, False)
    (final,) = watched.after(120, [0, 1, 2, 3])
    assert (final.rank, final.final) == (4, True)


def test_the_trainer_is_watched_too_but_not_while_it_waits_for_a_device() -> None:
    watched = Watched()
    watched.after(0, slice(None))
    assert [one.role for one in watched.after(101, [1, 2, 3, 4])] == [Role.TRAINER]
    watched.set("phase", Phase.WAITING, 0)
    assert watched.after(1000, [1, 2, 3, 4]) == []
    watched.set("phase", Phase.SAVING, 0)
    watched.after(0, 0)
    assert [one.final for one in watched.after(1000, [1, 2, 3, 4])] == [False]


def test_clocks_of_other_hosts_do_not_matter_nor_does_who_has_ended() -> None:
    watched = Watched()
    for beat in range(30):
        watched.set("heartbeat", 1e9 - beat, 3)  # a clock that runs backwards
        watched.set("ended", 1.0, 4)
        watched.after(10, [0, 1, 2])
    assert watched.found == []


def test_before_its_first_sign_of_life_a_process_has_the_time_of_a_start() -> None:
    watched = Watched()
    watched.after(0, [0, 1, 2, 3])
    for _ in range(11):
        watched.after(50, [0, 1, 2, 3])
    assert [(one.rank, one.final) for one in watched.found] == [(4, False)]
    assert not watched.silence.has_started(4)
    assert [(one.rank, one.final) for one in watched.after(60, [0, 1, 2, 3])] == [(4, True)]


def test_a_process_that_was_started_again_starts_anew() -> None:
    watched = Watched()
    watched.after(0, slice(None))
    assert [one.final for one in watched.after(101, [0, 1, 2, 3])] == [True]
    watched.silence.restarted(4)
    assert watched.after(50, [0, 1, 2, 3]) == []
    watched.after(1, slice(None))
    assert [one.final for one in watched.after(100, [0, 1, 2, 3])] == [True]


def test_a_local_rollout_that_hangs_is_started_again_and_the_run_ends_well(tmp_path: Path) -> None:
    kwargs = f"env.kwargs={{hang_at = 300, hung = '{tmp_path / 'hung'}'}}"
    done = forked(*TINY, *HANGS, *settings(f"run.dir={tmp_path / 'run'}", kwargs, "run.processes=1"))
    assert done.returncode == 0, done.stderr
    assert "(1 of 3 times in a row)" in done.stderr
    assert "run.max_env_steps reached" in done.stdout
    with Run(tmp_path / "run") as run:
        assert any("was started again" in text for text in run.events(kinds=["alarm"])["text"])
        steps = run.series(["env_steps"])["env_steps"]
        assert (np.diff(steps[np.isfinite(steps)]) >= 0).all()
    assert segments_of(tmp_path / "run") == []


@pytest.mark.long
def test_under_mpirun_the_job_ends_saved_with_one_message(tmp_path: Path) -> None:
    hangs = (*HANGS, *settings("env.kwargs={hang_at = 400}", "rollout.restarts=0"))
    done = mpirun(4, *TINY, *hangs, *settings(f"run.dir={tmp_path / 'run'}"))
    assert done.returncode != 0
    assert done.stderr.count("(run.silence_limit)") == 1, done.stderr
    assert any((tmp_path / "run" / "checkpoints").glob("0*"))
    went_on = forked("--resume", str(tmp_path / "run"), "--set", "env.kwargs={hang_at = -1}")
    assert went_on.returncode == 0, went_on.stderr
