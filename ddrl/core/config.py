"""Every setting of the core: one frozen dataclass per section, each field with its unit and meaning.

`run` hands each stage its own section. Impossible values are refused here; `ddrl.core.settings` reads files and command
lines. A slice (ddrl.pool, ddrl.balance, ...) has the same kind of dataclass in its `__init__.py`
(`plugins.slice_component`), and its section is kept in `Config.slices` until it is asked for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, overload

import msgspec

from ddrl.core import plugins
from ddrl.core.errors import ConfigError


def setting(
    default: Any,
    unit: str,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[str, ...] = (),
    plugin: str = "",
) -> Any:
    """A field of a component: its default, unit and one line of meaning, with the range or the words it accepts.

    `plugin`: the package of the plug-ins that the field names (`core.plugins`).
    """
    metadata = {"unit": unit, "doc": doc, "ge": ge, "gt": gt, "le": le, "choices": choices, "plugin": plugin}
    if isinstance(default, (dict, list)):
        fresh: Callable[[], Any] = default.copy  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        return field(default_factory=fresh, metadata=metadata)
    return field(default=default, metadata=metadata)


MOST_INT = (1 << 63) - 1  # of a setting: what the kernel, NumPy and SQLite can hold


def check_ranges(component: str, values: Any) -> None:
    """Raise ConfigError where a field of a component is out of its range, or names no plug-in."""
    for item in fields(values):
        value = getattr(values, item.name)
        meta = item.metadata
        name = f"{component}.{item.name}"
        if meta["plugin"] and (value or item.default):
            plugins.check_name(name, meta["plugin"], value)
        if meta["choices"] and value not in meta["choices"]:
            raise ConfigError(f"{name} ({value!r}) must be one of {', '.join(meta['choices'])}")
        if isinstance(value, int) and value > MOST_INT:
            raise ConfigError(f"{name} must be at most {MOST_INT}")  # Python may refuse to write so many digits
        for bound, holds, words in (
            ("ge", operator.ge, "at least"),
            ("gt", operator.gt, "above"),
            ("le", operator.le, "at most"),
        ):
            if meta[bound] is not None and not holds(value, meta[bound]):
                raise ConfigError(f"{name} ({value!r}) must be {words} {meta[bound]}")


def convert(values: Mapping[str, Any], component: Any, source: str, *, joint: str = ": ") -> Any:
    """`values` as a `component`, strictly; ConfigError that begins with `source` for a wrong type or value, `joint`
    between it and the setting's name."""
    try:
        return msgspec.convert(values, component, strict=True)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{source}: {error.__cause__}") from None
        what, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(f"{source}{joint}{name or 'settings'}: {what}") from None


# ---- Sections ----

Section = TypeVar("Section")
NEVER = math.inf


@dataclass(frozen=True)
class RolloutConfig:
    """Acting: exploration and how often new parameters are taken."""

    chooser: str = setting(
        "",
        "",
        "How actions are chosen from what the network gives: epsilon_greedy, ez_greedy, boltzmann, categorical, "
        "gaussian, or package.module:Class of your own; empty: the algorithm's own.",
        plugin="ddrl.acting.choosers",
    )
    epsilon_start: float = setting(1.0, "", "Share of random actions at the start.", ge=0, le=1)
    epsilon_end: float = setting(0.05, "", "Share of random actions after epsilon_decay_steps.", ge=0, le=1)
    epsilon_decay_steps: int = setting(
        20_000, "env steps", "Environment steps of all rollouts over which epsilon falls linearly.", ge=1
    )
    epsilon_spread: float = setting(
        0.0,
        "",
        "alpha in epsilon ** (1 + alpha i / (n - 1)) for rollout i of n (Horgan et al. 2018, eq. 1); "
        "0: the same for all.",
        ge=0,
        le=1e6,
    )
    by_rollout: list[dict[str, float]] = setting(
        [],
        "",
        "A family of exploration policies: rollout i takes entry i modulo their number. exploration = f multiplies its "
        "epsilon (the standard deviation of gaussian); every other name is a setting of the chooser, such as "
        "boltzmann's temperature.",
    )
    refresh: str = setting(
        "step",
        "",
        "When newer parameters are taken: at each vector step, when an episode ends, or, with replay.source = areas, "
        "when a block of samples is written.",
        choices=("step", "episode", "write"),
    )
    warmup_steps: int = setting(
        1_000, "env steps", "Steps of all rollouts together taken at random before the policy acts.", ge=0
    )
    max_policy_lag: float = setting(
        NEVER,
        "updates",
        "Service level: how many updates may have been made since the version that acted was published when a row "
        "arrives at the trainer.",
        ge=0,
    )
    at_max_lag: str = setting(
        "wait",
        "",
        "What to do where the lag would exceed max_policy_lag: wait, the trainer puts off updates, and leaves out rows "
        "that are older nevertheless; drop, older rows are left out and counted; weight, a sample of lag l counts "
        "(1 + max_policy_lag) / (1 + l) of a whole one, its age in replay included, with l = versions times "
        "learner.publish_period.",
        choices=("wait", "drop", "weight"),
    )
    restarts: int = setting(
        3,
        "",
        "Most times in a row that a rollout, evaluator, collector or trainer that died or hangs is started again; a "
        "row ends once it has recorded for 10 s, or an evaluator has played. One more death ends the run, saved.",
        ge=0,
    )
    on_error: str = setting(
        "end",
        "",
        "A Python exception of an environment: end, of the run, or restart, of the process with new environments, "
        "as after a death. With --serial it ends the run.",
        choices=("end", "restart"),
    )
    torch: bool = setting(
        False,
        "",
        "Environments may load torch in processes that act, at 145 MiB and more of memory in each: learned simulators "
        "and rewards.",
    )


@dataclass(frozen=True)
class ReplayConfig:
    """What is kept of experience and how it is drawn."""

    source: str = setting(
        "auto",
        "",
        "Where batches come from: auto, a replay or trajectories as the algorithm says; areas, a sample area shared "
        "with each rollout ([areas]); or package.module:Class of your own.",
    )
    capacity: int = setting(100_000, "transitions", "Records kept; then whole episodes are evicted.", ge=1, le=1 << 30)
    min_size: int = setting(1_000, "transitions", "Records needed before the first update.", ge=1)
    selector: str = setting(
        "prioritized",
        "",
        "How transitions are drawn: uniform, prioritized, rank_based, recency, or package.module:Class of your own.",
        plugin="ddrl.replay.selectors",
    )
    priority_exponent: float = setting(
        0.6, "", "alpha: mass = priority ** alpha (Schaul et al. 2016, eq. 1).", ge=0, le=1
    )
    importance_exponent: float = setting(
        0.4, "", "beta of the importance weights at the start; rises to 1 by max_env_steps.", ge=0, le=1
    )
    priority_offset: float = setting(
        1e-6,
        "",
        "epsilon: priority = |TD error| + epsilon (Schaul et al. 2016, section 3.3), so that a TD error of 0 is drawn "
        "again; 0: it is not.",
        ge=0,
    )
    n_step: int = setting(3, "steps", "Rewards summed before the bootstrap.", ge=1)
    eviction: str = setting(
        "fifo",
        "",
        "Which episode goes when full: fifo, second_chance, lru, lfu, or package.module:Class of your own.",
        plugin="ddrl.replay.evictions",
    )
    file: str = setting("", "path", "New file that holds the records instead of memory; it goes with the run.")
    samples_per_insert: float = setting(
        8.0,
        "samples/transition",
        "Transitions learned from per transition recorded; the side that is ahead waits. 0: neither waits.",
        ge=0,
    )
    samples_tolerance: float = setting(
        1_000.0,
        "transitions",
        "How far (in recorded transitions) rollouts and learner may drift from samples_per_insert before one waits.",
        gt=0,
    )

    def __post_init__(self) -> None:
        if self.source not in ("auto", "areas") and plugins.code_name(self.source) is None:
            raise ConfigError(
                f"replay.source ({self.source!r}) must be auto, areas, or package.module:Class of your own"
            )

    @property
    def through_areas(self) -> bool:
        """Whether rollouts write transitions into sample areas instead of rows into lanes."""
        return self.source == "areas" or bool(self.source != "auto" and self._plugin().through_areas)

    @property
    def spare_blocks(self) -> int:
        """Blocks of an area beyond areas.blocks, by which a full area stays whole while it is written."""
        return 1 if self.source == "areas" else self._plugin().spare_blocks

    def _plugin(self) -> Any:
        return plugins.load("replay.source", "", self.source)


@dataclass(frozen=True)
class AreasConfig:
    """Sample areas: what rollouts write for the trainer beside them (replay.source = areas)."""

    block: int = setting(2_000, "samples", "Samples that a rollout writes at a time (k).", ge=1)
    blocks: int = setting(4, "blocks", "Blocks that an area holds; then the oldest is overwritten.", ge=2, le=254)
    min_fill: float = setting(
        1.0, "", "Share of an area's blocks that must be written before batches are drawn from it.", gt=0, le=1
    )


@dataclass(frozen=True)
class LearnerConfig:
    """Algorithm, network, loss and optimizer."""

    algorithm: str = setting(
        "",
        "",
        "Learning algorithm: one of the library's, or package.module:Class of your own; its own settings are the table "
        "[learner.NAME]. Empty: dqn for discrete actions, td3 for continuous ones.",
        plugin="ddrl.learner.algorithms",
    )
    init: str = setting(
        "",
        "path",
        "Run whose newest checkpoint gives the first weights, of the same algorithm and networks; empty: drawn from "
        "run.seed.",
    )
    device: str = setting("auto", "", "torch device of the learner; auto: cuda where there is one, else cpu.")
    network: str = setting(
        "auto",
        "",
        "mlp, nature_cnn, small_cnn, auto (by the observation), or package.module:Class of your own torch module.",
    )
    hidden: list[int] = setting([256, 256], "units", "Hidden layers of the mlp.")
    normalize: bool = setting(
        False,
        "",
        "Networks see observations less their mean, over their standard deviation, of all that was learned from so "
        "far; both are saved with the policy.",
    )
    dueling: str = setting(
        "mean",
        "",
        "Q = V + A - baseline: mean, the sample mean of A; policy, its expectation under the acting policy "
        "(epsilon-greedy with rollout.epsilon_end); softmax, under softmax(A); none: a single head.",
        choices=("mean", "policy", "softmax", "none"),
    )
    double: bool = setting(True, "", "Choose the bootstrap action with the online network (van Hasselt et al. 2016).")
    loss: str = setting("huber", "", "Loss on the TD error.", choices=("huber", "mse"))
    lr: float = setting(1e-3, "", "Adam's step size.", gt=0)
    lr_end_fraction: float = setting(
        1.0, "", "Step size at max_env_steps as a fraction of lr; falls linearly.", ge=0, le=1
    )
    adam_epsilon: float = setting(1e-8, "", "Adam's epsilon.", gt=0)
    max_grad_norm: float = setting(10.0, "", "Gradients are scaled down to this norm.", gt=0)
    batch_size: int = setting(128, "transitions", "Transitions per optimizer step.", ge=1)
    discount: float = setting(0.99, "", "gamma.", ge=0, le=1)
    target_period: int = setting(
        100, "updates", "Updates between steps of the target network to the online network.", ge=1
    )
    target_rate: float = setting(
        1.0,
        "",
        "Share of the way that the target network goes to the online network each time (tau); 1: a copy.",
        gt=0,
        le=1,
    )
    publish_period: int = setting(10, "updates", "Updates between publishes of the acting parameters.", ge=1)
    threads: int = setting(1, "threads", "Threads of torch's CPU kernels.", ge=1, le=1024)
    nodes: int = setting(
        0,
        "nodes",
        "Ranks of mpirun that compute gradients, each of its part of every batch; 0: the trainer computes them itself.",
        ge=0,
        le=4096,
    )


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: where it writes, when it stops."""

    seed: int = setting(1, "", "Seed of everything random; with --serial the same seed gives the same bits.", ge=0)
    dir: str = setting("", "path", "Run directory; empty: a new one under runs/.")
    max_env_steps: int = setting(
        500_000, "env steps", "Stop after so many environment steps of all rollouts together.", ge=1
    )
    max_seconds: float = setting(
        NEVER,
        "s",
        "Stop training after so many seconds of wall time, those before a resume included; the last evaluation may "
        "take half as many more, at least 10 and at most 60.",
        gt=0,
    )
    target_return: float = setting(NEVER, "return", "Stop once an evaluation's mean return reaches this.")
    patience: int = setting(
        0, "evaluations", "Stop after so many evaluations in a row without a better one: converged; 0: never.", ge=0
    )
    processes: int = setting(
        0,
        "processes",
        "Rollout processes when started without mpirun; 0: one for each core but one, at least 1. With "
        "pool.collectors: collectors of each host, under mpirun too. Can be set while the run continues.",
        ge=0,
        le=4096,
    )
    max_processes: int = setting(
        0,
        "processes",
        "Rollouts that there can be when started without mpirun, if run.processes is raised while the run continues; "
        "0: run.processes.",
        ge=0,
        le=4096,
    )
    checkpoint_period: int = setting(
        100_000, "env steps", "Environment steps between checkpoints; 0: only at the end.", ge=0
    )
    checkpoint_seconds: float = setting(
        0.0,
        "s",
        "Seconds after a checkpoint until the next one, if checkpoint_period has not come first; 0: by steps alone. "
        "Bounds what the death of a trainer or a rank loses. Not with --serial, which depends on no clock.",
        ge=0,
    )
    start_limit: float = setting(
        600.0, "s", "The same before a process's first sign of life: hundreds that start at once take minutes.", gt=0
    )
    silence_limit: float = setting(
        300.0,
        "s",
        "After so long without a sign of life a rollout, evaluator or trainer is ended and started again "
        "(rollout.restarts); a silent gradient node ends the run, and so does a silent relay (but see "
        "cluster.host_limit). A warning comes at a tenth of it. More where one environment step or gradient takes "
        "longer.",
        gt=0,
    )


@dataclass(frozen=True)
class EnvConfig:
    """The environment and how one rollout holds several of it."""

    id: str = setting("CartPole-v1", "", "Gymnasium id, or package.module:factory of your own environment.")
    num_envs: int = setting(
        8, "environments", "Environments that one process steps together; 1: the evaluator has one too.", ge=1
    )
    workers: int = setting(
        0,
        "processes",
        "Processes that step the environments of one rollout at once, and those of the evaluator: for environments "
        "whose step takes a millisecond or more; 0: none beside the rollout itself.",
        ge=0,
    )
    kwargs: dict[str, Any] = setting({}, "", "Keyword arguments for the environment's constructor.")
    by_rollout: list[dict[str, Any]] = setting(
        [], "", "Further keyword arguments by rollout, over kwargs: rollout i takes entry i modulo their number."
    )
    observation: str = setting(
        "auto",
        "",
        "A Dict space of observations: flat, one vector; named, its arrays by name; auto, named where one of them is a "
        "picture, which convolutions see beside the rest, else flat.",
        choices=("auto", "flat", "named"),
    )
    max_lengths: dict[str, int] = setting(
        {}, "entries", "Most entries of each Sequence space in a named observation, by its name; the rest is padding."
    )
    action_mask: str = setting(
        "auto",
        "",
        "Where an environment says which discrete actions are allowed: auto, by the entry action_mask of a Dict of "
        'observations, or by its method action_masks(), where it has one; info, by info["action_mask"] of reset and '
        "step; none, all are. No other action is taken, at random or greedily, or counts in a target.",
        choices=("auto", "info", "none"),
    )
    figures: list[str] = setting(
        [],
        "",
        "Names in info whose numbers at the end of episodes become series info_NAME; is_success, for example.",
    )
    scale: str = setting(
        "auto",
        "",
        "How networks of the library see integers and actions: auto, integers of an observation as [0, 1] and actions "
        "as [-1, 1], by the bounds of their spaces, floats of an observation as they are; none, all as it is; bytes, "
        "only bytes as [0, 1], as runs before this setting.",
        choices=("auto", "none", "bytes"),
    )
    nonfinite: Literal["refuse", "drop"] = setting(
        "refuse",
        "",
        "A reward or state that is NaN or infinite: refuse ends the run; drop leaves the step out, and counts it.",
        choices=("refuse", "drop"),
    )
    reward_clip: bool = setting(
        False, "", "Clip each reward to [-1, 1] for learning; reported returns stay raw. Usual for Atari."
    )
    frame_skip: int = setting(4, "frames", "Atari: frames per action.", ge=1)
    frame_stack: int = setting(4, "frames", "Atari: newest frames that make one observation.", ge=1)
    screen_size: int = setting(84, "pixels", "Atari: height and width of the gray screen.", ge=16)
    noop_max: int = setting(30, "frames", "Atari: most no-op actions at an episode's start.", ge=0)


@dataclass(frozen=True)
class ClusterConfig:
    """Hosts, relays, and how a model reaches them."""

    relays: int = setting(
        0, "relays", "Groups of ranks that each act as a host with a relay; 0: one for each real host.", ge=0, le=4096
    )
    scheme: str = setting(
        "auto",
        "",
        "By which plan models travel: auto measures the links and takes the best; or a scheme by name, or "
        "package.module:Class of your own.",
        plugin="ddrl.distribution.schemes",
    )
    shards: int = setting(
        0, "shards", "Relays that get a shard from the root (m), for schemes with shards; 0: the scheme's choice.", ge=0
    )
    chunk_bytes: int = setting(
        0, "bytes", "Size of the pieces that relays forward on arrival; 0: the scheme's choice.", ge=0
    )
    codec: str = setting(
        "none",
        "",
        "How models travel between hosts: none, as they are; bf16 or int8, rounded to 2 or 1 bytes a parameter (hosts "
        "other than the trainer's act on that); xor_zstd, bit for bit, compressed against the last confirmed version; "
        "or package.module:Class of your own.",
        plugin="ddrl.distribution.codecs",
    )
    versions_in_flight: int = setting(2, "versions", "Published versions that may travel at once.", ge=1)
    closed_loop: bool = setting(
        False,
        "",
        "Send a version to the other hosts only when every rollout acts with the last one sent; else newest wins.",
    )
    host_limit: float = setting(
        120.0,
        "s",
        "After so long without a sign of life from another host the job continues without it, where MPI reports deaths "
        "(mpirun --with-ft ulfm); else a silent host ends the run at run.silence_limit. More than a link is ever down.",
        gt=0,
    )


@dataclass(frozen=True)
class ChannelConfig:
    """Shared memory inside a host."""

    lane_rows: int = setting(
        0,
        "rows",
        "Rows that one lane holds, at least a vector step: more hides pauses of the drain, fewer keep experience "
        "fresh; 0: where samples_per_insert makes rollouts wait, four vector steps, with more than 16 rollouts 64 in "
        "all lanes together, at least one in each; else 512.",
        ge=0,
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Greedy episodes beside training."""

    period: int = setting(5_000, "env steps", "Environment steps between evaluations; 0: none, and no evaluator.", ge=0)
    episodes: int = setting(20, "episodes", "Episodes per evaluation.", ge=1)
    held_out: bool = setting(
        False, "", "Play the same episodes in each evaluation: a held-out window, on which versions are compared."
    )
    max_episode_steps: int = setting(
        200_000,
        "env steps",
        "Steps after which an evaluated episode that has not ended counts with its return so far.",
        ge=1,
    )
    confirm_episodes: int = setting(
        0,
        "episodes",
        "Fresh episodes that judge the best policy once more: at the end, and where run.target_return seems reached.",
        ge=0,
    )


@dataclass(frozen=True)
class TelemetryConfig:
    """What is recorded during a run."""

    period: float = setting(1.0, "s", "Seconds between records of the counters in the run directory.", gt=0)
    live: bool = setting(
        True, "", "Also publish records on a ZeroMQ socket for dashboards and notebooks, and take commands on another."
    )
    bind: str = setting(
        "127.0.0.1",
        "address",
        "Where those sockets listen. Commands always need the keys in RUN/keys; beyond loopback the records do too.",
    )
    live_port: int = setting(0, "port", "Port of the records; 0: a free one, written to RUN/live.json.", ge=0, le=65535)
    control_port: int = setting(
        0, "port", "Port of the commands; 0: a free one, written to RUN/live.json.", ge=0, le=65535
    )
    alert: str = setting(
        "",
        "command or URL",
        "Where each alert is sent, once, as JSON: a command that reads it from standard input, or http://...; empty: "
        "nowhere.",
    )
    sinks: list[str] = setting(
        [],
        "",
        "Where else records go: tensorboard, prometheus (port 9400, or telemetry.prometheus_port), or "
        "package.module:Class of your own.",
    )
    tensorboard: bool = setting(False, "", "Also write TensorBoard event files to RUN/tensorboard.")
    prometheus_port: int = setting(
        0, "port", "Also serve the newest record as Prometheus text on this port; 0: not.", ge=0, le=65535
    )
    prometheus_bind: str = setting(
        "127.0.0.1", "address", "Where that port listens; whoever reaches it can read the figures."
    )


@dataclass(frozen=True)
class Config:
    """Everything; printed by --print-config, saved as config.toml in the run directory.

    The sections of slices (ddrl.pool, ddrl.balance, ...) are kept as they were read and made into components when they
    are asked for (`section`): a run that does not use a slice does not need it."""

    run: RunConfig = field(default_factory=RunConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    channels: ChannelConfig = field(default_factory=ChannelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    areas: AreasConfig = field(default_factory=AreasConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    slices: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # "pool" -> {...}, as read
    tables: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # "learner.c51" -> {...}

    def __post_init__(self) -> None:
        for component in fields(self):
            if component.name not in ("slices", "tables"):
                check_ranges(component.name, getattr(self, component.name))
        replay = self.replay
        learner = self.learner
        rollout = self.rollout
        if replay.min_size > replay.capacity:
            raise ConfigError(
                f"replay.min_size ({replay.min_size}) exceeds replay.capacity ({replay.capacity}): no batch would "
                "come; lower it"
            )
        if replay.n_step >= replay.capacity:
            raise ConfigError(f"replay.n_step ({replay.n_step}) must be below replay.capacity ({replay.capacity})")
        spare = replay.samples_tolerance * replay.samples_per_insert
        if replay.samples_per_insert and spare < learner.batch_size:
            raise ConfigError(
                f"replay.samples_tolerance ({replay.samples_tolerance:g}) times replay.samples_per_insert "
                f"({replay.samples_per_insert:g}) must cover one batch (learner.batch_size = {learner.batch_size}): "
                "neither side could move; raise replay.samples_tolerance"
            )
        if ":" not in replay.source:  # one from outside is imported once the user trusts the run
            self.check_source()
        if rollout.epsilon_end > rollout.epsilon_start:
            raise ConfigError(
                f"rollout.epsilon_end ({rollout.epsilon_end}) must not exceed rollout.epsilon_start "
                f"({rollout.epsilon_start})"
            )
        if rollout.at_max_lag == "wait" and rollout.max_policy_lag < 1:
            raise ConfigError(
                f"rollout.max_policy_lag ({rollout.max_policy_lag:g}) must be at least 1 where at_max_lag = wait: "
                "with none "
                "an update would make every row too old; or choose drop"
            )
        if not learner.hidden or any(width < 1 for width in learner.hidden):
            raise ConfigError(f"learner.hidden ({learner.hidden}) must list one or more widths of at least 1")

    def check_source(self) -> None:
        """ConfigError where rollouts' settings do not fit replay.source; imports a source from outside the library."""
        replay = self.replay
        rollout = self.rollout
        if rollout.refresh == "write" and not replay.through_areas:
            raise ConfigError(
                f"rollout.refresh = write waits for blocks of sample areas, and replay.source = {replay.source} has "
                "none: set replay.source = areas, or rollout.refresh = step"
            )
        bounded = rollout.max_policy_lag < NEVER
        if bounded and replay.through_areas:
            raise ConfigError(
                f"rollout.max_policy_lag ({rollout.max_policy_lag:g}, at_max_lag = {rollout.at_max_lag}) has no effect "
                f"on replay.source = {replay.source}: leave it out (fewer areas.blocks keep samples fresher)"
            )

    @overload
    def section(self, of: type[Section]) -> Section: ...
    @overload
    def section(self, of: str) -> Any: ...
    def section(self, of: Any) -> Any:
        """A section as its component, checked: of a slice by its class, or of any by its name.

        Raises ConfigError where a value is wrong, or where the slice is not installed."""
        name: str = of if isinstance(of, str) else of.section
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def uses(self, slice_name: str) -> bool:
        """Whether the run asks for a slice, by the setting that switches it on; imports nothing."""
        section, name, off = SWITCHED[slice_name]
        if section in CORE_SECTIONS:
            return getattr(getattr(self, section), name) != off
        return self.slices.get(section, {}).get(name, off) != off

    def table(self, place: str) -> dict[str, Any]:
        """The table of a plug-in as it was read, by its place (learner.c51, pool.fair); empty where there is none."""
        section, _, plugin = place.partition(".")
        return self.tables.get(place) or self.slices.get(section, {}).get(plugin, {})

    def with_section(self, section: Any) -> Config:
        """This config with another component of a slice."""
        return replace(self, slices={**self.slices, section.section: asdict(section)})

    @cached_property
    def _made(self) -> dict[str, Any]:
        return {}

    def _make(self, name: str) -> Any:
        if name in CORE_SECTIONS:
            return getattr(self, name)
        component = plugins.slice_component(name)
        if component is None:
            raise ConfigError(
                f"the section [{name}] needs ddrl.{name}, which this installation lacks: install the whole of ddrl"
            )
        known = {item.name for item in fields(component)}
        values = self.slices.get(name, {})
        for setting_name, value in values.items():
            if setting_name not in known and not isinstance(value, dict):  # a dict is the table of a plug-in
                raise ConfigError(f"there is no setting '{name}.{setting_name}': leave it out")
        own = {setting_name: value for setting_name, value in values.items() if setting_name in known}
        made = convert(own, component, name, joint=".")
        check_ranges(name, made)
        if hasattr(made, "check"):
            made.check(self)
        return made


# The settings that switch a slice on, each with the value by which it stays off.
SWITCHED = {"balance": ("learner", "nodes", 0), "pool": ("pool", "collectors", "off")}

CORE_SECTIONS = tuple(item.name for item in fields(Config) if item.name not in ("slices", "tables"))
