"""What ExperienceReplay promises its users, beyond agreeing with the reference."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from gymnasium import spaces

from ddrl.core.rows import row_schema
from ddrl.core.specs import ArraySpec, Column, EnvSpec
from ddrl.replay import ExperienceReplay
from tests.replay.filled import ACTION, STATE, add_episode, fill, make_replay


def test_no_window_crosses_an_episode_border_when_the_ring_is_full() -> None:
    replay = make_replay(500, pick_len=5, n_step=3)
    selector = replay.new_pick_selector("uniform")
    rng = np.random.default_rng(1)
    for _ in range(200):
        add_episode(replay, int(rng.integers(1, 60)), final=bool(rng.integers(2)))
        if replay.num_picks:
            batch = replay.get_batch(64, selector)
            assert (batch.batch_state[:, :, 0] == batch.batch_pick_epi[:, None]).all()
            np.testing.assert_array_equal(batch.batch_state[:, :, 1], batch.batch_pick_pos[:, None] + np.arange(5))
    replay.check()


def test_every_start_of_an_episode_can_be_drawn_with_n_step_returns() -> None:
    replay = make_replay(n_step=5)
    selector = replay.new_pick_selector("uniform")
    add_episode(replay, 20)
    _, positions = replay.picks()
    assert sorted(positions.tolist()) == list(range(20))
    batch = replay.sample(2000, selector, 0.5)
    for position, reward, discount, state in zip(
        batch.pick_pos.tolist(), batch.r_t, batch.discount_t, batch.s_t, strict=True
    ):
        steps = min(5, 20 - position)
        assert reward == pytest.approx(sum(0.5**j * (position + j) for j in range(steps)))
        assert discount == (0 if position + steps == 20 else 0.5**steps)
        assert state[1] == position + steps


def test_a_truncated_episode_bootstraps_from_its_final_state() -> None:
    replay = make_replay(n_step=3)
    selector = replay.new_pick_selector("uniform")
    add_episode(replay, 1, truncated=True)
    batch = replay.sample(4, selector, 0.5)
    assert (batch.discount_t == 0.5).all()
    assert (batch.s_t[:, 1] == 1).all()


def test_a_running_episode_without_a_next_state_has_one_next_state_less() -> None:
    replay = make_replay(pick_len=3, n_step=0)
    selector = replay.new_pick_selector("uniform")
    add_episode(replay, 3, final=False)
    batch = replay.get_batch(2, selector)
    assert batch.seq_len.tolist() == [3, 3]
    assert batch.seq_len_next.tolist() == [2, 2]
    with pytest.raises(ValueError, match="n_step"):
        replay.sample(1, selector, 0.9)


def test_short_picks_end_with_the_episode_and_the_rest_is_zero() -> None:
    replay = make_replay(pick_len=4, short_picks=True)
    selector = replay.new_pick_selector("uniform")
    add_episode(replay, 6)
    batch = replay.get_batch(200, selector)
    assert set(batch.seq_len.tolist()) == {1, 2, 3, 4}
    for length, position, states in zip(batch.seq_len, batch.batch_pick_pos, batch.batch_state, strict=True):
        assert length == min(4, 6 - position)
        assert not states[length:].any()


def test_an_episode_longer_than_the_capacity_goes_on_under_a_new_handle() -> None:
    replay = make_replay(10)
    handle = replay.new_episode()
    seen = {handle}
    for step in range(35):
        handle = replay.record(handle, np.array([handle, step], np.float32), step, 0.0)
        seen.add(handle)
        replay.check()
    assert len(seen) == 4
    assert len(replay) == 5


def test_recording_into_a_handle_that_never_was_or_has_ended_is_refused() -> None:
    replay = make_replay()
    handle = add_episode(replay, 3)
    state = np.zeros(2, np.float32)
    with pytest.raises(ValueError, match="has ended"):
        replay.record(handle, state, 0, 0.0)
    with pytest.raises(ValueError, match="no episode 99"):
        replay.record(99, state, 0, 0.0)


def test_arrays_that_do_not_fit_are_refused_and_others_are_converted() -> None:
    replay = make_replay()
    handle = replay.new_episode()
    replay.record(handle, [1, 2], np.int32(3), 1, policy_version=7)
    replay.record(handle, np.arange(4.0)[::2], np.array(4), np.float32(2), [5, 6])
    batch = replay.sample(8, replay.new_pick_selector("uniform"), 1.0)
    assert set(batch.a_tm1.tolist()) == {3, 4}
    assert set(map(tuple, batch.s_tm1.tolist())) == {(1, 2), (0, 2)}
    for state, action in (
        (np.zeros(3, np.float32), 0),
        (np.zeros((2, 2), np.float32), 0),
        (np.zeros(2), 0.5),
        (np.zeros(2), [1, 2]),
    ):
        with pytest.raises((ValueError, TypeError)):
            replay.record(replay.new_episode(), state, action, 0.0)
    with pytest.raises(TypeError, match="row dtype"):
        replay.record_rows(np.zeros(3, np.float32))


def test_rows_of_an_unknown_kind_are_refused_whole() -> None:
    replay = make_replay()
    rows = np.zeros(3, replay.row_dtype)
    rows["step"] = range(3)
    rows["kind"][2] = 9
    with pytest.raises(ValueError, match="kind 9"):
        replay.record_rows(rows)
    assert len(replay) == 0


def test_a_batch_keeps_its_values_while_any_of_its_arrays_is_held() -> None:
    replay = fill(make_replay(), [50])
    selector = replay.new_pick_selector("uniform")
    first = replay.sample(16, selector, 0.9)
    kept, copy = first.s_t[3:5], first.s_t.copy()
    address = first.s_tm1.ctypes.data
    del first
    for _ in range(20):
        replay.sample(16, selector, 0.9)
    np.testing.assert_array_equal(kept, copy[3:5])
    held = [replay.sample(16, selector, 0.9) for _ in range(20)]
    assert len({batch.s_tm1.ctypes.data for batch in held}) == 20
    del kept, held
    addresses = {replay.sample(16, selector, 0.9).s_tm1.ctypes.data for _ in range(50)}
    assert len(addresses) <= 2, "outputs nobody holds are used again"
    assert address


def test_frames_are_stored_once_and_stacked_when_drawn() -> None:
    spec = EnvSpec("", ArraySpec((4, 84, 84), "uint8"), 6, frame_stack=4)
    replay = ExperienceReplay.of(row_schema(spec), 3000, n_step=1)
    rows = np.zeros(2001, replay.row_dtype)
    rows["step"] = range(2001)
    rows["kind"][-1] = 1
    rows["state"] = (np.arange(2001) % 251)[:, None, None]
    replay.record_rows(rows)
    batch = replay.sample(64, replay.new_pick_selector("uniform"), 0.99)
    assert batch.s_tm1.shape == (64, 4, 84, 84)
    for position, stack, stack_next in zip(batch.pick_pos.tolist(), batch.s_tm1, batch.s_t, strict=True):
        for state, at in ((stack, position), (stack_next, position + 1)):
            assert (state == (np.maximum(0, np.arange(at - 3, at + 1)) % 251)[:, None, None]).all()
    del batch
    stacked = 2000 * 4 * 84 * 84
    assert stacked / (replay.nbytes - 64 * 8 * 84 * 84) > 3.5


def test_states_of_several_arrays_and_continuous_actions_come_back_as_they_were() -> None:
    state = {"image": ArraySpec((3, 5), "uint8"), "speed": ArraySpec((), "float64")}
    replay = ExperienceReplay(state, ArraySpec((2,), "float32"), 100, pick_len=2, frame_stack=2)
    handle = replay.new_episode()
    for step in range(10):
        observation = {"speed": step / 2, "image": np.full((3, 5), step, np.uint8)}
        final = {"image": np.full((3, 5), 10, np.uint8), "speed": 5.0} if step == 9 else None
        replay.record(handle, observation, [step, -step], 1.0, final)
    batch = replay.get_batch(32, replay.new_pick_selector("uniform"))
    assert batch.batch_state["image"].shape == (32, 2, 2, 3, 5)
    assert batch.batch_action.shape == (32, 2, 2)
    position = batch.batch_pick_pos[:, None] + np.arange(2)
    np.testing.assert_array_equal(batch.batch_action, np.stack([position, -position.astype(np.float32)], axis=2))
    np.testing.assert_array_equal(batch.batch_state_next["speed"], np.stack([position, position + 1], axis=2) / 2)
    stack = np.stack([np.maximum(position.astype(int) - 1, 0), position], axis=2)
    np.testing.assert_array_equal(batch.batch_state["image"][..., 0, 0], stack)
    with pytest.raises(ValueError, match="a dict of image, speed"):
        replay.record(replay.new_episode(), {"image": np.zeros((3, 5), np.uint8)}, [0, 0], 0.0)


def test_one_thread_records_while_another_samples_and_no_row_is_torn() -> None:
    replay = make_replay(2000, n_step=2, eviction="lru")
    selector = replay.new_pick_selector("prioritized")
    fill(replay, [100] * 20)
    stop = threading.Event()
    failures: list[BaseException] = []

    def write() -> None:
        try:
            while not stop.is_set():
                add_episode(replay, 100)
        except BaseException as error:
            failures.append(error)

    def draw() -> None:
        try:
            for _ in range(300):
                batch = replay.sample(512, selector, 1.0)
                assert (batch.s_t[:, 0] == batch.s_tm1[:, 0]).all()  # one episode, whatever handle it goes on under
                assert (batch.s_tm1[:, 1] == batch.pick_pos).all()
                assert (batch.s_t[:, 1] == batch.pick_pos + np.where(batch.pick_pos == 99, 1, 2)).all()
                replay.set_priority(selector, batch.pick_epi, batch.pick_pos, batch.weight)
        except BaseException as error:
            failures.append(error)

    writers, readers = (
        [threading.Thread(target=write) for _ in range(2)],
        [threading.Thread(target=draw) for _ in range(2)],
    )
    for thread in (*writers, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    for thread in writers:
        thread.join()
    assert not failures
    replay.check()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"capacity": 0}, "capacity"),
        ({"pick_len": 0}, "pick_len"),
        ({"n_step": -1}, "n_step"),
        ({"eviction": "random"}, "eviction"),
        ({"capacity": 5, "pick_len": 5}, "no pick could ever be drawn"),
        ({"frame_stack": 0}, "frame_stack"),
    ],
)
def test_impossible_options_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ExperienceReplay(STATE, ACTION, **({"capacity": 100} | options))


@pytest.mark.parametrize(
    ("state", "action", "named", "first"),
    [
        (spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(4), ("float32", (3,)), ("int64", ())),
        (
            spaces.Box(0, 255, (4, 4), np.uint8),
            spaces.Box(-1, 1, (2,), np.float32),
            ("uint8", (4, 4)),
            ("float32", (2,)),
        ),
        (spaces.MultiDiscrete([3, 5]), spaces.MultiBinary(2), ("int64", (2,)), ("int8", (2,))),
    ],
)
def test_spaces_of_gymnasium_say_what_is_recorded(state, action, named, first) -> None:
    replay = ExperienceReplay(state, action, 100)
    handle = replay.new_episode()
    given = [(state.sample(), action.sample()) for _ in range(5)]
    for one, taken in given:
        handle = replay.record(handle, one, taken, 1.0)
    replay.record(handle, state.sample(), action.sample(), 0.0, state.sample())
    batch = replay.sample(20, replay.new_pick_selector("uniform"), 0.9)
    assert (batch.s_tm1.dtype.name, batch.s_tm1.shape[1:]) == named
    assert (batch.a_tm1.dtype.name, batch.a_tm1.shape[1:]) == first


def test_named_spaces_are_named_arrays_and_other_things_are_refused() -> None:
    space = spaces.Dict(a=spaces.Box(0, 1, (2,), np.float32), b=spaces.Discrete(3))
    replay = ExperienceReplay(space, spaces.Discrete(2), 10)
    handle = replay.new_episode()
    replay.record(handle, space.sample(), 1, 0.5, space.sample())
    assert replay.sample(1, replay.new_pick_selector("uniform"), 0.9).s_tm1["a"].shape == (1, 2)
    for state, action in ((space, "two"), (spaces.Sequence(space), spaces.Discrete(2)), (4, spaces.Discrete(2))):
        with pytest.raises(TypeError, match=r"give an ArraySpec, a dict of them, or a space of fixed shape"):
            ExperienceReplay(state, action, 10)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["state", "action", "reward"])
@pytest.mark.parametrize("call", ["record", "record_steps", "final"])
def test_numbers_that_are_not_finite_are_refused_and_nothing_is_recorded(bad: float, where: str, call: str) -> None:
    replay = ExperienceReplay(ArraySpec((2,), "float32"), ArraySpec((2,), "float32"), 100)
    handle = replay.new_episode()
    given = {"state": np.ones((3, 2), np.float32), "action": np.ones((3, 2)), "reward": np.ones(3)}
    given[where].reshape(3, -1)[1, -1] = bad
    final = np.array([1.0, bad if call == "final" and where == "state" else 1.0])
    if call == "final" and where == "state":
        given = {name: np.ones_like(array) for name, array in given.items()}
    rows = slice(None) if call == "record_steps" else 1
    record = replay.record_steps if call == "record_steps" else replay.record
    arrays = [array[rows] for array in given.values()]
    with pytest.raises(ValueError, match=f"{where} holds a number that is NaN or infinite"):
        record(handle, *arrays, final)
    assert len(replay) == 0
    replay.check()
    replay.record(handle, np.ones(2), np.ones(2), 1.0, np.ones(2))  # the episode is still there
    assert len(replay) == 1


def test_further_columns_may_hold_any_number() -> None:
    replay = ExperienceReplay(STATE, ACTION, 100, columns=[Column("bid")])
    replay.record(replay.new_episode(), np.zeros(2), 0, 0.0, np.zeros(2), columns={"bid": np.nan})
    assert len(replay) == 1


def test_memory_is_reported_and_does_not_grow_once_full() -> None:
    replay = make_replay(5000)
    selector = replay.new_pick_selector("prioritized")
    rng = np.random.default_rng(2)

    def churn(rounds: int) -> int:
        for _ in range(rounds):
            add_episode(replay, int(rng.integers(20, 400)))
            replay.sample(64, selector, 0.9)
        return replay.nbytes

    full = churn(300)
    assert full > 5000 * (8 + 8 + 4 + 8)
    assert churn(1000) < 1.2 * full


def test_batches_of_ever_other_sizes_do_not_pile_up() -> None:
    replay = fill(make_replay(), [100])
    selector = replay.new_pick_selector("uniform")
    without = replay.nbytes
    for size in range(1, 400):
        replay.sample(size, selector, 0.9)
    assert replay.nbytes - without < 17 * 400 * 60  # as many sizes as are remembered, of 56 bytes a transition
    kept = replay.sample(7, selector, 0.9)
    copy = kept.s_t.copy()
    for size in range(100, 140):
        replay.sample(size, selector, 0.9)
    np.testing.assert_array_equal(kept.s_t, copy)


def test_threads_that_draw_batches_of_other_sizes_get_batches_of_their_own() -> None:
    replay = fill(make_replay(), [100])
    selector = replay.new_pick_selector("uniform")
    failures: list[BaseException] = []

    def draw(seed: int) -> None:
        try:
            for size in np.random.default_rng(seed).integers(1, 40, 400).tolist():
                batch = replay.sample(size, selector, 0.9)
                assert len(batch.s_tm1) == size
                assert (batch.s_tm1[:, 1] == batch.pick_pos).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=draw, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_get_batch_gives_eight_arrays_of_its_own_which_are_used_again_when_nobody_holds_one() -> None:
    replay = make_replay(pick_len=2, columns=(Column("logp"),))
    handle = replay.new_episode()
    for step in range(8):
        handle = replay.record(handle, np.full(2, step, np.float32), step, 0.0, columns={"logp": -step})
    selector = replay.new_pick_selector("uniform")
    batch, columns = replay.get_batch_with_columns(4, selector)
    state, action, reward, _, length, _, _, position = batch
    assert (columns["logp"] == -(position[:, None] + np.arange(2))).all()
    assert (reward == 0).all()
    assert (length == 2).all()
    held, before = columns["logp"], columns["logp"].copy()
    del batch, columns, state, reward, length, _
    kept, seen = action, action.copy()
    for _ in range(20):
        replay.get_batch(4, selector)
    assert (held == before).all(), "an array that is held is not written to"
    assert (kept == seen).all()
    first = replay.get_batch(4, selector)
    address = first.batch_reward.ctypes.data
    del first
    assert replay.get_batch(4, selector).batch_reward.ctypes.data == address


def test_records_of_episodes_that_were_never_drawn_from_are_counted_when_they_are_evicted() -> None:
    replay = fill(make_replay(40), [10, 10])
    assert replay.evicted_unseen == 0
    selector = replay.new_pick_selector("uniform")
    replay.sample(200, selector, 0.9)  # from both
    fill(replay, [15, 25])  # the episodes of 10 leave, seen
    assert replay.evicted_unseen == 0
    fill(replay, [20])  # that of 15 leaves, unseen, and then that of 25
    assert replay.evicted_unseen == 40 - (len(replay) - 20)
    assert replay.evicted == 80 - len(replay)
