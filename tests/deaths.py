"""What runs bear while their processes die: `python -m tests.deaths --part session --seconds 900`.

    session  one job under plain mpirun, three groups of ranks: kills of rollouts, the evaluator, the trainer, and of
             the keepers of other groups than the trainer's
    hosts    the same on eight hosts, emulated by network namespaces (root)
    relays   --jobs jobs under mpirun --with-ft ulfm, each until all its relays but the trainer's host's are killed
    cut      a job on emulated hosts for each scheme, --with-ft ulfm: the link of one host is down for a minute

Each victim is drawn among all living processes of the roles, alike; the time between two deaths is --every seconds on
average. Environments are CartPole with a step of one millisecond, so that the machine's speed decides little."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.distribution import cluster
from benchmarks.harness import arguments, mpi_environment, mpirun, print_rows, run_parts, setting_words
from ddrl.core import plugins
from ddrl.core.errors import DdrlError
from ddrl.core.roles import Role
from ddrl.telemetry import Run, run_status
from ddrl.telemetry.summary import LEDGER, accounts
from ddrl.testing.chaos import end_by, group_without_memory, processes_of

MEMBERS = ("rollout", "evaluator", "trainer")
HANG = 60.0  # [s] without a step or an update
START_LIMIT = 300.0  # [s] until the first update
END_LIMIT = 120.0  # [s]
ANSWER_LIMIT = 15.0  # [s]
LOOK_PERIOD = 0.25  # [s]
CUT_HOSTS = 4
HOSTS = 8  # of part hosts
WAYS = ("kill", "stop", "oom")
DOWN = 60.0  # [s] without a link
UPDATES_AFTER = 200  # a job's last death
SETTINGS = (
    "env.id=tests.deaths:slow_cartpole",
    "env.num_envs=4",
    "evaluation.period=2000",
    "evaluation.episodes=4",
    "evaluation.confirm_episodes=0",
    "rollout.restarts=1000",
    "run.checkpoint_seconds=10",
    "run.silence_limit=20",
)
ENDLESS = ("run.target_return=inf", "run.max_env_steps=1000000000", "replay.samples_per_insert=8")
STOP = f"""
import contextlib, sys
from ddrl.core.errors import DdrlError
from ddrl.telemetry import attach
with contextlib.suppress(DdrlError), attach(sys.argv[1], timeout={ANSWER_LIMIT}) as control:
    control.stop()
"""


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A step takes a while [s]."""

    def __init__(self, env: gymnasium.Env[Any, Any], pause: float) -> None:
        super().__init__(env)
        self._pause = pause

    def step(self, action: Any) -> Any:
        """One step."""
        time.sleep(self._pause)
        return self.env.step(action)


def slow_cartpole(pause: float = 1e-3) -> gymnasium.Env[Any, Any]:
    """CartPole whose step takes so long [s]."""
    return Slow(gymnasium.make("CartPole-v1"), pause)


class Job:
    """A run that is killed process by process. Use as a context, which ends it."""

    def __init__(self, launcher: Sequence[str], folder: Path, *settings: str, seed: int = 0) -> None:
        self.path = folder / "run"
        words = setting_words(f"run.dir={self.path}", *SETTINGS, *settings)
        self._log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [*launcher, "cartpole", *words],
            env=mpi_environment(PYTHON=sys.executable, OMP_NUM_THREADS="1"),
            stdout=self._log,
            stderr=self._log,
            stdin=subprocess.DEVNULL,
        )
        self.beside_trainer: Sequence[str] = ()  # what begins a command that runs on the trainer's host
        self.killed: Counter[str] = Counter()  # by role and way
        self.longest = 0.0  # [s] without a step or an update
        self._rng = random.Random(seed)
        self._progress = -1.0
        self._moved_at = time.monotonic()

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def counts(self) -> tuple[float, float]:
        """Steps that the trainer has recorded, and its updates."""
        with contextlib.suppress(DdrlError), Run(self.path) as run:
            table = run.latest()
            if len(table):
                trainer = table.column("role")[-1] == list(Role).index(Role.TRAINER)
                steps, updates = (np.nansum(table.column(name)[-1][trainer]) for name in ("env_steps", "updates"))
                return float(steps), float(updates)
        return 0.0, 0.0

    def learns(self) -> None:
        """Until the first update."""
        begun = time.monotonic()
        while not self.counts()[1]:
            if self.process.poll() is not None or time.monotonic() - begun > START_LIMIT:
                raise SystemExit(f"the run has not begun: {self.said()[-2000:]}")
            time.sleep(LOOK_PERIOD)
        self._moved_at = time.monotonic()

    def torment(
        self, seconds: float, every: float, roles: Sequence[str], ways: Sequence[str], kills: float = math.inf
    ) -> None:
        """Kill processes for so long, so many, or until the run ends; every 0: none."""
        end = time.monotonic() + seconds
        next_kill = time.monotonic() + every * self._rng.uniform(0.5, 1.5)
        with contextlib.ExitStack() as stack:
            group = stack.enter_context(group_without_memory()) if every and "oom" in ways else None
            while time.monotonic() < end and self.process.poll() is None and self.killed.total() < kills:
                time.sleep(LOOK_PERIOD)
                self._look()
                if not every or time.monotonic() < next_kill or run_status(self.path).state != "running":
                    continue
                run_id = json.loads((self.path / "run.json").read_text())["run_id"]  # of the newest job
                victims = [one for one in processes_of(run_id) if one.role in roles]
                if victims:
                    next_kill = time.monotonic() + every * self._rng.uniform(0.5, 1.5)
                    victim = self._rng.choice(victims)
                    with contextlib.suppress(ProcessLookupError):
                        self.killed[f"{victim.role} {end_by(self._rng.choice(ways), victim, group)}"] += 1

    def learns_on(self, updates: float) -> None:
        """Until so many further updates, or nothing has moved for HANG seconds."""
        wanted = self.counts()[1] + updates
        self._moved_at = time.monotonic()
        while self.process.poll() is None and self.longest <= HANG and self.counts()[1] < wanted:
            time.sleep(LOOK_PERIOD)
            self._look()

    def _look(self) -> None:
        now = time.monotonic()
        steps, updates = self.counts()
        if steps + updates != self._progress:
            self._progress = steps + updates
            self._moved_at = now
        self.longest = max(self.longest, now - self._moved_at)

    def steps_by_host(self) -> dict[int, float]:
        """Steps that the rollouts of each host have reported."""
        with Run(self.path) as run:
            table = run.latest()
        rollouts = table.column("role")[-1] == list(Role).index(Role.ROLLOUT)
        hosts, steps = (table.column(name)[-1][rollouts] for name in ("host", "env_steps"))
        return {int(host): float(np.nansum(steps[hosts == host])) for host in np.unique(hosts)}

    def seconds_to_newer_version(self, host: int) -> float:
        """Until all processes of a host act with a version that is newer than any of now; infinite after END_LIMIT."""
        begun = time.monotonic()
        newest = math.inf
        while self.process.poll() is None and time.monotonic() - begun < END_LIMIT:
            with Run(self.path) as run:
                table = run.latest()
            versions = table.column("policy_version")[-1]
            if newest == math.inf:
                newest = float(np.nanmax(versions))
            elif np.nanmin(versions[table.column("host")[-1] == host]) > newest:
                return time.monotonic() - begun
            time.sleep(LOOK_PERIOD)
        return math.inf

    def said(self) -> str:
        """What it has printed."""
        return Path(self._log.name).read_text()

    def stop(self) -> dict[str, Any]:
        """End it as a user does, and say what became of it and of its rows."""
        deadline = time.monotonic() + END_LIMIT
        while self.process.poll() is None and time.monotonic() < deadline:
            # It may be lost with a trainer that was killed just before.
            subprocess.run([*self.beside_trainer, sys.executable, "-c", STOP, self.path], check=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(ANSWER_LIMIT)
        status = self.process.poll()
        with Run(self.path) as run:
            entry = run.snapshot(LEDGER)
            table = run.latest()
        assert entry is not None
        found = accounts(entry, table.values[-1])
        state = entry["state"]
        return {
            "status": status,
            "last_words": "" if status == 0 else self.said()[-3000:],
            "deaths": self.killed.total(),
            "killed": dict(sorted(self.killed.items())),
            "longest_standstill_seconds": self.longest,
            "hangs": int(self.longest > HANG or status is None),
            "versions_refused": int(np.nansum(table.column("checksum_failures"))),
            "accounts": len(found),
            "accounts_that_do_not_balance": [str(one) for one in found if one.missing],
            "rows_taken": state["rows_taken"],
            "rows_lost_with_trainers": state["rows_lost"],
        }


def session(options: argparse.Namespace) -> Any:
    """Kills under plain mpirun."""
    launcher = [*mpirun(options.ranks), sys.executable, "-m", "ddrl.run"]
    return _torment(options, launcher, (*MEMBERS, "keeper"))


def hosts(options: argparse.Namespace) -> Any:
    """The same on emulated hosts of two ranks each, and two more on the trainer's (root)."""
    if problem := cluster.available():
        raise SystemExit(problem)
    with cluster.made(["1gbit"] * HOSTS):
        ranks = [4] + [2] * (HOSTS - 1)
        launcher = cluster.mpirun([sys.executable, "-m", "ddrl.run"], ranks=ranks)
        options.ranks = sum(ranks)
        options.relays = 0
        return _torment(options, launcher, (*MEMBERS, "keeper"), beside_trainer=cluster.on_host(0))


def _torment(
    options: argparse.Namespace, launcher: Sequence[str], roles: Sequence[str], beside_trainer: Sequence[str] = ()
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        given = (
            f"cluster.relays={options.relays}",
            "replay.samples_per_insert=2",
            f"env.kwargs={{pause = {options.pause}}}",
        )
        with Job(launcher, Path(folder), *ENDLESS, *given) as job:
            job.beside_trainer = beside_trainer
            job.learns()
            begun = time.monotonic()
            job.torment(*((20.0, 5.0) if options.short else (options.seconds, options.every)), roles, WAYS)
            seconds = time.monotonic() - begun
            found = {"ranks": options.ranks, "relays": options.relays, "seconds": seconds, **job.stop()}
    print_rows([{name: str(value) for name, value in found.items()}])
    return found


def relays(options: argparse.Namespace) -> Any:
    """Jobs that lose one host after the other, each by the death of its relay, but the trainer's."""
    ranks = max(options.ranks, 4 * options.relays)  # the trainer's host has a rollout too
    launcher = [*mpirun(ranks), "--with-ft", "ulfm", sys.executable, "-m", "ddrl.run"]
    jobs: list[dict[str, Any]] = []
    for seed in range(1 if options.short else options.jobs):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            more = (f"cluster.relays={options.relays}", f"run.seed={seed}", "replay.samples_per_insert=2")
            with Job(launcher, Path(folder), *ENDLESS, *more, seed=seed) as job:
                job.learns()
                job.torment(options.seconds, options.every, ("relay",), ("kill",), options.relays - 1)
                job.learns_on(UPDATES_AFTER)
                jobs.append(job.stop())
        print(f"job {seed}: {jobs[-1]}", flush=True)
    return {
        "ranks": ranks,
        "relays": options.relays,
        "jobs": len(jobs),
        "deaths": sum(job["deaths"] for job in jobs),
        "hangs": sum(job["hangs"] for job in jobs),
        "ended_otherwise_than_asked": sum(job["status"] != 0 for job in jobs),
        "versions_refused": sum(job["versions_refused"] for job in jobs),
        "accounts_that_do_not_balance": [text for job in jobs for text in job["accounts_that_do_not_balance"]],
        "longest_standstill_seconds": [job["longest_standstill_seconds"] for job in jobs],
        "last_words": [job["last_words"] for job in jobs if job["status"] != 0],
    }


def cut(options: argparse.Namespace) -> Any:
    """What the job loses while a link is down, for each scheme: nothing but that host's steps of that time."""
    if problem := cluster.available():
        raise SystemExit(problem)
    found: dict[str, Any] = {}
    for scheme in list(plugins.names("ddrl.distribution.schemes"))[: 1 if options.short else None]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, cluster.made(["1gbit"] * CUT_HOSTS):
            launcher = cluster.mpirun([sys.executable, "-m", "ddrl.run"], ranks=[4] + [2] * (CUT_HOSTS - 1))
            more = (f"cluster.scheme={scheme}", "replay.samples_per_insert=2", "run.silence_limit=120")
            with Job([*launcher[:1], "--with-ft", "ulfm", *launcher[1:]], Path(folder), *ENDLESS, *more) as job:
                job.beside_trainer = cluster.on_host(0)
                job.learns()
                victim = CUT_HOSTS - 1
                seconds = [job.seconds_to_newer_version(victim)]
                before = job.steps_by_host()
                cluster.set_link(victim, "down")
                job.torment(5.0 if options.short else DOWN, 0.0, (), ())
                during = job.steps_by_host()
                cluster.set_link(victim, "up")
                seconds.append(job.seconds_to_newer_version(victim))
                found[scheme] = {
                    "acts_with_newer_before_seconds": seconds[0],
                    "acts_with_newer_after_seconds": seconds[1],
                    "steps_meanwhile": {host: during[host] - before[host] for host in before},
                    "left_out": "has died" in job.said(),
                    **job.stop(),
                }
        print(f"{scheme}: {found[scheme]}", flush=True)
    return found


def main() -> None:
    """Run the parts."""
    parser = arguments("deaths", __doc__ or "")
    parser.add_argument("--ranks", type=int, default=9)
    parser.add_argument("--relays", type=int, default=3, help="groups of ranks that act as hosts (%(default)s)")
    parser.add_argument("--seconds", type=float, default=900.0, help="of each run, at most (%(default)s)")
    parser.add_argument("--every", type=float, default=15.0, help="mean time between two deaths [s] (%(default)s)")
    parser.add_argument("--pause", type=float, default=1e-3, help="of an environment's step in sessions [s]")
    parser.add_argument("--jobs", type=int, default=50, help="of part relays (%(default)s)")
    run_parts(parser, {"session": session, "hosts": hosts, "relays": relays, "cut": cut})


if __name__ == "__main__":
    main()
