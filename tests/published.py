"""A published environment as a stranger tries it, as one row of the table in docs/environments.md: how it is refused,
or whether 200 steps give what a plain Gymnasium loop gives, and whether a short training ends well.

    pip install minigrid && python -m tests.published minigrid:MiniGrid-DoorKey-5x5-v0

Observations are compared as networks see them (scaled by the bounds of their spaces), with rewards and ends; seeds and
actions are the same. What one seed does not reproduce in the plain loop either is said, not compared."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

from ddrl.acting.choosers import chooser_class
from ddrl.core.config import Config
from ddrl.core.errors import DdrlError, user_error
from ddrl.core.forks import seed_generators
from ddrl.core.plugins import code_name
from ddrl.core.settings import load_config
from ddrl.core.specs import ACTION_MASK, Array, EnvSpec
from ddrl.envs.making import make_vector_env, probe_spec
from ddrl.envs.vectors import environment_seeds, seed_spaces
from ddrl.learner.algorithm import describe, with_algorithm

STEPS = 200
SEED = 7


class Step(NamedTuple):
    """What a network sees, and what followed."""

    inputs: Array
    reward: float
    terminated: bool
    truncated: bool


def main() -> int:
    """The command; 1 where ddrl's numbers are not those of the plain loop, or the training fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.published", description=__doc__.splitlines()[0])
    parser.add_argument("env", metavar="ENV_ID")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.NAME=VALUE")
    parser.add_argument("--train", type=int, default=600, metavar="N", help="env steps of the training (%(default)s)")
    options = parser.parse_args()
    config = load_config(None, [f"env.id={options.env}", *options.overrides])
    try:
        spec = probe_spec(config.env)
        config = with_algorithm(config, spec)
        described = describe(config, spec)
        found, bad = compared(config, spec, chooser_class(described.chooser)(spec, 1, SEED, described.settings))
        trained = _train(options) if options.train else ""
    except Exception as error:
        text = str(error) if isinstance(error, DdrlError) else f"env.id = {options.env}: {user_error(error)}"
        print(f"| {_version(options.env)} | `{options.env}` | refused: {text} |")
        return 0
    print(f"| {_version(options.env)} | `{options.env}` | {config.learner.algorithm}: {found}{trained} |")
    return int(bad or bool(trained))


def compared(config: Config, spec: EnvSpec, chooser: Any) -> tuple[str, bool]:
    """What the comparison says, and whether it found other numbers."""
    actions: list[Array] = []
    ours = list(_by_ddrl(config, chooser, actions))
    plain = list(_by_loop(config, spec, actions))
    ends = sum(step.terminated or step.truncated for step in plain)
    if (at := first_difference(ours, plain)) < 0:
        return f"{STEPS} steps and {ends} ends as in a plain loop", False
    if (again := first_difference(plain, list(_by_loop(config, spec, actions)))) >= 0:
        return f"two plain loops of one seed differ at step {again}", False
    return f"OTHER NUMBERS than a plain loop at step {at}: {ours[at]}, {plain[at]}", True


def first_difference(some: Iterable[Step], others: Iterable[Step]) -> int:
    """The first step that differs; -1 for none."""
    for at, (one, other) in enumerate(zip(some, others, strict=True)):
        same = one.inputs.shape == other.inputs.shape and np.allclose(one.inputs, other.inputs, 1e-5, 1e-6)
        if not same or one[1:] != other[1:]:
            return at
    return -1


def _by_ddrl(config: Config, chooser: Any, actions: list[Array]) -> Iterable[Step]:
    seed_generators(SEED)
    env = make_vector_env(config.env, 1)
    seed_generators(SEED)
    observation = env.reset(SEED)
    yield Step(_scaled(env.spec, observation), 0.0, False, False)
    while len(actions) < STEPS:
        actions.append(chooser.random(observation)[0].copy())
        step = env.step(actions[-1])
        observation = step.observation
        ends = bool(step.terminated[0]), bool(step.truncated[0])
        yield Step(_scaled(env.spec, observation), float(step.raw_reward[0]), *ends)
    env.close()


def _by_loop(config: Config, spec: EnvSpec, actions: list[Array]) -> Iterable[Step]:
    seed_generators(SEED)
    env = _plain(config)
    seed_generators(SEED)
    (seed,) = environment_seeds(SEED, 1)
    seed_spaces(env, seed)
    space = env.observation_space
    first = int(getattr(env.action_space, "start", 0))
    over = True
    for place, action in enumerate([None, *actions]):
        if over or action is None:
            observation, _ = env.reset() if place else env.reset(seed=seed)
            over = False
            yield Step(_seen(space, observation, masked=spec.masked), 0.0, False, False)
            continue
        observation, reward, terminated, truncated, _ = env.step(
            int(action[0]) + first if spec.discrete else action[0].copy()
        )
        over = terminated or truncated
        inputs = _seen(space, observation, masked=spec.masked)
        yield Step(inputs, float(np.asarray(reward).item()), bool(terminated), bool(truncated))
    env.close()


def _plain(config: Config) -> Any:
    code = code_name(config.env.id)
    if code is not None:
        module = importlib.import_module(code.module)
        if code.attribute not in gymnasium.registry:
            return getattr(module, code.attribute)(**config.env.kwargs)
    return gymnasium.make(config.env.id, disable_env_checker=True, **config.env.kwargs)


def _scaled(spec: EnvSpec, observation: Array) -> Array:
    """As networks of the library see it, by its ranges."""
    parts: list[Array] = []
    for name, array in spec.observation.arrays.items():
        if name == ACTION_MASK and spec.masked:
            continue
        values = (observation[name] if spec.observation.fields else observation)[0].astype(np.float64).ravel()
        ranges = array.ranges or (((0.0, 255.0),) if array.dtype == "uint8" else ((0.0, 1.0),))
        low, high = np.array(ranges).T
        parts.append((values - low) / (high - low))
    return np.concatenate(parts)


def _seen(space: Any, value: Any, *, masked: bool) -> Array:
    """The same from Gymnasium's space and value alone."""
    if isinstance(space, spaces.Dict):
        names = [name for name in space.spaces if not (masked and name == ACTION_MASK)]
        return np.concatenate([_seen(space.spaces[name], value[name], masked=False) for name in names])
    if isinstance(space, spaces.Tuple):
        return np.concatenate([_seen(*pair, masked=False) for pair in zip(space.spaces, value, strict=True)])
    if not isinstance(space, spaces.Box):
        return np.asarray(spaces.flatten(space, value), np.float64).ravel()
    values = np.asarray(value).astype(np.float64)
    if space.dtype.kind in "iu":
        low = space.low.astype(np.float64)
        high = np.maximum(space.high.astype(np.float64), low + 1)
        limits = np.iinfo(space.dtype)
        most = min(limits.max, 2**31 - 1)
        wide = limits.max > 65535 or limits.max == 32767
        open_ended = wide & ((low < 0) & (low <= -most - 1) | (high >= most))
        values = np.where(open_ended, values, (values - low) / (high - low))
    return values.ravel()


def _train(options: argparse.Namespace) -> str:
    """What is wrong with a short training; "" for nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ddrl.run", "--serial", "--set", f"env.id={options.env}"]
        given = [f"run.dir={folder}/run", f"run.max_env_steps={options.train}", "run.max_seconds=60"]
        for text in [*options.overrides, *given, "replay.min_size=200", "evaluation.episodes=1"]:
            command += ["--set", text]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    return "" if done.returncode == 0 else f"; training ends with {done.returncode}: {done.stderr.splitlines()[-1]}"


def _version(env_id: str) -> str:
    """The package that brings the environment, and its version."""
    code = code_name(env_id)
    module = code.module.partition(".")[0] if code is not None else env_id.partition("/")[0]
    names = importlib.metadata.packages_distributions().get(module, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else module


if __name__ == "__main__":
    sys.exit(main())
