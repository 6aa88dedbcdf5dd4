"""ddrl: distributed deep reinforcement learning, one trainer and hundreds of rollouts.

The package's top imports nothing heavy: a rollout process never loads torch. See docs/architecture.md.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # nothing more is imported here: Ctrl-C in the middle of it would end a run with a traceback
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from ddrl.notebook import compare, play, policy, start, watch
    from ddrl.telemetry import Run, attach

# ONNX Runtime's wheels from 1.31 on write an identifier and a database of events into HOME, in every process, and send
# them to their maker. They read this when they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
__all__ = ["Run", "__version__", "attach", "compare", "play", "policy", "start", "watch"]

_HOMES = {
    "Run": "ddrl.telemetry",
    "attach": "ddrl.telemetry",
    "compare": "ddrl.notebook",
    "play": "ddrl.notebook",
    "policy": "ddrl.notebook",
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


RENAMED = {  # modules of earlier versions, which programs, settings and saved runs name, and what they are now
    "ddrl.envs.admix.making": "ddrl.admix.environment",
    "ddrl.envs.admix": "ddrl.admix",
    "ddrl.run.serving": "ddrl.admix.serving",
    "ddrl.serve.__main__": "ddrl.admix.serving",  # python -m ddrl.serve
    "ddrl.serve": "ddrl.admix",
    "ddrl.retrain": "ddrl.admix.retrain",
    "ddrl.envs.partial": "ddrl.envs.making",
    "ddrl.video": "ddrl.evaluate",
    "ddrl.rollout.evaluation": "ddrl.evaluate",
    "ddrl.plan": "ddrl.pool.simulator",  # python -m ddrl.plan says where its predictions went
    "ddrl.distribution.simulator": "ddrl.distribution.plan",
    "ddrl.core.algorithm": "ddrl.core.specs",
    "ddrl.telemetry.facts": "ddrl.telemetry.summary",
    "ddrl.learner.snapshot": "ddrl.learner.export",
    "ddrl.runs": "ddrl.telemetry.summary",  # python -m ddrl.runs
    "ddrl.pool." + "policy": "ddrl.pool.policies",
    "ddrl.pool.settings": "ddrl.pool",
    "ddrl.balance.settings": "ddrl.balance",
    **{
        f"ddrl.balance.{old}": f"ddrl.balance.{new}"
        for old, new in (("cluster", "sizes"), ("epochs", "collection"), ("sizer", "sizers"))
    },
}


def current_name(module: str) -> str:
    """The present name of a module, or of module:name, that may have the name of an earlier version (`RENAMED`)."""
    for old, new in RENAMED.items():
        if module == old or module.startswith((f"{old}.", f"{old}:")):
            return new + module[len(old) :]
    return module


class _RenamedLoader:
    """Imports the module `target` under its old name: both names give one module object."""

    def __init__(self, target: ModuleSpec) -> None:
        self._target = target

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make a module, which `exec_module` replaces."""

    def exec_module(self, module: ModuleType) -> None:
        import importlib

        sys.modules[module.__name__] = importlib.import_module(self._target.name)

    def get_code(self, name: str) -> Any:
        """For `python -m`."""
        loader: Any = self._target.loader
        return loader.get_code(self._target.name)


class _RenamedFinder:
    """Part of `sys.meta_path`: finds modules by their old names, without importing anything before it is asked to."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        new = current_name(name)
        if new == name:
            return None
        from importlib.machinery import ModuleSpec
        from importlib.util import find_spec

        found = find_spec(new)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        loader: Any = _RenamedLoader(found)
        return ModuleSpec(name, loader, origin=found.origin, is_package=is_package)


sys.meta_path.insert(0, _RenamedFinder)  # type: ignore[arg-type]
