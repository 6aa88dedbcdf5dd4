"""Random schemas and rows, torn ones and gaps among them: every column of a batch is what was recorded, record by
record, and the kernel's invariants hold after each call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.core.rows import RowSchema, schema_of
from ddrl.core.specs import ArraySpec, Column, ColumnRole
from ddrl.replay import ExperienceReplay
from ddrl.replay.batches import Windows
from tests.replay.filled import arrays_of, same
from tests.replay.reference import ReferenceReplay

DISCOUNT = 0.5
shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
dtypes = st.sampled_from(["uint8", "float32", "int64", "bool", "float16"])
arrays = st.builds(ArraySpec, shapes, dtypes)
roles = st.sampled_from(list(ColumnRole))


@st.composite
def schemas(draw: Any) -> RowSchema:
    columns = []
    for index in range(draw(st.integers(0, 4))):
        role = draw(roles)
        dtype = "float32" if role is ColumnRole.REWARD else draw(dtypes)
        columns.append(Column(f"c{index}", draw(shapes), dtype, role))
    names = draw(st.integers(0, 3))
    frame = ArraySpec.record({f"a{i}": draw(arrays) for i in range(names)}) if names else draw(arrays)
    return schema_of(frame, draw(arrays), columns, reward_shape=draw(shapes), frame_stack=draw(st.integers(1, 2)))


# (stream, what): 0 to 2 a row of that kind, 3 a row after a gap
plans = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([0, 0, 0, 0, 1, 2, 3])), min_size=1, max_size=60)


def make_rows(schema: RowSchema, plan: list[tuple[int, int]], seed: int) -> np.ndarray:
    """Random values everywhere, but small whole numbers as rewards, so that their sums are exact."""
    rng = np.random.default_rng(seed)
    rows = np.frombuffer(rng.bytes(len(plan) * schema.dtype.itemsize), schema.dtype).copy()
    for column in schema.columns:
        if column.dtype == "bool":  # bytes beside 0 and 1 are no bool: numpy's copies change them
            rows[column.name] = rng.integers(0, 2, rows[column.name].shape)
    for column in schema.of(ColumnRole.REWARD):
        rows[column.name] = rng.integers(-8, 9, rows[column.name].shape)
    steps: dict[int, int] = {}
    for row, (stream, what) in zip(rows, plan, strict=True):
        step = steps.get(stream, 0) + (what == 3)
        row["stream"], row["step"], row["kind"] = stream, step, what % 3
        steps[stream] = 0 if what in (1, 2) else step + 1
    return rows


@settings(max_examples=80)
@given(schema=schemas(), plan=plans, seed=st.integers(0, 2**31), n_step=st.integers(1, 3), pick_len=st.integers(1, 3))
def test_batches_hold_every_column_as_it_was_recorded(
    schema: RowSchema, plan: list[tuple[int, int]], seed: int, n_step: int, pick_len: int
) -> None:
    rows = make_rows(schema, plan, seed)
    options = {"n_step": n_step, "pick_len": pick_len, "short_picks": True, "burn_in": 1}
    replay, reference = ExperienceReplay.of(schema, 1000, **options), ReferenceReplay(schema, 1000, **options)
    for row in rows:
        reference.record_row(row)
    assert replay.record_rows(rows) == (rows["kind"] == 0).sum()
    replay.check()
    assert list(zip(*(side.tolist() for side in replay.picks()), strict=True)) == reference.table
    if not reference.table:
        return
    selector = replay.new_pick_selector("uniform")
    windows, columns = replay.get_batch_with_columns(20, selector)
    draws = [
        (replay.sample_sequences(20, selector, DISCOUNT), lambda pick: reference.sequence(pick, DISCOUNT)),
        (windows, reference.window),
    ]
    if pick_len == 1:
        draws.append((replay.sample(20, selector, DISCOUNT), lambda pick: reference.transition(pick, DISCOUNT)))
    for batch, law in draws:
        arrays = arrays_of(schema, batch, columns)
        handles, positions = (
            (batch.batch_pick_epi, batch.batch_pick_pos)
            if isinstance(batch, Windows)
            else (batch.pick_epi, batch.pick_pos)
        )
        for i, pick in enumerate(zip(handles.tolist(), positions.tolist(), strict=True)):
            wanted = law(pick)
            if isinstance(batch, Windows):
                del wanted["policy_version"]  # windows hold none
            assert wanted.keys() <= arrays.keys()
            for name, value in wanted.items():
                same(arrays[name][i], value, name)


@settings(max_examples=60)
@given(schema=schemas(), plan=plans, seed=st.integers(0, 2**31), data=st.data())
def test_torn_rows_are_refused_whole(schema: RowSchema, plan: list[tuple[int, int]], seed: int, data: Any) -> None:
    rows = make_rows(schema, plan, seed)
    replay = ExperienceReplay.of(schema, 1000)
    torn = rows.copy()
    torn["kind"][data.draw(st.integers(0, len(rows) - 1))] = data.draw(st.integers(3, 2**32 - 1))
    with pytest.raises(ValueError, match="torn or foreign"):
        replay.record_rows(torn)
    bytes_ = rows.view(np.uint8)
    with pytest.raises(TypeError):
        replay.record_rows(bytes_)
    with pytest.raises(TypeError, match="row dtype"):
        replay._core.record_rows(bytes_[: len(bytes_) - data.draw(st.integers(1, schema.dtype.itemsize - 1))])
    assert (len(replay), replay.num_episodes) == (0, 0)
    assert replay.record_rows(rows[::-1][::-1]) == (rows["kind"] == 0).sum()
    replay.check()


@settings(max_examples=60)
@given(schema=schemas(), steps=st.integers(1, 9), seed=st.integers(0, 2**31), one_by_one=st.booleans(), data=st.data())
def test_records_by_hand_hold_every_column_and_refuse_what_does_not_fit(
    schema: RowSchema, steps: int, seed: int, one_by_one: bool, data: Any
) -> None:
    held = make_rows(schema, [(0, 0)] * (steps + 1), seed)
    for name in held.dtype.names or ():  # what is recorded by hand may not be NaN or infinite
        if held[name].dtype.kind == "f":
            held[name] = np.nan_to_num(held[name], posinf=2.0, neginf=-2.0)
    replay = ExperienceReplay.of(schema, 1000)

    def state(at: Any) -> Any:
        arrays = {schema.array_name(column): held[column.name][at] for column in schema.observation}
        return arrays.get("observation", arrays)

    def columns(at: Any, ends: bool) -> dict[str, Any]:
        given = {column.name: held[column.name][at] for column in schema.further}
        after = {f"{column.name}_next": held[column.name][steps] for column in schema.further if column.role == "state"}
        return given | (after if ends else {})

    handle = replay.new_episode()
    if one_by_one:
        for at in range(steps):
            last = at == steps - 1
            final = state(steps) if last else None
            row = held[at]
            replay.record(handle, state(at), row["action"], row["reward"], final, columns=columns(at, last))
    else:
        every = slice(0, steps)
        given = columns(every, True)
        for wrong in given:
            broken = {name: value for name, value in given.items() if name != wrong}
            with pytest.raises(TypeError, match=f"lacks {wrong}"):
                replay.record_steps(
                    handle, state(every), held["action"][:steps], held["reward"][:steps], state(steps), columns=broken
                )
        with pytest.raises(TypeError, match="no column 'unknown'"):
            replay.record_steps(
                handle,
                state(every),
                held["action"][:steps],
                held["reward"][:steps],
                state(steps),
                columns={**given, "unknown": 1},
            )
        assert len(replay) == 0
        replay.record_steps(
            handle, state(every), held["action"][:steps], held["reward"][:steps], state(steps), columns=given
        )
    replay.check()
    batch = replay.sample(20, replay.new_pick_selector("uniform"), DISCOUNT)
    for i, position in enumerate(batch.pick_pos.tolist()):
        same(batch.r_t[i], held["reward"][position], "reward")
        same(batch.a_tm1[i], held["action"][position], "action")
        for column in schema.further:
            same(batch.columns[column.name][i], held[column.name][position], column.name)
            if column.role is ColumnRole.STATE:
                same(batch.columns[f"{column.name}_next"][i], held[column.name][position + 1], column.name)
