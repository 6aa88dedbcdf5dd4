"""Several training tasks on fewer devices: leases, the queue for them, pre-warming of collectors, and the simulator.

Imports ddrl.core and ddrl.channels alone: no torch, no MPI. The queue (`policies`) and the pre-warming (`prewarm`)
are pure state machines; `leases` runs them between processes, `simulator` in simulated time. The section [pool] of a
settings file is `PoolConfig`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ddrl.core.config import setting


@dataclass(frozen=True)
class PoolConfig:
    """Several tasks on fewer devices (--tasks), and learning in rounds (collectors)."""

    section: ClassVar[str] = "pool"

    devices: str = setting(
        "",
        "",
        "Devices that the tasks share, separated by commas: cuda:0, a torch device; cpu:0, a core; cpu:0-3, four; "
        "cpu:1@0.5, half a core.",
    )
    policy: str = setting(
        "fair",
        "",
        "Which waiting task gets an idle device: exclusive, slices, fifo, round_robin, fair, between_gradients, or "
        "package.module:Class of your own.",
        plugin="ddrl.pool.policies",
    )
    weight: float = setting(1.0, "", "Weight of a task in the queue; in the task's own file.", gt=0)
    collectors: str = setting(
        "off",
        "",
        "off: rollouts run beside learning. Else learning goes in rounds: run.processes collectors take a fixed "
        "number of steps with one version, then all learning happens, then the next version is sent. A collector ends "
        "once it has sent its steps, and the next one starts when its parameters are there (cold) or a predicted time "
        "before (prewarm); alive: it does not end. With or without --tasks. Under mpirun relays start them; "
        "ranks are a trainer, a relay per host, and an evaluator where evaluation is on; with --tasks a master, and a "
        "relay per task and host.",
        choices=("off", "alive", "cold", "prewarm"),
    )
    collect_steps: int = setting(128, "steps", "Steps of each environment that a collector takes a round.", ge=1)
    gradient_order: str = setting(
        "sent",
        "",
        "In which order a round's data are recorded and learned from: sent, as the collectors sent them; worker, by "
        "their numbers, so that a run is the same bit for bit.",
        choices=("sent", "worker"),
    )
    delay_cost: float = setting(
        49.0,
        "",
        "Cost of a second that parameters wait for a collector; one that a collector waits for them costs 1.",
        gt=0,
    )
