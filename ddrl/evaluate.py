"""Greedy episodes: how good a policy is. A run's evaluator plays them, and `python -m ddrl.evaluate RUN [--video FILE]
[--days N]` with a run's saved policy. Never imports torch.

Each of N environments plays a fixed share of the episodes and then no more, so that which episodes count does not
depend on their lengths: counting the first ones to end would prefer short ones.

The command reads RUN/policy.* only; the environment is made from the settings saved with it. A film is greedy episodes
as a GIF or an MP4, which dashboard and notebook show: Pillow and imageio are imported only where one is made. Its
environment is made with render_mode = "rgb_array"; one of the user's own needs a `render()` that gives uint8 [height,
width, 3].
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import SavedPolicy, load_trusted_policy
from ddrl.core.config import Config, EnvConfig, EvaluationConfig
from ddrl.core.errors import (
    CheckpointError,
    ConfigError,
    DdrlError,
    EnvError,
    MissingExtraError,
    RunDirError,
    user_error,
    user_frame,
)
from ddrl.core.files import MAX_ARRAYS, read_regular, replacement
from ddrl.core.forks import (
    checked_output,
    end_process,
    generators_kept,
    keep_streams,
    note_work,
    seed_generators,
    watched,
)
from ddrl.core.plugins import code_name, import_code
from ddrl.core.settings import apply_overrides
from ddrl.core.specs import Array, Bytes, Flags, Floats, Ints, VectorEnv
from ddrl.envs import make_vector_env
from ddrl.envs.making import load_states
from ddrl.telemetry.directory import FILMS

FILM_NAME = "agent.gif"
MOST_FRAMES = 3_000
FRAMES_PER_SECOND = 30.0
WIDTH = 480  # [pixels] above, every second pixel is left out


# -- episodes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EvaluationResult:
    """Raw returns [E] and lengths [E, env steps] of the episodes, by environment, then in the order played."""

    returns: Floats
    steps: Ints
    cut: int = 0  # episodes that had not ended at the limit of their steps

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns."""
        return float(self.returns.std())


MAX_EVALUATION_ENVS = 20


def evaluation_envs(config: EnvConfig, episodes: int) -> int:
    """How many environments play `episodes` together: one where env.num_envs is 1, since some simulators may exist once
    in a process."""
    return 1 if config.num_envs == 1 else min(episodes, MAX_EVALUATION_ENVS)


def episode_quotas(episodes: int, num_envs: int) -> list[int]:
    """How many of `episodes` each environment plays: shares that differ by at most one."""
    return [episodes // num_envs + (index < episodes % num_envs) for index in range(num_envs)]


@generators_kept()
def play_episodes(
    env: VectorEnv | Callable[[], VectorEnv],
    policy: ActingPolicy,
    vector: Bytes,
    episodes: int,
    seed: int,
    stop: Callable[[], bool] | None = None,
    max_steps: int = EvaluationConfig.max_episode_steps,
) -> EvaluationResult:
    """Play `episodes` greedily with the parameters `vector`; the same seed plays the same. An episode that has not
    ended after `max_steps` counts with its return so far, and what follows as the next one.

    `env` may be a factory; what it makes is closed again. `vector` must not change meanwhile: pass a copy of a
    mailbox's slot. `stop` is called at each vector step; where it returns True, InterruptedError is raised: a result of
    the episodes ended so far would be biased."""
    if episodes < 1:
        raise ValueError(f"episodes ({episodes}) must be at least 1")
    seed_generators(seed)
    if callable(env):
        made = env()
        try:
            return play_episodes(made, policy, vector, episodes, seed, stop, max_steps)
        finally:
            made.close()
    quotas = episode_quotas(episodes, env.num_envs)
    returns: list[list[float]] = [[] for _ in quotas]
    lengths: list[list[int]] = [[] for _ in quotas]
    running = np.zeros(env.num_envs)
    began = [0] * env.num_envs
    missing = episodes
    turn = 0
    count_cut = 0
    observation = env.reset(seed)
    policy.reset(count=env.num_envs)
    over = np.zeros(env.num_envs, bool)
    while missing:
        if stop is not None and stop():
            raise InterruptedError(f"evaluation stopped with {missing} of {episodes} episodes to play")
        step = env.step(policy.greedy(observation, vector))
        observation = step.observation
        terminated = step.terminated
        truncated = step.truncated
        reward = step.raw_reward
        if over.any():
            policy.reset(over)  # this step only reset them: the next one is step 0
        over = terminated | truncated
        running += reward
        turn += 1
        cut = ~over & (turn - np.array(began) >= max_steps)
        for index in np.flatnonzero(over | cut).tolist():
            if not np.isfinite(running[index]):
                raise EnvError(
                    f"env.id = {env.spec.env_id}: an episode's return is {running[index]}: a reward was NaN or infinite"
                )
            if len(returns[index]) < quotas[index]:
                returns[index].append(float(running[index]))
                lengths[index].append(turn - began[index])
                missing -= 1
                count_cut += int(cut[index])
            running[index] = 0.0
            began[index] = turn + (not cut[index])  # after an end the next step only resets
    return EvaluationResult(np.array([*chain(*returns)]), np.array([*chain(*lengths)], np.int64), count_cut)


# ---- States met in play ----

MOMENTS = 4  # at which states are kept
MOST_STEPS = 900  # vector steps that are played
REST = 0.05  # weight of the rewards not seen, below which a return counts as known


@dataclass(frozen=True)
class MetStates:
    """The states of N environments at M moments."""

    observations: Array  # [M, N, *observation.shape]
    steps: Ints  # [M], vector steps from the beginning of play
    returns: Floats  # [M, N, K], discounted sums of the rewards (of K numbers) that followed; NaN: unknown


@generators_kept()
def meet_states(env: VectorEnv, policy: ActingPolicy, vector: Bytes, discount: float, seed: int) -> MetStates:
    """Play greedily from a reset, for three times as many steps as it takes `discount` to fall to REST, at most
    MOST_STEPS.

    A return is known where its episode terminated, or where what was not seen of it weighs less than REST."""
    horizon = min(MOST_STEPS // 3, math.ceil(math.log(REST) / math.log(discount)) if discount < 1 else MOST_STEPS)
    moments = [index * 2 * horizon // MOMENTS for index in range(MOMENTS)]
    seed_generators(seed)
    observation = env.reset(seed)
    observations = list[Array]()
    policy.reset(count=env.num_envs)
    rewards = list[Array]()
    ends = list[Flags]()
    over = np.zeros(env.num_envs, bool)
    valid = list[Flags]()
    for turn in range(3 * horizon):
        if turn in moments:
            observations.append(observation.copy())
        valid.append(~over)  # else this step only resets
        step = env.step(policy.greedy(observation, vector))
        if over.any():
            policy.reset(over)
        observation = step.observation
        over = step.terminated | step.truncated
        rewards.append(step.reward.reshape(env.num_envs, -1).astype(np.float64))
        ends.append(np.stack([step.terminated, step.truncated]))
    sums = np.zeros_like(rewards[0])  # rest: weight of what was not seen
    rest = np.ones(env.num_envs)
    returns = np.zeros((len(moments), *sums.shape))
    for turn in reversed(range(3 * horizon)):
        terminated, truncated = ends[turn]
        sums[terminated | truncated] = 0
        rest = discount * np.where(terminated, 0.0, np.where(truncated, 1.0, rest))
        sums = rewards[turn] + discount * sums
        if turn in moments:
            known = valid[turn] & (rest < REST)
            returns[moments.index(turn)] = np.where(known[:, None], sums, np.nan)
    return MetStates(np.stack(observations), np.array(moments), returns)


# -- of a saved policy -------------------------------------------------------------------------------------------------


def evaluate(saved: SavedPolicy, episodes: int, seed: int) -> EvaluationResult:
    """Play `episodes` with a saved policy. CheckpointError where its environment is no longer what it was trained
    in."""
    seed_generators(seed)  # constructors may draw from them
    env = make_vector_env(saved.env, evaluation_envs(saved.env, episodes))
    try:
        if replace(env.spec, env_id=saved.model.spec.env_id) != saved.model.spec:
            raise CheckpointError(
                f"the policy was trained in {_describe(saved.model.spec)}, but env.id = {saved.env.id} makes "
                f"{_describe(env.spec)}: install the version of the environment it was trained in, or leave out --set"
            )
        load_states(env, saved.model.states, frozen=True)
        return play_episodes(env, ActingPolicy(saved.model, outputs=()), saved.vector, episodes, seed)
    finally:
        env.close()


def report(run: Path, saved: SavedPolicy, result: EvaluationResult, seed: int, seconds: float) -> dict[str, Any]:
    """What --json prints."""
    returns = result.returns
    return {
        "run": str(run),
        "env": saved.env.id,
        "seed": seed,
        "episodes": len(returns),
        "mean": result.mean,
        "std": result.std,
        "median": float(np.median(returns)),
        "min": float(returns.min()),
        "max": float(returns.max()),
        "mean_episode_steps": float(result.steps.mean()),
        "env_steps": int(result.steps.sum()),
        "seconds": round(seconds, 3),
        "policy": saved.evaluation,
        "returns": returns.tolist(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status. Trouble that ddrl knows is one line on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.evaluate",
        description="Play greedy episodes with a run's saved policy.",
        epilog="python -m ddrl.export RUN writes the policy as one ONNX file, which runs without ddrl.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--episodes", type=_positive, metavar="N", help="episodes to play (100; 1 with --video)")
    parser.add_argument("--seed", type=_seed, default=0, metavar="S", help="seed of the episodes (%(default)s)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="overrides",
        metavar="env.NAME=VALUE",
        help="play in another environment of the same observations and actions: env.id=..., env.kwargs.length=2.0",
    )
    parser.add_argument(
        "--trust", action="store_true", help="run the code that the run names, though the run was not started here"
    )
    parser.add_argument(
        "--video",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="film the episodes into FILE.gif or FILE.mp4 (default: agent.gif in RUN, where the dashboard shows it)",
    )
    parser.add_argument(
        "--days",
        type=_positive,
        metavar="N",
        help="ad mixing: play N held-out days beside every baseline and the optimum into RUN/days.json, which the "
        "dashboard shows",
    )
    parser.add_argument(
        "--log", type=Path, metavar="FOLDER", help="with --days, for a policy trained on a log: the log of another day"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of words")
    options = parser.parse_args(arguments)
    try:
        saved = load_trusted_policy(options.run, trust=options.trust)
        if wrong := [override for override in options.overrides if not override.startswith("env.")]:
            raise ConfigError(f"--set {wrong[0]}: an evaluation takes settings of [env] alone, such as env.id")
        if options.overrides:
            saved = msgspec.structs.replace(saved, env=apply_overrides(Config(env=saved.env), options.overrides).env)
        if options.days:
            return _account(saved, options)
        note_work(saved.env.id)
        begin = time.perf_counter()
        result, film = _play(saved, options)
    except DdrlError as error:
        print(f"ddrl.evaluate: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        if not user_frame(error):
            raise
        print(f"ddrl.evaluate: {user_error(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ddrl.evaluate: interrupted", file=sys.stderr)
        return 130
    figures = report(options.run, saved, result, options.seed, time.perf_counter() - begin)
    if film is not None:
        figures["video"] = str(film)
    print(json.dumps(figures) if options.json else _words(figures))
    return 0


def _play(saved: SavedPolicy, options: argparse.Namespace) -> tuple[EvaluationResult, Path | None]:
    """The episodes that the command asks for, and the film of them."""
    if options.video is None:
        return evaluate(saved, options.episodes or 100, options.seed), None
    film = options.run / FILM_NAME if options.video == Path() else options.video
    return record(saved, film, options.episodes or 1, options.seed), film


def _account(saved: SavedPolicy, options: argparse.Namespace) -> int:
    """The days that the command asks for, beside baselines and the optimum, where the environment's module has a
    function `account_days` (saved policy, run directory, days, log, notify) -> report."""
    code = code_name(saved.env.id)
    hook = None if code is None else getattr(import_code(code.module), "account_days", None)
    if hook is None:
        raise CheckpointError(f"the policy was trained in {saved.env.id}, not in ad mixing: it has no days to account")
    begin, end = ("\r\033[K", "") if sys.stderr.isatty() else ("", "\n")

    def notify(words: str) -> None:
        print(f"{begin}{words}", end=end, file=sys.stderr)

    made = hook(saved, options.run, options.days, options.log, notify)
    print(begin, end="", file=sys.stderr)
    if options.json:
        print(json.dumps({"run": str(options.run), "days": made["days"], "scores": made["scores"]}))
        return 0
    for name, score in sorted(made["scores"].items(), key=lambda item: -item[1]):
        print(f"{name:18} {score:.4f}")
    print(f"{made['measure']}, mean of {made['days']} days; written to {made['path']}")
    return 0


def _describe(spec: Any) -> str:
    seen = spec.observation
    return f"{spec.env_id} with observations {seen.dtype} {seen.shape} and {spec.num_actions} actions"


def _words(figures: dict[str, Any]) -> str:
    return (
        f"{figures['env']}: mean return {figures['mean']:.2f} (std {figures['std']:.2f}, median "
        f"{figures['median']:.2f}, {figures['min']:.2f} to {figures['max']:.2f}) over {figures['episodes']} greedy "
        f"episodes of {figures['mean_episode_steps']:.1f} steps on average, seed {figures['seed']}, in "
        f"{figures['seconds']:.1f} s"
    ) + (f"\nfilm: {figures['video']}" if "video" in figures else "")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must be at least 0")
    return value


# ---- films ----


@dataclass(frozen=True)
class Film:
    """A film that a notebook shows: the last line of a cell."""

    path: Path
    result: EvaluationResult

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """The film and its returns as a piece of a page that needs no further file."""
        kind = FILMS[self.path.suffix]
        data = base64.b64encode(read_regular(self.path, MAX_ARRAYS)).decode()
        source = f'src="data:{kind};base64,{data}"'
        picture = f"<img {source}>" if kind.startswith("image") else f"<video {source} controls loop></video>"
        return f"{picture}<br>return {', '.join(f'{value:g}' for value in self.result.returns)}"


def record(saved: SavedPolicy, path: Path, episodes: int, seed: int) -> EvaluationResult:
    """Play `episodes`, one after the other, and write them to `path` (.gif or .mp4), whole or not at all.

    Raises EnvError where the environment cannot be drawn or an episode is longer than MOST_FRAMES, MissingExtraError
    without what writes films, RunDirError where the file cannot be written."""
    if path.suffix not in FILMS:
        raise ConfigError(f"--video {path}: name a file that ends in {' or '.join(FILMS)}")
    module = "PIL.Image" if path.suffix == ".gif" else "imageio.v2"
    try:
        films: Any = import_module(module)  # without types
    except ImportError:
        raise MissingExtraError(module.partition(".")[0], "video", "ddrl.evaluate --video") from None
    config = replace(saved.env, kwargs={**saved.env.kwargs, "render_mode": "rgb_array"})
    env: Any = make_vector_env(config, 1)
    frames = 0

    def look() -> bool:
        nonlocal frames
        frames += 1
        if frames > MOST_FRAMES:
            raise EnvError(f"the film has more than {MOST_FRAMES} frames: play fewer episodes, or film by hand")
        picture = env.render() if hasattr(env, "render") else None
        if picture is None:
            raise EnvError(f"env.id = {saved.env.id} cannot be drawn: its environment gives no picture by render()")
        writer.append_data(_small(np.asarray(picture)))
        return False

    def open_writer(temporary: Path) -> Any:
        if path.suffix == ".gif":
            return _Gif(temporary, films)
        options = {"fps": FRAMES_PER_SECOND, "macro_block_size": 2, "output_params": ["-f", "mp4"]}
        return films.get_writer(temporary, format=path.suffix, **options)

    try:
        load_states(env, saved.model.states, frozen=True)
        with replacement(path) as temporary, open_writer(temporary) as writer:
            return play_episodes(env, ActingPolicy(saved.model, outputs=()), saved.vector, episodes, seed, look)
    except OSError as error:
        raise RunDirError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        env.close()


class _Gif:
    """Writes its frames at the end of a `with` block; until then each is kept with a palette, a third of its bytes."""

    def __init__(self, path: Path, images: Any) -> None:
        self._path = path
        self._images = images
        self._frames: list[Any] = []

    def append_data(self, picture: np.ndarray) -> None:
        """One frame more."""
        self._frames.append(self._images.fromarray(picture).quantize(256))

    def __enter__(self) -> _Gif:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            first, *others = self._frames
            timing = {"duration": 1000 / FRAMES_PER_SECOND, "loop": 0}
            first.save(self._path, format="GIF", save_all=True, append_images=others, **timing)
            del first, others
        self._frames.clear()
        with contextlib.suppress(AttributeError):  # glibc alone, which otherwise keeps 30 KB a frame in this process
            ctypes.CDLL(None).malloc_trim(0)


def _small(picture: np.ndarray) -> np.ndarray:
    stride = -(-picture.shape[1] // WIDTH)
    return np.ascontiguousarray(picture[::stride, ::stride])


if __name__ == "__main__":
    keep_streams(patience=None)
    end_process(watched(lambda: checked_output(main())))
