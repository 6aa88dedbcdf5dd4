"""Checkpoints: everything that the trainer needs to continue, whole or not at all.

    RUN/checkpoints/<env steps>/learner.safetensors   parameters, targets, optimizer
                                environments.msgpack  what environments keep between episodes, where they do
                                replay.snapshot       records and selectors (or trajectories.npy), and with
                                replay.snapshot.1 ... run.checkpoint_seconds what has changed since, file by file
                                state.json            counts, live settings, digests of the files; written last

A checkpoint is written under a temporary name and renamed when it is complete, so a run killed at any moment leaves the
older ones intact; so does a disk that is full. The newest whole one is taken; what is torn or foreign is refused by
name. state.json has a checksum of its own values: a changed count is damage as much as a changed tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import msgspec
import numpy as np

from ddrl.acting.policy_file import LONGEST, MANIFEST, ActingModel, load_policy, save_policy
from ddrl.core.errors import CheckpointError, RunDirError, shortened
from ddrl.core.files import (
    MAX_ARRAYS,
    MAX_DOCUMENT,
    MAX_NAME,
    digest_of_file,
    is_full_disk,
    read_regular,
    refuse_links,
    sync,
    write_atomically,
    write_json,
)
from ddrl.core.metrics import Phase
from ddrl.core.roles import Evaluation, Returns
from ddrl.core.settings import config_to_toml
from ddrl.run.directory import Disk, RunDirectory, sweep_unfinished
from ddrl.telemetry.store import run_id_of

if TYPE_CHECKING:
    from ddrl.run.topology import Topology
    from ddrl.run.training import Training

FORMAT = 3
STATE = "state.json"
LEARNER = "learner.safetensors"
ENVIRONMENTS = "environments.msgpack"
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]


class TrainingState(msgspec.Struct, forbid_unknown_fields=True):
    """What a checkpoint keeps of training itself."""

    env_steps: Count = 0
    updates: Count = 0
    samples: Count = 0
    policy_version: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)] = -1
    wall_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    cuts: Count = 0  # checkpoints taken; each one cuts running episodes and seeds the next ones
    # What became of rows, over all jobs of the run (ddrl.telemetry.summary); env_steps counts the steps recorded.
    rows_taken: Count = 0  # out of lanes
    rows_ended: Count = 0  # of these: recorded ends of episodes
    rows_too_old: Count = 0  # left out for rollout.max_policy_lag
    rows_beyond: Count = 0  # after run.max_env_steps
    rows_lost: Count = 0  # taken after the last checkpoint of a trainer that has died
    rows_dropped: Count = 0  # of a round that a collector has not finished
    rows_left: Count = 0  # written to a lane, but never taken: under way when a job ended


class LiveSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings changed from outside during a run (`telemetry.control.SETTABLE`), each by its name without its section;
    None: as configured. Checkpoints keep them."""

    lr: Annotated[float, msgspec.Meta(ge=0)] | None = None
    epsilon: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    samples_per_insert: Annotated[float, msgspec.Meta(gt=0)] | None = None
    scheme: str | None = None
    processes: Annotated[int, msgspec.Meta(ge=1)] | None = None


class State(msgspec.Struct, forbid_unknown_fields=True):
    """state.json, but for its format and checksum."""

    digests: dict[str, str]  # of the other files, by name
    training: TrainingState
    live: LiveSettings
    source: dict[str, Any]
    layout: Name
    env_id: Name
    algorithm: Name
    run_id: Name = ""  # of the run that wrote it; neither it nor the settings in those of earlier versions
    settings: str | None = None  # a whole config.toml


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, verified."""

    path: Path
    state: State

    @property
    def env_steps(self) -> int:
        """Environment steps done when it was written."""
        return self.state.training.env_steps

    def states(self) -> bytes:
        """What the environments kept between episodes; b"": nothing."""
        if ENVIRONMENTS not in self.state.digests:
            return b""
        return read_regular(self.path / ENVIRONMENTS, MAX_ARRAYS)


KEPT_CHECKPOINTS = 3  # the newest of a run


@dataclass(frozen=True)
class TaskRecords:
    """Where a task's records are kept, and the checkpoint that it resumes from. same_job: the trainer has died, and
    another one continues in its place."""

    directory: RunDirectory
    resume: Checkpoint | None = None
    same_job: bool = False


class Records(msgspec.Struct, tag=True):
    """Where the trainer keeps the run's records; the descriptor of the run's lock travels beside it. resume: folder and
    state of the checkpoint to go on from; has_collectors: learning goes in rounds, and the descriptor of the socket
    that orders collectors travels beside it, too. same_job: a trainer before this one has died; it resumes from the
    newest checkpoint."""

    directory: str
    resume: tuple[str, State] | None
    has_lock: bool = False
    has_collectors: bool = False
    same_job: bool = False


def write_checkpoint(
    folder: Path,
    env_steps: int,
    state: dict[str, Any],
    write: Callable[[Path], object],
    keep: int = KEPT_CHECKPOINTS,
    digests: dict[tuple[int, int, int], str] | None = None,
) -> Path:
    """Write a checkpoint and drop all but the `keep` newest.

    `write` writes the checkpoint's files into the folder it is given. `state` must be JSON. `digests`: kept by the
    caller from one checkpoint to the next, so that linked files are read once. Raises RunDirError where
    the disk refuses: what was written is removed, and older checkpoints, one of the same step included, stay."""
    final = folder / f"{env_steps:012d}"
    temporary = folder / f".{env_steps:012d}.{os.getpid()}"
    replaced = folder / f".{env_steps:012d}.replaced"
    refuse_links([folder])
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        files = {path.name: path.stat() for path in sorted(temporary.iterdir())}
        keys = {name: (found.st_ino, found.st_size, found.st_mtime_ns) for name, found in files.items()}
        known = {} if digests is None else digests
        for name in [name for name, key in keys.items() if key not in known]:
            sync(temporary / name)
            known[keys[name]] = digest_of_file(temporary / name)
        for key in known.keys() - keys.values():
            del known[key]
        document = {**state, "digests": {name: known[key] for name, key in keys.items()}}
        write_json(temporary / STATE, {"format": FORMAT, "checksum": _checksum(document), **document})
        if final.exists():
            final.rename(replaced)  # killed here: the next start renames it back (directory.sweep_unfinished)
        temporary.rename(final)
        sync(folder)
    except (OSError, CheckpointError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if replaced.exists() and not final.exists():
            replaced.rename(final)
        reason = (error.strerror or error) if isinstance(error, OSError) else error
        rest = "older ones are untouched: free some space, or change permissions"
        if not folder.is_dir():
            rest = "the folder of checkpoints is gone, and what was in it: make it anew"
        raise RunDirError(f"the checkpoint {final} cannot be written: {reason}; {rest}") from None
    shutil.rmtree(replaced, ignore_errors=True)
    for old in _complete(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def newest_checkpoint(folder: Path) -> Checkpoint:
    """The newest checkpoint, verified; CheckpointError if there is none or it is damaged."""
    return read_checkpoint(_newest(folder))


def newest_state(folder: Path) -> State:
    """What state.json of the newest checkpoint says; its other files are not read. CheckpointError as
    `newest_checkpoint`."""
    path = _newest(folder)
    return read_state(path, f"delete {path} to use the one before it")


def _newest(folder: Path) -> Path:
    found = _complete(folder)
    if not found:
        raise CheckpointError(
            f"there is no checkpoint in {folder}: the run stopped before its first one; start a new run"
        )
    return found[-1]


def take_over(directory: RunDirectory) -> TaskRecords:
    """The records of a job whose trainer has died, for the next one: from the newest checkpoint, if there is one."""
    sweep_unfinished(directory)
    found = _complete(directory.checkpoints)
    return TaskRecords(directory, read_checkpoint(found[-1]) if found else None, same_job=True)


def read_checkpoint(path: Path) -> Checkpoint:
    """Verify one checkpoint against its digests."""
    advice = f"delete {path} to resume from the one before it"
    damage = f"the checkpoint {path} is damaged"
    state = read_state(path, advice)
    if state.training.env_steps != int(path.name):
        raise CheckpointError(
            f"{damage}: it was written after {state.training.env_steps} environment steps, not {int(path.name)}: "
            f"it was renamed; {advice}"
        )
    for name, digest in state.digests.items():
        if name != Path(name).name:
            raise CheckpointError(f"{damage}: {STATE} names a file outside of it ({shortened(name)}); {advice}")
        try:
            actual = digest_of_file(path / name)
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint {path} is incomplete: {name} cannot be read ({error.strerror or error}); {advice}"
            ) from None
        if actual != digest:
            raise CheckpointError(f"{damage}: {name} is not what was written (its digest differs); {advice}")
    return Checkpoint(path, state)


def newest_settings(folder: Path) -> str | None:
    """The settings that the newest checkpoint holds; None where there is none, or an earlier version wrote it."""
    for path in reversed(_complete(folder)):
        try:
            return read_state(path, "").settings
        except CheckpointError:
            continue
    return None


def read_state(path: Path, advice: str) -> State:
    """What state.json of a checkpoint says; CheckpointError, with the advice given, unless it is whole."""
    damage = f"the checkpoint {path} is damaged"
    try:
        document: Any = json.loads(read_regular(path / STATE, MAX_DOCUMENT))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{damage}: {STATE} cannot be read ({shortened(error)}); {advice}") from None
    state = cast(dict[str, Any], document) if isinstance(document, dict) else {}
    written = state.pop("format", None)
    if written != FORMAT:
        raise CheckpointError(
            f"the checkpoint {path} has format {str(written)[:40]}, this ddrl reads format {FORMAT}: another version "
            f"wrote it, or it is damaged; {advice}"
        )
    if state.pop("checksum", None) != _checksum(state):
        raise CheckpointError(f"{damage}: {STATE} is not what was written (its checksum differs); {advice}")
    try:
        return msgspec.convert(state, State)
    except (msgspec.ValidationError, RecursionError) as error:
        raise CheckpointError(f"{damage}: {STATE} does not fit ({shortened(error)}); {advice}") from None


_STEPS = re.compile(r"[0-9]{1,18}")


def _complete(folder: Path) -> list[Path]:
    """Checkpoints by age, oldest first; unfinished ones have a dot in front."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and _STEPS.fullmatch(path.name))


def _checksum(document: dict[str, Any]) -> str:
    """Of the values, in whatever order and with whatever spaces they are written."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


class Checkpoints:
    """Takes the checkpoints of a training, in `folder`."""

    def __init__(
        self, folder: Path, training: Training, model: ActingModel, disk: Disk, states: Callable[[], bytes]
    ) -> None:
        self.disk = disk
        self._folder = folder
        self._training = training
        self._states = states
        self._layout = model.layout.digest
        self._run_id = run_id_of(folder.parent)
        self._digests: dict[tuple[int, int, int], str] = {}
        self._set_next()

    def due(self) -> bool:
        """Whether to take one now, between two draws."""
        steps = self._training.state.env_steps
        is_due = steps >= self.next_steps or (time.monotonic() >= self._next_time and steps > self._saved)
        return is_due and self.disk.due("checkpoint")

    def save(self) -> bool:
        """Take one; whether that worked. Where the disk refuses, it is tried again later."""
        return self.disk.attempt("checkpoint", self.write)

    def write(self) -> Path:
        """Take one. Running episodes continue; the resumed run begins new ones. RunDirError where the disk refuses."""
        begin = time.perf_counter()
        training = self._training
        counters = training.ends.counters
        counters["phase"].set(Phase.SAVING)
        training.state.wall_seconds = training.seconds
        training.state.cuts += 1
        state: dict[str, Any] = {
            "training": msgspec.structs.asdict(training.state),
            "live": msgspec.structs.asdict(training.live),
            "layout": self._layout,
            "env_id": training.config.env.id,
            "algorithm": training.config.learner.algorithm,
            "run_id": self._run_id,
            "settings": config_to_toml(training.config),
        }

        def write(folder: Path) -> None:
            training.learner.save(folder / LEARNER)
            state["source"] = training.source.save(folder)
            if kept := self._states():
                write_atomically(folder / ENVIRONMENTS, kept, sync=False)  # `write_checkpoint` waits for the disk

        try:
            path = self._write_with_room(
                partial(write_checkpoint, self._folder, training.state.env_steps, state, write, digests=self._digests)
            )
        finally:
            counters["phase"].set(Phase.RUNNING)
            training.beat()
        self._set_next()
        counters["checkpoint_seconds"].add(time.perf_counter() - begin)
        self.disk.record_event("checkpoint", f"checkpoint {path.name}", env_steps=training.state.env_steps)
        return path

    def _write_with_room(self, write: Callable[[], Path]) -> Path:
        """Write a checkpoint; where it has no room, the oldest gives way, but never the last whole one."""
        while True:
            try:
                return write()
            except RunDirError as error:
                steps = self._training.state.env_steps
                older = [path for path in _complete(self._folder) if int(path.name) != steps]
                if len(older) < 2 or not is_full_disk(error):
                    raise
                shutil.rmtree(older[0], ignore_errors=True)
                if older[0].exists():
                    raise
                self.disk.notify(f"the newest checkpoint had no room: the oldest, {older[0].name}, was removed for it")

    def _set_next(self) -> None:
        run = self._training.config.run
        self._saved = self._training.state.env_steps
        period = run.checkpoint_period
        self.next_steps = (self._training.state.env_steps // period + 1) * period if period else math.inf
        self._next_time = time.monotonic() + run.checkpoint_seconds if run.checkpoint_seconds else math.inf


# -- the best policy ---------------------------------------------------------------------------------------------------


class BestPolicy:
    """Compares evaluations and keeps the best policy in the run directory `path`, from where it is read at any time.
    Its files say how good it is: a resumed run, from whatever checkpoint, never replaces it by a worse one."""

    def __init__(
        self, path: Path, topology: Topology, model: ActingModel, disk: Disk, states: Callable[[], bytes]
    ) -> None:
        """states: the newest of the environments."""
        self._path = path
        self._topology = topology
        self._model = model
        self._disk = disk
        self._unsaved: np.ndarray | None = None  # the best parameters, where the disk has refused them
        self.evaluation: Evaluation | None = None  # of the best policy so far; None: none was played
        self.target_reached = False
        self.worse_since = 0  # evaluations since the best one
        self.states = b""  # of the environments that the best policy acted in
        self._newest_states = states
        self._run_id = run_id_of(path)
        if (path / "policy.json").exists():
            self._read()

    def consider(self, evaluation: Evaluation, vector: np.ndarray) -> None:
        """Keep the acting parameters `vector` if no evaluation was better.

        run.target_return counts as reached once an evaluation and, where there is one, its confirmation both reach it.
        """
        reached = self._reaches(evaluation)
        self.worse_since += 1
        if self.evaluation is None or self._rank(evaluation) >= self._rank(self.evaluation):
            if self.evaluation is None or self._rank(evaluation) > self._rank(self.evaluation):
                self.worse_since = 0
            self.evaluation = evaluation
            self.states = self._newest_states()
            self._save(vector)
        self.target_reached = self.target_reached or reached

    def confirm(self, confirmed: Returns) -> None:
        """Note further episodes of the best policy."""
        assert self.evaluation is not None
        seen = self.evaluation
        self.evaluation = Evaluation(seen.policy_version, seen.env_steps, seen.played, confirmed)
        self._save(self.vector())

    def save_unjudged(self, vector: np.ndarray) -> None:
        """Where there was no evaluation, the last parameters stand in for the best."""
        if self.evaluation is None:
            self.states = self._newest_states()
            self._save(vector)

    def vector(self) -> np.ndarray:
        """The best policy's parameters, from its files unless the disk has refused them [nbytes]."""
        return load_policy(self._path).vector if self._unsaved is None else self._unsaved

    def save_again(self, *, now: bool = False) -> None:
        """Write what the disk has refused, now and then, or `now`."""
        if self._unsaved is not None and (now or self._disk.due("policy")):
            self._save(self._unsaved)

    def _rank(self, evaluation: Evaluation) -> tuple[bool, float]:
        return self._reaches(evaluation), evaluation.best.mean

    def _reaches(self, evaluation: Evaluation) -> bool:
        target = self._topology.config.run.target_return
        return min(evaluation.played.mean, evaluation.best.mean) >= target

    def _read(self) -> None:
        """What an earlier part of this run kept. A policy that is damaged or foreign is set aside: the checkpoint is
        whole without it."""
        try:
            saved = load_policy(self._path)
            if saved.model.layout != self._model.layout:
                raise CheckpointError(
                    f"the policy in {self._path} is of another network than the checkpoint's: move it away"
                )
            if saved.run_id not in ("", self._run_id):
                raise CheckpointError(
                    f"the policy in {self._path} is of the run {saved.run_id}, not of this one: move it away"
                )
            evaluation = Evaluation.from_json(saved.evaluation) if saved.evaluation else None
        except (CheckpointError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            odd = f"what {self._path / MANIFEST} says of its evaluation cannot be read"
            words = error if isinstance(error, CheckpointError) else odd
            aside = f"aside-{time.time_ns()}"
            for name in LONGEST:
                with contextlib.suppress(FileNotFoundError):
                    (self._path / name).rename(self._path / f"{name}.{aside}")
            self._disk.notify(f"{words}; it was set aside as policy.*.{aside}, and the best policy is sought anew")
            return
        self.states = saved.model.states
        env = self._topology.config.env
        if saved.evaluation and (saved.env.id, saved.env.kwargs) != (env.id, env.kwargs):
            self._disk.notify(
                f"the best policy was judged in env.id = {saved.env.id}, env.kwargs = {saved.env.kwargs}, not in this "
                "environment: the next evaluation begins a new best"
            )
        elif evaluation:
            self.evaluation = evaluation

    def _save(self, vector: np.ndarray) -> None:
        document = self.evaluation.to_json() if self.evaluation else {}
        vector = vector[: self._model.layout.nbytes]
        env = self._topology.config.env
        model = msgspec.structs.replace(self._model, states=self.states)
        written = self._disk.attempt(
            "policy",
            lambda: save_policy(self._path, model, vector, env=env, evaluation=document, run_id=self._run_id),
        )
        self._unsaved = None if written else np.array(vector)
