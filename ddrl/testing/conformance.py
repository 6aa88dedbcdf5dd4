"""`python -m ddrl.testing.conformance ENV_ID` (or package.module:factory): does an environment keep the contract, and
what will ddrl do with it?

The environment is made, described and stepped as a rollout does, with random actions, so that every check of a run is
made: what a run refuses is refused here, in the same line. Beyond those, the same seed is played twice."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddrl.acting.choosers import chooser_class
from ddrl.channels.lane import Lane, StepWriter
from ddrl.core.background import checked_output, keep_streams
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError, EnvError, user_error
from ddrl.core.forks import end_process, note_work, watched
from ddrl.core.generators import seed_generators
from ddrl.core.rows import row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec, VectorEnv
from ddrl.envs.making import make_vector_env
from ddrl.envs.spaces import doubts
from ddrl.envs.vectors import LoopVectorEnv, NativeVectorEnv
from ddrl.learner.algorithm import describe, with_algorithm

NUM_ENVS = 2
MAX_STEPS = 500  # vector steps of one play
MAX_SECONDS = 5.0  # of one play
SEED = 1


class Play:
    """What random actions met from a seed: for two plays of one environment to be compared."""

    def __init__(self, config: Config, max_steps: int) -> None:
        """Steps are recorded as a rollout records them, so that its checks are made."""
        seed_generators(SEED)  # constructors may draw from them
        env = make_vector_env(config.env, min(NUM_ENVS, config.env.num_envs))
        try:
            self.spec = env.spec
            self.autoreset = _autoreset(env)
            self._play(env, config, max_steps)
        finally:
            env.close()

    def _play(self, env: VectorEnv, config: Config, max_steps: int) -> None:
        declaration = describe(config, env.spec)
        chooser: Any = chooser_class(declaration.chooser)(env.spec, env.num_envs, SEED, declaration.settings)
        schema = row_schema(env.spec)
        rows = np.zeros(2 * env.num_envs, schema.dtype)  # the most of one step: an end is a row too
        lane = Lane.create(None, schema.dtype, len(rows))
        writer = StepWriter(lane, schema, 0, env_id=config.env.id, nonfinite=config.env.nonfinite)
        seed_generators(SEED)
        self.states = [env.reset(SEED)]
        self.rewards: list[Any] = []
        self.returns: list[float] = []
        self.terminated = 0
        self.truncated = 0
        self.env_seconds = 0.0
        running = np.zeros(env.num_envs)
        end = time.perf_counter() + MAX_SECONDS
        while len(self.rewards) < max_steps and time.perf_counter() < end:
            action, _ = chooser.random(self.states[-1])
            began = time.process_time()
            step = env.step(action)
            self.env_seconds += time.process_time() - began
            try:
                writer.write(
                    *(self.states[-1], action, step.reward, step.terminated, step.truncated, step.observation, 0),
                    step.columns,
                )
            except EnvError as error:
                raise EnvError(f"{error}{env.spec.nonfinite_entry(self.states[-1], step.observation)}") from None
            lane.pop(rows)
            self.states.append(step.observation.copy())
            self.rewards.append(step.raw_reward.copy())
            self.terminated += int(step.terminated.sum())
            self.truncated += int((step.truncated & ~step.terminated).sum())
            running += step.raw_reward
            for index in np.flatnonzero(step.terminated | step.truncated):
                self.returns.append(float(running[index]))
                running[index] = 0.0

    def first_difference(self, other: Play) -> str:
        """Where another play of the same seed differs; "" where it does not."""
        for step, (mine, theirs) in enumerate(zip(self.states, other.states, strict=False)):
            if mine.tobytes() != theirs.tobytes():
                return f"observations differ at step {step}" if step else "the first observations differ"
        for step, (mine, theirs) in enumerate(zip(self.rewards, other.rewards, strict=False)):
            if not np.array_equal(mine, theirs):
                return f"rewards differ at step {step + 1}"
        return ""


def examine(config: Config) -> list[str]:
    """What ddrl will do with the environment, one line a subject. Raises what a run would be refused for."""
    play = Play(config, MAX_STEPS)
    again = Play(config, min(len(play.rewards), 100))
    spec = play.spec
    declaration = describe(config, spec)
    config = with_algorithm(config, spec)
    difference = play.first_difference(again)
    steps = max(
        len(play.rewards) * min(NUM_ENVS, config.env.num_envs) - len(play.returns), 1
    )  # those after an end only reset
    nbytes = row_schema(spec, declaration.columns).dtype.itemsize
    capacity = config.replay.capacity
    notes = [note.removeprefix("env.scale = auto: ") for note in spec.notes]
    notes += doubts(spec, np.concatenate(play.states))
    returns = f", mean return {np.mean(play.returns):.4g}" if play.returns else ""
    same = (
        f"NOT REPRODUCIBLE, one seed played twice: {difference}" if difference else "one seed played twice is the same"
    )
    unscaled = "bytes as 0 to 1" if _all_bytes(spec.observation) else "numbers as they are"
    return [
        f"{config.env.id}: trains with {config.learner.algorithm}",
        f"observation  {_shown(spec.observation)}",
        f"action       {_action(spec)}",
        f"scale        {'; '.join(notes) or unscaled}",
        f"masks        {'read: only allowed actions are taken' if spec.masked else 'none'}",
        f"autoreset    {play.autoreset}",
        f"seeds        {same}",
        f"episodes     {play.terminated} terminated and {play.truncated} truncated in {steps} steps at random{returns}",
        f"cost         {1e6 * play.env_seconds / steps:.0f} us of processor time a step",
        f"row          {nbytes} bytes: replay.capacity = {capacity} takes up to {capacity * nbytes / 2**20:.0f} MiB",
    ]


def _autoreset(env: VectorEnv) -> str:
    if isinstance(env, LoopVectorEnv):
        return "by ddrl, on the step after an end: single environments, one after the other"
    if isinstance(env, NativeVectorEnv):
        return "by its own vector, on the next step"
    return "by a VectorEnv, on the next step"


def _all_bytes(observation: ArraySpec) -> bool:
    return {array.dtype for array in observation.arrays.values()} == {"uint8"}


def _shown(observation: ArraySpec) -> str:
    fields = dict(observation.fields) or {"": observation}
    arrays = [f"{name} {array.dtype} {list(array.shape)}".lstrip() for name, array in fields.items()]
    pictures = ", ".join(name or "it" for name, array in fields.items() if array.is_picture)
    text = ", ".join(arrays[:4]) + (f" and {len(arrays) - 4} more" if len(arrays) > 4 else "")
    return f"{text}; convolutions see {pictures}" if pictures else text


def _action(spec: EnvSpec) -> str:
    if spec.discrete:
        return f"one of {spec.num_actions}"
    bounds = f"from {min(spec.action_low):g} to {max(spec.action_high):g}" if spec.action_low else "without bounds"
    return f"{math.prod(spec.action.shape)} numbers {bounds}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status: 0 where the environment can be trained in, 1 where a run would be refused."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.testing.conformance",
        description="Hold an environment to ddrl's contract, and say what ddrl will do with it.",
    )
    parser.add_argument("env", metavar="ENV_ID", help="a Gymnasium id, package:Id, or package.module:factory")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE", help="as ddrl.run takes"
    )
    options = parser.parse_args(arguments)
    note_work(options.env)
    try:
        lines = examine(load_config(None, [f"env.id={options.env}", *options.overrides]))
    except DdrlError as error:
        print(f"refused: {error}")
        return 1
    except Exception as error:
        print(f"refused: env.id = {options.env}: {user_error(error)}")
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    keep_streams(patience=None)
    end_process(watched(lambda: checked_output(main())))
