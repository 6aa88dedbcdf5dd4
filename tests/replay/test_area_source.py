"""The source of single transitions in sample areas, and the sources from outside that it is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.admix.sources import RandomPool
from ddrl.channels import AreaWriter, SampleArea
from ddrl.core.config import AreasConfig, Config, LearnerConfig, ReplayConfig
from ddrl.core.errors import ChannelError, CheckpointError, ConfigError
from ddrl.core.rows import RowKind, transition_columns
from ddrl.core.specs import Experience
from ddrl.replay.sources import AreaSource, make_source
from tests.replay.test_sources import SCHEMA, episode

COLUMNS = transition_columns(SCHEMA)
BLOCK = 4
POOL = "benchmarks.admix.sources:RandomPool"
FLAG = "benchmarks.admix.sources:PlainFlag"


def config(source: str = "areas", **settings) -> Config:
    replay = {"capacity": 20, "min_size": 1, "samples_per_insert": 0.0, "n_step": 1, "source": source}
    areas = AreasConfig(block=BLOCK, blocks=2, **{k: settings.pop(k) for k in ("min_fill",) if k in settings})
    return Config(replay=ReplayConfig(**{**replay, **settings}), learner=LearnerConfig(batch_size=8), areas=areas)


def make(count: int = 3, **settings) -> tuple[AreaSource, list[SampleArea]]:
    whole = config(**settings)
    areas = [SampleArea.create(None, COLUMNS, BLOCK, 2, whole.replay.spare_blocks) for _ in range(count)]
    source = make_source(whole, SCHEMA, Experience(), areas)
    assert isinstance(source, AreaSource)
    return source, areas


def write(area: SampleArea, number: int, version: int = 0) -> None:
    """A block whose states say whose it is."""
    samples = {one.name: np.zeros((BLOCK, *one.shape), one.dtype) for one in COLUMNS}
    samples["state"][:], samples["policy_version"][:] = number, version
    area.write(samples)


def test_each_batch_comes_from_one_area_and_all_areas_are_served_alike() -> None:
    source, areas = make()
    for index, area in enumerate(areas):
        for _ in range(index + 2):  # explorers of different speeds
            write(area, index)
    source.arrived()
    owners = []
    for _ in range(30):
        assert source.pacing.ready()
        batch = source.sample()
        assert len(set(batch.s_tm1.ravel().tolist())) == 1
        owners.append(int(batch.s_tm1[0, 0]))
    assert [owners.count(index) for index in range(3)] == [10, 10, 10]
    assert source.drawn == [10, 10, 10]


def test_an_area_is_read_from_its_threshold_on_and_nobody_waits_for_the_others() -> None:
    for min_fill, blocks in ((1.0, 2), (0.5, 1)):
        source, areas = make(min_fill=min_fill)
        for number in range(blocks):
            assert not source.pacing.ready()
            write(areas[1], number)
            source.arrived()
        assert source.pacing.ready()
        source.sample()
        assert source.drawn == [0, 1, 0]
        assert source.figures()["areas_readable"] == 1
        assert source.figures()["replay_size"] == blocks * BLOCK


def test_a_draw_waits_for_an_explorer_that_has_written_over_the_area_since_it_was_ready(monkeypatch) -> None:
    source, areas = make()
    for _ in range(2):
        write(areas[1], 1)
    source.arrived()
    assert source.pacing.ready()
    looks = iter([False] * 7)
    whole = source._readable
    monkeypatch.setattr(source, "_readable", lambda area: next(looks, None) is None and whole(area))
    assert set(source.sample().s_tm1.ravel().tolist()) == {1.0}
    monkeypatch.setattr(source, "_readable", lambda area: False)
    monkeypatch.setattr("ddrl.replay.sources.MAX_DRAW_SECONDS", 0.01)
    with pytest.raises(ChannelError, match=r"raise areas\.blocks"):
        source.sample()


def test_samples_written_count_as_steps_once_and_bound_the_draws() -> None:
    source, areas = make(samples_per_insert=2.0, samples_tolerance=8.0)
    for number in range(3):
        write(areas[0], number)
    assert source.arrived() == 3 * BLOCK
    assert source.arrived() == 0
    drawn = 0
    while source.pacing.ready():
        source.learned(source.sample(), None)
        drawn += 8
    assert drawn == 2 * (3 * BLOCK - 1) // 8 * 8 + 2 * 8  # the ratio, and the tolerance


def test_a_batch_over_a_block_that_is_being_overwritten_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("areas", FLAG):
        source, areas = make(1, source=kind)
        for number in range(3):
            write(areas[0], number)
        source.arrived()
        draw, draws = areas[0].draw, []

        def interrupted(rows, draw=draw, draws=draws, area=areas[0]):
            draws.append(rows)
            if len(draws) == 1:
                for number in range(3, 6):
                    write(area, number)  # every block that was counted
            return draw(rows)

        monkeypatch.setattr(areas[0], "draw", interrupted)
        source.sample()
        assert len(draws) == (2 if kind == "areas" else 1)
        assert (source.repeated, source.torn) == ((1, 0) if kind == "areas" else (0, 1))


def test_what_was_saved_is_drawn_again_in_the_same_order(tmp_path: Path) -> None:
    source, areas = make(2)
    for index, area in enumerate(areas):
        for number in range(3):
            write(area, 10 * index + number)
    source.arrived()
    source.sample()
    state = source.save(tmp_path)
    again, _ = make(2)
    again.load(tmp_path, state)
    assert again.arrived() == 0
    for _ in range(5):
        np.testing.assert_array_equal(again.sample().s_tm1, source.sample().s_tm1)
    (tmp_path / "areas.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"areas\.npz cannot be used"):
        again.load(tmp_path, state)


def test_a_writer_makes_blocks_of_the_steps_that_environments_take() -> None:
    area = SampleArea.create(None, COLUMNS, BLOCK, 2)
    writer = AreaWriter(area, SCHEMA, 0, 2, n_step=1, discount=0.5)
    state = np.zeros((2, 2), np.float32)
    for step in range(140):
        following = np.full((2, 2), step + 1, np.float32)
        ends = np.full(2, step % 10 == 8)
        resets = step % 10 == 9  # the step after an end only resets
        columns = {"logp": np.full(2, step, np.float32), "hidden": np.zeros((2, 3), np.float32)}
        action, reward, over = np.zeros(2, np.int64), np.full(2, step, np.float32), np.zeros(2, bool)
        writer.write(state, action, reward, ends, over, following, step, columns)
        state = following
        assert not writer.pending
        del resets
    assert writer.blocks == area.written > 50
    standing = area.update() * BLOCK
    drawn, whole = area.draw(np.arange(standing))
    assert whole
    np.testing.assert_array_equal(drawn["state_next"], drawn["state"] + 1)
    np.testing.assert_array_equal(drawn["reward"], drawn["state"][:, 0])
    np.testing.assert_array_equal(drawn["policy_version"], drawn["reward"].astype(np.uint64))
    np.testing.assert_array_equal(drawn["discount_t"], np.where(drawn["reward"] % 10 == 8, 0.0, 0.5))
    assert 9 not in (drawn["reward"] % 10).tolist()
    writer.cut()
    before = area.written
    writer.write(state, action, reward, ends, over, state, 0, columns)
    assert area.written == before


def test_a_cut_drops_the_samples_of_the_block_that_is_not_full() -> None:
    area = SampleArea.create(None, COLUMNS, BLOCK, 200)
    writer = AreaWriter(area, SCHEMA, 0, 1, n_step=1, discount=0.5)
    columns = {"logp": np.zeros(1, np.float32), "hidden": np.zeros((1, 3), np.float32)}
    no = np.zeros(1, bool)

    def steps(first: int, count: int) -> None:
        for step in range(first, first + count):
            state, following = (np.full((1, 2), at, np.float32) for at in (step, step + 1))
            writer.write(state, np.zeros(1, np.int64), np.zeros(1, np.float32), no, no, following, 0, columns)

    steps(0, 256)  # of which 255 are transitions, one short of a block
    assert area.written == 255 // BLOCK
    writer.cut()
    steps(1000, 256)
    area.update()
    states = area.draw(np.arange(area.written * BLOCK))[0]["state"][:, 0].reshape(-1, BLOCK)
    assert area.written == 2 * (255 // BLOCK)
    np.testing.assert_array_equal(np.unique(states[states >= 1000]), np.arange(1000, 1000 + 255 // BLOCK * BLOCK))
    assert ((states >= 1000).all(axis=1) | (states < 1000).all(axis=1)).all()


def test_a_full_pool_replaces_random_transitions_one_for_one() -> None:
    source = make_source(config(POOL), SCHEMA, Experience())
    assert isinstance(source, RandomPool)
    assert not source.pacing.ready()
    for stream in range(3):
        assert source.record(episode(SCHEMA, stream, 10), 0) == 10
        assert source.figures()["replay_size"] == min(20, 10 * (stream + 1))
    held = source._pool["state"][:, 0]
    assert 0 < (held == 2).sum() <= 10  # a place may be drawn twice
    assert {0.0, 1.0} <= set(held.tolist())
    batch = source.sample()
    assert source.learned(batch, None).transitions == 8
    assert (batch.weight == 1).all()
    np.testing.assert_array_equal(batch.s_t[:, 1], batch.s_tm1[:, 1] + 1)
    assert set(batch.columns) == {"logp", "hidden"}


@pytest.mark.parametrize("experience", [Experience(source="trajectories", length=4), Experience(pick_len=3)])
@pytest.mark.parametrize("source", ["areas", POOL])
def test_trajectories_and_sequences_are_refused(experience: Experience, source: str) -> None:
    with pytest.raises(ConfigError, match=r"set replay\.source = auto"):
        make_source(config(source), SCHEMA, experience)


def test_a_truncated_episode_is_bootstrapped_from() -> None:
    source = make_source(config(POOL), SCHEMA, Experience())
    source.record(episode(SCHEMA, 0, 8, RowKind.TRUNCATED), 0)
    assert (source.sample().discount_t > 0).all()
