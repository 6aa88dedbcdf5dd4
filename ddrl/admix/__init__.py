"""Ad mixing: contract ads and bidding ads compete for each request, and a policy scores both on one scale.

`generated` and `logged` make vectors of environments (`env.id = "ddrl.admix:generated"`), `generated_env` and
`logged_env` Gymnasium environments; `Market` draws days, `open_log` and `LogWriter` read and write logs, `solve_dual`
computes the best possible result of a day. `Mixer` serves a trained policy, over HTTP as `python -m ddrl.serve`. The
slice needs the core alone. `docs/admix.md` and `docs/serving.md` describe it.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "account": ("account_days",),
    "contracts": ("Contracts", "Inventory", "Requests"),
    "environment": ("AdmixVectorEnv",),
    "logs": ("LogDay", "LogWriter", "open_log"),
    "making": ("AdmixEnv", "generated", "generated_env", "logged", "logged_env"),
    "market": ("Market", "MarketDay"),
    "messages": ("Billing", "Control", "Decision", "DisplayRequest"),
    "mixer": ("Book", "Mixer", "ServedPolicy"),
    "optimum": ("Optimum", "Problem", "solve_dual", "solve_lp"),
    "serving": ("open_mixer",),
    "settings": ("MarketConfig", "PlayConfig"),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str) -> Any:
    """The public object `name`, imported when it is first asked for: a server needs no market, a reader no kernel."""
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
