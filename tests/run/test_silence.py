"""An environment that hangs is noticed, said, and ended: nobody waits for ever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddrl.core.errors import JobFailed
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Role
from ddrl.run.silence import MAX_RESTARTS, Silence
from ddrl.telemetry import Run
from tests.run.launch import TINY, ddrl, mpirun, segments_of, settings

HANGS = settings("env.id=tests.run.environments:walk", "env.num_envs=1", "run.silence_limit=6")


class Watched:
    """A trainer, a relay, an evaluator and two rollouts, and a clock that stands until it is moved."""

    def __init__(self, limit: float = 100.0, restarts: bool = True) -> None:
        self.now = 50.0
        self.said: list[tuple[str, int]] = []
        self.restarted: list[int] = []
        self.table = np.full((5, len(COLUMNS)), np.nan)
        roles = (Role.TRAINER, Role.RELAY, Role.EVALUATOR, Role.ROLLOUT, Role.ROLLOUT)
        self.set("role", [list(Role).index(role) for role in roles])
        self.set("rank", range(5))
        self.set("host", 0)

        def restart(rank: int) -> bool:
            self.restarted.append(rank)
            return restarts

        self.silence = Silence(limit, lambda words, rank: self.said.append((words, rank)), restart, lambda: self.now)

    def set(self, name: str, values: object, rows: object = slice(None)) -> None:
        self.table[rows, COLUMNS.index(name)] = values  # type: ignore[index]

    def after(self, seconds: float, beating: object) -> None:
        self.now += seconds
        self.set("heartbeat", self.now, beating)
        self.silence.look(self.table)


def test_silence_is_said_once_and_then_ended_by_a_restart() -> None:
    watched = Watched()
    watched.after(0, slice(None))
    watched.after(1, slice(None))
    for _ in range(20):
        watched.after(4, [0, 1, 2, 3])
    assert [rank for _, rank in watched.said] == [4]
    assert "rank 4 (rollout of host 0) has shown no sign of life for 12 s" in watched.said[0][0]
    watched.after(20, [0, 1, 2, 3])
    assert watched.restarted == [4]
    assert "was started again (1 of 3 times)" in watched.said[-1][0]
    watched.after(4, slice(None))
    watched.after(50, slice(None))
    assert watched.restarted == [4]


def test_a_silent_relay_ends_the_run() -> None:
    watched = Watched(restarts=False)
    watched.after(0, slice(None))
    for _ in range(9):
        watched.after(10, [0, 2, 3, 4])
    with pytest.raises(JobFailed, match=r"rank 1 \(relay of host 0\).*it hangs, or its host"):
        watched.after(20, [0, 2, 3, 4])


def test_clocks_of_other_hosts_do_not_matter_nor_does_who_has_ended() -> None:
    watched = Watched()
    for beat in range(30):
        watched.set("heartbeat", 1e9 - beat, 3)  # a clock that runs backwards
        watched.set("ended", 1.0, 4)
        watched.after(10, [0, 1, 2])
    assert watched.said == []


def test_a_rank_that_comes_late_counts_from_when_it_came() -> None:
    watched = Watched()
    watched.set("role", np.nan, 4)
    watched.after(0, [0, 1, 2, 3])
    watched.after(500, [0, 1, 2, 3])
    watched.set("role", list(Role).index(Role.ROLLOUT), 4)
    watched.after(1, [0, 1, 2, 3])
    assert watched.said == []
    watched.after(50, [0, 1, 2, 3])
    assert watched.said == []
    watched.after(12, [0, 1, 2, 3])
    assert [rank for _, rank in watched.said] == [4]  # a tenth of the minutes that a start may take


def test_who_fell_silent_before_the_first_look_is_known_to_have_lived() -> None:
    watched = Watched()
    watched.after(0, slice(None))
    watched.after(101, [0, 1, 2, 3])
    assert watched.restarted == [4]


def test_the_run_ends_where_a_process_cannot_be_started_again_or_hangs_again_and_again() -> None:
    watched = Watched(restarts=False)
    watched.after(0, slice(None))
    watched.after(1, slice(None))
    with pytest.raises(JobFailed, match=r"rank 2 \(evaluator of host 0\) .* 100 s \(run.silence_limit\)"):
        watched.after(100, [0, 1, 3, 4])
    watched = Watched()
    watched.after(0, slice(None))
    for _ in range(MAX_RESTARTS):
        watched.after(1, slice(None))
        watched.after(101, [0, 1, 2, 3])
    watched.after(1, slice(None))
    with pytest.raises(JobFailed, match="no sign of life"):
        watched.after(101, [0, 1, 2, 3])
    assert watched.restarted == [4] * MAX_RESTARTS


def test_a_local_rollout_that_hangs_is_started_again_and_the_run_ends_well(tmp_path: Path) -> None:
    kwargs = f"env.kwargs={{hang_at = 300, hung = '{tmp_path / 'hung'}'}}"
    done = ddrl(*TINY, *HANGS, *settings(f"run.dir={tmp_path / 'run'}", kwargs, "run.processes=1"))
    assert done.returncode == 0, done.stderr
    assert "(1 of 3 times)" in done.stderr
    assert "run.max_env_steps reached" in done.stdout
    with Run(tmp_path / "run") as run:
        assert any("was started again" in text for text in run.events(kinds=["alarm"])["text"])
        steps = run.series(["env_steps"])["env_steps"]
        assert (np.diff(steps[np.isfinite(steps)]) >= 0).all()
    assert segments_of(tmp_path / "run") == []


def test_under_mpirun_the_job_ends_saved_with_one_message(tmp_path: Path) -> None:
    done = mpirun(4, *TINY, *HANGS, *settings(f"run.dir={tmp_path / 'run'}", "env.kwargs={hang_at = 400}"))
    assert done.returncode != 0
    assert done.stderr.count("(run.silence_limit)") == 1, done.stderr
    assert any((tmp_path / "run" / "checkpoints").glob("0*"))
    went_on = ddrl("--resume", str(tmp_path / "run"), "--set", "env.kwargs={hang_at = -1}")
    assert went_on.returncode == 0, went_on.stderr
