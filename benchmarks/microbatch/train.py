"""Pre-training of the DDQN sizer in the simulator: `python -m benchmarks.microbatch --train` (M8).

One compact double DQN with vector-valued heads, apart from ddrl.learner: its nodes share a network and a batch, which
the library's algorithms do not know yet. To move it there, replace `Agent.update` (loss, Adam, target copy) and
`Memory`.

Rewards are difference rewards (Wolpert and Tumer 2002): what the vector reward of an iteration gains by a node's action
beside the filter's own size for that node, all others unchanged, on the same noise. The simulator can ask that of any
action, so exploration costs the trajectory nothing: it follows the greedy actions, and what is learned from is one
action a node, drawn at random half of the time. The next state is the trajectory's (one node's size hardly moves
it)."""

# pyright: basic
# scipy and torch have no complete types.

from __future__ import annotations

import json
import sys
import time
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
from ddrl.balance.sizers import apply_actions, best_actions, first_of
from ddrl.balance.sizes import FilterSettings, Floats, fractions_at, water_level

KINDS = (
    "static",
    "drifting",
    "bursty",
    "periodic",
    "lasting",
)  # no other kind of the simulator is ever seen
NODES = (3, 5, 8, 14, 28)  # 4, 10, 20, 32 and 64 are never seen
NODES_AT_ONCE = 160  # of all clusters that are simulated together; iterations of an episode
ITERATIONS = 150
BATCH = 64
CAPACITY = 8_000
TAU = 0.01
DISCOUNT = 0.1  # an iteration's sizes hardly touch the next one
GRADIENT_FEATURES = ("norm", "cosine", "loss", "staleness")
HIDE = {"regimes": (), "no_gradients": GRADIENT_FEATURES}


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
        self.columns: dict[str, np.ndarray] = {
            "features": np.zeros((CAPACITY, nodes, len(NODE_FEATURES)), f32),
            "context": np.zeros((CAPACITY, len(CONTEXT_FEATURES)), f32),
            "next_features": np.zeros((CAPACITY, nodes, len(NODE_FEATURES)), f32),
            "next_context": np.zeros((CAPACITY, len(CONTEXT_FEATURES)), f32),
            "actions": np.zeros((CAPACITY, nodes), i64),
            "rewards": np.zeros((CAPACITY, nodes, objectives), f32),
            "first": np.zeros(CAPACITY, i64),
            "first_rewards": np.zeros((CAPACITY, objectives), f32),
        }
        self.written = 0

    def write(self, rows: dict[str, np.ndarray]) -> None:
        """One row a cluster."""
        clusters = len(rows["actions"])
        at = (self.written + np.arange(clusters)) % CAPACITY
        for name, values in rows.items():
            self.columns[name][at] = values
        self.written += clusters

    def draw(self, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """BATCH transitions."""
        rows = rng.integers(0, min(self.written, CAPACITY), BATCH)
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
            best = (chosen @ weights[:, None]).squeeze(-1).argmax(-1)
            best_first = (chosen_first @ weights).squeeze(-1).argmax(-1)
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
    """Values [..., A, O] at actions [...]."""
    index = actions[..., None, None].expand(*actions.shape, 1, values.shape[-1])
    return values.gather(-2, index).squeeze(-2)


def level_inputs(state: NodeState, slowness: Floats) -> tuple[Floats, Floats]:
    """Overhead and speed [..., N] whose water level gives real-valued sizes: what training compares actions by."""
    return state.filter.overhead * slowness, state.filter.speed / slowness


def gains(
    simulation: Simulation, state: NodeState, taken: np.ndarray, tried: np.ndarray, first: np.ndarray
) -> np.ndarray:
    """Difference rewards [C, N, objectives] of the actions `tried`, each alone among the actions `taken`."""
    cluster = state.cluster
    nodes = taken.shape[1]
    alone = np.eye(nodes, dtype=np.bool_)[:, None, :]  # [tried node, 1, N]
    both = np.stack([np.where(alone, tried, taken), np.where(alone, 0, taken)])  # [2, N, C, N]
    overhead, speed = level_inputs(state, state.slowness(both))
    level = water_level(cluster.total, overhead, speed, cluster.min_size, cluster.max_size)
    sizes = fractions_at(level, overhead, speed, cluster.min_size, cluster.max_size)
    reward = simulation.reward(sizes, first)
    return np.moveaxis(reward[0] - reward[1], 0, 1)


def train(seed: int, updates: int, variant: str, path: Path, command: str) -> dict[str, Any]:
    """Train one agent and write it to `path`.

    `variant`: regimes; no_gradients (nothing of the gradients is seen)."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(seed)
    agent = Agent(seed)
    memories = {nodes: Memory(nodes) for nodes in NODES}
    seen = np.array([name not in HIDE[variant] for name in NODE_FEATURES], np.float32)
    begin = time.monotonic()
    done = 0
    episode = 0
    losses = []
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
        state = NodeState(scenario.cluster, FilterSettings())
        state.update(simulation.blank())
        taken = np.zeros((clusters, nodes), np.int64)
        _, observation = simulation.step(apply_actions(state, taken))
        row: dict[str, np.ndarray] = {}
        for _ in range(ITERATIONS - 1):
            state.update(observation)
            features = state.features() * seen
            context = state.context(weights)
            if row:
                memories[nodes].write({**row, "next_features": features, "next_context": context})
            values, values_first = agent.values(features, context)
            taken = best_actions((values @ weights[:, None, :, None]).squeeze(-1), 0.002)
            tried = np.where(rng.random(taken.shape) < 0.5, rng.integers(0, ACTION_COUNT, taken.shape), taken)
            best_first = best_actions((values_first @ weights[..., None]).squeeze(-1), 0.002)
            best_first[::2] = 0  # half the clusters await all
            first = first_of(best_first, nodes)
            tried_first = rng.integers(0, len(FIRST), clusters)
            reward = gains(simulation, state, taken, tried, first)
            sizes = apply_actions(state, taken)
            first_reward = simulation.reward(sizes, first_of(tried_first, nodes)) - simulation.reward(sizes, all_nodes)
            row = {"features": features, "context": context, "actions": tried, "rewards": np.clip(reward, -5, 5)}
            row |= {"first": tried_first, "first_rewards": np.clip(first_reward, -5, 5)}
            _, observation = simulation.step(sizes, first)
            if episode >= 2 * len(KINDS):
                memory = memories[int(rng.choice([n for n, memory in memories.items() if memory.written]))]
                losses.append(agent.update(memory.draw(rng), 1e-3 * max(0.02, 1 - done / updates)))
                done += 1
        episode += 1
        if episode % 20 == 0:
            print(f"{path.name}: {done} updates, loss {np.mean(losses[-1000:]):.4f}", file=sys.stderr, flush=True)
    about = {"form": FORM, "hidden": list(HIDE[variant]), "seed": seed, "updates": done, "command": command}
    tensors = {name: np.ascontiguousarray(tensor.detach().numpy()) for name, tensor in agent.online.tensors().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"ddqn": json.dumps(about)})
    return {"seed": seed, "variant": variant, "updates": done, "seconds": round(time.monotonic() - begin, 1)}
