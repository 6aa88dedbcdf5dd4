"""The library's networks as numbers, without torch: which one a setting means, and the widths of its linear layers.

Read by `networks`, which builds them, and by algorithms that must declare sizes before torch is loaded."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import NetworkError
from ddrl.core.specs import ArraySpec, EnvSpec

SMALLEST_SCREEN = 36  # pixels; below it nothing is left after the three convolutions of the Nature network


class Convolutions(NamedTuple):
    """Layers (channels, kernel, stride) of an image network, and the width of its two streams."""

    layers: tuple[tuple[int, int, int], ...]
    stream_width: int
    smallest: int  # pixels a side


CNN_KINDS = {
    "nature_cnn": Convolutions(((32, 8, 4), (64, 4, 2), (64, 3, 1)), 512, SMALLEST_SCREEN),
    "small_cnn": Convolutions(((32, 5, 5), (64, 5, 5)), 256, 25),
}


class Image(NamedTuple):
    """An observation as an image network takes it."""

    channels: int
    height: int
    width: int
    channels_last: bool
    add_channel: bool


def network_kind(name: str, observation: ArraySpec) -> str:
    """What learner.network means: `auto` is nature_cnn for images that are large enough, else mlp."""
    if name != "auto":
        return name
    shape = observation.shape
    image = (len(shape) == 3 and min(sorted(shape)[1:]) >= SMALLEST_SCREEN) or (
        len(shape) == 2 and min(shape) >= SMALLEST_SCREEN
    )
    return "nature_cnn" if image else "mlp"


def image_of(kind: str, observation: ArraySpec) -> Image:
    """[C, H, W], [H, W, C] or [H, W] as an image; NetworkError for what is none, or too small for `kind`."""
    shape = observation.shape
    smallest = CNN_KINDS[kind].smallest
    if len(shape) not in (2, 3):
        raise NetworkError(
            f"learner.network = {kind} needs an image [C, H, W] or [H, W], but the observation is {list(shape)}: "
            "set learner.network = mlp, or name a module of your own"
        )
    channels_last = len(shape) == 3 and shape[2] <= 4 < shape[0]
    add_channel = len(shape) == 2
    channels, height, width = (1, *shape) if add_channel else ((shape[2], *shape[:2]) if channels_last else shape)
    if min(height, width) < smallest:
        raise NetworkError(
            f"learner.network = {kind} needs at least {smallest} x {smallest} pixels, but the "
            f"observation is {list(shape)}: set learner.network = mlp, or a larger env.screen_size"
        )
    return Image(channels, height, width, channels_last, add_channel)


def image_features(kind: str, image: Image) -> int:
    """Numbers that the convolutions of `kind` give for one image."""
    channels, height, width = image[:3]
    for outputs, kernel, stride in CNN_KINDS[kind].layers:
        channels = outputs
        height = (height - kernel) // stride + 1
        width = (width - kernel) // stride + 1
    return channels * height * width


def linear_widths(config: LearnerConfig, spec: EnvSpec, atoms: int = 1) -> list[tuple[int, int]]:
    """(inputs, outputs) of every linear layer of the library's network that `config` names, in order."""
    kind = network_kind(config.network, spec.observation)
    rows = spec.num_actions * atoms
    dueling = 0
    if config.dueling != "none":
        dueling = atoms
    if kind == "mlp":
        return list(itertools.pairwise([spec.observation.size, *config.hidden, rows + dueling]))
    width = CNN_KINDS[kind].stream_width
    features = image_features(kind, image_of(kind, spec.observation))
    if not dueling:
        return [(features, width), (width, rows)]
    return [(features, 2 * width), (width, dueling), (width, rows)]
