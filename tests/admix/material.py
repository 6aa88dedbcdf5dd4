"""Small policies and markets for the tests of serving: scores are weighted sums of each ad's features."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from onnx import TensorProto, helper

from ddrl.acting.policy_file import ActingModel, save_policy
from ddrl.admix import Book, DisplayRequest, Mixer, ServedPolicy
from ddrl.admix.environment import make_book
from ddrl.core.config import EnvConfig
from ddrl.core.rows import ParameterLayout
from ddrl.core.specs import ArraySpec, EnvSpec

SMALL = {"requests": 400, "contracts": 6, "bids": 3, "extra_bids": 2, "regions": 3, "ages": 2, "windows": 4}


def env_config(**settings: Any) -> EnvConfig:
    """A small market."""
    return EnvConfig(id="ddrl.admix:generated", kwargs=SMALL | settings)


def linear_model(spec: EnvSpec) -> ActingModel:
    """score = ad @ weights, for each place that the action scores; within the action's bounds."""
    width, actions = spec.observation.arrays["ad"].shape[1], spec.action.size
    constants = {"last": [2], "begin": [0], "end": [actions], "axis": [1]}
    nodes = [
        helper.make_node("MatMul", ["ad", "weights"], ["products"]),
        helper.make_node("Squeeze", ["products", "last"], ["scores"]),
        helper.make_node("Slice", ["scores", "begin", "end", "axis"], ["mean"]),
    ]
    graph = helper.make_graph(
        nodes,
        "linear",
        [
            helper.make_tensor_value_info("ad", TensorProto.FLOAT, ["batch", *spec.observation.arrays["ad"].shape]),
            helper.make_tensor_value_info("weights", TensorProto.FLOAT, [width, 1]),
        ],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, ["batch", actions])],
        [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    layout = ParameterLayout.of({"weights": ((width, 1), "float32")})
    return ActingModel(model.SerializeToString(), layout, spec, {"mean": ArraySpec((actions,), "float32")}, "gaussian")


def linear_policy(book: Book, shared: ServedPolicy | None = None, **weights: float) -> ServedPolicy:
    """A policy whose scores are the sum of weight x feature, by the fields' names."""
    model = linear_model(book.spec)
    return ServedPolicy(model, weights_vector(book, model, weights), shared=shared)


def weights_vector(book: Book, model: ActingModel, weights: Mapping[str, float]) -> np.ndarray:
    """The parameter vector with these weights."""
    vector = np.zeros(model.layout.nbytes, np.uint8)
    for name, weight in weights.items():
        model.layout.views(vector)["weights"][book.layout.ad_fields.index(name), 0] = weight
    return vector


def save_run(run: Path, env: EnvConfig, **weights: float) -> Book:
    """A run directory with such a policy."""
    run.mkdir(parents=True, exist_ok=True)
    book = make_book(env)
    model = linear_model(book.spec)
    save_policy(run, model, weights_vector(book, model, weights), env=env)
    return book


def small_mixer(weights: Mapping[str, float] | None = None, seed: int = 0, **settings: Any) -> Mixer:
    """A mixer of a small market; by default the action scores all ads, and each scores its value [eCPM]."""
    book = make_book(env_config(**{"mode": "all"} | settings))
    return Mixer(book, linear_policy(book, **(weights or {"value": 1.0})), seed=seed)


_IDS = count(1)  # a request_id that was answered is answered alike


def afresh(request: DisplayRequest) -> DisplayRequest:
    """The same request by another visitor: with a request_id of its own."""
    return msgspec.structs.replace(request, request_id=next(_IDS))


def request_of(
    book: Book, request_id: int | None = None, *, contracts: int | None = None, bids: int = 3, **changes: Any
) -> DisplayRequest:
    """A request of a visitor whom contract 0 targets, with the first `contracts` contracts and `bids` bids of eCPM 1,
    2, ..."""
    cell = int(np.flatnonzero(book.contracts.eligible[:, 0])[0])
    _, genders, ages = book.contracts.visitors
    ads = [int(ad) for ad in book.contracts.ad_id[:contracts]]
    values: dict[str, Any] = {
        "request_id": next(_IDS) if request_id is None else request_id,
        "region": cell // (genders * ages),
        "gender": cell // ages % genders,
        "age": cell % ages,
        "ad": ads + [10_000 + place for place in range(bids)],
        "kind": [0] * len(ads) + [1] * bids,
        "ecpm": [0.0] * len(ads) + [1.0 + place for place in range(bids)],
        "ctr": [0.02] * (len(ads) + bids),
        "time": 0.5,
    }
    return DisplayRequest(**values | changes)
