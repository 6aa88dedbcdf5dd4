"""Codecs of models on their way: bytes, speed beside memcpy, greedy actions on a rounded copy, and what training
changes a version.

Policies of CartPole, LunarLander and Pong are trained briefly in this process (`--steps` of each). Their parameters are
kept at some updates of the run, so differences over 1, 10, 100 and 1000 updates are real ones; the observations on
which greedy actions are compared are those that the learner drew last. Rounding matters most where action values lie
close together, as in a policy that has hardly learned yet."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.harness import Timing, arguments, interleave, print_table, save
from ddrl import _kernel
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import load_policy
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.chunks import wire_edges
from ddrl.distribution.codecs import Codec, make_codec
from ddrl.distribution.plan import cut_chunks
from ddrl.learner import Learner
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import run_serial

PERIODS = (1, 10, 100, 1000)  # updates between two publishes
AGES = (0.1, 0.5, 0.9)  # of the run: where differences are taken
STEPS = {"cartpole": 20_000, "lunarlander": 60_000, "pong": 8_000}
SHORT = {"cartpole": 4_000, "lunarlander": 7_000, "pong": 6_000}
EXTRA = {
    "cartpole": [],
    "lunarlander": [],
    "pong": ["replay.capacity=20000", "replay.min_size=1000", "rollout.warmup_steps=1000"],
}
BATCHES = 200  # whose observations are kept
CHUNK = 1 << 16


class Diary:
    """Keeps the parameters at chosen updates of a learner, and the observations of its last batches."""

    def __init__(self, updates: int) -> None:
        self.anchors = [int(age * (updates - max(PERIODS) - 2)) for age in AGES]
        self.wanted = {anchor + period for anchor in self.anchors for period in (0, *PERIODS)}
        self.kept: dict[int, np.ndarray] = {}
        self.batches: deque[np.ndarray] = deque(maxlen=BATCHES)
        self.updates = 0

    def note(self, learner: Learner, states: np.ndarray) -> None:
        """After each update."""
        self.updates += 1
        self.batches.append(np.array(states))
        if self.updates in self.wanted:
            self.kept[self.updates] = learner.parameters.numpy()


def train(
    task: str, steps: int, folder: Path, kind: Callable[[int], Diary] = Diary
) -> tuple[Diary, ActingPolicy, np.ndarray, ParameterLayout, float]:
    """Train in this process: the diary, the policy with its parameters, and the mean return of its last evaluation."""
    settings = [
        f"run.max_env_steps={steps}",
        f"run.dir={folder / task}",
        "run.target_return=inf",
        "run.checkpoint_period=0",
        "run.seed=1",
        "evaluation.period=0",
        "telemetry.live=false",
        *EXTRA[task],
    ]
    preparation = Preparation(
        parse([task, "--serial", *(word for setting in settings for word in ("--set", setting))]), "codecs"
    )
    config = preparation.config
    diary = kind(int((steps - config.replay.min_size) * config.replay.samples_per_insert / config.learner.batch_size))
    original = Learner.update

    def update(learner: Learner, batch: Any, **options: Any) -> Any:
        result = original(learner, batch, **options)
        diary.note(learner, batch.s_tm1)
        return result

    Learner.update = update  # type: ignore[method-assign]
    try:
        summary = run_serial(preparation)
    finally:
        Learner.update = original  # type: ignore[method-assign]
    saved = load_policy(folder / task)
    mean = (summary["evaluation"] or {}).get("mean", np.nan)
    return diary, ActingPolicy(saved.model), saved.vector, saved.model.layout, float(mean)


def coded(codec: Codec, model: np.ndarray, base: np.ndarray | None, bounds: list[int], wire: np.ndarray) -> list[int]:
    """Code every chunk into its place; bytes of each."""
    edges = wire_edges(codec, bounds)
    return [
        codec.encode(wire[edges[i] : edges[i + 1]], model, base, bounds[i], bounds[i + 1])
        for i in range(len(bounds) - 1)
    ]


def decoded(
    codec: Codec, wire: np.ndarray, lengths: list[int], base: np.ndarray | None, bounds: list[int], out: np.ndarray
) -> None:
    edges = wire_edges(codec, bounds)
    for i, length in enumerate(lengths):
        codec.decode(out, wire[edges[i] : edges[i] + length], base, bounds[i], bounds[i + 1])


def speeds(
    layout: ParameterLayout, model: np.ndarray, base: np.ndarray, rounds: int, chunk: int = CHUNK
) -> dict[str, dict[str, Any]]:
    """Bytes and GB/s (of the model) of every codec, beside a memcpy of the model; checked to give back what it
    should."""
    bounds = [0, *cut_chunks(0, len(model), chunk)]
    out = np.zeros_like(model)
    repeats = max(1, 8_000_000 // len(model))
    cases: dict[str, Any] = {"memcpy": lambda: [np.copyto(out, model) for _ in range(repeats)]}
    figures: dict[str, dict[str, Any]] = {}
    for name, against in (("bf16", None), ("int8", None), ("xor_zstd", base), ("xor_zstd whole", None)):
        codec = make_codec(Config(cluster=ClusterConfig(codec=name.split()[0])), layout)
        assert codec is not None
        wire = np.zeros(wire_edges(codec, bounds)[-1], np.uint8)
        lengths = coded(codec, model, against, bounds, wire)
        decoded(codec, wire, lengths, against, bounds, out)
        assert not codec.lossless or np.array_equal(out, model)
        figures[name] = {"bytes": sum(lengths), "ratio": len(model) / sum(lengths)}
        cases[f"{name} encode"] = lambda codec=codec, against=against, wire=wire: [
            coded(codec, model, against, bounds, wire) for _ in range(repeats)
        ]
        cases[f"{name} decode"] = lambda codec=codec, against=against, wire=wire, lengths=lengths: [
            decoded(codec, wire, lengths, against, bounds, out) for _ in range(repeats)
        ]
    rates = {
        name: Timing.of([1e-9 * len(model) * repeats / second for second in seconds])
        for name, seconds in interleave(cases, rounds).items()
    }
    for name, found in figures.items():
        found |= {"encode_gb_per_s": rates[f"{name} encode"], "decode_gb_per_s": rates[f"{name} decode"]}
    figures["memcpy"] = {
        "bytes": len(model),
        "ratio": 1.0,
        "encode_gb_per_s": rates["memcpy"],
        "decode_gb_per_s": rates["memcpy"],
    }
    return figures


def actions(
    policy: ActingPolicy, layout: ParameterLayout, vector: np.ndarray, observations: np.ndarray
) -> dict[str, Any]:
    """Share of greedy actions that differ when acting on the decoded copy, and the largest change of an action value
    beside the values' spread."""
    exact = policy.act(observations, vector)["q"].copy()
    figures: dict[str, Any] = {
        "observations": len(observations),
        "value_spread": float(exact.std()),
        "median_gap": float(np.median(np.diff(np.sort(exact, axis=1)[:, -2:], axis=1))),
    }
    for name in ("bf16", "int8", "xor_zstd"):
        codec = make_codec(Config(cluster=ClusterConfig(codec=name)), layout)
        assert codec is not None
        wire = np.zeros(codec.wire_bytes(0, len(vector)), np.uint8)
        out = np.zeros_like(vector)
        used = codec.encode(wire, vector, None, 0, len(vector))
        codec.decode(out, wire[:used], None, 0, len(vector))
        values = policy.act(observations, out)["q"]
        figures[name] = {
            "differ": float((values.argmax(1) != exact.argmax(1)).mean()),
            "largest_change": float(np.abs(values - exact).max()),
        }
    return figures


def difference(model: np.ndarray, base: np.ndarray) -> dict[str, float]:
    """What changed between two versions, and how short the difference becomes: byte planes at several levels, and
    without planes."""
    words = model.view(np.uint32) ^ base.view(np.uint32)
    bits = model.view(np.uint32).size * 32
    used = (model.view(np.uint32) | base.view(np.uint32)) != 0  # padding between tensors is no parameter
    planes = np.zeros_like(model)
    _kernel.split_planes(planes, model, base)
    quarter = len(model) // 4

    def ratio(level: int, pieces: list[np.ndarray]) -> float:
        return len(model) / sum(
            min(len(zstandard.ZstdCompressor(level=level).compress(piece.data)), len(piece)) for piece in pieces
        )

    split = [planes[plane * quarter : (plane + 1) * quarter] for plane in range(4)]
    return {
        "parameters_changed": float(np.count_nonzero(words) / np.count_nonzero(used)),
        "bits_changed": float(np.unpackbits(words.view(np.uint8)).sum(dtype=np.int64) / bits),
        "ratio": ratio(1, split),
        "ratio_level_9": ratio(9, split),
        "ratio_no_planes": ratio(1, [words.view(np.uint8)]),
    }


def main() -> None:
    parser = arguments("codecs", __doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--steps", type=int, help="environment steps of training in place of the usual ones")
    options = parser.parse_args()
    rounds = 5 if options.short else 15
    figures = {}
    for task in options.tasks:
        with tempfile.TemporaryDirectory() as folder:
            steps = options.steps or (SHORT if options.short else STEPS)[task]
            diary, policy, vector, layout, mean = train(task, steps, Path(folder))
        changes: dict[int, list[dict[str, float]]] = {period: [] for period in PERIODS}
        for anchor in diary.anchors:
            for period in PERIODS:
                if anchor in diary.kept and anchor + period in diary.kept:
                    changes[period].append(difference(diary.kept[anchor + period], diary.kept[anchor]))
        last = diary.anchors[-1]
        figures[task] = {
            "env_steps": steps,
            "updates": diary.updates,
            "model_bytes": layout.nbytes,
            "evaluation_mean": mean,
            "speed": speeds(layout, diary.kept[last + 10], diary.kept[last], rounds),
            "actions": actions(policy, layout, vector, np.concatenate(list(diary.batches))),
            "changes": {str(period): found for period, found in changes.items()},
        }
        if task == "pong":
            figures["chunks"] = {
                str(chunk): speeds(layout, diary.kept[last + 10], diary.kept[last], max(3, rounds // 3), chunk)
                for chunk in (20_480, 1 << 18, 1 << 20)
            }
        save(options.json, {"tasks": figures})
    rows = [
        [
            task,
            found["model_bytes"],
            name,
            one["bytes"],
            one["ratio"],
            one["encode_gb_per_s"].median,
            one["decode_gb_per_s"].median,
            one["encode_gb_per_s"].median / found["speed"]["memcpy"]["encode_gb_per_s"].median,
        ]
        for task, found in figures.items()
        if task in STEPS
        for name, one in found["speed"].items()
    ]
    print_table(
        ["task", "model bytes", "codec", "bytes", "ratio", "encode GB/s", "decode GB/s", "encode / memcpy"], rows
    )
    print()
    print_table(
        ["task", "observations", "median gap of the two best values", "bf16 differ", "int8 differ", "xor_zstd differ"],
        [
            [
                task,
                found["actions"]["observations"],
                found["actions"]["median_gap"],
                *(found["actions"][name]["differ"] for name in ("bf16", "int8", "xor_zstd")),
            ]
            for task, found in figures.items()
            if task in STEPS
        ],
    )
    print()
    rows = []
    for task, found in figures.items():
        for period, changes in found.get("changes", {}).items():
            for age, change in zip(AGES, changes, strict=False):
                rows.append([task, int(period), age, *change.values()])
    print_table(
        [
            "task",
            "updates between",
            "age of the run",
            "parameters changed",
            "bits changed",
            "ratio",
            "level 9",
            "no planes",
        ],
        rows,
    )


if __name__ == "__main__":
    main()
