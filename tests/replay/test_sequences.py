"""Sequences for recurrent learners: n-step sums, priorities, burn-in and the stored recurrent state together."""

from __future__ import annotations

import numpy as np
import pytest

from ddrl.core.specs import Column, ColumnRole
from ddrl.replay import ExperienceReplay
from tests.replay.filled import ACTION, STATE, make_replay


@pytest.mark.parametrize(("final", "truncated"), [(True, False), (True, True), (False, False)])
def test_sequences_hold_the_records_their_fields_promise(final: bool, truncated: bool) -> None:
    length, n_step, burn_in, discount = 5, 3, 4, 0.5
    replay = ExperienceReplay(
        STATE,
        ACTION,
        1000,
        pick_len=length,
        n_step=n_step,
        burn_in=burn_in,
        short_picks=True,
        columns=[Column("memory", (2, 3), "float32", ColumnRole.MEMORY)],
    )
    selector = replay.new_pick_selector("prioritized")
    ends = {}
    for steps in (1, 3, 7, 40, 150):
        handle = replay.new_episode()
        ends[handle] = steps
        states = np.stack([np.full(steps + 1, handle), np.arange(steps + 1)], axis=1).astype(np.float32)
        memory = (handle * 1000 + np.arange(steps, dtype=np.float32))[:, None, None] * np.ones((2, 3), np.float32)
        replay.record_steps(
            handle,
            states[:-1],
            np.arange(steps),
            np.arange(steps),
            states[-1] if final else None,
            truncated=truncated,
            policy_version=np.arange(steps) + 7,
            columns={"memory": memory},
        )
        if not final:
            replay.cut(handle)
    batch = replay.sample_sequences(400, selector, discount)
    assert batch.state.shape == (400, burn_in + length + n_step, 2)
    for i in range(400):
        handle, position = int(batch.pick_epi[i]), int(batch.pick_pos[i])
        last_state = ends[handle] if final else ends[handle] - 1
        before = min(burn_in, position)
        count = min(length, last_state - position)
        assert (batch.burn_len[i], batch.length[i]) == (before, count)
        first, states = position - before, min(before + count + n_step, last_state + 1 - (position - before))
        np.testing.assert_array_equal(batch.state[i, :states, 1], first + np.arange(states))
        assert (batch.state[i, :states, 0] == handle).all()
        assert not batch.state[i, states:].any()
        np.testing.assert_array_equal(batch.action[i, : before + count], first + np.arange(before + count))
        assert not batch.action[i, before + count :].any()
        assert (batch.columns["memory"][i] == handle * 1000 + first).all()
        assert batch.policy_version[i] == position + 7
        for t in range(length):
            steps = min(n_step, last_state - position - t) if t < count else 0
            assert batch.ahead[i, t] == steps
            np.testing.assert_allclose(
                batch.r_t[i, t], sum(discount**j * (position + t + j) for j in range(steps)), rtol=1e-6
            )
            ended = final and not truncated and position + t + steps == last_state
            assert batch.discount_t[i, t] == (0 if ended or not steps else discount**steps)


def test_priorities_of_sequences_are_drawn_and_updated() -> None:
    replay = make_replay(pick_len=4, n_step=2)
    selector = replay.new_pick_selector("prioritized", priority_exponent=1.0)
    replay.record_steps(
        replay.new_episode(), np.zeros((12, 2), np.float32), np.zeros(12, int), np.zeros(12), np.zeros(2, np.float32)
    )
    assert replay.num_picks == 9
    replay.set_priority(selector, np.zeros(9), np.arange(9), [0, 0, 0, 0, 0, 1, 0, 0, 3])
    batch = replay.sample_sequences(4000, selector, 0.9)
    assert set(batch.pick_pos.tolist()) == {5, 8}
    np.testing.assert_allclose((batch.pick_pos == 8).mean(), 0.75, atol=0.05)


def test_single_transitions_are_refused_where_picks_are_sequences() -> None:
    with pytest.raises(ValueError, match="pick_len = 1"):
        make_replay(pick_len=2).sample(1, 0, 0.9)
