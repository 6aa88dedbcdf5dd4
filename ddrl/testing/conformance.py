"""`python -m ddrl.testing.conformance ENV_ID` (or package.module:factory): does an environment keep the contract, and
what will ddrl do with it?

The environment is made, described and stepped as a rollout does, with random actions, so that every check of a run is
made: what a run refuses is refused here, in the same line. Beyond those, the same seed is played twice, and the rows
that replay would be given are compared with what a plain loop over the bare environment sees for the same actions.

Several ids, or --all: each in a process of its own, for one may end its process, and a line for each."""

from __future__ import annotations

import argparse
import inspect
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registered

from ddrl.acting.choosers import chooser_class
from ddrl.channels.lane import Lane, StepWriter
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError, EnvError, user_error
from ddrl.core.forks import checked_output, end_process, keep_streams, note_work, seed_generators, watched
from ddrl.core.rows import RowKind, row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ACTION_MASK, Array, ArraySpec, EnvSpec, VectorEnv
from ddrl.envs.making import ENV_INDEX, every_id, find_env, make_vector_env
from ddrl.envs.spaces import doubts, environment_seeds, seed_spaces
from ddrl.envs.vectors import LoopVectorEnv, NativeVectorEnv
from ddrl.learner.algorithm import describe, with_algorithm

NUM_ENVS = 2
MAX_STEPS = 500  # vector steps of one play
MAX_SECONDS = 5.0  # of one play
PLAIN_STEPS = 200  # that are compared with a plain loop
EACH_SECONDS = 600.0  # for one of several environments
SEED = 1


class Play:
    """What random actions met from a seed: for two plays of one environment to be compared."""

    def __init__(self, config: Config, max_steps: int, num_envs: int = NUM_ENVS) -> None:
        """Steps are recorded as a rollout records them, so that its checks are made."""
        seed_generators(SEED)  # constructors may draw from them
        env = make_vector_env(config.env, min(num_envs, config.env.num_envs))
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
        self.rows: list[Any] = []  # as replay would be given them
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
            self.rows.extend(rows[: lane.pop(rows)].copy())
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


class Differs(Exception):
    """ddrl would record something else than the environment gives."""


class PlainLoop:
    """The bare environment, without ddrl's code, and what a loop over it sees for given actions."""

    def __init__(self, config: Config, spec: EnvSpec) -> None:
        self._spec = spec
        self._clips = config.env.reward_clip
        self._env, self.why_not = _bare(config)  # why_not: "" where there is an environment to compare with

    def first_difference(self, rows: Sequence[Any]) -> str:
        """Where the rows of one environment differ; "" where none does."""
        env = cast(gymnasium.Env[Any, Any], self._env)
        seed_generators(SEED)
        (seed,) = environment_seeds(SEED, 1)
        seed_spaces(env, seed)
        observation = env.reset(seed=seed)[0]
        kind = RowKind.STEP
        for number, row in enumerate(rows):
            if row["kind"] != kind:
                return f"row {number} is a {RowKind(int(row['kind'])).name}, not a {kind.name}"
            for name, seen in self._seen(observation).items():
                if not np.array_equal(row[name], seen.astype(row[name].dtype).reshape(row[name].shape), equal_nan=True):
                    return f"row {number} has another {name}"
            if kind is not RowKind.STEP:
                observation = env.reset()[0]
                kind = RowKind.STEP
                continue
            observation, given, terminated, truncated, _ = env.step(self._action(row["action"]))
            reward = np.asarray(given, np.float64).item()
            if row["reward"] != np.float32(np.clip(reward, -1.0, 1.0) if self._clips else reward):
                return f"row {number} has the reward {row['reward']}, not {reward}"
            kind = RowKind.TERMINATED if terminated else RowKind.TRUNCATED if truncated else RowKind.STEP
        return ""

    def close(self) -> None:
        if self._env is not None:
            self._env.close()

    def _seen(self, observation: Any) -> dict[str, Array]:
        """The observation as arrays, by the column of a row."""
        space: Any = cast(Any, self._env).observation_space
        if self._spec.masked and ACTION_MASK in getattr(space, "spaces", ()):
            space = spaces.Dict({name: entry for name, entry in space.items() if name != ACTION_MASK})
            observation = {name: observation[name] for name in space}
        names = [name for name, _ in self._spec.observation.fields if name != ACTION_MASK]
        if not names or (names == ["observation"] and self._spec.masked):
            return {"state.observation" if names else "state": _array(space, observation)}
        return {
            f"state.{name}": _array(space[name], observation[name])
            for name in names
            if name in space.spaces and not isinstance(space[name], spaces.Sequence)  # those are padded
        }

    def _action(self, action: Any) -> Any:
        space: Any = cast(Any, self._env).action_space
        kind = cast(object, space)
        if isinstance(kind, spaces.Discrete):
            return int(action) + int(space.start)
        if isinstance(kind, spaces.MultiBinary):
            shape = space.shape
            return np.array(np.unravel_index(int(action), (2,) * math.prod(shape)), space.dtype).reshape(shape)
        if isinstance(kind, spaces.MultiDiscrete):
            parts = np.array(np.unravel_index(int(action), space.nvec.ravel())).reshape(space.shape)
            return (parts + space.start).astype(space.dtype)
        return np.asarray(action, space.dtype).reshape(space.shape)


def _array(space: Any, observation: Any) -> Array:
    if isinstance(space, spaces.Box):
        return np.asarray(observation)
    return np.asarray(spaces.flatten(space, observation))


def _bare(config: Config) -> tuple[gymnasium.Env[Any, Any] | None, str]:
    """The environment as Gymnasium or its factory gives it, or why it cannot be compared with."""
    found = find_env(config.env.id)
    kwargs = dict(config.env.kwargs)
    if config.env.nonfinite == "drop":
        return None, "steps may be left out"
    seed_generators(SEED)
    if not isinstance(found, Registered):
        parameters = inspect.signature(found).parameters
        if ENV_INDEX in parameters:
            kwargs.setdefault(ENV_INDEX, 0)
        made = None if "num_envs" in parameters else found(**kwargs)
        if isinstance(made, gymnasium.Env):
            return cast(Any, made), ""
        return None, "it is a vector"
    if found.id.startswith("ALE/") and kwargs.get("obs_type", "rgb") != "ram":
        game: Any = gymnasium.make(found, frameskip=1, **kwargs)
        one = config.env
        return gymnasium.wrappers.AtariPreprocessing(game, one.noop_max, one.frame_skip, one.screen_size), ""
    return gymnasium.make(found, disable_env_checker=True, **kwargs), ""


def _compared(config: Config, steps: int) -> str:
    """What a comparison with a plain loop says. Differs where the rows are not the same."""
    alone = Play(config, steps, 1)
    plain = PlainLoop(config, alone.spec)
    try:
        if plain.why_not:
            return f"not compared with a plain loop, for {plain.why_not}"
        difference = plain.first_difference(alone.rows)
    finally:
        plain.close()
    if difference:
        raise Differs(f"env.id = {config.env.id}: not what a plain loop over the environment sees: {difference}")
    return f"{len(alone.rows)} rows are those of a plain loop"


def examine(config: Config) -> list[str]:
    """What ddrl will do with the environment, one line a subject. Raises what a run is refused for, and Differs."""
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
        f"NOT REPRODUCIBLE, one seed played twice: {difference}"
        if difference
        else f"one seed played twice is the same; {_compared(config, min(len(play.rewards), PLAIN_STEPS))}"
    )
    all_bytes = {array.dtype for array in spec.observation.arrays.values()} == {"uint8"}
    unscaled = "bytes as 0 to 1" if all_bytes else "numbers as they are"
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


def _examine_each(ids: Sequence[str], overrides: Sequence[str]) -> int:
    """A line for each of `ids`, in their order, and their counts; 1 where one of them is wrong."""
    settings = [word for each in overrides for word in ("--set", each)]

    def judge(env_id: str) -> tuple[str, str]:
        command = [sys.executable, "-m", "ddrl.testing.conformance", env_id, *settings]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=EACH_SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "WRONG", f"{env_id}: no answer in {EACH_SECONDS:.0f} s"
        lines = done.stdout.splitlines()  # the environment may print there too
        if not done.returncode:
            seeds = next((line for line in lines if line.startswith("seeds ")), "").removeprefix("seeds").strip()
            return "trains", f"{env_id}: {seeds}"
        lines += done.stderr.splitlines()
        for line in lines:
            words = line.removeprefix("refused: ").removeprefix("ddrl: ")  # ddrl: it has ended its process
            if words != line:
                return "refused", f"{env_id}: {words.removeprefix(f'env.id = {env_id}: ')}"
        last = (lines or ["its process said nothing"])[-1]  # of a traceback too
        return "WRONG", f"{env_id}: {last.removeprefix('WRONG: ')}"

    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for verdict, words in pool.map(judge, ids):
            counts[verdict] += 1
            print(f"{verdict:8} {words}", flush=True)
    print(
        f"{len(ids)} environments: {counts['trains']} can be trained in, {counts['refused']} are refused, "
        f"{counts['WRONG']} are wrong"
    )
    return 1 if counts["WRONG"] else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status: 0 where the environment can be trained in, 1 where a run would be refused or would
    record something else than the environment gives. Of several: 1 only where one is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.testing.conformance",
        description="Hold an environment to ddrl's contract and say what ddrl will do; of several: a line each.",
    )
    parser.add_argument(
        "env", metavar="ENV_ID", nargs="*", help="a Gymnasium id, package:Id, or package.module:factory"
    )
    parser.add_argument("--all", action="store_true", help="every environment that is installed and registered")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE", help="as ddrl.run takes"
    )
    options = parser.parse_args(arguments)
    ids = [*options.env, *(every_id() if options.all else ())]
    if not ids:
        parser.error("name an environment, or give --all")
    if options.all or len(ids) > 1:
        return _examine_each(ids, options.overrides)
    (env_id,) = ids
    note_work(env_id)
    ours = sys.stdout  # an environment may put another in its place
    try:
        lines = examine(load_config(None, [f"env.id={env_id}", *options.overrides]))
    except Differs as error:
        lines = [f"WRONG: {error}"]
    except DdrlError as error:
        lines = [f"refused: {error}"]
    except Exception as error:
        lines = [f"refused: env.id = {env_id}: {user_error(error)}"]
    print("\n".join(lines), file=ours)
    return 0 if len(lines) > 1 else 1


if __name__ == "__main__":
    keep_streams(patience=None)
    end_process(watched(lambda: checked_output(main())))
