"""Selectors: ways of drawing picks, chosen by the setting replay.selector.

A built-in selector names one of the kernel's and gives its options (`KernelSelector`). One from outside is a Python
class with the methods of `Selector`, written package.module:Class. Both are made with their own settings (the table
`[replay.<name>]`) and with `Common`, which holds the settings that many selectors take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from ddrl.core import plugins
from ddrl.core.config import Config, setting
from ddrl.core.settings import plugin_settings
from ddrl.core.specs import Floats, Floats32
from ddrl.replay.batches import Places

PACKAGE = "ddrl.replay.selectors"


@dataclass(frozen=True)
class Common:
    """What every selector is made with."""

    priority_exponent: float  # alpha
    importance_exponent: float  # beta at the start
    seed: int


class KernelSelector:
    """The kernel's selector of that `name`, with the options of `ExperienceReplay.new_pick_selector`."""

    name: ClassVar[str]
    uses_priorities: ClassVar[bool]

    def __init__(self, settings: Any, common: Common) -> None:
        """Take the checked `Settings` of the class, or None where it has none."""
        self.options = self.kernel_options(settings, common)

    def kernel_options(self, settings: Any, common: Common) -> dict[str, float]:
        """The options of the kernel's selector."""
        raise NotImplementedError


@dataclass(frozen=True)
class Stratified:
    """The table of a selector that can draw from equal parts of the mass."""

    stratified: bool = setting(False, "", "Cut the mass into one part a draw: less spread between batches.")


class PrioritySelector(KernelSelector):
    """A selector of the kernel that draws by the learner's priorities."""

    uses_priorities = True
    Settings: ClassVar[type] = Stratified

    def kernel_options(self, settings: Stratified, common: Common) -> dict[str, float]:
        """The options of the kernel's selector."""
        return {
            "priority_exponent": common.priority_exponent,
            "importance_exponent": common.importance_exponent,
            "stratified": settings.stratified,
        }


@runtime_checkable
class Selector(Protocol):
    """A selector in Python. Constructed as cls(settings, common).

    The pick table is dense: picks have indices 0 .. size - 1. The kernel calls a selector under the replay's lock, at
    most once a batch for each method; it must not call the replay. Changes of the table since the last call are
    reported in order, before a draw, probabilities, priorities or a snapshot. An exception is raised by the call that
    needed it.
    """

    name: ClassVar[str]
    uses_priorities: ClassVar[bool]  # whether the learner's priorities are handed to set_priority

    def added(self, first: int, count: int) -> None:
        """The table grew by picks first .. first + count - 1, in the order in which they were made."""
        ...

    def moved(self, source: Places, target: Places) -> None:
        """Pick source[i] now has index target[i]; applied in this order."""
        ...

    def dropped(self, size: int) -> None:
        """The table now ends at `size`."""
        ...

    def set_priority(self, index: Places, priority: Floats32) -> None:
        """New priorities [K], finite and at least 0."""
        ...

    def set_importance_exponent(self, exponent: float) -> None:
        """Beta of the importance weights."""
        ...

    def draw(self, count: int) -> tuple[Places, Floats32 | None] | None:
        """Indices [count], with replacement, and their importance weights (None: all 1); None: nothing to draw."""
        ...

    def probabilities(self) -> Floats:
        """The probability [size] with which the next draw takes each pick."""
        ...

    def state(self) -> bytes:
        """Everything, for a snapshot."""
        ...

    def load_state(self, state: bytes) -> None:
        """Become what `state` gave."""
        ...


def check_selector(selector: Selector) -> None:
    """Raise TypeError where a selector in Python has the interface of earlier versions."""
    if not hasattr(selector, "probabilities"):
        renamed = ": rename its method `law`" if hasattr(selector, "law") else ""
        raise TypeError(f"selector {selector.name} has no method probabilities() -> float64 [size]{renamed}")


class Uniform(KernelSelector):
    """Every pick with the same probability."""

    name = "uniform"
    uses_priorities = False

    def kernel_options(self, settings: None, common: Common) -> dict[str, float]:
        return {}


class Prioritized(PrioritySelector):
    """P = p^alpha / sum p^alpha (Schaul et al. 2016, eq. 1)."""

    name = "prioritized"


class RankBased(PrioritySelector):
    """P = rank^-alpha / sum rank^-alpha (Schaul et al. 2016, section 3.3)."""

    name = "rank_based"


@dataclass(frozen=True)
class RecencySettings(Stratified):
    """The table [replay.recency]."""

    half_life: float = setting(10_000.0, "picks", "Picks made later that halve the probability of one.", gt=0)


class Recency(KernelSelector):
    """P halves with every half_life picks made later."""

    name = "recency"
    uses_priorities = False
    Settings: ClassVar[type] = RecencySettings

    def kernel_options(self, settings: RecencySettings, common: Common) -> dict[str, float]:
        return {
            "half_life": settings.half_life,
            "importance_exponent": common.importance_exponent,
            "stratified": settings.stratified,
        }


def make_selector(config: Config) -> KernelSelector | Selector:
    """The selector that replay.selector names, with its settings; ConfigError where there is none."""
    replay = config.replay
    plugin = plugins.load("replay.selector", PACKAGE, replay.selector)
    common = Common(replay.priority_exponent, replay.importance_exponent, config.run.seed)
    return plugin(plugin_settings(config, "replay", plugin), common)
