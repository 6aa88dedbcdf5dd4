"""The loop: a server writes what it decides, a policy is fitted to that, published, and taken back."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet
import pytest
import safetensors.numpy

pytest.importorskip("torch", reason="needs the extra [train]")

from ddrl.acting.policy_file import load_policy, save_policy
from ddrl.admix import Billing, Market, open_log
from ddrl.admix.environment import market_and_play
from ddrl.admix.journal import Journal, Versions, finished_days, requests_of
from ddrl.admix.mixer import Decision, version_of
from ddrl.admix.retrain import main, retrain
from ddrl.admix.serving import App, day_begin, open_mixer
from ddrl.admix.settings import ServeConfig
from ddrl.core.errors import ConfigError, MessageError
from ddrl.run.__main__ import main as train
from tests.admix.material import afresh, request_of
from tests.admix.test_app import ask

REQUESTS = 1000


def trained(folder: Path, **settings: Any) -> Path:
    """A run of the task admix on a small market, whose policy asks far too little for every contract."""
    market: dict[str, Any] = {"requests": REQUESTS, "contracts": 4, "bids": 4, "extra_bids": 0, "regions": 2, "ages": 1}
    market |= {"windows": 8, "repeat": 20, "demand_low": 0.05, "demand_high": 0.25, "penalty": 3.0, "pace_step": 0.0}
    given = {f"env.kwargs.{name}": json.dumps(value) for name, value in (market | settings).items()}
    given |= {"run.dir": str(folder), "run.max_env_steps": "60", "replay.min_size": "1000", "evaluation.episodes": "1"}
    words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    assert train(["admix", "--serial", *words]) == 0
    saved = load_policy(folder)
    saved.model.layout.views(saved.vector)["head.bias"][...] = -3
    save_policy(folder, saved.model, saved.vector, env=saved.env, evaluation=saved.evaluation, run_id=saved.run_id)
    return folder


class Loop:
    """A served run: `day` lets it answer a day of its market, or the first requests of it, and ends it."""

    def __init__(self, run: Path, keep: int = 5) -> None:
        self.run = run
        self.log = run / "log"
        self.market = Market(market_and_play(load_policy(run).env.kwargs)[0])
        self.lost: list[str] = []
        self.days = 0
        self._keep = keep
        self.start()

    def start(self) -> None:
        self.app = App(open_mixer(self.run), ServeConfig(), self.run, self.run / "state")
        self.journal = self.app.journal = Journal(self.log, self.app.mixer.book, self._keep, self.lost.append)
        self.app.mixer.journal = self.journal.add

    def answer(self, begin: int = 0, end: int | None = None, billing: int | None = 1) -> list[Decision]:
        """`billing`: whether every other impression counts; None: there is no news."""
        mixer = self.app.mixer
        day = self.market.day(0, self.days + 1)
        made: list[Decision] = []
        for request in [each for part in day for each in requests_of(part, day.contracts)][begin:end]:
            request.request_id += 10**9 * self.days
            made.append(mixer.answer(request))
            if billing is not None and made[-1].kind == 0:
                assert made[-1].ad is not None
                mixer.bill(Billing([made[-1].ad], [1], [billing if len(made) % 2 else 1]))
        return made

    def end_day(self) -> Path:
        assert ask(self.app, b"", path="/v1/day")[0] == 200
        self.journal._thread.submit(int).result()  # all that was to be written has been
        self.days += 1
        return finished_days(self.log)[-1]

    def day(self, requests: int | None = None, billing: int | None = 1) -> Path:
        self.answer(end=requests, billing=billing)
        return self.end_day()

    def choose(self, version: str) -> tuple[int, Any]:
        status, _, answer = ask(self.app, msgspec.json.encode({"version": version}), path="/v1/versions")
        return status, answer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("loop") / "run")


@pytest.fixture
def loop(run: Path, tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(Path(shutil.copytree(run, tmp_path / "run")))
    yield loop
    loop.journal.close()


def test_a_server_learns_from_its_log_and_goes_back(loop: Loop) -> None:
    first = loop.app.mixer.policy.version
    for _ in range(3):
        loop.day()
    verdict = retrain(loop.run, loop.log, 2, 1, rules=["adaptive_pacing"])
    assert verdict.published  # anything is better than what is served
    assert verdict.over_served[0] > verdict.over_served[1] > 0
    assert (verdict.window, verdict.judged) == (["day-000001", "day-000002"], ["day-000003"])
    assert verdict.scores.keys() == {"fitted", "served", "adaptive_pacing"}
    asyncio.run(loop.app._reload())
    assert loop.app.mixer.policy.version == verdict.version != first
    loop.day(100)
    assert loop.choose(first)[1]["version"] == first
    (loop.run / "policy.json").touch()
    asyncio.run(loop.app._reload())
    assert loop.app.mixer.policy.version == first
    assert open_mixer(loop.run).policy.version == first  # a restart
    assert {each.version: each.pinned for each in Versions(loop.run).listed()} == {first: True, verdict.version: False}
    assert loop.choose("")[1]["version"] == verdict.version
    again = retrain(loop.run, loop.log, 2, 1, rules=["adaptive_pacing"])  # on a day of 100 requests
    assert not again.published
    assert load_policy(loop.run).evaluation["judged"]["version"] == verdict.version


def test_a_day_of_the_log_is_what_was_decided(loop: Loop) -> None:
    made = loop.answer(0, 300, billing=0)
    loop.journal.close()
    counts = [*loop.app.mixer.seen_shown], [*loop.app.mixer.seen_billed]
    mixer = loop.app.mixer
    loop.start()  # a restart in the middle of the day
    mixer, loop.app.mixer = loop.app.mixer, mixer
    loop.app.mixer.journal = loop.journal.add
    made += loop.answer(300, 400, billing=None)
    folder = loop.end_day()
    log = open_log(folder, 4)
    requests = log.requests()
    count = log.contracts.count
    shown = [each.kind == 0 for each in made]
    assert len(requests) == 400
    assert requests.request_id.tolist() == list(range(400))
    track = pyarrow.parquet.read_table(folder / "track_log.parquet")
    assert track["asked"].to_pylist() == [each.request_id for each in made]
    assert set(track["version"].to_pylist()) == {loop.app.mixer.policy.version}
    of_contracts = [(0 <= at < count) for at in requests.logged.tolist()]
    assert of_contracts[:300] == shown[:300]
    for place in range(count):
        own = requests.logged == place
        assert own.sum() == counts[0][place]  # impressions without news of billing are in no exposure
        assert requests.logged_billed[own].sum() == counts[1][place]
    assert log.counts["requests without an exposure"] == sum(shown[300:]) + sum(each.ad is None for each in made)
    assert not loop.lost
    assert loop.app.mixer.shown.sum() == 0  # the next day has begun


def test_a_log_holds_each_request_whole_and_loses_alone_what_a_column_cannot_hold(loop: Loop) -> None:
    day = loop.market.day(0, loop.days + 1)
    sent = [each for part in day for each in requests_of(part, day.contracts)][:60]
    for number, request in enumerate(sent):
        request.slot = number
    sent[7].filters = [2] * (len(sent[7].ad) - 1) + [2**31 - 1]
    made = [loop.app.mixer.answer(request) for request in sent]
    wrong = msgspec.structs.replace(sent[9], filters=[0] * (len(sent[9].ad) - 1) + [2**31])
    with pytest.raises(MessageError, match="<= 2147483647"):
        loop.app.mixer.decide(msgspec.json.encode(wrong))
    loop.journal.add(wrong, 0.5, made[9])  # as a program of one's own may
    assert loop.journal.lost == 1
    assert "1 decisions are missing" in loop.lost[0]
    loop.journal.add(sent[10], 0.5, made[10])
    track = pyarrow.parquet.read_table(loop.end_day() / "track_log.parquet")
    kept = [*sent, sent[10]]
    for name in ("ad", "kind", "filters", "region", "gender", "age", "slot"):
        wanted = [getattr(each, name) for each in kept]
        if name == "filters":
            wanted = [each.filters or [0] * len(each.ad) for each in kept]
        assert track[name].to_pylist() == wanted, name
    for name in ("ecpm", "ctr"):
        values = [np.float32(getattr(each, name)).tolist() for each in kept]
        assert track[name].to_pylist() == values, name


def test_times_of_the_log_never_fall_and_old_days_go(loop: Loop) -> None:
    loop.journal._keep = 2
    for _ in range(4):
        loop.answer(200, 220)
        loop.answer(0, 20)  # the clock went back
        last = loop.end_day()
    assert [path.name for path in finished_days(loop.log)] == ["day-000003", "day-000004"]
    time = open_log(last, 4).requests().time
    assert (np.diff(time) >= 0).all()


def test_a_full_disk_costs_the_log_and_no_answer(loop: Loop) -> None:
    shutil.rmtree(loop.log)
    assert len(loop.answer(0, 10)) == 10
    loop.journal.flush()
    loop.journal._thread.submit(int).result()
    assert loop.journal.lost == 10
    assert "10 decisions are missing in the log" in loop.lost[0]
    assert "ddrl_serve_log_lost_total 10" in loop.app._metrics()


def test_what_cannot_be_learned_from_is_one_clear_line(loop: Loop, capsys: pytest.CaptureFixture[str]) -> None:
    loop.day(60)
    silent = loop.day(60, billing=None)

    def fails(*words: str) -> str:
        assert main([str(loop.run), *words]) == 1
        return capsys.readouterr().err

    log = ["--log", str(loop.log)]
    assert "has 2 finished days: 7 to fit to and 1 to judge on" in fails(*log, "--window", "week")
    assert f"{silent} has no news of billing" in fails(*log)
    assert "write day, week, month or 1 and more" in fails(*log, "--window", "dya")
    assert "name the log with --log FOLDER" in fails()
    assert "there is no version 'abc' (any more): kept are" in fails("--pin", "abc")
    record = json.loads((silent / "contracts.json").read_text())
    record["contracts"][0]["demand"] += 1
    (silent / "contracts.json").write_text(json.dumps(record))
    assert f"{silent} is of another market: its contracts differ from those of the policy in demand" in fails(*log)


def test_a_version_that_is_gone_changes_nothing(loop: Loop) -> None:
    served = loop.app.mixer.policy.version
    status, answer = loop.choose("0123456789ab")
    assert (status, answer["error"]) == (422, "there is no version '0123456789ab' (any more): kept are none")
    assert loop.app.mixer.policy.version == served


def test_parameters_that_were_sent_are_served_after_a_restart(loop: Loop) -> None:
    own = load_policy(loop.run)
    tensors = {name: view + 0.5 for name, view in own.model.layout.views(own.vector).items()}
    status, _, answer = ask(loop.app, safetensors.numpy.save(tensors), path="/v1/policy")
    assert status == 200
    assert open_mixer(loop.run).policy.version == answer["version"] != version_of(own.model, own.vector)


def test_parameters_that_cannot_be_served_are_not_chosen_either(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(policy: object) -> None:
        raise MessageError("it is of another market")

    own = load_policy(loop.run)
    tensors = {name: view + 0.5 for name, view in own.model.layout.views(own.vector).items()}
    monkeypatch.setattr(loop.app.mixer, "use", refuse)
    assert ask(loop.app, safetensors.numpy.save(tensors), path="/v1/policy")[0] == 422
    assert open_mixer(loop.run).policy.version == version_of(own.model, own.vector)


def test_a_day_begins_at_its_hour_whatever_the_clock_does(loop: Loop) -> None:
    config = ServeConfig(day_begins="04:30")
    assert day_begin(config, 10 * 86400 + 5 * 3600) == 10 * 86400 + 4.5 * 3600
    assert day_begin(config, 10 * 86400 + 4 * 3600) == 9 * 86400 + 4.5 * 3600
    now = 10 * 86400 + 5 * 3600
    mixer = loop.app.mixer
    mixer._clock = lambda: now
    mixer.began = day_begin(config, now)
    now += 3600
    request = request_of(mixer.book, explain=True, time=None)
    time = mixer.answer(request).explanation.time
    assert time == pytest.approx(1.5 / 24)
    now -= 2 * 86400
    assert mixer.answer(afresh(request)).explanation.time == time
    now += 5 * 86400
    assert mixer.time >= 1
    loop.app.end_day(day_begin(config, now))
    assert mixer.answer(afresh(request)).explanation.time == pytest.approx(1.5 / 24)
    with pytest.raises(ConfigError, match="write a time of the day, as 04:30"):
        ServeConfig(day_begins="24:00")
