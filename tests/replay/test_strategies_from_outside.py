"""A selector and an eviction written in Python outside the library, each one class, chosen by a setting."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ddrl.core.config import setting
from ddrl.core.errors import ConfigError
from ddrl.core.rows import row_schema
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.replay import ExperienceReplay
from ddrl.replay.evictions import make_eviction
from ddrl.replay.selectors import Common, Selector, make_selector
from tests.replay.filled import add_episode, make_replay

SPEC = EnvSpec("x", ArraySpec((2,), "float32"), 2)


@dataclass(frozen=True)
class NewestSettings:
    share: float = setting(0.5, "", "Share of the table's end that is drawn.", gt=0, le=1)


class Newest:
    """Draws evenly among the newest share of the table, weighted by nothing; keeps priorities to show that it can."""

    name = "newest"
    uses_priorities = True
    Settings = NewestSettings

    def __init__(self, settings: NewestSettings, common: Common) -> None:
        self.share = settings.share
        self.random = np.random.default_rng(common.seed)
        self.beta = common.importance_exponent
        self.priority = np.zeros(0, np.float32)

    def added(self, first: int, count: int) -> None:
        assert first == len(self.priority)
        self.priority = np.append(self.priority, np.ones(count, np.float32))

    def moved(self, source: np.ndarray, target: np.ndarray) -> None:
        for one, other in zip(source, target, strict=True):
            self.priority[other] = self.priority[one]

    def dropped(self, size: int) -> None:
        self.priority = self.priority[:size]

    def set_priority(self, index: np.ndarray, priority: np.ndarray) -> None:
        self.priority[index] = priority

    def set_importance_exponent(self, exponent: float) -> None:
        self.beta = exponent

    def draw(self, count: int) -> Any:
        size = len(self.priority)
        if not size:
            return None
        first = int(size * (1 - self.share))
        return self.random.integers(first, size, count, dtype=np.uint32), np.full(count, self.beta, np.float32)

    def probabilities(self) -> np.ndarray:
        size = len(self.priority)
        first = int(size * (1 - self.share))
        return np.where(np.arange(size) >= first, 1.0 / (size - first), 0.0)

    def state(self) -> bytes:
        return self.priority.tobytes()

    def load_state(self, state: bytes) -> None:
        self.priority = np.frombuffer(state, np.float32).copy()


class Youngest:
    """Evicts the episode that began last, the running one apart; counts what it hears."""

    name = "youngest"
    wants_draws = True

    def __init__(self, settings: None) -> None:
        self.ended: list[int] = []
        self.drawn = 0

    def changed(self, added: np.ndarray, ended: np.ndarray, drawn: np.ndarray, removed: np.ndarray) -> None:
        self.ended = [handle for handle in [*self.ended, *ended.tolist()] if handle not in removed]
        self.drawn += len(drawn)

    def victim(self) -> int:
        return self.ended[-1]

    def state(self) -> bytes:
        return np.array([self.drawn, *self.ended], np.uint64).tobytes()

    def load_state(self, state: bytes) -> None:
        self.drawn, *self.ended = np.frombuffer(state, np.uint64).tolist()


def make(*overrides: str, capacity: int = 100) -> tuple[ExperienceReplay, int, Any]:
    config = load_config(None, overrides)
    eviction, selector = make_eviction(config), make_selector(config)
    replay = ExperienceReplay.of(row_schema(SPEC), capacity, eviction=eviction)
    return replay, replay.new_pick_selector(selector), (selector, eviction)


def test_a_selector_from_outside_is_chosen_by_a_setting_and_draws_by_its_law() -> None:
    replay, handle, (selector, _) = make(f"replay.selector={__name__}:Newest", "replay.newest.share=0.25")
    assert isinstance(selector, Selector)
    with pytest.raises(ValueError, match="no pick can be drawn"):
        replay.sample(4, handle, 0.9)
    for _ in range(6):
        add_episode(replay, 30)  # evicts: the table's picks move
    replay.check()
    batch = replay.sample(64, handle, 0.9)
    law = replay.probabilities(handle)
    drawn = {
        pick for pick, p in zip(zip(*(side.tolist() for side in replay.picks()), strict=True), law, strict=True) if p
    }
    assert set(zip(batch.pick_epi.tolist(), batch.pick_pos.tolist(), strict=True)) <= drawn
    assert (batch.weight == np.float32(0.4)).all()
    assert replay.set_priority(handle, [*batch.pick_epi, 10**6], [*batch.pick_pos, 0], np.arange(65)) == 64
    replay.set_importance_exponent(handle, 0.75)
    assert (replay.sample(4, handle, 0.9).weight == np.float32(0.75)).all()
    restored, other, (second, _) = make(f"replay.selector={__name__}:Newest", "replay.newest.share=0.25")
    restored.unserialize(replay.serialize())
    np.testing.assert_array_equal(second.priority, selector.priority)
    np.testing.assert_array_equal(restored.probabilities(other), law)
    with pytest.raises(ConfigError, match="share"):
        make(f"replay.selector={__name__}:Newest", "replay.newest.share=2")


def test_an_eviction_from_outside_is_chosen_by_a_setting_and_names_the_victim() -> None:
    replay, handle, (_, eviction) = make(f"replay.eviction={__name__}:Youngest", "replay.selector=uniform")
    handles = [add_episode(replay, 30) for _ in range(3)]
    replay.sample(10, handle, 0.9)
    last = add_episode(replay, 20)
    assert set(replay.picks()[0].tolist()) == {*handles[:2], last}
    assert eviction.drawn == 10
    replay.check()
    restored, _, (_, second) = make(f"replay.eviction={__name__}:Youngest", "replay.selector=uniform")
    restored.unserialize(replay.serialize())
    assert (second.ended, second.drawn) == (eviction.ended, 10)
    eviction.ended.append(10**6)
    with pytest.raises(ValueError, match="holds no records"):
        add_episode(replay, 60)
    eviction.ended.pop()
    replay.check()


def test_an_error_of_a_selector_surfaces_and_leaves_the_replay_sound() -> None:
    replay, handle, (selector, _) = make(f"replay.selector={__name__}:Newest")
    add_episode(replay, 30)
    selector.draw = lambda count: (np.full(count, 999, np.uint32), None)
    with pytest.raises(ValueError, match="drew pick 999 of 30"):
        replay.sample(4, handle, 0.9)
    selector.draw = lambda count: 1 / 0
    with pytest.raises(ZeroDivisionError):
        replay.sample(4, handle, 0.9)
    selector.draw = lambda count: (len(replay), None)
    with pytest.raises(RuntimeError, match="may not call the replay"):
        replay.sample(4, handle, 0.9)
    replay.check()
    add_episode(replay, 5)
    del selector.draw
    assert len(replay.sample(4, handle, 0.9).weight) == 4


def test_threads_that_record_and_draw_with_strategies_from_outside_do_not_wait_for_each_other_for_ever() -> None:
    replay, handle, _ = make(f"replay.selector={__name__}:Newest", f"replay.eviction={__name__}:Youngest", capacity=400)
    add_episode(replay, 30)
    failures: list[BaseException] = []

    def repeat(call: Any) -> None:
        try:
            for _ in range(100):
                call()
        except BaseException as error:
            failures.append(error)

    calls = [lambda: add_episode(replay, 20), lambda: replay.sample(32, handle, 0.9), replay.check]
    threads = [threading.Thread(target=repeat, args=(call,), daemon=True) for call in calls * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures
    replay.check()


@pytest.mark.parametrize("name", ["rank_based", "recency", "prioritized"])
def test_built_in_selectors_take_their_settings_from_their_table(name: str) -> None:
    config = load_config(None, [f"replay.selector={name}", f"replay.{name}.stratified=true"])
    selector = make_selector(config)
    assert selector.options["stratified"]  # type: ignore[union-attr]
    replay = ExperienceReplay.of(row_schema(SPEC), 100)
    handle = replay.new_pick_selector(selector)
    add_episode(replay, 30)
    assert len(replay.sample(4, handle, 0.9).weight) == 4
    with pytest.raises(ConfigError, match="stratifid"):
        make_selector(load_config(None, [f"replay.selector={name}", f"replay.{name}.stratifid=true"]))


def test_a_selector_with_the_method_of_earlier_versions_is_refused_by_the_new_name() -> None:
    old = SimpleNamespace(name="old", law=lambda: np.zeros(0))
    with pytest.raises(TypeError, match=r"selector old has no method probabilities\(\) .*: rename its method `law`"):
        make_replay(40).new_pick_selector(cast(Any, old))
