"""What runs bear while their processes die: `python -m benchmarks.run.deaths --part session --seconds 900`.

    session    one job under plain mpirun, three groups of ranks: kills of rollouts, the evaluator, the trainer, and of
               the keepers of other groups than the trainer's
    hosts      the same on --hosts hosts, emulated by network namespaces (root)
    kept       one job under `mpi_launch/local N --keep-alive`, kills of relays and keepers too
    relays     --jobs jobs under mpirun --with-ft ulfm, each until all its relays but the trainer's host's are killed
    cut        a job on emulated hosts for each scheme, --with-ft ulfm: the link of one host is down for --down seconds
    effective  env steps learned from a second, with kills over without, at the same time
    again      seconds from a kill to the next update of a trainer, and to the next step of a rollout
    solve      env steps of CartPole to 475, with kills over without, seed by seed at the same time
    cost       processor time of a run without deaths that can survive them, over one that cannot, in turn

Each victim is drawn among all living processes of the roles, alike; the time between two deaths is --every seconds on
average. Environments are CartPole with a step of one millisecond, so that the machine's speed decides little."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from benchmarks.distribution import cluster
from benchmarks.harness import ROOT, arguments, mpi_environment, mpirun, print_rows, ratio_of_pairs, run_parts
from ddrl.core import plugins
from ddrl.core.errors import DdrlError
from ddrl.core.roles import Role
from ddrl.run.topology import HostChannels
from ddrl.telemetry import Run, run_status
from ddrl.telemetry.summary import LEDGER, accounts
from ddrl.testing.chaos import end_by, group_without_memory, processes_of

MEMBERS = ("rollout", "evaluator", "trainer")
HANG = 60.0  # [s] without a step or an update
START_LIMIT = 300.0  # [s] until the first update
END_LIMIT = 120.0  # [s]
ANSWER_LIMIT = 15.0  # [s]
LOOK_PERIOD = 0.25  # [s]
COST_STEPS = 30_000
CUT_HOSTS = 4
UPDATES_AFTER = 200  # a job's last death
SETTINGS = (
    "env.id=benchmarks.run.deaths:slow_cartpole",
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


class Wide(gymnasium.Env[Any, Any]):
    """Observations of 28 KB, so that replay is large after few steps."""

    WIDTH = 7_168

    def __init__(self) -> None:
        self.observation_space = gymnasium.spaces.Box(-1.0, 1.0, (self.WIDTH,), np.float32)
        self.action_space = gymnasium.spaces.Discrete(2)
        self._observations = np.random.default_rng(0).uniform(-1.0, 1.0, (64, self.WIDTH)).astype(np.float32)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observations[0], {}

    def step(self, action: Any) -> Any:
        """One step of 200."""
        self._steps += 1
        return self._observations[self._steps % 64], 1.0, self._steps == 200, False, {}


class Job:
    """A run that is killed process by process. Use as a context, which ends it."""

    def __init__(self, launcher: Sequence[str], folder: Path, *settings: str, seed: int = 0) -> None:
        self.path = folder / "run"
        words = [word for text in (f"run.dir={self.path}", *SETTINGS, *settings) for word in ("--set", text)]
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
        self.again: list[float] = []  # [s] from each end of the job to the first update after it
        self._rng = random.Random(seed)
        self._progress = -1.0
        self._moved_at = time.monotonic()
        self._job_ended_at = 0.0

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

    def await_checkpoint_of(self, rows: int) -> dict[str, float]:
        """Wait for a checkpoint after so many steps: its bytes."""
        if not rows:
            return {}
        deadline = time.monotonic() + START_LIMIT + rows / 100
        while True:
            steps = [int(path.name) for path in (self.path / "checkpoints").glob("[0-9]*")]
            if steps and max(steps) >= rows:
                break
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"no checkpoint of {rows:,} steps: {self.said()[-2000:]}")
            time.sleep(LOOK_PERIOD)
        newest = self.path / "checkpoints" / f"{max(steps):012}"
        return {"checkpoint_bytes": sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())}

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
                if victims and not self._job_ended_at:
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
        if run_status(self.path).state not in ("running", "paused"):
            self._job_ended_at = self._job_ended_at or now
        if steps + updates != self._progress:
            self._progress = steps + updates
            self._moved_at = now
            if self._job_ended_at and run_status(self.path).state == "running":
                self.again.append(now - self._job_ended_at)
                self._job_ended_at = 0.0
        self.longest = max(self.longest, now - self._moved_at)

    def steps_to_target(self) -> float:
        """Of a run that has ended, those counted that were lost; infinite where it has not reached its target."""
        summary = self.summary()
        if "target_return" not in summary["reason"]:
            return math.inf
        return float(summary["env_steps"] + summary["steps_lost"])

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

    def summary(self) -> dict[str, Any]:
        """Of the run that has ended; no steps where it has left none, of which the log's end is printed."""
        path = self.path / "summary.json"
        if path.exists():
            return json.loads(path.read_text())
        print(self.said()[-3000:], flush=True)
        return {"env_steps": 0, "reason": ""}

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
            "jobs_started_again": len(self.again),
            "learning_again_seconds": self.again,
        }


def session(options: argparse.Namespace) -> Any:
    """Kills under plain mpirun."""
    launcher = [*mpirun(options.ranks), sys.executable, "-m", "ddrl.run"]
    return _torment(options, launcher, (*MEMBERS, "keeper"))


def hosts(options: argparse.Namespace) -> Any:
    """The same on emulated hosts of two ranks each, and two more on the trainer's (root)."""
    if problem := cluster.available():
        raise SystemExit(problem)
    with cluster.made(["1gbit"] * options.hosts):
        ranks = [4] + [2] * (options.hosts - 1)
        launcher = cluster.mpirun([sys.executable, "-m", "ddrl.run"], ranks=ranks)
        options.ranks = sum(ranks)
        options.relays = 0
        return _torment(options, launcher, (*MEMBERS, "keeper"), beside_trainer=cluster.on_host(0))


def kept(options: argparse.Namespace) -> Any:
    """Kills under a launcher that starts the job again, of relays and keepers too."""
    launcher = [str(ROOT / "mpi_launch" / "local"), str(options.ranks), "--keep-alive", "1000"]
    return _torment(options, launcher, (*MEMBERS, "relay", "first-relay", "keeper", "first-keeper"))


def _torment(
    options: argparse.Namespace, launcher: Sequence[str], roles: Sequence[str], beside_trainer: Sequence[str] = ()
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        given = (
            f"cluster.relays={options.relays}",
            f"run.checkpoint_seconds={options.checkpoint_seconds}",
            "replay.samples_per_insert=2",
            f"env.kwargs={{pause = {options.pause}}}",
        )
        with Job(launcher, Path(folder), *ENDLESS, *given) as job:
            job.beside_trainer = beside_trainer
            job.learns()
            begun = time.monotonic()
            job.torment(options.seconds, options.every, roles, options.how.split(","))
            seconds = time.monotonic() - begun
            found = {"ranks": options.ranks, "relays": options.relays, "seconds": seconds, **job.stop()}
    print_rows([{name: str(value) for name, value in found.items()}])
    return found


def relays(options: argparse.Namespace) -> Any:
    """Jobs that lose one host after the other, each by the death of its relay, but the trainer's."""
    ranks = max(options.ranks, 4 * options.relays)  # the trainer's host has a rollout too
    launcher = [*mpirun(ranks), "--with-ft", "ulfm", sys.executable, "-m", "ddrl.run"]
    jobs: list[dict[str, Any]] = []
    for seed in range(options.jobs):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            more = (f"cluster.relays={options.relays}", f"run.seed={seed}", "replay.samples_per_insert=2")
            with Job(launcher, Path(folder), *ENDLESS, *more, seed=seed) as job:
                job.learns()
                job.torment(options.seconds, options.every, ("relay",), ["kill"], options.relays - 1)
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
    for scheme in plugins.names("ddrl.distribution.schemes"):
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
                job.torment(options.down, 0.0, (), ())
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


def effective(options: argparse.Namespace) -> Any:
    """Steps learned from a second, with kills and without, at the same time, each side on a core of its own, which the
    next pair swaps."""
    pairs: list[dict[str, float]] = []
    deaths = 0

    def learn(side: str, core: int, seed: int) -> tuple[float, int]:
        launcher = ["taskset", "-c", str(core), sys.executable, "-m", "ddrl.run"]
        with (
            tempfile.TemporaryDirectory() as folder,
            Job(launcher, Path(folder), *ENDLESS, "run.processes=3", seed=seed) as job,
        ):
            job.learns()
            begun = time.monotonic()
            before = job.counts()[0]
            job.torment(options.seconds, options.every if side == "kills" else 0.0, MEMBERS, ["kill"])
            seconds = time.monotonic() - begun
            job.stop()
            steps = job.summary()["env_steps"]  # a trainer's own counter begins with its process
            return (steps - before) / seconds, job.killed.total()

    for turn, found in _at_once(learn, options.pairs_of_runs):
        deaths += found["kills"][1]
        pairs.append({side: rate for side, (rate, _) in found.items()})
        print(
            f"pair {turn}: {pairs[-1]['kills']:.0f} steps/s with kills, {pairs[-1]['without']:.0f} without", flush=True
        )
    ratio = ratio_of_pairs([(pair["kills"], pair["without"]) for pair in pairs])
    return {"seconds": options.seconds, "every": options.every, "deaths": deaths, "pairs": pairs, "ratio": ratio}


def _at_once(
    learn: Callable[[str, int, int], tuple[float, int]], pairs: int
) -> Iterator[tuple[int, dict[str, tuple[float, int]]]]:
    """What `learn(side, core, turn)` finds for both sides at the same time, turn by turn."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ThreadPoolExecutor(2) as pool:
        for turn in range(pairs):
            there = cores[:: -1 if turn % 2 else 1]
            at_once = {
                side: pool.submit(learn, side, core, turn)
                for side, core in zip(("kills", "without"), there, strict=True)
            }
            yield turn, {side: each.result() for side, each in at_once.items()}


def again(options: argparse.Namespace) -> Any:
    """Seconds from a kill to the next update of a trainer, and to the next step of a rollout, as their counters say;
    with --gigabytes, once replay holds so much and a checkpoint has it."""
    seconds: dict[str, list[float]] = {"trainer": [], "rollout": []}
    rows = round(options.gigabytes * 1e9 / (4 * Wide.WIDTH))
    wide = ("env.id=benchmarks.run.deaths:Wide", f"replay.capacity={rows}", "replay.samples_per_insert=0.2")
    wide += ("evaluation.period=0", f"run.checkpoint_seconds={options.checkpoint_seconds}")
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "ddrl.run"]
        with Job(launcher, Path(folder), *ENDLESS, "run.processes=2", *wide[: len(wide) if rows else 0]) as job:
            job.learns()
            job_id = json.loads((job.path / "run.json").read_text())["run_id"]
            channels = HostChannels.attach(job_id, 0, 0.0)
            saved = job.await_checkpoint_of(rows)
            for turn in range(2 * options.pairs_of_runs):
                role, column = (("trainer", "updates"), ("rollout", "env_steps"))[turn % 2]
                victim = next(one for one in processes_of(job_id) if one.role == role)
                row = channels.counters.row(int(victim.name.split()[1]))
                end_by("kill", victim, None)
                begun = time.monotonic()
                while row["pid"].value == victim.pid or np.isnan(row["pid"].value):
                    time.sleep(1e-3)
                before = float(np.nan_to_num(row[column].value)) if role == "rollout" else 0.0
                while not row[column].value > before:
                    time.sleep(1e-3)
                seconds[role].append(time.monotonic() - begun)
                print(f"{role}: {seconds[role][-1]:.2f} s", flush=True)
                time.sleep(options.every)
            channels.close()
            job.stop()
    medians = {f"{role}_median": statistics.median(found) for role, found in seconds.items()}
    print(medians, {f"{role}_most": max(found) for role, found in seconds.items()}, flush=True)
    return {"gigabytes": options.gigabytes, **saved, "every": options.every, "seconds": seconds, **medians}


def solve(options: argparse.Namespace) -> Any:
    """Steps to 475, those counted that were lost, with kills and without, seed by seed at the same time, each side on a
    core of its own, which the next seed swaps."""
    steps: dict[str, list[float]] = {"kills": [], "without": []}
    deaths: list[int] = []

    def learn(side: str, core: int, seed: int) -> tuple[float, int]:
        launcher = ["taskset", "-c", str(core), sys.executable, "-m", "ddrl.run"]
        more = ("run.target_return=475", "evaluation.period=1000", "evaluation.episodes=20", "run.processes=2")
        with (
            tempfile.TemporaryDirectory() as folder,
            Job(launcher, Path(folder), *more, f"run.seed={seed}", seed=seed) as job,
        ):
            job.learns()
            job.torment(options.seconds, options.every if side == "kills" else 0.0, MEMBERS, ["kill"])
            if job.process.poll() is None:
                job.process.send_signal(signal.SIGINT)
            job.process.wait(END_LIMIT)
            return job.steps_to_target(), job.killed.total()

    for seed, found in _at_once(learn, options.pairs_of_runs):
        for side, (taken, _) in found.items():
            steps[side].append(taken)
        deaths.append(found["kills"][1])
        words = ", ".join(f"{side}: {taken:,.0f} env steps" for side, (taken, _) in found.items())
        print(f"seed {seed}, {words}, {deaths[-1]} deaths", flush=True)
    medians = {side: statistics.median(found) for side, found in steps.items()}
    return {
        "steps": steps,
        "deaths": deaths,
        "solved": {side: int(np.isfinite(found).sum()) for side, found in steps.items()},
        "ratio_of_medians": medians["kills"] / medians["without"],
        "interval": interval(steps["kills"], steps["without"]),
    }


def cost(options: argparse.Namespace) -> Any:
    """Processor time of so many env steps of plain CartPole, all processes, with and without what surviving needs: a
    checkpoint each 10 s, and processes that are started again."""
    sides = {
        "survives": ("run.checkpoint_seconds=10",),
        "does not": ("run.checkpoint_seconds=0", "rollout.restarts=0"),
    }
    common = ("env.num_envs=8", "evaluation.period=0", "run.target_return=inf", f"run.max_env_steps={COST_STEPS}")
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(options.pairs_of_runs):
        for side in sorted(sides, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as folder:
                settings = (*common, *sides[side], f"run.dir={folder}/run", f"run.seed={turn}", "run.processes=1")
                words = [word for text in settings for word in ("--set", text)]
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                command = [sys.executable, "-m", "ddrl.run", "cartpole", *words]
                environment = mpi_environment(OMP_NUM_THREADS="1")
                subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds[side].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
            print(f"{side}: {seconds[side][-1]:.2f} s", flush=True)
    ratio = ratio_of_pairs(list(zip(seconds["survives"], seconds["does not"], strict=True)))
    return {"env_steps": COST_STEPS, "processor_seconds": seconds, "ratio": ratio}


def interval(kills: Sequence[float], without: Sequence[float]) -> list[float]:
    """95 % of the ratio of medians (bootstrap over the runs of each side)."""
    rng = np.random.default_rng(0)
    draws = [np.median(rng.choice(side, (10_000, len(side))), axis=1) for side in (kills, without)]
    return np.quantile(draws[0] / draws[1], [0.025, 0.975]).tolist()


def main() -> None:
    """Run the parts."""
    parser = arguments("deaths", __doc__ or "")
    parser.add_argument("--ranks", type=int, default=9)
    parser.add_argument("--relays", type=int, default=3, help="groups of ranks that act as hosts (%(default)s)")
    parser.add_argument("--seconds", type=float, default=900.0, help="of each run, at most (%(default)s)")
    parser.add_argument("--every", type=float, default=15.0, help="mean time between two deaths [s] (%(default)s)")
    parser.add_argument("--how", default="kill,stop,oom", help="ways of dying in sessions (%(default)s)")
    parser.add_argument("--pause", type=float, default=1e-3, help="of an environment's step in sessions [s]")
    parser.add_argument("--hosts", type=int, default=8, help="emulated ones (%(default)s)")
    parser.add_argument("--down", type=float, default=60.0, help="seconds without a link in part cut (%(default)s)")
    parser.add_argument("--jobs", type=int, default=50, help="of part relays (%(default)s)")
    parser.add_argument("--checkpoint-seconds", type=float, default=10.0)
    parser.add_argument("--gigabytes", type=float, default=0.0, help="that replay holds in part again (CartPole's)")
    parser.add_argument("--pairs-of-runs", type=int, default=3)
    run_parts(
        parser,
        {
            "session": session,
            "hosts": hosts,
            "kept": kept,
            "relays": relays,
            "cut": cut,
            "effective": effective,
            "again": again,
            "solve": solve,
            "cost": cost,
        },
    )


if __name__ == "__main__":
    main()
