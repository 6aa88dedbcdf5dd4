"""What limits a run, from measured shares of time: one answer for terminal, dashboard, notebook and JSON.

`causes_of(run)` reads the newest moments of a run directory; `find_causes(frames, config)` takes them as they are. Both
give causes, the most costly first, each with a sentence and a remedy. The limiting stage follows from the trainer's
time: one that waits is limited by what feeds it, one that works by what it works at. Within a stage, the time that its
process was ready to run and had no core counts as `processor`, and the rest as the stage's own. Ranks are compared with
their peers. Pure but for `causes_of`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ddrl.core.config import Config
from ddrl.core.metrics import Phase
from ddrl.core.roles import Role
from ddrl.core.specs import Floats
from ddrl.telemetry.directory import State
from ddrl.telemetry.series import ROLES, Record

if TYPE_CHECKING:
    from ddrl.telemetry.reading import Processes, Run

SPAN = 10.0  # [s] over which shares are taken, at most
MIN_SPAN = 3.0  # [s] below it nothing is said yet: samples of processor time are two seconds apart
SILENT = 6.0  # [s] without a sign of life after which a rank counts as sick
SLOW = 0.5  # of the median of its peers: a rank below it counts as sick
AHEAD = 0.05  # by which another cause must be ahead of the one that was named last
MIN_PEERS = 3  # rollouts below which none is compared with the others
IDLE = 0.25  # share of its time that the trainer may wait before it counts as starved
FULL = 0.10  # share of their time that rollouts may wait at full lanes
TOO_OLD = 0.25  # share of the rows that may be left out for their age
RARE = 0.25  # replay.samples_per_insert below which the trainer is expected to wait
DEFERRED = 0.5  # share of versions put off because earlier ones were still on their way

Kind = Literal[
    "processor",
    "learner",
    "replay",
    "environments",
    "policy",
    "network",
    "disk",
    "filling",
    "pacing",
    "lag",
    "rank",
    "evaluation",
    "paused",
    "stuck",
    "other",
    "unknown",
]
STARVED = ("environments", "policy", "network", "pacing", "rank")  # the trainer waits for rows
REMEDIES: dict[Kind, str] = {
    "processor": "Fewer processes (run.processes, or fewer ranks on this machine), or more cores.",
    "learner": "A smaller network or batch, another device (learner.device), or fewer updates "
    "(replay.samples_per_insert).",
    "replay": "Fewer updates a transition (replay.samples_per_insert), or replay.selector = uniform.",
    "environments": "More rollouts, more environments each (env.num_envs), or a faster environment.",
    "policy": "More environments a rollout (env.num_envs), more rollouts, or a smaller network.",
    "network": "More time between versions (learner.publish_period), cluster.codec, or a faster link.",
    "disk": "More steps between checkpoints (run.checkpoint_period), or a faster disk for run.dir.",
    "filling": "A smaller replay.min_size or rollout.warmup_steps, or more rollouts.",
    "pacing": "A larger replay.samples_per_insert uses the trainer's time.",
    "lag": "A larger rollout.max_policy_lag, or more rollouts.",
    "rank": "Look at that process and its machine; a rollout that ends is replaced.",
    "evaluation": "Fewer episodes (evaluation.episodes, evaluation.confirm_episodes).",
    "paused": "Resume it: ddrl.attach(RUN).resume().",
    "stuck": "Look at the newest events, and at the stacks of the silent processes in the log.",
    "other": "",
    "unknown": "",
}


@dataclass(frozen=True)
class Cause:
    """One thing that holds a run back. `share`: of the limiting stage's time, 0 to 1."""

    kind: Kind
    sentence: str
    share: float = 1.0
    rank: int | None = None  # the process that is sick

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES[self.kind]

    @property
    def starved(self) -> bool:
        """Whether the trainer waits for rows."""
        return self.kind in STARVED

    def as_json(self) -> dict[str, Any]:
        """The cause with its remedy, as plain values."""
        return {**asdict(self), "remedy": self.remedy}


def causes_of(run: Run, before: str = "") -> list[Cause]:
    """What limits a run, the most costly first; of a run that has ended, what did last. Never empty."""
    config = run.config
    moments = math.ceil(SPAN / config.telemetry.period) + 1
    return find_causes(
        run.processes(since=max(run.cursor - moments, 0), points=16), config, state=run.state, before=before
    )


def find_causes(frames: Processes, config: Config, *, state: State = "running", before: str = "") -> list[Cause]:
    """What limits a run, the most costly first, from counters [T, processes, columns] of its newest moments. Never
    empty: `unknown` where too little is known. `before`: the kind that was named first the last time, which stays
    first until another one is clearly ahead."""
    if state == "paused":
        return [Cause("paused", "Paused: rollouts and learner wait for the command to go on.")]
    if state == "ending":
        return [Cause("evaluation", "Evaluation: the run is ending; its best policy is evaluated and saved.")]
    window = _Window(frames)
    if window.seconds < MIN_SPAN:
        return [Cause("unknown", "Not known yet: fewer than three seconds have been recorded.")]
    sick = _silent(window) + _slow(window)
    limiting = _limits(window, config, before)
    if limiting[0].starved:
        return sick + limiting
    silent = [cause for cause in sick if cause.share == 1.0]
    return silent + limiting + [cause for cause in sick if cause.share != 1.0]


def between(earlier: Record, newest: Record) -> Processes:
    """Two records as moments."""
    from ddrl.telemetry.reading import Processes

    values = np.full((2, len(newest.table), len(newest.columns)), np.nan)
    values[0, : len(earlier.table)] = earlier.table
    values[1] = newest.table
    moments = np.array([(record.time, record.wall_seconds) for record in (earlier, newest)])
    ticks = np.array([earlier.tick, newest.tick])
    return Processes(ticks, moments[:, 0], moments[:, 1], values, newest.columns, newest.tick + 1)


class CauseWatch:
    """Causes from records as they are made, looked for at most every PERIOD."""

    PERIOD = 2.0  # [s]

    def __init__(self, config: Config) -> None:
        self._config = config
        self._recent = deque[Record]()
        self._due = -math.inf

    def look(self, record: Record, state: State, before: str = "") -> list[Cause]:
        """Causes, the most costly first; none where it is too early, or soon after the last look."""
        if not self._recent or record.wall_seconds - self._recent[-1].wall_seconds >= 0.5:
            self._recent.append(record)
        while len(self._recent) > 1 and record.wall_seconds - self._recent[1].wall_seconds > SPAN:
            self._recent.popleft()
        early = state == "running" and record.wall_seconds - self._recent[0].wall_seconds < 0.9 * SPAN
        if early or record.wall_seconds < self._due:
            return []
        self._due = record.wall_seconds + self.PERIOD
        return find_causes(between(self._recent[0], record), self._config, state=state, before=before)


class _Window:
    """Growth of every counter from one moment to the newest, a second."""

    def __init__(self, frames: Processes) -> None:
        self.frames = frames
        self.seconds = 0.0
        if len(frames) < 2:
            return
        seconds = frames.wall_seconds
        began = min(int(np.count_nonzero(seconds < seconds[-1] - SPAN)), len(frames) - 2)
        self.seconds = float(seconds[-1] - seconds[began])
        self._began = began
        role = self.now("role")
        self.trainer = role == ROLES.index(Role.TRAINER)
        self.hosts = np.nan_to_num(self.now("host"))
        self.rollouts = (role == ROLES.index(Role.ROLLOUT)) & (self.now("ended") != 1.0)

    def set_forward(self) -> float:
        """How much the clock of the trainer's machine was set forward within the window [s]: signs of life from before
        are no older for it."""
        frames = self.frames
        return max(float(frames.time[-1] - frames.time[self._began]) - self.seconds, 0.0)

    def now(self, name: str) -> Floats:
        """Newest values [processes]."""
        return self.frames.column(name)[-1]

    def rate(self, name: str) -> Floats:
        """Growth a second [processes]; 0 where nothing was reported or the counter began anew."""
        values = self.frames.column(name)
        growth = values[-1] - np.nan_to_num(values[self._began])
        return np.maximum(np.nan_to_num(growth), 0.0) / max(self.seconds, 1e-9)

    def of_trainer(self, name: str) -> float:
        """A second of the trainer's: a share of its time where the counter holds seconds."""
        return float(self.rate(name)[self.trainer].sum())

    def most(self, name: str) -> float:
        """The most that a gauge of the trainer's was within the window; 0 where it was not reported."""
        return float(np.nan_to_num(self.frames.column(name)[self._began :, self.trainer]).max(initial=0.0))

    def fullest_host(self) -> tuple[float, float]:
        """Of the hosts without the trainer that whose rollouts wait most at full lanes, and their mean share of time
        there."""
        waiting = self.rate("wait_seconds")
        shares = {
            float(host): float(waiting[self.rollouts & (self.hosts == host)].mean())
            for host in np.unique(self.hosts[self.rollouts])
            if host not in self.hosts[self.trainer]
        }
        host = max(shares, key=shares.__getitem__, default=0.0)
        return host, shares.get(host, 0.0)

    def of_rollouts(self, name: str) -> float:
        """The same, mean over the rollouts."""
        values = self.rate(name)[self.rollouts]
        return float(values.mean()) if values.size else 0.0


def _name(window: _Window, place: int) -> str:
    rank, host, pid = (window.now(name)[place] for name in ("rank", "host", "pid"))
    role = ROLES[int(window.now("role")[place])].value
    return f"rank {rank:.0f} ({role}, process {pid:.0f} on host {0 if np.isnan(host) else host:.0f})"


def _silent(window: _Window) -> list[Cause]:
    """Rollouts, relays and nodes that show no sign of life."""
    ages = window.frames.time[-1] - window.now("heartbeat") - window.set_forward()
    excused = window.trainer | (window.now("ended") == 1.0) | np.isnan(ages)
    excused |= (window.now("role") == ROLES.index(Role.EVALUATOR)) | np.isin(
        window.now("phase"), (Phase.SAVING, Phase.WAITING, Phase.STARTING)
    )
    places = np.flatnonzero((ages > SILENT) & ~excused)
    return [
        Cause(
            "rank",
            f"Rank: {_name(window, place)} has shown no sign of life for {ages[place]:.0f} s.",
            1.0,
            int(window.now("rank")[place]),
        )
        for place in places[np.argsort(-ages[places])]
    ]


def _slow(window: _Window) -> list[Cause]:
    """Rollouts that take far fewer steps than their peers, and do not wait."""
    places = np.flatnonzero(window.rollouts)
    steps = window.rate("env_steps")
    if len(places) < MIN_PEERS or not np.median(steps[places]):
        return []
    usual = float(np.median(steps[places]))
    busy = window.rate("env_seconds") + window.rate("act_seconds")
    found: list[Cause] = []
    for place in places[np.argsort(steps[places])]:
        if steps[place] < SLOW * usual and busy[place] > 0.5:
            queued = window.rate("queued_seconds")[place]
            why = f", {queued:.0%} of its time without a core" if queued > IDLE else ""
            words = f"takes {steps[place]:.0f} steps/s where its peers take {usual:.0f}{why}"
            found.append(
                Cause(
                    "rank",
                    f"Rank: {_name(window, place)} {words}.",
                    0.99 * (1 - float(steps[place]) / usual),
                    int(window.now("rank")[place]),
                )
            )
    return found


def _limits(window: _Window, config: Config, before: str) -> list[Cause]:
    """The causes within the trainer or within what feeds it."""
    steps = float(window.rate("env_steps")[window.rollouts].sum())
    updates = window.of_trainer("updates")
    size = float(np.nan_to_num(window.now("replay_size")[window.trainer]).max(initial=0.0))
    wait = window.of_trainer("wait_seconds")
    work: dict[Kind, float] = {
        "learner": window.of_trainer("learn_seconds"),
        "network": window.of_trainer("publish_seconds"),
        "replay": window.of_trainer("sample_seconds") + window.of_trainer("record_seconds"),
        "disk": window.of_trainer("checkpoint_seconds"),
    }
    if updates == 0 and max(work.values()) < IDLE:
        if steps == 0:
            return [Cause("stuck", "Nothing moves: no environment steps and no updates in the last seconds.")]
        least = max(config.replay.min_size, config.rollout.warmup_steps)
        return [Cause("filling", f"Filling: no updates yet, replay holds {size:,.0f} of the {least:,} that they need.")]
    first = _beyond_lag(window, config) + _late_versions(window)
    waited = AHEAD if before in STARVED else 0.0
    if wait + waited > max(IDLE, *work.values()):
        return first + _feeding(window, config, wait, before)
    queued = min(window.of_trainer("queued_seconds"), sum(work.values()))
    own = 1 - queued / max(sum(work.values()), 1e-9)
    kept = "rollouts wait for it" if window.of_rollouts("wait_seconds") > FULL else "rollouts keep up"
    record = window.of_trainer("record_seconds")
    draw = window.of_trainer("sample_seconds")
    goes: dict[str, str] = {
        "learner": "updates",
        "network": "publishing parameters",
        "replay": f"recording ({record:.0%}) and drawing ({draw:.0%})",
        "disk": "checkpoints",
    }
    parts = [
        Cause(
            kind,
            f"{kind.capitalize()}: {share:.0%} of the trainer's time goes to {goes[kind]}; {kept}.",
            share if kind == "disk" else share * own,  # who waits for a disk is not ready to run
        )
        for kind, share in work.items()
    ]
    words = f"the trainer is ready to run {queued:.0%} of its time and gets no core"
    parts.append(Cause("processor", f"Processor: {words}.", queued))
    other = max(1 - wait - sum(work.values()), 0.0)
    parts.append(Cause("other", f"Other: {other:.0%} of the trainer's time goes to nothing that is measured.", other))
    return first + _sorted(parts, before)


def _beyond_lag(window: _Window, config: Config) -> list[Cause]:
    """The bound of the policy lag, where it leaves out rows or makes the trainer wait."""
    most = config.rollout.max_policy_lag
    old = window.of_trainer("rows_too_old")
    left_out = old / max(old + window.of_trainer("rows_recorded"), 1e-9)
    held = window.of_trainer("lag_wait_seconds")
    if left_out > TOO_OLD:
        return [Cause("lag", f"Lag: {left_out:.0%} of the rows are left out, older than {most:g} updates.", left_out)]
    if held > IDLE:
        words = f"{held:.0%} of its time for rows that are not older than {most:g} updates"
        return [Cause("lag", f"Lag: the trainer waits {words}.", held)]
    return []


def _late_versions(window: _Window) -> list[Cause]:
    """Versions that the links cannot carry as fast as they are made."""
    deferred = window.of_trainer("publish_deferred")
    share = deferred / max(deferred + window.of_trainer("publishes"), 1e-9)
    seconds = window.now("seal_seconds")
    if share < DEFERRED or not np.isfinite(seconds).any():
        return []
    place = int(np.nanargmax(seconds))
    words = f"a version takes {seconds[place]:.2g} s to host {np.nan_to_num(window.now('host')[place]):.0f}"
    return [
        Cause("network", f"Network: {share:.0%} of the versions are put off, {words}{_rate_of(window, place)}.", share)
    ]


def _rate_of(window: _Window, place: int) -> str:
    megabytes = (window.rate("bytes_received") + window.rate("bytes_sent"))[place] / 1e6
    return f", whose link carries {megabytes:.3g} MB/s" if megabytes else ""


def _feeding(window: _Window, config: Config, wait: float, before: str) -> list[Cause]:
    """Why rows come too slowly to a trainer that waits."""
    environments = window.of_rollouts("env_seconds")
    policy = window.of_rollouts("act_seconds")
    waits = f"the trainer waits for data {wait:.0%} of its time"
    if not window.most("rollout_wait"):  # else the trainer leaves rows where they are, for replay.samples_per_insert
        host, full = window.fullest_host()
        if full > FULL:
            is_relay = (window.now("role") == ROLES.index(Role.RELAY)) & (window.hosts == host)
            link = _rate_of(window, int(np.argmax(is_relay))) if is_relay.any() else ""
            words = f"rollouts of host {host:.0f} wait {full:.0%} of theirs at full lanes{link}"
            return [Cause("network", f"Network: {waits} while {words}.", full)]
    queued = min(window.of_rollouts("queued_seconds") + window.of_trainer("queued_seconds"), wait)
    own = 1 - min(window.of_rollouts("queued_seconds") / max(environments + policy, 1e-9), 1.0)
    parts = [
        Cause(
            "environments",
            f"Environments: {waits}, and rollouts spend {environments:.0%} of theirs inside them.",
            environments * own,
        ),
        Cause("policy", f"Policy: {waits}, and rollouts spend {policy:.0%} of theirs choosing actions.", policy * own),
        Cause(
            "processor",
            f"Processor: {waits}, and {queued:.0%} pass while rollouts or trainer are ready to run and get no core.",
            queued,
        ),
    ]
    wanted = config.replay.samples_per_insert
    if 0 < wanted < RARE:
        words = f"replay.samples_per_insert = {wanted:g} allows few updates"
        return [Cause("pacing", f"Pacing: {waits}: {words}.", wait), *_sorted(parts, before)]
    return _sorted(parts, before)


def _sorted(parts: Sequence[Cause], before: str) -> list[Cause]:
    costly = [part for part in parts if part.share > 0]
    return sorted(costly, key=lambda cause: -cause.share - AHEAD * (cause.kind == before)) or [parts[0]]
