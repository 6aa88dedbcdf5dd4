"""What is checked and made before anything starts, on rank 0 alone: settings, environment, algorithm, extras, run
directory, checkpoint. Whatever can be refused is refused here, before any channel exists.
"""

from __future__ import annotations

import math
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ddrl import __version__
from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import (
    CheckpointError,
    ConfigError,
    DdrlError,
    EnvError,
    MissingExtraError,
    error_of,
    frame_of_stacks,
    plain_line,
)
from ddrl.core.plugins import check_trust, foreign_code, remember_trust, slice_module, use_code
from ddrl.core.roles import Assignment, Role
from ddrl.core.settings import apply_overrides, config_from_toml, config_tree
from ddrl.core.specs import Declaration, EnvSpec
from ddrl.run.checkpoint import KEPT_CHECKPOINTS, Checkpoint, TaskRecords, newest_checkpoint, newest_state
from ddrl.run.cli import Command
from ddrl.run.directory import RunDirectory, absolute, planned_path, working_directory
from ddrl.run.keeper import Keeper, Place, import_for_members
from ddrl.run.process import interrupts_held_back, name_process
from ddrl.run.topology import Made, Ranks, Topology, describe
from ddrl.telemetry.control import SETTABLE
from ddrl.telemetry.sinks import SINKS, sink_names

if TYPE_CHECKING:
    from ddrl.run.processes import Job

# -- banner ------------------------------------------------------------------------------------------------------------
# The first words of a run, within half a second of rank 0's start: what runs where, and how to watch it.
#
# Printed before MPI, the environment's package or torch is loaded, which takes seconds, with many ranks a minute. What
# cannot be read yet (a setting that is wrong, a directory that is none) is left to the checks that follow.


def planned_config(command: Command) -> Config:
    """The settings of the run that the command starts or resumes."""
    if command.resume is None:
        return command.config()
    return apply_overrides(RunDirectory.open(command.resume)[1], command.overrides)


def announce(command: Command, run_id: str, ranks: int) -> Path | None:
    """Print the banner; the directory that a new run is to have. `ranks`: those of mpirun, 0 without it."""
    try:
        config = planned_config(command)
        path = planned_path(config, run_id) if command.resume is None else absolute(command.resume)
        banner = _banner(command, config, path, ranks)
    except DdrlError:
        return None
    print(banner, file=sys.stderr, flush=True)
    if file := os.environ.get("DDRL_RUN_FILE"):  # of a launcher that starts the job again where it fails
        Path(file).write_text(str(path))
    return None if command.resume is not None else path


def _banner(command: Command, config: Config, path: Path, ranks: int) -> str:
    here = working_directory()
    shown = path.relative_to(here) if path.is_relative_to(here) else path
    if command.serial:
        processes = "one process, reproducible by run.seed"
    elif ranks:
        processes = f"{ranks} ranks under mpirun"
    else:
        processes = "local processes"
    verb = "go on with" if command.resume is not None else "train"
    what = plain_line(f"{config.env.id} by {config.learner.algorithm or 'dqn'}")
    dashboard = "python -m ddrl.dashboard"
    if path.parent != here / "runs":
        dashboard += f" {shlex.quote(str(shown.parent))}"
    neutral = ""
    if command.task is None and command.resume is None:
        neutral = (
            f"neutral settings: no task ships for {config.env.id}; see learner.lr, run.max_env_steps in --help, or "
            "name a "
            "task.toml\n"
        )
    return (
        f"ddrl {__version__}: {verb} {what}, {processes}\n"
        f"run:      {plain_line(str(shown))}\n"
        f"watch it: {plain_line(dashboard)}\n"
        f"{neutral}starting ..."
    )


# -- preparation -------------------------------------------------------------------------------------------------------

EPSILON_SCHEDULE = ("rollout.epsilon_start", "rollout.epsilon_end", "rollout.epsilon_decay_steps")
PROBE_PERIOD = 0.2  # [s] between two looks at the process that makes an environment


class _Probed(msgspec.Struct):
    spec: EnvSpec | None = None
    declaration: Declaration | None = None
    kind: str = ""  # class of the error
    text: str = ""


def describe_environment(config: Config) -> tuple[EnvSpec, Declaration]:
    """What the environment gives and takes, and what the algorithm needs; imports the user's code, but no torch."""
    from ddrl.envs import probe_spec
    from ddrl.learner import describe as describe_algorithm

    spec = probe_spec(config.env)
    return spec, describe_algorithm(config, spec)


def probe_in_fork(config: Config, meanwhile: Callable[[], object] = lambda: None) -> tuple[EnvSpec, Declaration]:
    """`describe_environment` in a fork, so that this process never imports the user's code. The same errors, and
    EnvError where it takes longer than run.start_limit; `meanwhile` is called once in PROBE_PERIOD."""
    answer = os.memfd_create("probe")

    def work() -> int:
        from ddrl.envs import probe_spec
        from ddrl.learner import describe as describe_algorithm

        name_process("ddrl probe")  # it is no rollout
        subject = f"env.id = {config.env.id}"
        try:
            spec = probe_spec(config.env)
            subject = f"learner.algorithm = {config.learner.algorithm}"
            found = _Probed(spec, describe_algorithm(config, spec))
        except DdrlError as error:
            found = _Probed(kind=type(error).__name__, text=str(error))
        except (Exception, SystemExit) as error:
            found = _Probed(kind="EnvError", text=describe(error, subject))
        os.write(answer, msgspec.msgpack.encode(found))
        return 0

    keeper = Keeper({0: Place(1, Role.ROLLOUT, work)})
    try:
        child = keeper.start(0)
        deadline = time.monotonic() + config.run.start_limit
        gone = keeper.look(0.0)
        while not gone:
            meanwhile()
            gone = keeper.look(PROBE_PERIOD)
            if not gone and time.monotonic() > deadline:
                asked = " or ".join(
                    f"{name} = {value}"
                    for name, value in (("env.id", config.env.id), ("learner.algorithm", config.learner.algorithm))
                    if value
                )
                limit = f"{config.run.start_limit:g} s (run.start_limit)"
                where = f"process {child.pid} on {socket.gethostname()}"
                stacks = child.stacks()
                print(stacks, file=sys.stderr, flush=True)
                raise EnvError(
                    f"{asked} has not said within {limit} what it needs: {where}{frame_of_stacks(stacks)}; its stacks "
                    "are above; raise run.start_limit where it takes so long"
                )
        _, ended = gone[0]
        data = os.pread(answer, os.fstat(answer).st_size, 0)
        if not data:
            print(ended.words, file=sys.stderr, flush=True)
            raise EnvError(
                f"env.id = {config.env.id}: the process that made one {ended.how}{frame_of_stacks(ended.words)}; "
                "what it "
                f"printed is above: try it by python -m ddrl.testing.conformance {config.env.id}"
            )
        found = msgspec.msgpack.decode(data, type=_Probed)
    finally:
        keeper.end(0.0)
        keeper.close()
        os.close(answer)
    if found.kind:
        raise error_of(found.kind, found.text)
    assert found.spec is not None
    assert found.declaration is not None
    return found.spec, found.declaration


Probe = Callable[[Config], tuple[EnvSpec, Declaration]]


class Preparation:
    """A command line turned into a run that can start."""

    def __init__(
        self, command: Command, run_id: str, path: Path | None = None, probe: Probe = describe_environment
    ) -> None:
        """`path`: the directory of a new run, where it has been announced; `probe`: asks the user's code."""
        self.run_id = run_id
        self._path = path
        self._probe = probe
        self._trust = command.trust
        self.resume: Checkpoint | None = None
        if command.resume is not None:
            self.directory, saved = RunDirectory.open(command.resume, claim=True)
            self.config = apply_overrides(saved, command.overrides)
            self._check_trust(command)
            self.resume = newest_checkpoint(self.directory.checkpoints)
            self._check_resume(self.resume, command.overrides)
        else:
            self.config = command.config()
        if command.serial and self.config.uses("pool"):
            raise ConfigError("--serial is one process: leave it out, or set pool.collectors = off")
        _require_packages(self.config)

    @cached_property
    def _probed(self) -> tuple[EnvSpec, Declaration]:
        from ddrl.learner.algorithm import with_algorithm

        probed = self._probe(self.config)
        self._unnamed = not self.config.learner.algorithm
        self.config = with_algorithm(self.config, probed[0])
        return probed

    @property
    def spec(self) -> EnvSpec:
        """What the environment gives and takes."""
        return self._probed[0]

    @property
    def declaration(self) -> Declaration:
        """What the algorithm needs of every process."""
        return self._probed[1]

    def topology(self, ranks: tuple[Assignment, ...], *, has_spare: bool = False) -> Topology:
        """All that processes must know, with these ranks; refuses settings of the cluster that cannot be used.
        has_spare: a keeper starts the trainer, and may have the next one ready."""
        from ddrl.distribution.schemes import check_cluster

        spec = self.spec  # asks the environment, on which the settings depend
        if self.config.learner.init and self.resume is None:
            check_init(self.config)
        self.config.check_source()
        if self.config.uses("pool"):
            self._check_rounds()
        if self.config.learner.nodes:
            nodes = slice_module("balance.nodes", "learner.nodes")
            nodes.check_nodes(self.config, self.declaration, ranks)
        topology = Topology(self.run_id, self.config, self.spec, self.declaration, ranks)
        if topology.area_columns and topology.hosts > 1:
            raise ConfigError(
                f"replay.source = {self.config.replay.source}: sample areas are shared memory of one host, and there "
                f"are {topology.hosts}; "
                "set replay.source = auto, or start everything on one host with cluster.relays = 0"
            )
        run = self._path if self.resume is None else self.directory.path
        path = run or planned_path(self.config, self.run_id)
        room = check_room(topology, path, has_spare=has_spare) if ranks else []
        lines = [*spec.notes, *check_cluster(self.config, max(topology.hosts - 1, 0)), *room]
        if self._unnamed and not spec.discrete:
            lines = [f"learner.algorithm = {self.config.learner.algorithm}: actions are continuous", *lines]
        if self.declaration.unread:
            names = ", ".join(self.declaration.unread)
            lines = [*lines, f"without effect with learner.algorithm = {self.config.learner.algorithm}: {names}"]
        for line in lines:
            print(f"ddrl: {line}", file=sys.stderr, flush=True)
        return topology

    def _check_rounds(self) -> None:
        if self.config.learner.nodes:
            raise ConfigError("pool.collectors: a task in rounds computes its gradients itself: set learner.nodes = 0")
        if self.config.replay.through_areas:
            raise ConfigError(
                f"pool.collectors send their rows through lanes: replay.source = {self.config.replay.source} has "
                "none; set auto"
            )
        if self.declaration.experience.source == "replay" and self.config.replay.samples_per_insert == 0:
            raise ConfigError(
                "pool.collectors: a round has no end where replay.samples_per_insert is 0: set how often a recorded "
                "transition is learned from"
            )

    def open_records(self) -> TaskRecords:
        """The run's directory, made here for a new run, and the checkpoint to resume from. The settings of a resumed
        run are written once the checkpoint has been read with them."""
        if self.resume is None:
            self.directory = RunDirectory.create(self.config, self.run_id, self._path)
            remember_trust(self.directory.path, foreign_code(config_tree(self.config), self.directory.path))
        return TaskRecords(self.directory, self.resume)

    def _check_trust(self, command: Command) -> None:
        """Before anything of the run is imported. What is set on the command line is the user's own choice."""
        run = self.directory.path
        settings = config_tree(self.config)
        code = foreign_code(settings, run)
        mine = {setting: name for setting, name in code.items() if _is_set(setting, command.overrides)}
        check_trust(run, {setting: code[setting] for setting in code.keys() - mine.keys()}, trust=command.trust)
        remember_trust(run, mine)
        use_code(run, mine.values())

    def _check_resume(self, checkpoint: Checkpoint, overrides: tuple[str, ...]) -> None:
        state = checkpoint.state
        run_id = self.directory.run_id
        if state.run_id not in ("", run_id):
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} is of the run {state.run_id}, this is the run {run_id}: delete "
                "it to resume from the one before it"
            )
        for name, mine in (("env.id", self.config.env.id), ("learner.algorithm", self.config.learner.algorithm)):
            theirs = getattr(state, name.replace("learner.", "").replace(".", "_"))
            if theirs != mine:
                raise ConfigError(
                    f"--set {name}={mine}: the checkpoint {checkpoint.path} belongs to {theirs}: leave it out, or "
                    "begin a new run"
                )
        scheme = {"cluster": {"scheme": state.live.scheme or ""}}
        check_trust(self.directory.path, foreign_code(scheme, self.directory.path), trust=self._trust)
        for override in overrides:  # what is set now comes before what was set during the run
            name = override.partition("=")[0].strip()
            for live in SETTABLE:
                if name == live or (live == "rollout.epsilon" and name in EPSILON_SCHEDULE):
                    setattr(state.live, live.partition(".")[2], None)


OF_NETWORKS = ("network", "hidden", "dueling", "normalize")  # settings of learner that networks are made by


def check_init(config: Config) -> None:
    """CheckpointError where learner.init names a run with other networks, as far as its settings say; its arrays are
    compared once there are networks."""
    where = f"learner.init = {config.learner.init}"
    try:
        state = newest_state(Path(config.learner.init) / "checkpoints")
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    if state.algorithm != config.learner.algorithm:
        raise CheckpointError(
            f"{where}: its checkpoint holds {state.algorithm}, and this run learns by {config.learner.algorithm}: "
            "name a run of the same algorithm"
        )
    try:
        theirs = config_from_toml(state.settings or "", where).learner
    except ConfigError:  # of another version
        return
    for name in OF_NETWORKS if state.settings else ():
        if getattr(theirs, name) != getattr(config.learner, name):
            raise CheckpointError(
                f"{where} was written for another network: learner.{name} = {getattr(theirs, name)} there, "
                f"{getattr(config.learner, name)} here; set the same"
            )


def _is_set(setting: str, overrides: tuple[str, ...]) -> bool:
    """Whether the command line sets the setting, or the table that it is in."""
    return any(f"{setting}.".startswith(f"{override.partition('=')[0].strip()}.") for override in overrides)


def _require_packages(config: Config) -> None:
    """MissingExtraError for a package that the settings need and that is not installed."""
    wanted = [("torch", "train", "training"), ("onnx", "train", "training")]
    sinks = sink_names(config.telemetry)
    for name in sinks:
        plugins.check_name("telemetry.sinks", SINKS, name)
    if "tensorboard" in sinks:
        wanted.append(("tensorboardX", "sinks", "telemetry.tensorboard = true"))
    if "prometheus" in sinks:
        wanted.append(("prometheus_client", "sinks", f"telemetry.prometheus_port = {config.telemetry.prometheus_port}"))
    for package, extra, purpose in wanted:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra, purpose)


Prepare = Callable[[Probe], Preparation]


def run_host(
    job: Job, prepare: Prepare, ranks_of: Callable[[Config], Ranks], made: Callable[[Made], object] = lambda made: None
) -> dict[str, Any] | None:
    """On the trainer's host, from the preparation to the end of training; the summary, None of a trainer that is a
    rank. The trainer imports torch meanwhile. ranks_of: the ranks of the job; made: called once the channels are there
    and the run's directory is."""
    import_for_members()
    preparation = prepare(lambda config: probe_in_fork(config, job.check_interrupts))
    preparation.declaration  # noqa: B018  (the environment is made while ranks still start)
    ranks = ranks_of(preparation.config)
    topology = preparation.topology(tuple(ranks.ranks), has_spare=job.has_trainer)
    records = preparation.open_records()
    on_host = [one.rank for one in topology.on_host(job.host)]
    job.keeper.folder = records.directory.path / "output"
    with interrupts_held_back():  # until the trainer has something to save
        job.check_interrupts()
        job.open(topology, [ranks.cores[rank] for rank in on_host if rank < len(ranks.cores)])
        message = job.hand_over(records)
    made(Made(topology.to_bytes(), message))
    return job.run() if job.has_trainer else None


# -- room ------------------------------------------------------------------------------------------------------------
# What a run will need of memory, shared memory and disk, added up before anything starts, against what there is.
#
# What the run surely fills is refused where there is less, with the setting to lower; what it might fill (a capacity
# beyond run.max_env_steps, checkpoints on a nearly full disk, the trainer's spare) is a line for the user. Networks are
# not counted: their size is known once the trainer has made them.


SHARED_MEMORY = Path("/dev/shm")
PLACE = "this machine (or its control group)"
SPARE_BYTES = 200e6  # of a process that has imported torch and what training needs (PSS)
UNLIMITED = 1 << 60  # [B] version 1 of control groups writes "no limit" as a number of this order


@dataclass(frozen=True)
class Need:
    """Bytes that `what` takes, surely and at most, of `place` with `free` bytes; `setting`: the one to lower."""

    what: str
    place: str
    free: float
    sure: float
    most: float
    setting: str

    @property
    def words(self) -> str:
        """Both numbers and the remedy."""
        needed = self.sure if self.sure > self.free else self.most
        return (
            f"{self.what}: {_size(needed)} are needed, and {self.place} has {_size(self.free)} free; "
            f"lower {self.setting}"
        )


def check_room(topology: Topology, run: Path, *, has_spare: bool = False) -> list[str]:
    """Lines for the user, of what may not have room; ConfigError for what has none. run: the run's directory;
    has_spare: the trainer may have another process ready that takes its place where it dies."""
    needs = needs_of(topology, run, has_spare)
    for need in needs:
        if need.sure > need.free:
            raise ConfigError(need.words)
    return [f"{need.words}, or let it end before" for need in needs if need.most > need.free]


def needs_of(topology: Topology, run: Path, has_spare: bool) -> list[Need]:
    """What this machine, the trainer's, has to hold."""
    config = topology.config
    row = topology.schema.dtype.itemsize
    shared = shared_bytes(topology)
    free = free_memory()
    memory = free - shared
    found = [
        Need(
            f"{topology.rollouts} rollouts' lanes or sample areas",
            str(SHARED_MEMORY),
            min(free_disk(SHARED_MEMORY), free),
            shared,
            shared,
            "areas.blocks or areas.block" if topology.area_columns else "run.processes, channels.lane_rows or num_envs",
        )
    ]
    if topology.declaration.experience.source == "replay" and config.replay.source == "auto":
        most = float(row * config.replay.capacity)
        sure = row * min(config.replay.capacity, config.run.max_env_steps)
        what = f"replay.capacity = {config.replay.capacity:,} records of {_size(row)}"
        if config.replay.file:
            folder = Path(config.replay.file).absolute().parent
            found.append(Need(what, str(folder), free_disk(folder), sure, most, "replay.capacity"))
        else:
            found.append(Need(what, PLACE, memory, sure, most, "replay.capacity"))
            memory -= sure
        if config.run.checkpoint_period or config.run.checkpoint_seconds:
            filled = sure * (KEPT_CHECKPOINTS + 1)  # one is written before the oldest goes
            what = f"{KEPT_CHECKPOINTS + 1} checkpoints, each with the replay's records"
            found.append(Need(what, str(run), free_disk(run), 0.0, filled, "replay.capacity"))
    if has_spare and config.rollout.restarts and topology.trainer_can_restart:
        what = "the process that is ready after a minute to take the trainer's place"
        found.append(Need(what, PLACE, memory, 0.0, SPARE_BYTES, "rollout.restarts to 0"))
    return found


def shared_bytes(topology: Topology) -> float:
    """Bytes of the lanes or sample areas that the trainer's host holds."""
    config = topology.config
    here = sum(one.role is Role.ROLLOUT for one in topology.on_host(0))
    if topology.area_columns:
        sample = sum(column.array.nbytes for column in topology.area_columns)
        return float(here * sample * config.areas.block * (config.areas.blocks + config.replay.spare_blocks))
    lanes = here
    for host in range(1, topology.hosts):
        lanes += max(4, len(topology.on_host(host)) if topology.in_rounds else 0)
    return float(lanes * topology.lane_rows() * topology.schema.dtype.itemsize)


def free_disk(folder: Path) -> float:
    """Bytes that this user can still write below the folder, or below the nearest one that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        found = os.statvfs(folder)
    except OSError:
        return math.inf
    return float(found.f_bavail * found.f_frsize) if found.f_blocks else math.inf


def free_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes that this process may still take: of the machine, and of each control group that it is in."""
    free = math.inf
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            free = float(line.split()[1]) * 1024
    for folder in group_folders(proc, groups):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            most = _number(folder / limit)
            if most is not None and most < UNLIMITED:
                cached = sum(
                    float(line.split()[1])
                    for line in _lines(folder / "memory.stat")
                    if line.startswith(("inactive_file ", "total_inactive_file "))
                )
                free = min(free, most - max((_number(folder / used) or 0.0) - cached, 0.0))
    return free


def group_folders(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Folders of the control groups of this process, from its own to the root, as far as they are seen from here."""
    found: list[Path] = []
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        root = groups / controllers if controllers else groups
        own = root / path.strip().lstrip("/")
        found += [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]
    return found


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text().strip())
    except (OSError, ValueError):  # "max"
        return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _size(count: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if count >= 1024:
            count /= 1024
            unit = larger
    return f"{count:,.1f} {unit}".replace(".0 ", " ")
