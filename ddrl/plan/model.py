"""What a number of tasks, devices, hosts and rollouts comes to: throughput, device use, policy lag, makespan.

Serial tasks, alone or in a pool, are simulated round by round on the pool's own queue (ddrl.pool.simulator), on cores
that they share. Tasks with rollouts are flows: an env step asks each resource for so many seconds, and the resource
that is asked for most bounds all (the asymptotic bound of queueing networks; Denning and Buzen, 1978):

    trainer    record + u (sample + learn) + publish, and what the rollouts' work takes from its core
    rollouts   a vector step / (environments x rollouts)
    devices    u (sample + learn) tasks / devices
    cores      all of these, over the cores of the host that has most to do
    links      rows from the other hosts to the trainer's, at the given rate

u = updates an env step. Where nobody waits for the other (samples_per_insert = 0) rollouts take their share of the
cores and the trainer its own. Versions reach the other hosts by the distribution's own planner and simulator.

All seconds are longer by what else the machine did while it was recorded (`Costs.slowed`).

Left out: memory bandwidth, evaluation inside serial pools, what MPI costs the processors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError
from ddrl.distribution.plan import HEADER_BYTES
from ddrl.distribution.plans.planner import choose
from ddrl.distribution.plans.planner import predict as predict_plan
from ddrl.distribution.simulator import Network
from ddrl.plan.costs import Costs
from ddrl.plan.rounds import rounds_per, serial_rounds
from ddrl.pool.devices import Device
from ddrl.pool.offline import lower_bound
from ddrl.pool.policy import Policy
from ddrl.pool.processors import Processors
from ddrl.pool.settings import PoolConfig
from ddrl.pool.simulator import Outcome, simulate
from ddrl.pool.traces import TaskTrace

MAX_ROUNDS = 2_000  # of a trace; more are put together
LATENCY = 1e-4  # [s] of a link whose rate alone is given, as in distribution's planner
MESSAGE_SECONDS = 2e-5


@dataclass(frozen=True)
class Case:
    """What is to be predicted. rollouts: a task's; 0: serial. devices: of the pool; (): each task has its own.

    rate [bytes/s] of each host's link, each way; row_nbytes: of a row of experience, for several hosts."""

    tasks: int = 1
    devices: tuple[Device, ...] = ()
    hosts: int = 1
    rollouts: int = 0
    cores: int = 1
    rate: float = math.inf
    row_nbytes: int = 0


@dataclass(frozen=True)
class Prediction:
    """Figures of a case, all tasks together. device_use: share of the time of all devices in which they compute; lag
    [versions]: published between choosing an action and its arrival at the trainer, mean; binds: the resource that is
    asked for most, `loads`: the share of its time that each is asked for."""

    case: Case
    env_steps_per_s: float
    updates_per_s: float
    device_use: float
    lag: float
    makespan: float
    binds: str
    loads: Mapping[str, float]


def predict(case: Case, tasks: Sequence[tuple[Config, Costs]], policy: Policy) -> Prediction:
    """Predict a case of `tasks`: settings and costs, taken in turn where the case has more. ConfigError for a case that
    the model does not know."""
    chosen = [tasks[index % len(tasks)] for index in range(case.tasks)]
    if case.rollouts == 0:
        if case.hosts > 1:
            raise ConfigError("a serial task is one process: several hosts need --rollouts of at least 1")
        return _serial(case, chosen, policy)
    return _flow(case, chosen)


def traces(case: Case, tasks: Sequence[tuple[Config, Costs]]) -> list[TaskTrace]:
    """The rounds of serial tasks, for the pool's simulator; a process's start is part of its first round."""
    demand = min(case.devices[0].capacity, tasks[0][0].learner.threads) if case.devices else 1.0
    torch_device = bool(case.devices) and not case.devices[0].is_slot
    found: list[TaskTrace] = []
    for index, (config, costs) in enumerate(tasks):
        collect = [costs.start]
        gradient = [0.0]
        rounds = list(serial_rounds(config, config.run.max_env_steps))
        together = -(-len(rounds) // MAX_ROUNDS)
        for number, round in enumerate(rounds):
            if number and number % together == 0:
                collect.append(0.0)
                gradient.append(0.0)
            if case.devices:  # a lease enters and leaves its device
                gradient[-1] += 2 * costs.switch
            steps = round.vector_steps
            updates = round.updates
            cold = steps > 0
            collect[-1] += steps * (costs.step + costs.record) + cold * costs.cold_step
            collect[-1] += costs.sample * (updates > 0) + costs.publish * round.publishes
            work = updates * costs.learn + max(0, updates - 1) * costs.sample + cold * (updates > 0) * costs.cold_learn
            gradient[-1] += work / (1.0 if torch_device else demand)
        count = len(collect)
        found.append(
            TaskTrace(
                f"{index}",
                startup=[[0.0]] * count,
                collect=[[seconds] for seconds in collect],
                gradient=[[seconds] for seconds in gradient],
                update=[0.0] * count,
                send=[0.0] * (count - 1) + [costs.end if case.devices else 0.0],
                weight=config.section(PoolConfig).weight,
            )
        )
    return found


def simulate_pool(case: Case, tasks: Sequence[tuple[Config, Costs]], policy: Policy) -> tuple[list[TaskTrace], Outcome]:
    """The rounds of a pool of serial tasks, and what the pool's simulator makes of them."""
    made = traces(case, tasks)
    cores = max(case.cores, 1 + max((core for device in case.devices for core in device.cores), default=0))
    own = [Device("own", "own")] * len(tasks)  # without a pool learning is a task's own, on its own core
    slots = case.devices or own
    if not case.devices:  # all work is a process's own
        made = [
            replace(
                trace,
                collect=[[a[0] + b[0]] for a, b in zip(trace.collect, trace.gradient, strict=True)],
                gradient=[[0.0]] * trace.rounds,
            )
            for trace in made
        ]
    return made, simulate(made, len(slots), policy, "alive", processors=Processors(cores, slots))


def _serial(case: Case, tasks: Sequence[tuple[Config, Costs]], policy: Policy) -> Prediction:
    made, outcome = simulate_pool(case, tasks, policy)
    slowed = max(costs.slowed for _, costs in tasks)
    makespan = outcome.makespan
    start = max(costs.start for _, costs in tasks)
    env_steps = sum(config.run.max_env_steps for config, _ in tasks)
    rounds = [list(serial_rounds(config, config.run.max_env_steps)) for config, _ in tasks]
    updates = sum(round.updates for own in rounds for round in own)
    held = sum(trace.busy(number) for trace in made for number in range(trace.rounds))
    work = held + sum(map(sum, (collect for trace in made for collect in trace.collect)))
    if case.devices:
        learning = held - sum(2 * costs.switch * len(own) for (_, costs), own in zip(tasks, rounds, strict=True))
    else:
        learning = sum(
            costs.learn * round.updates for (_, costs), own in zip(tasks, rounds, strict=True) for round in own
        )
    devices = len(case.devices) or case.tasks
    loads = {
        "task": max(lower_bound([trace], 1) for trace in made) / makespan,
        "devices": learning / devices / makespan,
        "cores": work / case.cores / makespan,
    }
    if not case.devices:
        loads = {"trainer": loads["task"], "cores": loads["cores"]}
    return Prediction(
        case=case,
        env_steps_per_s=env_steps / max(makespan - start, 1e-9) / slowed,
        updates_per_s=updates / max(makespan - start, 1e-9) / slowed,
        device_use=learning / devices / makespan / slowed,
        lag=0.0,
        makespan=makespan * slowed,
        binds=max(loads, key=lambda name: loads[name]),
        loads=loads,
    )


def _flow(case: Case, tasks: Sequence[tuple[Config, Costs]]) -> Prediction:
    """Tasks with rollouts; unlike tasks go at the speed of their mean."""
    count = len(tasks)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    per_step = [_Demand.of(config, costs) for config, costs in tasks]
    learn = mean([one.learn for one in per_step])
    trainer = mean([one.trainer for one in per_step])
    rollout = mean([one.rollout for one in per_step])
    judge = mean([costs.judge for _, costs in tasks])
    lost = mean([costs.preempted for _, costs in tasks]) * rollout / case.hosts
    devices = len(case.devices) or count
    nearby = 1 / case.hosts  # share of the rollouts on the trainer's host
    on_slots = bool(case.devices) and not case.devices[0].is_slot
    demands = {
        "trainer": trainer + lost,
        "rollouts": rollout / case.rollouts,
        "devices": learn * count / devices,
        "cores": count * (trainer - (learn if on_slots else 0.0) + rollout * nearby + judge) / case.cores,
        "cores of the other hosts": count * rollout * nearby / case.cores if case.hosts > 1 else 0.0,
        "links": count * case.row_nbytes * (1 - nearby) / case.rate,
    }
    binds = max(demands, key=lambda name: demands[name])
    slowed = mean([costs.slowed for _, costs in tasks])
    speed = 1 / demands[binds] / slowed  # [env steps/s] of a task
    updates = speed * mean([costs.updates_per_step for _, costs in tasks])
    config, costs = tasks[0]
    if not config.replay.samples_per_insert and binds != "rollouts":
        speed, updates = (rate / slowed for rate in _unlimited(case, per_step[0], config, costs))
        binds = "trainer"
    published = updates / config.learner.publish_period
    lane = max(config.channels.lane_rows or 0, 4 * config.env.num_envs)
    waiting = lane if binds in ("trainer", "devices", "links") else config.env.num_envs
    lag = case.rollouts * waiting * published / speed
    if case.hosts > 1:
        lag += (1 - nearby) * published * _seal_seconds(case, config, costs, published)
    steps = max(config.run.max_env_steps for config, _ in tasks)
    processes = count * (1 + case.rollouts * nearby)
    return Prediction(
        case=case,
        env_steps_per_s=speed * count,
        updates_per_s=updates * count,
        device_use=min(1.0, updates * count * learn / max(costs.updates_per_step, 1e-12) / devices),
        lag=lag,
        makespan=costs.start * slowed * max(1.0, processes / case.cores) + steps / speed,
        binds=binds,
        loads={name: min(1.0, demand * speed) for name, demand in demands.items() if demand > 0},
    )


def _unlimited(case: Case, demand: _Demand, config: Config, costs: Costs) -> tuple[float, float]:
    """[env steps/s, updates/s] where nobody waits: equal shares of the cores for the trainer and each rollout."""
    share = min(1.0, case.cores / (case.tasks * (1 + case.rollouts / case.hosts)))
    speed = share * case.rollouts / demand.rollout
    left = max(0.0, share - speed * costs.record / config.env.num_envs)
    return speed, left / (costs.learn + costs.sample + costs.publish / config.learner.publish_period)


def _seal_seconds(case: Case, config: Config, costs: Costs, published: float) -> float:
    """Mean seconds from a publish until the other hosts have that version or a newer one."""
    hosts = case.hosts - 1
    network = Network.equal(
        hosts, case.rate, latency=LATENCY, message_seconds=MESSAGE_SECONDS, header_bytes=HEADER_BYTES
    )
    choice = choose(config, hosts, costs.vector_nbytes, network)
    alone = predict_plan(choice, network, costs.vector_nbytes, 1)
    period = predict_plan(choice, network, costs.vector_nbytes, config.cluster.versions_in_flight)
    return alone + (period / 2 if published * period > 1 else 0.0)


@dataclass(frozen=True)
class _Demand:
    """Seconds that an env step asks for."""

    learn: float
    trainer: float  # `learn` is part of it
    rollout: float

    @classmethod
    def of(cls, config: Config, costs: Costs) -> _Demand:
        cold = rounds_per(config)[1] * costs.cold_learn
        learn = costs.updates_per_step * (costs.learn + cold + costs.sample)
        publish = costs.updates_per_step / config.learner.publish_period * costs.publish
        return cls(learn, learn + costs.record / config.env.num_envs + publish, costs.step / config.env.num_envs)


def to_json(prediction: Prediction) -> dict[str, Any]:
    """A row of figures."""
    case = prediction.case
    return {
        "tasks": case.tasks,
        "devices": len(case.devices),
        "hosts": case.hosts,
        "rollouts": case.rollouts,
        "env_steps_per_s": prediction.env_steps_per_s,
        "updates_per_s": prediction.updates_per_s,
        "device_use": prediction.device_use,
        "lag_versions": prediction.lag,
        "makespan_seconds": prediction.makespan,
        "binds": prediction.binds,
        "loads": dict(prediction.loads),
    }
