"""Every setting of ddrl: one frozen dataclass per component, each field with its unit and meaning. `run` hands each
stage its own component. Impossible values are refused here; `ddrl.core.settings` reads files and command lines."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, overload

from ddrl.core.errors import ConfigError
from ddrl.core.fields import check_ranges, convert, setting, slice_component
from ddrl.core.learning_config import NEVER, AreasConfig, LearnerConfig, ReplayConfig, RolloutConfig

Section = TypeVar("Section")


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: where it writes, when it stops."""

    seed: int = setting(1, "", "Seed of everything random; with --serial the same seed gives the same bits.", ge=0)
    dir: str = setting("", "path", "Run directory; empty: a new one under runs/.")
    max_env_steps: int = setting(
        500_000, "env steps", "Stop after so many environment steps of all rollouts together.", ge=1
    )
    max_seconds: float = setting(NEVER, "s", "Stop after so many seconds of wall time.", gt=0)
    target_return: float = setting(NEVER, "return", "Stop once an evaluation's mean return reaches this.")
    patience: int = setting(
        0, "evaluations", "Stop after so many evaluations in a row without a better one: converged; 0: never.", ge=0
    )
    processes: int = setting(
        0,
        "processes",
        "Rollout processes when started without mpirun; 0: one for each core but one, at least 1. With "
        "pool.collectors: collectors of each host, under mpirun too.",
        ge=0,
    )
    checkpoint_period: int = setting(
        100_000, "env steps", "Environment steps between checkpoints; 0: only at the end.", ge=0
    )
    start_limit: float = setting(
        600.0, "s", "The same before a process's first sign of life: hundreds that start at once take minutes.", gt=0
    )
    silence_limit: float = setting(
        300.0,
        "s",
        "After so long without a sign of life a rollout or evaluator is started again (local runs), or the run ends, "
        "saved (mpirun; a silent relay or gradient node too); words come at a tenth of it. More where one environment "
        "step or gradient takes longer.",
        gt=0,
    )
    keep_checkpoints: int = setting(3, "checkpoints", "How many of the newest checkpoints stay.", ge=1)


@dataclass(frozen=True)
class EnvConfig:
    """The environment and how one rollout holds several of it."""

    id: str = setting("CartPole-v1", "", "Gymnasium id, or package.module:factory of your own environment.")
    num_envs: int = setting(8, "environments", "Environments that one rollout process steps together.", ge=1)
    kwargs: dict[str, Any] = setting({}, "", "Keyword arguments for the environment's constructor.")
    by_rollout: list[dict[str, Any]] = setting(
        [], "", "Further keyword arguments by rollout, over kwargs: rollout i takes entry i modulo their number."
    )
    observation: str = setting(
        "flat",
        "",
        "A Dict space of observations: flat, one vector; named, its arrays by name.",
        choices=("flat", "named"),
    )
    max_lengths: dict[str, int] = setting(
        {}, "entries", "Most entries of each Sequence space in a named observation, by its name; the rest is padding."
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
        0, "relays", "Groups of ranks that each act as a host with a relay; 0: one for each real host.", ge=0
    )
    scheme: str = setting(
        "auto",
        "",
        "By which plan models travel: auto measures the links and takes the best; or a scheme by name, or "
        "package.module:Class of your own.",
        plugin="ddrl.distribution.plans.schemes",
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
        plugin="ddrl.distribution.transport.codecs",
    )
    versions_in_flight: int = setting(2, "versions", "Published versions that may travel at once.", ge=1)
    closed_loop: bool = setting(
        False,
        "",
        "Send a version to the other hosts only when every rollout acts with the last one sent; else newest wins.",
    )
    uplink_block_bytes: int = setting(
        1 << 18, "bytes", "Most experience that a relay sends to the root in one message.", ge=4096
    )


@dataclass(frozen=True)
class ChannelConfig:
    """Shared memory inside a host."""

    lane_rows: int = setting(
        0,
        "rows",
        "Rows that one lane holds: more hides pauses of the drain, fewer keep experience fresh; 0: four vector "
        "steps where samples_per_insert makes rollouts wait, else 512.",
        ge=0,
    )
    lane_full: Literal["wait", "drop"] = setting(
        "wait",
        "",
        "What a producer does at a full lane: wait, or drop the new row (counted).",
        choices=("wait", "drop"),
    )
    mailbox_slots: int = setting(
        4, "slots", "Parameter vectors held per host: newest, being written, and pinned ones.", ge=3
    )


@dataclass(frozen=True)
class EvaluationConfig:
    """Greedy episodes beside training."""

    period: int = setting(5_000, "env steps", "Environment steps between evaluations; 0: none, and no evaluator.", ge=0)
    episodes: int = setting(20, "episodes", "Episodes per evaluation.", ge=1)
    held_out: bool = setting(
        False, "", "Play the same episodes in each evaluation: a held-out window, on which versions are compared."
    )
    confirm_episodes: int = setting(
        0,
        "episodes",
        "Fresh episodes that judge the best policy once more: at the end, and where run.target_return seems reached.",
        ge=0,
    )


@dataclass(frozen=True)
class TelemetryConfig:
    """What is written down while a run goes on."""

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
    tensorboard: bool = setting(False, "", "Also write TensorBoard event files to RUN/tensorboard.")
    prometheus_port: int = setting(
        0, "port", "Also serve the newest record as Prometheus text on this port of loopback; 0: not.", ge=0, le=65535
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
                f"replay.min_size ({replay.min_size}) exceeds replay.capacity ({replay.capacity}): no batch would come"
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
        if rollout.refresh == "write" and replay.source != "areas":
            raise ConfigError(
                f"rollout.refresh = write waits for blocks of sample areas, and replay.source = {replay.source} has "
                "none: set replay.source = areas, or rollout.refresh = step"
            )
        bounded = rollout.max_policy_lag < NEVER
        if bounded and (replay.source == "areas" or (replay.source == "pool" and rollout.at_max_lag == "weight")):
            raise ConfigError(
                f"rollout.max_policy_lag ({rollout.max_policy_lag:g}, at_max_lag = {rollout.at_max_lag}) has no effect "
                f"on replay.source = {replay.source}: leave it out (fewer areas.blocks keep samples fresher)"
            )
        if rollout.epsilon_end > rollout.epsilon_start:
            raise ConfigError(
                f"rollout.epsilon_end ({rollout.epsilon_end}) exceeds rollout.epsilon_start ({rollout.epsilon_start})"
            )
        if learner.node_replay == "own" and not learner.nodes:
            raise ConfigError(
                "learner.node_replay = own needs nodes: set learner.nodes, or learner.node_replay = leader"
            )
        if rollout.at_max_lag == "wait" and rollout.max_policy_lag < 1:
            raise ConfigError(
                f"rollout.max_policy_lag ({rollout.max_policy_lag:g}) must be at least 1 where at_max_lag = wait: "
                "while a "
                "version travels, rollouts act with the one before it; or choose drop"
            )
        if not learner.hidden or any(width < 1 for width in learner.hidden):
            raise ConfigError(f"learner.hidden ({learner.hidden}) must list one or more widths of at least 1")

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
        component = slice_component(name)
        if component is None:
            raise ConfigError(f"there is no section '{name}': the package ddrl.{name} is not installed")
        known = {item.name for item in fields(component)}
        values = self.slices.get(name, {})
        for setting_name, value in values.items():
            if setting_name not in known and not isinstance(value, dict):  # a dict is the table of a plug-in
                raise ConfigError(f"there is no setting '{name}.{setting_name}'")
        own = {setting_name: value for setting_name, value in values.items() if setting_name in known}
        made = convert(own, component, name, joint=".")
        check_ranges(name, made)
        if hasattr(made, "check"):
            made.check(self)
        return made


# The settings that switch a slice on, each with the value by which it stays off.
SWITCHED = {"balance": ("learner", "nodes", 0), "pool": ("pool", "collectors", "off")}

CORE_SECTIONS = tuple(item.name for item in fields(Config) if item.name not in ("slices", "tables"))
