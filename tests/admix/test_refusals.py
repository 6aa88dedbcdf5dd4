"""Refused means unchanged: a server that refuses what no other is asked goes on as that other one, to the byte."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ddrl.admix import journal as snapshot
from ddrl.admix.mixer import Mixer
from ddrl.admix.serving import App
from ddrl.admix.settings import ServeConfig
from tests.admix.material import request_of, small_mixer
from tests.admix.test_app import ask
from tests.mutated import mutate

ODD = [0, 77, -1, 1e39, float("nan"), 2**70, "", None, True, [], {}, [1e308], -0.5, 1.5]
FIELDS = ("region", "gender", "age", "ad", "kind", "ecpm", "ctr", "slot", "filters", "creative", "time", "request_id")


def state_of(mixer: Mixer) -> bytes:
    return snapshot.encode(mixer).partition(b'"requests"')[2]  # without the moment at which the day began


class Refusals(RuleBasedStateMachine):
    """Two servers get the same sound requests; one of them broken ones as well."""

    @initialize(
        play=st.sampled_from(
            [
                {"mode": "all"},
                {"mode": "bonuses", "repeat": 1, "ad_fields": ["pace"], "prior": "demand", "pace_step": 2.0},
                {"mode": "bonuses", "repeat": 5, "ad_fields": ["pace"], "prior": "demand"},
            ]
        )
    )
    def begin(self, play: dict[str, Any]) -> None:
        weights = {"pace": 1.0} if "ad_fields" in play else {"value": 1.0}
        self.apps = [App(small_mixer(weights, **play), ServeConfig(), Path("no run"), Path("no state")) for _ in "ab"]
        self.number = 0
        for app in self.apps:
            app.mixer.rate[:] = 0.5
            app.mixer.began = 0.0
            app.mixer._clock = lambda: 43_200.0

    def both(self, body: bytes, path: str) -> None:
        """Ask both, which answer alike."""
        answers = [ask(app, body, path=path) for app in self.apps]
        assert answers[0] == answers[1]
        assert answers[0][0] == 200

    def broken(self, body: bytes, path: str = "/v1/decide", method: str = "POST") -> None:
        """Ask one of them what it refuses; what it takes by chance is asked of the other one too."""
        before = state_of(self.apps[0].mixer)
        given = ask(self.apps[0], body, path=path, method=method)
        assert given[0] in (200, 404, 405, 413, 422, 500), given
        if given[0] == 200:
            assert ask(self.apps[1], body, path=path, method=method) == given
        else:
            assert "error" in given[2]
            assert state_of(self.apps[0].mixer) == before

    def request(self, moment: float) -> Any:
        self.number += 1
        return request_of(self.apps[0].mixer.book, self.number, time=moment, explain=True)

    @rule(moment=st.floats(0, 0.99))
    def decide(self, moment: float) -> None:
        self.both(msgspec.json.encode(self.request(moment)), "/v1/decide")

    @rule(count=st.integers(0, 3), billed=st.integers(0, 3))
    def bill(self, count: int, billed: int) -> None:
        mixer = self.apps[0].mixer
        first = int(mixer.book.contracts.ad_id[0])
        count = min(count, int(mixer.shown[0] - mixer.seen_shown[0]))
        self.both(msgspec.json.encode({"ad": [first], "shown": [count], "billed": [min(billed, count)]}), "/v1/billing")

    @rule(rate=st.floats(0, 1), theta=st.floats(0, 1))
    def control(self, rate: float, theta: float) -> None:
        first = int(self.apps[0].mixer.book.contracts.ad_id[0])
        self.both(msgspec.json.encode({"ad": [first], "rate": [rate], "theta": [theta]}), "/v1/control")

    @rule(field=st.sampled_from(FIELDS), value=st.sampled_from(ODD), moment=st.floats(0, 0.99))
    def decide_with_an_odd_value(self, field: str, value: Any, moment: float) -> None:
        document = msgspec.to_builtins(self.request(moment))
        listed = isinstance(document[field], list) and not isinstance(value, list)
        document[field] = [*document[field][:-1], value] if listed else value
        self.broken(_json(document))

    @rule(moment=st.floats(0, 0.99))
    def decide_with_an_unknown_candidate(self, moment: float) -> None:
        whole = self.request(moment)
        whole.kind[-1] = 0  # a bid's id is no contract; those before it have drawn by then
        self.broken(msgspec.json.encode(whole))

    @rule(seed=st.integers(0, 2**32), path=st.sampled_from(["/v1/decide", "/v1/billing", "/v1/control", "/v1/day/"]))
    def ask_anything(self, seed: int, path: str) -> None:
        draw = random.Random(seed)
        self.broken(mutate(msgspec.json.encode(self.request(0.5)), draw), path)

    @rule(values=st.lists(st.sampled_from([0.5, *ODD]), max_size=3), twice=st.booleans())
    def control_or_bill_with_odd_values(self, values: list[Any], twice: bool) -> None:
        first = int(self.apps[0].mixer.book.contracts.ad_id[0])
        ads = [first, first] if twice else [first]
        self.broken(_json({"ad": ads, "rate": values, "theta": [0.5]}), "/v1/control")
        self.broken(_json({"ad": [first], "shown": [10**6], "billed": values}), "/v1/billing")

    @rule(scores=st.sampled_from([float("nan"), float("inf")]), moment=st.floats(0, 0.99))
    def decide_by_a_policy_that_fails(self, scores: float, moment: float) -> None:
        mixer = self.apps[0].mixer
        if mixer._held is not None:
            return  # an earlier action decides
        policy = mixer.policy
        kept = policy.scores
        policy.scores = lambda: np.full((1, mixer.book.spec.action.size), scores, np.float32)  # type: ignore[method-assign]
        self.broken(msgspec.json.encode(self.request(moment)))
        policy.scores = kept  # type: ignore[method-assign]
        for app in self.apps:  # where no candidate could be shown, nobody saw the scores, and they decide further ones
            app.mixer._held = None

    @rule(value=st.sampled_from([float("nan"), 3e38]), name=st.sampled_from(["weights", "others"]))
    def send_parameters(self, value: float, name: str) -> None:
        size = self.apps[0].mixer.policy.vector.size // 4
        array = np.full((size, 1), value, np.float32)
        array[::2] *= -1
        self.broken(safetensors.numpy.save({name: array}), "/v1/policy")

    @invariant()
    def they_are_in_one_state(self) -> None:
        if hasattr(self, "apps"):
            assert state_of(self.apps[0].mixer) == state_of(self.apps[1].mixer)


def _json(document: Any) -> bytes:
    return json.dumps(document).encode()


def test_refusals() -> None:
    run_state_machine_as_test(Refusals, settings=settings(max_examples=25, stateful_step_count=20, deadline=None))
