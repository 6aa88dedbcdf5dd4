"""Evictions: which episode is removed when replay is full, chosen by the setting replay.eviction.

A built-in eviction names one of the kernel's. One from outside is a Python class with the methods of `Eviction`,
written package.module:Class and constructed with its own settings (the table `[replay.<name>]`).
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.settings import plugin_settings
from ddrl.replay.batches import Handles

PACKAGE = "ddrl.replay.evictions"


class Eviction(Protocol):
    """An eviction in Python. Constructed as cls(settings). It names episodes by handle.

    The kernel calls it under the replay's lock, where an episode must be evicted and for a snapshot; it must not call
    the replay. An exception is raised by the call that recorded.
    """

    name: ClassVar[str]
    wants_draws: ClassVar[bool]  # whether `changed` is given the episodes whose picks were drawn

    def changed(self, added: Handles, ended: Handles, drawn: Handles, removed: Handles) -> None:
        """Changes since the last call: episodes that got their first records, that ended, whose picks were drawn (one
        entry a pick), and that were removed. An episode can be in several of them."""
        ...

    def victim(self) -> int:
        """The episode to evict: one that was added and not removed."""
        ...

    def state(self) -> bytes:
        """Everything, for a snapshot."""
        ...

    def load_state(self, state: bytes) -> None:
        """Become what `state` gave."""
        ...


class KernelEviction:
    """The kernel's eviction of that `name`; none of them has settings."""

    name: ClassVar[str]

    def __init__(self, settings: None) -> None:
        """`settings`: what every plug-in is constructed with."""


class Fifo(KernelEviction):
    """First in, first out: the episode that began first is removed."""

    name = "fifo"


class SecondChance(KernelEviction):
    """First in, first out, but an episode that was drawn since the pointer passed it is skipped once."""

    name = "second_chance"


class Lru(KernelEviction):
    """The episode whose last draw is longest ago is removed; running episodes only where none has ended."""

    name = "lru"


class Lfu(KernelEviction):
    """The episode drawn least is removed; running episodes only where none has ended."""

    name = "lfu"


def make_eviction(config: Config) -> KernelEviction | Eviction:
    """The eviction that replay.eviction names, with its settings; ConfigError where there is none."""
    plugin = plugins.load("replay.eviction", PACKAGE, config.replay.eviction)
    return plugin(plugin_settings(config, "replay", plugin))
