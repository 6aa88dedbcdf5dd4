"""Refused means unchanged: whatever order commands to a run come in, one that is refused changes nothing that the run
goes on from."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from ddrl.core.errors import DdrlError
from ddrl.telemetry.control import MAX_LIVE, SETTABLE
from tests.run.test_resume import go_on, start, stop

ODD = st.one_of(
    st.sampled_from([None, "", "no scheme", "gift.evil:X", "a\x00", float("nan"), float("inf"), -1.0, 0.0, 1e308]),
    st.floats(allow_subnormal=False),
    st.booleans(),
)
SOUND = {"learner.lr": st.floats(1e-5, 1e-2), "rollout.epsilon": st.sampled_from([0.0, 0.25, 1.0])}


class Commands(RuleBasedStateMachine):
    """A serial run between two turns."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ddrl-commands-"))
        self.run = start(self.folder / "run", "--set", "evaluation.period=0")
        self.handlers = self.run.task.steering.handlers()
        self.set: dict[str, float] = {}

    def state(self) -> tuple[Any, ...]:
        task = self.run.task
        place = self.folder / "learner"
        task.training.learner.save(place)
        files = sorted(str(path) for path in (self.folder / "run").rglob("*") if path.suffix not in (".sqlite", ""))
        config = (self.folder / "run" / "config.toml").read_bytes()
        steering = task.steering
        return (
            repr(task.training.live),
            msgspec.structs.asdict(task.training.state),
            repr(vars(task.training.source.pacing)),
            place.read_bytes(),
            files,
            config,
            steering.paused,
            steering.stop_requested,
        )

    @rule(name=st.sampled_from([*SETTABLE, "run.seed", "", "learner", "x" * 200]), value=ODD)
    def set_an_odd_value(self, name: str, value: Any) -> None:
        before = self.state()
        refused = ""
        try:
            self.handlers["set"](name, value)
        except DdrlError as error:
            refused = str(error)
        if refused:
            assert "\n" not in refused
            assert self.state() == before
        else:
            assert value != "gift.evil:X", "nobody has trusted it"
            assert value is None or isinstance(value, str) or abs(value) <= MAX_LIVE[name]

    @rule(data=st.data(), name=st.sampled_from(list(SOUND)))
    def set_a_sound_value(self, data: st.DataObject, name: str) -> None:
        value = data.draw(SOUND[name])
        self.handlers["set"](name, value)
        assert {"learner.lr": self.run.task.training.live.lr}.get(name, value) == value

    @rule()
    def train(self) -> None:
        go_on(self.run, 8)

    @rule()
    def pause_and_resume(self) -> None:
        before = self.state()
        self.handlers["pause"]()
        self.handlers["resume"]()
        assert self.state() == before

    def teardown(self) -> None:
        stop(self.run)
        shutil.rmtree(self.folder)


def test_refused_commands() -> None:
    run_state_machine_as_test(Commands, settings=settings(max_examples=8, stateful_step_count=25, deadline=None))
