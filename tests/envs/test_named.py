"""Dict spaces as named arrays, and the columns that a user's environment brings."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from ddrl.core.config import EnvConfig
from ddrl.core.errors import EnvError
from ddrl.core.specs import ArraySpec, Column, ColumnRole, EnvSpec, EnvStep
from ddrl.envs import make_vector_env

BOX = spaces.Box(-1, 1, (2,), np.float32)


class Market(gymnasium.Env[Any, Any]):
    """Observes a picture, a kind, and as many orders as the step's number modulo 4."""

    observation_space = spaces.Dict(
        {"picture": spaces.Box(0, 255, (2, 3), np.uint8), "kind": spaces.Discrete(3), "orders": spaces.Sequence(BOX)}
    )
    action_space = spaces.Box(np.array([-1, 0], np.float32), np.array([1, 2], np.float32))

    def __init__(self) -> None:
        self.count = 0

    def observe(self) -> dict[str, Any]:
        orders = tuple(np.full(2, self.count / 10 + i, np.float32) for i in range(self.count % 4))
        return {"kind": self.count % 3, "orders": orders, "picture": np.full((2, 3), self.count, np.uint8)}

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        return self.observe(), 1.0, self.count == 6, False, {}


def named(**settings: Any) -> EnvConfig:
    return EnvConfig(id=f"{__name__}:Market", num_envs=2, observation="named", **settings)


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or __import__(__name__))


def test_a_dict_space_gives_named_arrays_with_masks_and_bounds_of_actions() -> None:
    env = make_vector_env(named(max_lengths={"orders": 3}))
    assert env.spec.observation.arrays == {
        "kind": ArraySpec((3,), "float32"),
        "orders": ArraySpec((3, 2), "float32", axes=("orders", "")),
        "picture": ArraySpec((2, 3), "uint8"),
        "orders_mask": ArraySpec((3,), "bool"),
    }
    assert (env.spec.action_low, env.spec.action_high) == ((-1.0, 0.0), (1.0, 2.0))
    seen = [env.reset(1), *(env.step(np.zeros((2, 2), np.float32)).observation for _ in range(3))]
    for count, observation in enumerate(seen):
        assert observation.shape == (2,)
        assert (observation["picture"] == count).all()
        assert (observation["kind"].argmax(1) == count % 3).all()
        assert (observation["orders_mask"].sum(1) == count % 4).all()
        for i in range(3):
            assert (observation["orders"][:, i] == (np.float32(count / 10 + i) if i < count else 0)).all()


def test_sequences_without_a_maximum_or_longer_than_it_are_refused() -> None:
    with pytest.raises(EnvError, match=r"set env\.max_lengths\.orders"):
        make_vector_env(named())
    with pytest.raises(EnvError, match="no Sequence space of that name"):
        make_vector_env(named(max_lengths={"order": 3}))
    env = make_vector_env(named(max_lengths={"orders": 1}))
    env.reset(1)
    env.step(np.zeros((2, 2), np.float32))
    with pytest.raises(EnvError, match=r"has 2 entries, more than env\.max_lengths\.orders = 1"):
        env.step(np.zeros((2, 2), np.float32))


def test_arrays_of_a_record_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 3 entries, but n_mask"):
        ArraySpec.record({"a": ArraySpec((3,), "float32", axes=("n",)), "n_mask": ArraySpec((4,), "bool")})
    with pytest.raises(ValueError, match="must name each axis"):
        ArraySpec((3, 2), "float32", axes=("n",))
    with pytest.raises(ValueError, match="array of the observation"):
        EnvSpec("x", ArraySpec((), "float32"), 2, columns=(Column("a", role=ColumnRole.STATE),))


class Priced:
    """A VectorEnv of two environments that brings a column."""

    num_envs = 2
    spec = EnvSpec("priced", ArraySpec((1,), "float32"), 2, columns=(Column("price", (3,), "float64"),))
    columns: Any = None

    def reset(self, seed: int) -> np.ndarray:
        return np.zeros((2, 1), np.float32)

    def step(self, action: np.ndarray) -> EnvStep:
        no = np.zeros(2, bool)
        return EnvStep(self.reset(0), np.zeros(2, np.float32), no, no, np.zeros(2), self.columns)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "must hold price by its spec, not nothing"),
        ({"price": np.zeros((2, 3)), "cost": np.zeros(2)}, "not price, cost"),
        ({"price": np.zeros((2, 3), np.float32)}, "price must be a C-contiguous float64 array"),
    ],
)
def test_columns_that_break_the_spec_are_refused(columns: dict[str, Any], words: str) -> None:
    from ddrl.envs.vectors import OwnVectorEnv

    inner = Priced()
    env = OwnVectorEnv(inner, "priced")
    env.reset(0)
    inner.columns = {"price": np.zeros((2, 3))}
    assert env.step(np.zeros(2, np.int64)).columns["price"].shape == (2, 3)
    inner.columns = columns
    with pytest.raises(EnvError, match=words):
        env.step(np.zeros(2, np.int64))
