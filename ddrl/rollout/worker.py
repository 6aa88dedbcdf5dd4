"""The rollout's loop: act with the newest parameters, step the environments, record every step in the lane.

Reads a mailbox and the board; writes a lane and its own row of counters. A vector step takes tens of microseconds, so
work is done for many steps at once where possible: random numbers are drawn ahead, and counters are stored a few times
a second.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.acting.choosers import Columns, chooser_class, chooser_settings, epsilon_of
from ddrl.acting.policy import ActingPolicy
from ddrl.channels.board import Board, Command, CounterRow
from ddrl.channels.lane import StepWriter
from ddrl.channels.mailbox import Pin
from ddrl.core.config import RolloutConfig
from ddrl.core.errors import ConfigError, EnvError
from ddrl.core.forks import forbid_torch, seed_generators
from ddrl.core.metrics import Phase
from ddrl.core.specs import ACTION_MASK, EnvStep, VectorEnv, allowed_actions

STATE_PERIOD = 1.0  # [s] between copies of what the environments keep between episodes
REPORT_PERIOD = 0.1  # [s] between stores of the counters
PAUSE_WAIT = 0.5  # [s] between signs of life while paused
ROOM_WAIT = 0.2  # [s] between checks of the board while the lane is full: a stop is noticed that late
ENV_STEPS = 0  # index in a published version's values: steps of all rollouts
EPSILON = 1  # and their epsilon


@dataclass(frozen=True)
class Place:
    """Which rollout this is: number `index` of `count`, and the seed of its environments and choices."""

    index: int
    count: int
    seed: int


class PolicyReader(Protocol):
    """What a worker needs of its place in the mailbox."""

    def pin(self) -> Pin | None:
        """Pin the newest version in place of the former pin; None where there is none."""
        ...

    def unpin(self) -> None:
        """Hold nothing."""
        ...


class RolloutWorker:
    """One rollout: N environments, one policy, one lane."""

    def __init__(
        self,
        env: VectorEnv,
        policy: ActingPolicy,
        reader: PolicyReader,
        writer: StepWriter,
        counters: CounterRow,
        config: RolloutConfig,
        place: Place,
        board: Board,
        keep_states: Callable[[], object] | None = None,
    ) -> None:
        """Take over `env` and `writer`; the first step resets the environments with the place's seed.

        The policy must compute the outputs that the writer's rows have columns for. `keep_states`, called
        about once in STATE_PERIOD, saves what the environments keep between episodes."""
        self.env = env
        self._policy = policy
        self._reader = reader
        self._writer = writer
        self._board = board
        self._config = config
        self._place = place
        self._keep_states = keep_states
        self._next_states = 0.0
        self._chooser_class = chooser_class(policy.model.chooser)
        self._chooser_settings = {**policy.model.settings, **chooser_settings(config, place.index)}
        self._chooser_class(env.spec, 1, 0, self._chooser_settings)  # refuses actions that it cannot choose
        self._stateful = bool(policy.model.inputs)
        self._masked = env.spec.masked
        chosen = {column.name for column in (*self._chooser_class.columns(env.spec), *env.spec.columns)}
        recorded = {column.name for column in writer.schema.further} - chosen
        self._recorded_outputs = sorted(recorded & set(policy.model.outputs))
        self._recorded_states = sorted(recorded & set(policy.state))
        if lacking := recorded.difference(self._recorded_outputs, self._recorded_states):
            raise ConfigError(
                f"nobody gives the columns {', '.join(sorted(lacking))} that learner.algorithm declares: they must be "
                f"outputs of its acting module ({', '.join(policy.model.outputs)}) or columns of the chooser"
            )
        self._blank: dict[str, NDArray[Any]] = {}  # what is recorded of outputs before there is a policy
        self._by_step = config.refresh == "step"
        self._by_write = config.refresh == "write"
        self._blocks = 0  # of a sample area, when parameters were last taken
        self._nbytes = policy.layout.nbytes
        self._counters = {
            name: counters[name]
            for name in (
                "env_steps",
                "episodes",
                "return_sum",
                "episode_steps_sum",
                "env_seconds",
                "act_seconds",
                "wait_seconds",
                "rows_dropped",
                "fetches",
            )
        }
        self._gauges = {name: counters[name] for name in ("heartbeat", "policy_version", "epsilon", "phase")}
        self._row = counters
        # Not yet added to the counters, to which an earlier process of this place may still add while this one starts.
        self._counts = dict.fromkeys(self._counters, 0.0)
        self._counted_dropped = writer.nonfinite
        self._counted_wait = writer.lane.wait_seconds
        self._env_seconds = self._act_seconds = self._env_steps = 0.0
        self._next_report = 0.0
        self._pin: Pin | None = None
        self._vector: NDArray[np.uint8] | None = None  # None: act at random
        self._warming = False  # act at random, though the policy's state advances
        self._version = 0  # of the actions taken
        self._epsilon = 1.0
        self._observation: NDArray[Any] | None = None

    def reset(self, seed: int) -> None:
        """Begin new episodes everywhere. From here on the worker depends on `seed` and what is published, and on
        nothing before."""
        self._begin(seed)

    def restart(self, seed: int) -> None:
        """As `reset`, with the policy's noise from the seed too: as a worker that was made with this seed."""
        self._policy.reseed(seed)
        self.reset(seed)

    def refresh(self) -> None:
        """Act with the newest version from the next step on."""
        self._take(self._reader.pin())

    def _begin(self, seed: int) -> NDArray[Any]:
        env_seed, choice_seed = np.random.SeedSequence(seed).generate_state(2)
        n = self.env.num_envs
        self._chooser = self._chooser_class(self.env.spec, n, int(choice_seed), self._chooser_settings)
        seed_generators(int(env_seed))
        self._observation = observation = self.env.reset(int(env_seed))
        self._writer.cut()
        if self._stateful:
            self._policy.reset(count=n)
        outputs = self._policy.model.outputs
        self._blank = {
            name: np.zeros((n, *outputs[name].shape), outputs[name].dtype) for name in self._recorded_outputs
        }
        self._over: NDArray[np.bool_] = np.zeros(n, bool)  # environments whose step only resets
        self._returns = np.zeros(n)
        self._began = [0] * n  # turn at which each environment's episode began
        self._turn = self._resetting = 0
        self._take(self._reader.pin())
        return observation

    def step(self) -> int:
        """One vector step: act, step, record. Returns the environment steps taken (environments that only reset take
        none)."""
        observation = self._observation
        if observation is None:
            observation = self._begin(self._place.seed)
        elif self._by_step or (self._wrote() if self._by_write else self._resetting):
            pin = self._reader.pin()
            if pin is not self._pin:
                self._take(pin)
        clock = time.perf_counter
        begin = clock()
        action, columns = self._act(observation)
        acted = clock()
        step = self.env.step(action)
        stepped = clock()
        following, reward, terminated, truncated, raw_reward, brought = step
        try:
            self._writer.write(
                *(observation, action, reward, terminated, truncated, following, self._version),
                {**brought, **columns} if columns else brought,
                ROOM_WAIT,
            )
        except EnvError as error:
            raise EnvError(f"{error}{self.env.spec.nonfinite_entry(observation, following)}") from None
        if self._writer.pending:
            self._wait_for_room()
        if self._stateful:
            self._advance(terminated, truncated)
        self._observation = following
        returns = self._returns
        np.add(returns, raw_reward, out=returns)
        taken = self.env.num_envs - self._resetting
        self._turn += 1
        self._resetting = 0
        if np.count_nonzero(terminated) or np.count_nonzero(truncated):
            self._end_episodes(step)
        self._env_steps += taken
        self._act_seconds += acted - begin
        self._env_seconds += stepped - acted
        if stepped >= self._next_report:
            self.report()
        return taken

    def run(self) -> None:
        """Step until the board says neither run nor pause. NetworkError where this process has loaded torch."""
        forbid_torch(self._config.torch)
        self._gauges["phase"].set(Phase.RUNNING)
        board = self._board
        bell = self._board.rollout_bell
        last_ring = bell.value
        command = board.command
        try:
            while True:
                rung = bell.value  # rung after each new command
                if rung != last_ring or self._writer.pending:  # a full lane was left at a new command, before its bell
                    last_ring = rung
                    command = board.command
                if command is Command.RUN:
                    self.step()
                elif command is Command.PAUSE:
                    self._pause(rung)
                else:
                    break
        finally:
            self.report()
            self.share_states()
            self.release()

    def report(self) -> None:
        """Store the counters and a sign of life."""
        counts = self._counts
        counters = self._counters
        counts["env_steps"] += self._env_steps
        counts["act_seconds"] += self._act_seconds
        counts["env_seconds"] += self._env_seconds
        self._env_steps = self._act_seconds = self._env_seconds = 0.0
        dropped = self._writer.nonfinite
        counts["rows_dropped"] = float(dropped - self._counted_dropped)
        self._counted_dropped = dropped
        waited = self._writer.lane.wait_seconds
        counts["wait_seconds"] += waited - self._counted_wait
        self._counted_wait = waited
        for name, value in counts.items():
            counters[name].add(value)
            counts[name] = 0.0
        for name, value in getattr(self.env, "figures", {}).items():
            self._row[name].set(value)
        self._gauges["heartbeat"].set(time.time())
        self._gauges["policy_version"].set(self._version)
        self._gauges["epsilon"].set(1.0 if self._vector is None or self._warming else self._epsilon)
        now = time.perf_counter()
        self._next_report = now + REPORT_PERIOD
        if now >= self._next_states:
            self.share_states()

    def share_states(self) -> None:
        """Save what the environments keep between episodes, if this rollout's is saved."""
        if self._keep_states is not None:
            self._next_states = time.perf_counter() + STATE_PERIOD
            self._keep_states()

    def release(self) -> None:
        """Unpin the mailbox's slot; the next step pins again."""
        self._pin = self._vector = None
        self._reader.unpin()
        self._policy.release()

    def _act(self, observation: NDArray[Any]) -> tuple[NDArray[Any], Columns]:
        """An action for each environment [N] and what is recorded beside it, by parameters of one version alone."""
        while self._vector is not None:
            outputs = self._policy.act(observation, self._vector)
            if self._pin.valid():  # type: ignore[union-attr]
                chosen = (
                    self._chooser.random(observation)
                    if self._warming
                    else self._chooser.choose(outputs, observation, self._epsilon)
                )
                break
            self._take(self._reader.pin())  # the slot was taken while it was read; the outputs may be of two versions
        else:
            outputs = self._blank
            chosen = self._chooser.random(observation)
        if self._masked:
            allowed = allowed_actions(observation[ACTION_MASK])
            if not allowed[np.arange(len(allowed)), chosen[0]].all():
                raise ConfigError(
                    f"rollout.chooser = {self._chooser_class.name} chose an action that observation['{ACTION_MASK}'] "
                    "forbids: draw among ddrl.core.specs.allowed_actions, or set env.action_mask = none"
                )
        if not self._recorded_outputs and not self._recorded_states:
            return chosen
        states = self._policy.state  # before the step
        recorded = {name: outputs[name] for name in self._recorded_outputs}
        return chosen[0], {**chosen[1], **recorded, **{name: states[name] for name in self._recorded_states}}

    def _wrote(self) -> bool:
        """Whether a block of samples was written since parameters were last taken, or none are taken yet."""
        before = self._blocks
        self._blocks = getattr(self._writer, "blocks", 0)
        return self._blocks > before or self._pin is None

    def _advance(self, terminated: NDArray[np.bool_], truncated: NDArray[np.bool_]) -> None:
        """Commit the policy's next state; where this step was a reset, the next one is step 0 of a new episode."""
        if self._vector is not None:
            self._policy.commit()
        if self._over.any():
            self._policy.reset(self._over)
        self._over = terminated | truncated

    def _take(self, pin: Pin | None) -> None:
        """Act with a pinned version from now on; at random while there is none, and during the warm-up."""
        if pin is None:
            self._pin = None
            self._vector = None
            self._version = 0
            self._warming = False
            return
        if self._pin is not pin:
            self._counts["fetches"] += 1
        fresh = self._pin is None or pin.version != self._version
        self._pin = pin
        self._version = pin.version
        values = pin.values
        if fresh:  # in a closed loop the relay waits for it
            self._gauges["policy_version"].set(pin.version)
            self._board.relay_bell.ring()
        self._epsilon = epsilon_of(self._config, values[EPSILON], self._place.index, self._place.count)
        self._warming = values[ENV_STEPS] < self._config.warmup_steps
        idle = self._warming and not self._stateful
        self._vector = None if idle else pin.data[: self._nbytes]

    def _end_episodes(self, step: EnvStep) -> None:
        ended = np.flatnonzero(step.terminated | step.truncated).tolist()
        self._resetting = len(ended)
        counts = self._counts
        returns = self._returns
        for index in ended:
            if math.isfinite(returns[index]):  # where a row was dropped for its reward, the episode has no return
                counts["episodes"] += 1
                counts["return_sum"] += returns[index]
                counts["episode_steps_sum"] += self._turn - self._began[index]
            returns[index] = 0.0
            self._began[index] = self._turn + 1  # the next turn only resets

    def _pause(self, rung: int) -> None:
        begin = time.perf_counter()
        self._board.rollout_bell.wait(rung, PAUSE_WAIT)
        self._counts["wait_seconds"] += time.perf_counter() - begin
        self.report()

    def _wait_for_room(self) -> None:
        """The lane is full and is not drained for now. Wait, with signs of life, unless the job stops."""
        while self._writer.pending and self._board.command in (Command.RUN, Command.PAUSE):
            self._writer.flush(ROOM_WAIT)
            self.report()
