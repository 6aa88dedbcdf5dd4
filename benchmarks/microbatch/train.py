"""Pre-training of the DDQN sizer in the simulator: `python -m benchmarks.microbatch --train` (M8).

One compact double DQN with vector-valued heads, apart from ddrl.learner: its nodes share a network and a batch, which
the library's algorithms do not know yet. To move it there, replace `Agent.update` (loss, Adam, target copy) and
`Memory`.

Rewards are difference rewards (Wolpert and Tumer 2002): what the vector reward of an iteration gains by a node's action
beside the size that the best-known rule gives that node, all others unchanged, on the same noise. The simulator can ask
that of any action, so exploration costs the trajectory nothing: it follows the greedy actions, and what is learned from
are TRIES actions a node, each drawn at random half of the time. The next state is the trajectory's (one node's size
hardly moves it). In half of the episodes the gradients' statistics are unknown, as in loops that give times alone."""

# pyright: basic
# scipy and torch have no complete types.

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import nn

from benchmarks.microbatch.simulator import Simulation, make_scenario
from ddrl.balance.ddqn import (
    ACTION_COUNT,
    CONTEXT_FEATURES,
    FIRST,
    FORM,
    NODE_FEATURES,
    OBJECTIVES,
    SHAPES,
    NodeState,
)
from ddrl.balance.sizers import (
    RULE_GAIN,
    RULE_TRUST,
    Choice,
    DdqnSettings,
    HedgeSettings,
    apply_actions,
    best_actions,
    first_of,
)
from ddrl.balance.sizes import fractions_at, water_level
from ddrl.core.specs import Floats

# In turn. No other kind of the simulator is ever seen; the laws by the clock in `mixed` alone, but for two.
KINDS = ("static", "mixed", "drifting", "bursty", "clock periodic", "periodic", "mixed", "lasting", "clock bursty")
NODES = (3, 5, 8, 14, 28)  # 4, 10, 20, 32 and 64 are never seen
NODES_AT_ONCE = 160  # of all clusters that are simulated together; iterations of an episode
ITERATIONS = 150
BATCH = 64
CAPACITY = 240_000  # nodes: about ten episodes, so that every kind is among what is learned from
UPDATES = 2  # an iteration
TAU = 0.01
DISCOUNT = 0.1  # an iteration's sizes hardly touch the next one
TRIES = 3


class Network(nn.Module):
    """`ddrl.balance.ddqn.ValueNetwork` in torch."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.names = list(SHAPES)
        for name, shape in SHAPES.items():
            scale = (2.0 / shape[0]) ** 0.5 if len(shape) == 2 else 0.0
            scale *= 0.01 if name in ("values.weight", "first2.weight") else 1.0
            parameter = nn.Parameter(scale * torch.randn(shape, generator=generator))
            self.register_parameter(name.replace(".", "_"), parameter)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By the names of the file."""
        return {name: getattr(self, name.replace(".", "_")) for name in self.names}

    def forward(self, features: torch.Tensor, context: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Values [B, N, actions, objectives] and [B, len(FIRST), objectives]."""
        t = self.tensors()
        code = torch.relu(features @ t["encode1.weight"] + t["encode1.bias"])
        code = torch.relu(code @ t["encode2.weight"] + t["encode2.bias"])
        pool = torch.cat([code.mean(1), code.amax(1), context], -1)
        hidden = code @ t["node.weight"] + (pool @ t["pool.weight"] + t["node.bias"])[:, None]
        nodes = torch.relu(hidden) @ t["values.weight"] + t["values.bias"]
        first = torch.relu(pool @ t["first1.weight"] + t["first1.bias"]) @ t["first2.weight"] + t["first2.bias"]
        return nodes.unflatten(-1, (-1, len(OBJECTIVES))), first.unflatten(-1, (-1, len(OBJECTIVES)))


class Memory:
    """Transitions of clusters of one number of nodes: a ring, drawn uniformly."""

    def __init__(self, nodes: int) -> None:
        objectives = len(OBJECTIVES)
        f32 = np.float32
        i64 = np.int64
        self.capacity = rows = CAPACITY // nodes
        self.columns: dict[str, np.ndarray] = {
            "features": np.zeros((rows, nodes, len(NODE_FEATURES)), f32),
            "context": np.zeros((rows, len(CONTEXT_FEATURES)), f32),
            "next_features": np.zeros((rows, nodes, len(NODE_FEATURES)), f32),
            "next_context": np.zeros((rows, len(CONTEXT_FEATURES)), f32),
            "actions": np.zeros((rows, nodes, TRIES), i64),
            "rewards": np.zeros((rows, nodes, TRIES, objectives), f32),
            "first": np.zeros((rows, 1), i64),
            "first_rewards": np.zeros((rows, 1, objectives), f32),
        }
        self.written = 0

    def write(self, rows: dict[str, np.ndarray]) -> None:
        """One row a cluster."""
        clusters = len(rows["actions"])
        at = (self.written + np.arange(clusters)) % self.capacity
        for name, values in rows.items():
            self.columns[name][at] = values
        self.written += clusters

    def draw(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """BATCH transitions."""
        rows = rng.integers(0, min(self.written, self.capacity), BATCH)
        return {name: torch.from_numpy(column[rows]) for name, column in self.columns.items()}


class Agent:
    """Online and target network, Adam, and the double-Q step."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.online = Network(generator)
        self.target = Network(generator)
        self.target.load_state_dict(self.online.state_dict())
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=1e-3)

    def update(self, batch: dict[str, torch.Tensor], lr: float) -> float:
        """One step of size `lr`; the loss. Squared, not Huber: rare slow-downs weigh as much as they cost."""
        weights = batch["next_context"][:, -len(OBJECTIVES) :, None]
        inputs = batch["next_features"], batch["next_context"]
        with torch.no_grad():
            chosen, chosen_first = self.online(*inputs)
            later, later_first = self.target(*inputs)
            best = (chosen @ weights[:, None]).argmax(-2)
            best_first = (chosen_first @ weights).argmax(-2)
            target = batch["rewards"] + DISCOUNT * _at(later, best)
            target_first = batch["first_rewards"] + DISCOUNT * _at(later_first, best_first)
        values, values_first = self.online(batch["features"], batch["context"])
        loss = (_at(values, batch["actions"]) - target).square().sum(-1).mean()
        loss = loss + 0.3 * (_at(values_first, batch["first"]) - target_first).square().sum(-1).mean()
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.lerp_(theirs, TAU)
        return float(loss.detach())

    def values(self, features: np.ndarray, context: np.ndarray) -> tuple[np.ndarray, ...]:
        """Online values, as numpy."""
        with torch.no_grad():
            return tuple(
                values.numpy() for values in self.online(torch.from_numpy(features), torch.from_numpy(context))
            )


def _at(values: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Values [..., A, O] at actions [..., T]: [..., T, O]."""
    return values.gather(-2, actions[..., None].expand(*actions.shape, values.shape[-1]))


def gains(
    simulation: Simulation, state: NodeState, taken: np.ndarray, tried: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Difference rewards [C, N, T, objectives] of the actions `tried` [C, N, T], each alone among those `taken`."""
    cluster = state.cluster
    nodes = taken.shape[1]
    alone = np.eye(nodes, dtype=np.bool_)[:, None, :]  # [tried node, 1, N]
    each = [*np.moveaxis(tried, -1, 0), np.zeros_like(taken)]
    slowness = state.slowness(np.stack([np.where(alone, actions, taken) for actions in each]))  # [T + 1, N, C, N]
    overhead = state.filter.overhead * slowness
    speed = state.filter.speed / slowness
    # Real-valued sizes: rounding would hide what a small change of a size gives.
    level = water_level(cluster.total, overhead, speed, cluster.min_size, cluster.max_size)
    sizes: Floats = fractions_at(level, overhead, speed, cluster.min_size, cluster.max_size)
    reward = simulation.reward(sizes, first)  # [T + 1, N, C, objectives]
    return np.moveaxis(reward[:-1] - reward[-1], (0, 1, 2), (2, 1, 0))


def train(seed: int, updates: int, path: Path, command: str) -> dict[str, Any]:
    """Train one agent and write it to `path`; `gained`: what its sizes gained in the last fifth of the training beside
    those of the best-known rule where all are awaited, in iterations at full speed, by kind."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    agent = Agent(seed)
    margin = DdqnSettings().margin  # so what others do is mostly what the rule says, and little noise
    memories = {nodes: Memory(nodes) for nodes in NODES}
    begin = time.monotonic()
    done = 0
    episode = 0
    losses = []
    gained: dict[str, list[float]] = defaultdict(list)
    while done < updates:
        kind = KINDS[episode % len(KINDS)]
        nodes = int(rng.choice(NODES))
        clusters = int(np.clip(NODES_AT_ONCE // nodes, 6, 40))
        scenario = make_scenario(kind, clusters, nodes, ITERATIONS, 1_000_003 * (seed + 1) + episode)
        weights = np.where(
            rng.random((clusters, 1)) < 0.5,
            np.eye(len(OBJECTIVES))[0],
            rng.dirichlet(np.ones(len(OBJECTIVES)), clusters),
        )
        all_nodes = np.full(clusters, nodes)
        simulation = Simulation(scenario)
        rules = Choice(scenario.cluster, HedgeSettings(), weights, RULE_TRUST, (0.0, RULE_GAIN, RULE_GAIN))
        rules.reads_gradients = bool(rng.random() < 0.5)
        state = rules.state
        _, observation = simulation.step(rules.propose(simulation.blank()))
        row: dict[str, np.ndarray] = {}
        for _ in range(ITERATIONS - 1):
            kept = rules.propose(observation)
            features = state.features()
            context = state.context(weights)
            if row:
                memories[nodes].write({**row, "next_features": features, "next_context": context})
            values, values_first = agent.values(features, context)
            taken = best_actions((values @ weights[:, None, :, None]).squeeze(-1), margin)
            tried = rng.integers(0, ACTION_COUNT, (*taken.shape, TRIES))
            tried = np.where(rng.random(tried.shape) < 0.5, tried, taken[..., None])
            best_first = best_actions((values_first @ weights[..., None]).squeeze(-1), margin)
            best_first[::2] = 0  # half the clusters await all
            first = first_of(best_first, nodes)
            tried_first = rng.integers(0, len(FIRST), clusters)
            reward = gains(simulation, state, taken, tried, first)
            sizes = apply_actions(state, taken)
            by_all = simulation.reward(np.stack([sizes, kept]), all_nodes)
            first_reward = simulation.reward(sizes, first_of(tried_first, nodes)) - by_all[0]
            gained[kind].append(float(((by_all[0] - by_all[1]) * weights).sum(-1)[::2].mean()))
            row = {"features": features, "context": context, "actions": tried, "rewards": np.clip(reward, -5, 5)}
            row |= {"first": tried_first[:, None], "first_rewards": np.clip(first_reward, -5, 5)[:, None]}
            _, observation = simulation.step(sizes, first)
            for _ in range(UPDATES if episode >= len(KINDS) else 0):
                memory = memories[int(rng.choice([n for n, memory in memories.items() if memory.written]))]
                losses.append(agent.update(memory.draw(rng), 1e-3 * max(0.02, 1 - done / updates)))
                done += 1
        episode += 1
        if episode % len(KINDS) == 0:
            curve = {name: f"{100 * np.mean(found[-2 * ITERATIONS :]):.2f}" for name, found in gained.items()}
            print(
                f"{path.name}: {done} updates, loss {np.mean(losses[-1000:] or 0):.4f}, gained {curve} %",
                file=sys.stderr,
                flush=True,
            )
    about = {"form": FORM, "seed": seed, "updates": done, "command": command}
    tensors = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in agent.online.tensors().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"ddqn": json.dumps(about)})
    shares = {name: float(np.mean(found[-len(found) // 5 :])) for name, found in gained.items()}
    return {"seed": seed, "updates": done, "seconds": round(time.monotonic() - begin, 1), "gained": shares}
