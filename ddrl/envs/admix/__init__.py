"""Ad mixing: contract ads and bidding ads compete for each request, and a policy scores them on one scale.

`generated` and `logged` make vectors of environments (`env.id = "ddrl.envs.admix:generated"`), `generated_env` and
`logged_env` Gymnasium environments; `Market` draws days, `open_log` and `LogWriter` read and write logs, `solve_dual`
gives the best that was possible. `docs/admix.md` tells the whole.
"""

from ddrl.envs.admix.contracts import Contracts, Requests
from ddrl.envs.admix.inventory import Inventory
from ddrl.envs.admix.logs.day import LogDay, open_log
from ddrl.envs.admix.logs.writer import LogWriter
from ddrl.envs.admix.making import AdmixEnv, generated, generated_env, logged, logged_env
from ddrl.envs.admix.market import Market, MarketDay
from ddrl.envs.admix.optimum import Optimum, Problem, solve_dual, solve_lp
from ddrl.envs.admix.settings import MarketConfig, PlayConfig
from ddrl.envs.admix.vector import AdmixVectorEnv

__all__ = [
    "AdmixEnv",
    "AdmixVectorEnv",
    "Contracts",
    "Inventory",
    "LogDay",
    "LogWriter",
    "Market",
    "MarketConfig",
    "MarketDay",
    "Optimum",
    "PlayConfig",
    "Problem",
    "Requests",
    "generated",
    "generated_env",
    "logged",
    "logged_env",
    "open_log",
    "solve_dual",
    "solve_lp",
]
