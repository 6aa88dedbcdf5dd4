"""The rollout's loop: act with the newest parameters, step the environments, record every step in the lane.

Reads a mailbox and the board; writes a lane and its own row of counters. A vector step takes tens of microseconds, so
whatever can be done for many at once is: random numbers are drawn ahead, and counters are stored some times a second.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.channels.board import Board, Command
from ddrl.channels.counters import CounterRow
from ddrl.channels.mailbox import MailboxReader, Pin
from ddrl.channels.step_writer import StepWriter
from ddrl.core.config import RolloutConfig
from ddrl.core.errors import EnvError
from ddrl.core.specs import EnvStep, VectorEnv
from ddrl.rollout.exploration import EpsilonGreedy, epsilon_of
from ddrl.rollout.policy import ActingPolicy, forbid_torch

REPORT_PERIOD = 0.1  # [s] between stores of the counters
PAUSE_WAIT = 0.5  # [s] between signs of life while paused
ROOM_WAIT = 0.2  # [s] between looks at the board while the lane is full: a stop is heard that late
ENV_STEPS, EPSILON = 0, 1  # where a published version's values say how far all rollouts were, and their epsilon


class RolloutWorker:
    """Rollout `index` of `count`: N environments, one policy, one lane."""

    def __init__(
        self,
        env: VectorEnv,
        policy: ActingPolicy,
        reader: MailboxReader,
        writer: StepWriter,
        counters: CounterRow,
        config: RolloutConfig,
        index: int,
        count: int,
        seed: int,
        board: Board,
    ) -> None:
        """Take over `env` and `writer`; the first step resets the environments with `seed`."""
        if not env.spec.discrete:
            raise EnvError(
                f"env.id = {env.spec.env_id} has continuous actions; choose an environment whose actions are Discrete"
            )
        self.env = env
        self._policy, self._reader, self._writer, self._board, self._config = policy, reader, writer, board, config
        self._index, self._count, self._seed = index, count, seed
        self._by_step = config.refresh == "step"
        self._nbytes = policy.layout.nbytes
        self._columns = {
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
        self._gauges = {name: counters[name] for name in ("heartbeat", "policy_version", "epsilon")}
        self._counts = dict.fromkeys(self._columns, 0.0)
        self._env_seconds = self._act_seconds = self._env_steps = 0.0
        self._next_report = 0.0
        self._pin: Pin | None = None
        self._vector: NDArray[np.uint8] | None = None  # None: act at random
        self._version = 0  # of the actions taken
        self._paused_seconds = 0.0
        self._epsilon = 1.0
        self._observation: NDArray[Any] | None = None

    def reset(self, seed: int) -> None:
        """Begin new episodes everywhere. From here on the worker depends on `seed` and what is published, and on
        nothing before."""
        self._begin(seed)

    def _begin(self, seed: int) -> NDArray[Any]:
        env_seed, choice_seed = np.random.SeedSequence(seed).generate_state(2)
        n = self.env.num_envs
        self._explore = EpsilonGreedy(self.env.spec.num_actions, n, int(choice_seed))
        self._observation = observation = self.env.reset(int(env_seed))
        self._writer.cut()
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
            observation = self._begin(self._seed)
        elif self._by_step or self._resetting:
            pin = self._reader.pin()
            if pin is not self._pin:
                self._take(pin)
        clock = time.perf_counter
        begin = clock()
        action = self._act(observation)
        acted = clock()
        step = self.env.step(action)
        stepped = clock()
        following, reward, terminated, truncated, raw_reward, columns = step
        self._writer.write(
            observation, action, reward, terminated, truncated, following, self._version, columns, ROOM_WAIT
        )
        if self._writer.pending:
            self._wait_for_room()
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
        forbid_torch()
        board, bell = self._board, self._board.rollout_bell
        heard = None
        try:
            while True:
                rung = bell.value  # whoever sets the command rings it afterwards
                if rung != heard:
                    heard, command = rung, board.command
                if command is Command.RUN:
                    self.step()
                elif command is Command.PAUSE:
                    self._pause(rung)
                else:
                    break
        finally:
            self.report()
            self.release()

    def report(self) -> None:
        """Store the counters and a sign of life."""
        counts, columns = self._counts, self._columns
        counts["env_steps"] += self._env_steps
        counts["act_seconds"] += self._act_seconds
        counts["env_seconds"] += self._env_seconds
        self._env_steps = self._act_seconds = self._env_seconds = 0.0
        counts["wait_seconds"] = self._paused_seconds + self._writer.lane.wait_seconds
        counts["rows_dropped"] = self._writer.lane.dropped + self._writer.nonfinite
        for name, value in counts.items():
            columns[name].set(value)
        self._gauges["heartbeat"].set(time.time())
        self._gauges["policy_version"].set(self._version)
        self._gauges["epsilon"].set(self._epsilon if self._vector is not None else 1.0)
        self._next_report = time.perf_counter() + REPORT_PERIOD

    def release(self) -> None:
        """Let go of the mailbox's slot; the next step pins again."""
        self._pin = self._vector = None
        self._reader.unpin()
        self._policy.release()

    def _act(self, observation: NDArray[Any]) -> NDArray[np.int64]:
        """An action for each environment [N], by parameters of one version alone."""
        while self._vector is not None:
            action = self._policy.greedy(observation, self._vector)
            if self._pin.valid():  # type: ignore[union-attr]
                return self._explore.choose(action, self._epsilon)
            self._take(self._reader.pin())  # the slot was taken while it was read; the action may be of two versions
        return self._explore.random()

    def _take(self, pin: Pin | None) -> None:
        """Act with a pinned version from now on; at random while there is none or the warm-up goes on."""
        if pin is None:
            self._pin, self._vector, self._version = None, None, 0
            return
        if self._pin is not pin:
            self._counts["fetches"] += 1
        self._pin, self._version, values = pin, pin.version, pin.values
        self._epsilon = epsilon_of(self._config, values[EPSILON], self._index, self._count)
        self._vector = pin.data[: self._nbytes] if values[ENV_STEPS] >= self._config.warmup_steps else None

    def _end_episodes(self, step: EnvStep) -> None:
        ended = np.flatnonzero(step.terminated | step.truncated).tolist()
        self._resetting = len(ended)
        counts, returns = self._counts, self._returns
        counts["episodes"] += len(ended)
        for index in ended:
            counts["return_sum"] += returns[index]
            counts["episode_steps_sum"] += self._turn - self._began[index]
            returns[index] = 0.0
            self._began[index] = self._turn + 1  # the next turn only resets

    def _pause(self, rung: int) -> None:
        begin = time.perf_counter()
        self._board.rollout_bell.wait(rung, PAUSE_WAIT)
        self._paused_seconds += time.perf_counter() - begin
        self.report()

    def _wait_for_room(self) -> None:
        """The lane is full: nobody drains it for now. Wait, with signs of life, unless the job stops."""
        while self._writer.pending and self._board.command in (Command.RUN, Command.PAUSE):
            self._writer.flush(ROOM_WAIT)
            self.report()
