"""Codecs: how a piece of a model becomes fewer bytes on its way, and the piece again.

A codec is a plug-in (`core.plugins`): one file in `codecs/`, or package.module:Class from outside, named by
cluster.codec; its settings stand in the table [cluster.NAME]. It transforms one chunk at a time and is called by
`coding`; it is given the places of float32 values, nothing of versions, relays or MPI. The same bytes decode to the
same values on every machine."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol, Self

from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.core.rows import ParameterLayout
from ddrl.core.settings import plugin_settings
from ddrl.distribution.chunks import Bytes

PACKAGE = "ddrl.distribution.transport.codecs"
SETTING = "cluster.codec"


class Codec(Protocol):
    """A chunk of a model is its bytes [start, stop), both on 64-byte boundaries (the last may end anywhere)."""

    name: ClassVar[str]
    lossless: ClassVar[bool]  # gives the model back bit for bit
    uses_base: ClassVar[bool]  # may take another version, so both ends must hold it
    fixed: ClassVar[bool]  # always `wire_bytes` long

    @classmethod
    def check(cls) -> None:
        """Raise MissingExtraError where a package that it needs is not installed."""
        ...

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> Self | None:
        """A codec for models of this manifest (ConfigError where it needs one and there is none); None where models
        travel as they are. `settings`: its checked table, None where it has none."""
        ...

    def wire_bytes(self, start: int, stop: int) -> int:
        """Most bytes that the chunk takes when coded."""
        ...

    def encode(self, out: Bytes, model: Bytes, base: Bytes | None, start: int, stop: int) -> int:
        """Code the chunk of `model` into `out`; bytes used. `base`: the same chunk of another version will be at hand
        for decoding."""
        ...

    def decode(self, model: Bytes, wire: Bytes, base: Bytes | None, start: int, stop: int) -> None:
        """Write the chunk into `model`. MessageError where `wire` is no coded chunk of that place."""
        ...


def load_codec(name: str) -> type[Codec]:
    """The codec that cluster.codec names; ConfigError where there is none."""
    return plugins.load(SETTING, PACKAGE, name)


def make_codec(config: Config, layout: ParameterLayout | None) -> Codec | None:
    """The codec of the settings; None where models travel as they are. `layout` gives the places of float32 values."""
    codec = load_codec(config.cluster.codec)
    return codec.make(layout, plugin_settings(config, "cluster", codec))


def require_layout(name: str, layout: ParameterLayout | None) -> ParameterLayout:
    """The manifest; ConfigError where there is none."""
    if layout is None:
        raise ConfigError(f"{SETTING} = {name} needs the manifest of the model's parameters: hand it to the relay")
    return layout
