"""Ad mixing: contract ads and bidding ads compete for each request, and a policy scores both on one scale.

`generated` and `logged` make vectors of environments (`env.id = "ddrl.admix:generated"`), `generated_env` and
`logged_env` Gymnasium environments; `Market` draws days, `open_log` and `LogWriter` read and write logs, `solve_dual`
computes the best possible result of a day. `Mixer` serves a trained policy, over HTTP as `python -m ddrl.serve`. The
slice needs the core alone. `docs/admix.md` and `docs/serving.md` describe it.

    settings, contracts        settings; contracts, visitors, requests, the forecast, pacing: what all others share
    market, logs               days that are drawn; days that are read from logs, and writing these
    kernel                     which ad is shown and what a policy sees, in C++, by the tables of `contracts`
    environment                environments, and how settings name them; `Book`, what is known before a day
    networks                   actor and critics over a queue of any length
    optimum, baselines         the linear program; whole days played by rules, and the rules to compare with
    account, page              held-out days of a policy beside all of these, and their figures
    mixer                      display requests in, decisions out
    journal                    what a server writes: its log, its counters, versions of the policy, scored logs
    serving, load              `python -m ddrl.serve`: HTTP, or whole logs; a load generator
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddrl.admix.account import account_days
    from ddrl.admix.contracts import Contracts, Inventory, Requests
    from ddrl.admix.environment import AdmixEnv, AdmixVectorEnv, Book, generated, generated_env, logged, logged_env
    from ddrl.admix.logs import LogDay, LogWriter, open_log
    from ddrl.admix.market import Market, MarketDay
    from ddrl.admix.mixer import Billing, Control, Decision, DisplayRequest, Mixer, ServedPolicy
    from ddrl.admix.optimum import Optimum, Problem, solve_dual, solve_lp
    from ddrl.admix.serving import open_mixer
    from ddrl.admix.settings import MarketConfig, PlayConfig

__all__ = [
    "AdmixEnv",
    "AdmixVectorEnv",
    "Billing",
    "Book",
    "Contracts",
    "Control",
    "Decision",
    "DisplayRequest",
    "Inventory",
    "LogDay",
    "LogWriter",
    "Market",
    "MarketConfig",
    "MarketDay",
    "Mixer",
    "Optimum",
    "PlayConfig",
    "Problem",
    "Requests",
    "ServedPolicy",
    "account_days",
    "generated",
    "generated_env",
    "logged",
    "logged_env",
    "open_log",
    "open_mixer",
    "solve_dual",
    "solve_lp",
]

_HOMES = {
    "account": ("account_days",),
    "contracts": ("Contracts", "Inventory", "Requests"),
    "logs": ("LogDay", "LogWriter", "open_log"),
    "environment": ("AdmixEnv", "AdmixVectorEnv", "Book", "generated", "generated_env", "logged", "logged_env"),
    "market": ("Market", "MarketDay"),
    "mixer": ("Billing", "Control", "Decision", "DisplayRequest", "Mixer", "ServedPolicy"),
    "optimum": ("Optimum", "Problem", "solve_dual", "solve_lp"),
    "serving": ("open_mixer",),
    "settings": ("MarketConfig", "PlayConfig"),
}


def __getattr__(name: str) -> Any:
    """The public object `name`, imported when it is first asked for: a server needs no market, a reader no kernel."""
    for module, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(f"{__name__}.{module}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
