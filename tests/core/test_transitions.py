"""Rows become n-step transitions: against a plain loop over episodes, whatever the pieces they come in."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.core.errors import ConfigError
from ddrl.core.rows import RowKind, RowSchema, TransitionBuilder, row_schema, transition_columns
from ddrl.core.specs import ArraySpec, Column, ColumnRole, EnvSpec

COST, HIDDEN = Column("cost", (2,), "float32", ColumnRole.REWARD), Column("hidden", (2,), "float32", ColumnRole.STATE)
SCHEMA = row_schema(EnvSpec("x", ArraySpec((2,), "float32"), 2), [Column("logp"), COST, HIDDEN])


def episode(stream: int, steps: int, kind: RowKind | None, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = np.zeros(steps + (kind is not None), SCHEMA.dtype)
    rows["stream"], rows["step"] = stream, np.arange(len(rows))
    rows["policy_version"], rows["action"] = rng.integers(0, 99, len(rows)), rng.integers(0, 2, len(rows))
    for name in ("state", "reward", "logp", "cost", "hidden"):
        rows[name] = rng.random(rows[name].shape, np.float32)
    if kind is not None:
        rows["kind"][-1] = kind
    return rows


def plain(rows: np.ndarray, n_step: int, discount: float) -> list[tuple]:
    """The transitions of one whole episode, one by one."""
    found = []
    ended = rows["kind"][-1] != RowKind.STEP
    for first in range(len(rows) - 1 if ended else len(rows)):
        length = min(n_step, len(rows) - 1 - first)
        if not ended and length < n_step:
            continue
        reward = sum(discount**j * float(rows["reward"][first + j]) for j in range(length))
        cost = sum(discount**j * rows["cost"][first + j].astype(float) for j in range(length))
        last = rows[first + length]
        after = 0.0 if last["kind"] == RowKind.TERMINATED else discount**length
        found.append((rows[first], reward, cost, after, last))
    return found


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 7), st.sampled_from([*list(RowKind)[1:], None])), min_size=1,
        max_size=8,
    ),
    st.integers(1, 4),
    st.lists(st.integers(0, 20), max_size=6),
)  # fmt: skip
def test_it_gives_what_a_plain_loop_gives(episodes: list, n_step: int, cuts: list[int]) -> None:
    """Episodes without an end are followed by another of the same stream: their last steps are lost."""
    made = [episode(stream, steps, kind, seed) for seed, (stream, steps, kind) in enumerate(episodes)]
    expected = [one for rows in made for one in plain(rows, n_step, 0.9)]
    builder = TransitionBuilder(SCHEMA, n_step, 0.9)
    rows = np.concatenate(made)
    bounds = sorted({min(cut, len(rows)) for cut in cuts} | {0, len(rows)})
    given_ = [builder.add(rows[a:b]) for a, b in pairwise(bounds)]
    columns = {name: np.concatenate([one[name] for one in given_]) for name in given_[0]} if given_ else {}
    assert len(columns.get("reward", ())) == len(expected)
    key = {one[0]["state"].tobytes(): one for one in expected}
    for index in range(len(expected)):
        first, reward, cost, after, last = key[columns["state"][index].tobytes()]
        assert columns["reward"][index] == pytest.approx(reward, rel=1e-6)
        np.testing.assert_allclose(columns["cost"][index], cost, rtol=1e-6)
        assert columns["discount_t"][index] == pytest.approx(after)
        for name in ("action", "policy_version", "logp", "hidden"):
            assert np.array_equal(columns[name][index], first[name])
        assert np.array_equal(columns["state_next"][index], last["state"])
        assert np.array_equal(columns["hidden_next"][index], last["hidden"])


def test_a_gap_and_a_cut_lose_what_is_not_complete_and_nothing_else() -> None:
    rows = episode(0, 8, None, 0)
    builder = TransitionBuilder(SCHEMA, 2, 0.9)
    assert builder.add(np.delete(rows, 4))["state"][:, 0].tolist() == rows["state"][[0, 1, 5], 0].tolist()
    builder.cut()
    assert len(builder.add(episode(0, 2, None, 1))["state"]) == 0
    assert len(builder.add(episode(0, 4, None, 1)[2:])["state"]) == 2


def test_columns_name_everything_that_is_given() -> None:
    builder = TransitionBuilder(SCHEMA, 1, 0.9)
    made = builder.add(episode(0, 3, RowKind.TERMINATED, 0))
    for column in transition_columns(SCHEMA):
        assert made[column.name].shape[1:] == column.shape
        assert made[column.name].dtype == np.dtype(column.dtype)
    assert set(made) == {column.name for column in transition_columns(SCHEMA)}


def test_stacked_frames_are_refused() -> None:
    stacked = RowSchema(SCHEMA.columns, 4)
    with pytest.raises(ConfigError, match="stacked frames"):
        transition_columns(stacked)
