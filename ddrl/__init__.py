"""ddrl: distributed deep reinforcement learning, one trainer and hundreds of rollouts.

The package's top imports nothing heavy: a rollout process never loads torch. See docs/architecture.md.
"""

from __future__ import annotations

TYPE_CHECKING = False  # nothing is imported here: Ctrl-C in the middle of it would end a run with a traceback
if TYPE_CHECKING:
    from typing import Any

    from ddrl.notebook import play, start, watch
    from ddrl.telemetry import Run, attach

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "attach", "play", "start", "watch"]

_HOMES = {
    "Run": "ddrl.telemetry",
    "attach": "ddrl.telemetry",
    "play": "ddrl.notebook",
    "start": "ddrl.notebook",
    "watch": "ddrl.notebook",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddrl' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
