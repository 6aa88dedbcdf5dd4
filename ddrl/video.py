"""Films of a saved policy at play: greedy episodes as a GIF or an MP4, which dashboard and notebook show.

Used by `ddrl.evaluate` and notebooks; Pillow and imageio are imported only where a film is made. The environment is
made with render_mode = "rgb_array"; one of the user's own needs a `render()` that gives uint8 [height, width, 3]."""

from __future__ import annotations

import base64
import contextlib
import ctypes
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import SavedPolicy
from ddrl.core.errors import ConfigError, EnvError, MissingExtraError, RunDirError
from ddrl.core.files import MAX_ARRAYS, read_regular, replacement
from ddrl.envs import make_vector_env
from ddrl.envs.states import load_states
from ddrl.rollout.evaluation import EvaluationResult, play_episodes
from ddrl.telemetry.directory import FILMS

NAME = "agent.gif"
MOST_FRAMES = 3_000
FRAMES_PER_SECOND = 30.0
WIDTH = 480  # [pixels] above, every second pixel is left out


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
