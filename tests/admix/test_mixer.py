"""The mixer decides as the environment does, by its own counters, and refuses what it cannot answer."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ddrl.admix import Billing, Control, DisplayRequest, Market, MarketConfig, Mixer, generated
from ddrl.admix import journal as snapshot
from ddrl.admix.contracts import outputs_of
from ddrl.admix.environment import make_book
from ddrl.admix.journal import requests_of
from ddrl.admix.mixer import REASONS
from ddrl.core.errors import CheckpointError, ConfigError, DdrlError, MessageError, NetworkError
from tests.admix.material import SMALL, afresh, env_config, linear_policy, request_of, small_mixer


def _as_request(env: Any, request_id: int) -> DisplayRequest:
    """The environment's present request as a server is asked it."""
    now, book = {name: env._feed.present(name)[0] for name in env._feed.requests}, env.contracts
    listed, bids = np.flatnonzero(now["eligible"]), np.flatnonzero(now["ecpm"] > 0)
    ages = book.ages.shape[1]
    return DisplayRequest(
        request_id=request_id,
        region=int(now["cell"]) // (2 * ages),
        gender=int(now["cell"]) // ages % 2,
        age=int(now["cell"]) % ages,
        slot=int(now["slot"]),
        ad=[*book.ad_id[listed].tolist(), *now["bid_ad"][bids].tolist()],
        kind=[0] * len(listed) + [1] * len(bids),
        ecpm=[0.0] * len(listed) + now["ecpm"][bids].tolist(),
        ctr=[*now["ctr"][listed].tolist(), *now["bid_ctr"][bids].tolist()],
        time=float(now["time"]),
    )


@pytest.mark.parametrize("mode", ["all", "contracts", "bonuses", "bonuses with pacing"])
@pytest.mark.parametrize("billed", [1.0, 0.7])
def test_server_and_environment_see_and_choose_the_same_all_day(mode: str, billed: float) -> None:
    bonuses, paces = mode.startswith("bonuses"), mode.endswith("pacing")
    kwargs = SMALL | {"mode": mode.split()[0], "billed": billed, "requests": 300, "seed": 5}
    if bonuses:
        kwargs |= {
            "prior": "demand",
            "pace_step": 2.0 * paces,
            "ad_fields": ["ad_id", "kind", "pace", "cap", "penalty", "impressions", "late", "need", "rate"],
        }
    env = generated(1, **kwargs)
    book = make_book(env_config(**kwargs))
    weights = {"value": 1.0, "pace": -1.5, "cap": 2.0, "penalty": 0.5, "impressions": 0.3, "late": 0.1}
    weights = {name: weight for name, weight in weights.items() if name in book.layout.ad_fields}
    policy = linear_policy(book, **weights)
    mixer = Mixer(book, policy)
    state = env.reset(3)
    mixer.tables.begin_day(0, env._days(env._seeds[0], 0))  # another day than the server's first
    record = np.zeros(1, env.spec.observation.numpy)
    state_arrays = record[0]
    first = env.delivery.prior[0].copy()
    mixer._queue.write_into(outputs_of(record))
    over, choices = False, 0
    while not over:
        request = _as_request(env, choices)
        before = env.delivery.seen_shown[0].copy(), env.delivery.seen_billed[0].copy()
        policy.inputs["ad"][0] = state["ad"][0]
        decision = mixer.choose(afresh(request))
        np.testing.assert_array_equal(state_arrays["queue_mask"], state["queue_mask"][0])
        np.testing.assert_allclose(state_arrays["ad"], state["ad"][0], rtol=1e-6)
        np.testing.assert_array_equal(state_arrays["ad_id"], state["ad_id"][0])
        if bonuses:
            np.testing.assert_allclose(state_arrays["prior"], state["prior"][0], rtol=1e-5)
        np.testing.assert_array_equal(state_arrays["traffic"], state["traffic"][0])
        np.testing.assert_allclose(state_arrays["overall"], state["overall"][0], rtol=1e-5, atol=1e-7)
        scores = policy.scores()
        slots = {ad: slot for slot, ad in enumerate(env.contracts.ad_id.tolist())}
        slots |= {ad: len(slots) + slot for slot, ad in enumerate(env._feed.present("bid_ad")[0].tolist())}
        step = env.step(scores)
        chosen = int(step.columns["chosen"][0])
        assert (decision.ad is None) == (chosen < 0)
        if decision.ad is not None:
            assert slots[decision.ad] == chosen
            assert decision.score == pytest.approx(float(step.columns["score"][0]), rel=1e-6)
            assert decision.worth == pytest.approx(float(step.columns["revenue"][0]), rel=1e-5)
        _tell(mixer, env, before)
        choices += 1
        state, over = step.observation, bool(step.terminated[0])
    assert choices > 200
    assert bool(np.abs(env.delivery.prior[0] - first).max() > 0.1) == paces
    np.testing.assert_array_equal(mixer.shown, env.delivery.shown[0])
    assert mixer.sums[0] > 10
    assert mixer.sums[2] > 10


def test_one_action_decides_as_many_requests_as_in_the_environment() -> None:
    kwargs = SMALL | {"mode": "bonuses", "repeat": 20, "requests": 400, "prior": "demand", "ad_fields": ["pace", "cap"]}
    env, book = generated(1, **kwargs), make_book(env_config(**kwargs))
    policy = linear_policy(book, pace=-1.0, cap=3.0)
    state, over = env.reset(4), False
    scores, calls = policy.scores, 0
    while not over:
        policy.inputs["ad"][0] = state["ad"][0]
        step = env.step(scores())
        state, over = step.observation, bool(step.terminated[0])
    mixer = Mixer(book, policy)
    mixer.tables.begin_day(0, env._days(env._seeds[0], 0))

    def counted() -> Any:
        nonlocal calls
        calls += 1
        return scores()

    policy.scores = counted  # type: ignore[method-assign]
    day = env._days(env._seeds[0], 0)
    for part in day:
        for request in requests_of(part, day.contracts):
            mixer.choose(afresh(request))
    np.testing.assert_array_equal(mixer.shown, env.delivery.shown[0])
    assert calls == -(-mixer.requests // 20)
    mixer.use(policy)
    before = calls  # beside those by which it is tried
    mixer.choose(afresh(request))
    mixer.choose(afresh(request))
    assert calls == before + 1  # another policy begins with an action of its own, which then stands


def _tell(mixer: Mixer, env: Any, before: Any) -> None:
    """The news of billing since `before`."""
    shown, billed = env.delivery.seen_shown[0] - before[0], env.delivery.seen_billed[0] - before[1]
    at = np.flatnonzero(shown)
    ads = mixer.book.contracts.ad_id[at].tolist()
    mixer.bill(Billing(ads, shown[at].astype(int).tolist(), billed[at].astype(int).tolist()))


def test_bytes_in_give_bytes_out_that_name_request_and_version() -> None:
    mixer = small_mixer()
    request = request_of(mixer.book, 77, creative=[f"page {place}" for place in range(9)])
    answer = json.loads(mixer.decide(msgspec.json.encode(request)))
    assert answer["request_id"] == 77
    assert answer["version"] == mixer.policy.version
    assert (answer["ad"], answer["kind"], answer["score"], answer["creative"]) == (10_002, 1, 3.0, "page 8")


def test_of_equal_scores_contracts_go_before_bids_and_lower_ones_first() -> None:
    mixer = small_mixer({"ctr": 1.0})
    request = request_of(mixer.book)
    targeted = mixer.book.contracts.ad_id[mixer.book.contracts.eligible[mixer._cell(request)]].tolist()
    assert mixer.choose(afresh(request)).ad == targeted[0]
    backwards = [getattr(request, name)[::-1] for name in ("ad", "kind", "ecpm", "ctr")]
    turned = msgspec.structs.replace(request, **dict(zip(("ad", "kind", "ecpm", "ctr"), backwards, strict=True)))
    assert mixer.choose(afresh(turned)).ad == targeted[0]


def test_an_empty_queue_shows_nothing_and_is_counted() -> None:
    mixer = small_mixer()
    empty = request_of(mixer.book, ad=[], kind=[], ecpm=[], ctr=[])
    decision = mixer.choose(empty)
    assert (decision.ad, decision.kind, decision.place, decision.score) == (None, None, None, 0.0)
    assert (mixer.requests, mixer.empty_queues) == (1, 1)
    nobody = request_of(mixer.book, contracts=0, bids=1, ecpm=[0.0])
    assert mixer.choose(nobody).ad is None
    assert mixer.empty_queues == 2


def test_contracts_at_their_cap_are_shown_no_more() -> None:
    mixer = small_mixer({"kind": 1.0})
    request = request_of(mixer.book, contracts=1, explain=True)
    mixer.tables.cap[0, 0] = 3
    ads = [mixer.choose(afresh(request)).ad for _ in range(5)]
    assert ads == [int(mixer.book.contracts.ad_id[0])] * 3 + [10_000] * 2
    explanation = mixer.choose(afresh(request)).explanation
    assert not isinstance(explanation, msgspec.UnsetType)
    assert explanation.candidates[0].reason == "at its cap"
    assert explanation.candidates[0].score is None


def test_contracts_that_do_not_target_the_visitor_or_are_filtered_do_not_play() -> None:
    mixer = small_mixer({"kind": 1.0})
    column = mixer.book.contracts.eligible[:, 0]
    cell = int(np.flatnonzero(~column)[0])
    ages = mixer.book.contracts.visitors[2]
    other = request_of(mixer.book, contracts=1, region=cell // (2 * ages), gender=cell // ages % 2, age=cell % ages)
    assert mixer.choose(other).kind == 1
    assert mixer.choose(request_of(mixer.book, contracts=1, filters=[1, 0, 0, 0])).kind == 1
    assert mixer.choose(request_of(mixer.book, contracts=1, filters=[2, 0, 0, 0])).kind == 0


def test_of_more_bids_than_slots_the_highest_stay() -> None:
    mixer = small_mixer()
    request = request_of(mixer.book, contracts=0, bids=7, explain=True)
    decision = mixer.choose(afresh(request))
    assert decision.ad == 10_006
    assert mixer.cut_bids == 2
    explanation = decision.explanation
    assert not isinstance(explanation, msgspec.UnsetType)
    assert [candidate.reason for candidate in explanation.candidates] == [REASONS[7]] * 2 + [""] * 5


@pytest.mark.parametrize(("rate", "theta"), [(0.3, 1.0), (1.0, 0.6), (0.5, 0.4), (0.0, 1.0)])
def test_rate_and_theta_are_probabilities(rate: float, theta: float) -> None:
    mixer = small_mixer({"kind": 1.0}, seed=11)
    mixer.tables.cap[0, 0] = 1e9
    ad = int(mixer.book.contracts.ad_id[0])
    mixer.control(Control([ad], [rate], [theta]))
    request, count = request_of(mixer.book, contracts=1), 4000
    shown = sum(mixer.choose(afresh(request)).kind == 0 for _ in range(count))
    chance = rate * theta
    assert abs(shown - count * chance) <= 4.5 * np.sqrt(count * chance * (1 - chance))
    reasons = set()
    for _ in range(50):
        explanation = mixer.choose(msgspec.structs.replace(afresh(request), explain=True)).explanation
        assert not isinstance(explanation, msgspec.UnsetType)
        reasons.add(explanation.candidates[0].reason)
    assert (REASONS[4] in reasons) == (rate < 1)
    assert (REASONS[5] in reasons) == (theta < 1)


def test_support_sets_rate_and_theta_aside_for_contracts_that_are_late() -> None:
    mixer = small_mixer({"kind": 1.0}, support="late", support_gap=0.1, rate=0.0)
    early, late = request_of(mixer.book, contracts=1, time=0.0), request_of(mixer.book, contracts=1, time=0.9)
    assert mixer.choose(early).kind == 1
    assert mixer.choose(late).kind == 0


def test_an_explanation_gives_scores_duals_and_the_margin() -> None:
    mixer = small_mixer({"value": 1.0, "penalty": 1.0})
    decision = mixer.choose(request_of(mixer.book, explain=True))
    explanation = decision.explanation
    assert not isinstance(explanation, msgspec.UnsetType)
    playing = {each.ad: each for each in explanation.candidates if not each.reason}
    assert decision.ad == max(playing, key=lambda ad: playing[ad].score or 0.0)
    scores = sorted((each.score or 0.0 for each in playing.values()), reverse=True)
    assert explanation.margin == pytest.approx(scores[0] - scores[1])
    for each in playing.values():
        if each.kind == 0:  # score = value + penalty [eCPM]: one billed impression is worth its penalty
            assert each.alpha == pytest.approx(each.penalty, rel=1e-5)
        else:
            assert each.alpha is None
            assert each.score == each.worth


BROKEN = [
    ({"ctr": [0.02] * 8}, "ctr has 8 entries, ad has 9"),
    ({"ctr": [float("nan")] * 9}, r"Expected `float` >= 0.0 - at `\$.ctr\[0\]`"),
    ({"ecpm": [0.0] * 8 + [-1.0]}, r"Expected `float` >= 0.0 - at `\$.ecpm\[8\]`"),
    ({"ecpm": [0.0] * 8 + [float("inf")]}, r"ecpm\[8\]"),
    ({"kind": [0] * 6 + [1, 1, 2]}, r"Expected `int` <= 1 - at `\$.kind\[8\]`"),
    ({"ad": [1] * 9}, "is there twice"),
    ({"kind": [0] * 9}, r"ad\[6\] = 10000 is no contract of this server"),
    ({"region": 3}, r"region = 3 is outside 0 \.\. 2"),
    ({"creative": ["a"]}, "creative has 1 entries"),
    ({"filters": [0]}, "filters has 1 entries"),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN)
def test_broken_requests_are_named_and_count_nothing(changes: dict[str, Any], words: str) -> None:
    mixer = small_mixer()
    with pytest.raises(MessageError, match=words):
        mixer.choose(request_of(mixer.book, **changes))
    assert mixer.requests == 0
    assert mixer.sums.sum() == 0
    assert mixer.choose(request_of(mixer.book)).ad is not None


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "truncated"),
        (b'{"request_id": 1}', "missing required field `region`"),
        (b'{"request_id": "x"}', "Expected `int`, got `str` - at `\\$.request_id`"),
        (b'{"reqest_id": 1}', "unknown field `reqest_id`"),
        (b'{"request_id": NaN}', "malformed"),
        (b"[" * 100_000, "."),
    ],
)
def test_bodies_that_are_no_request_are_refused(body: bytes, words: str) -> None:
    with pytest.raises(MessageError, match=words):
        small_mixer().decide(body)


def test_a_policy_that_gives_no_number_is_an_error_that_counts_nothing() -> None:
    mixer = small_mixer({"value": 3e38})
    huge = request_of(mixer.book, contracts=0, bids=1, ecpm=[1e30])
    mixer.policy.scores = lambda: np.full((1, mixer.book.spec.action.size), np.nan, np.float32)  # type: ignore[method-assign]
    with pytest.raises(NetworkError, match=r"scores ad\[0\] as .*nan"):
        mixer.choose(huge)
    assert mixer.requests == 0


@pytest.mark.parametrize("failing", ["candidate", "visitor", "score", "policy"])
def test_a_refused_request_takes_no_draws_from_later_ones(failing: str) -> None:
    def decisions(refused: bool) -> tuple[list[list[str]], bytes]:
        mixer = small_mixer(mode="all")
        mixer.rate[:] = 0.5
        ids = mixer.book.contracts.ad_id.tolist()
        reasons: list[list[str]] = []
        for number in range(40):
            whole = request_of(mixer.book, number, explain=True)
            if refused:
                scores = mixer.policy.scores
                broken = msgspec.structs.replace(whole, request_id=1000 + number)
                if failing == "candidate":
                    last = max(ids) + 1
                    broken.ad = [*whole.ad, last]
                    broken.kind = [*whole.kind, 0]
                    broken.ecpm = [*whole.ecpm, 0.0]
                    broken.ctr = [*whole.ctr, 0.1]
                elif failing == "visitor":
                    broken.age = 99
                elif failing == "score":
                    mixer.policy.scores = lambda: np.full((1, mixer.book.spec.action.size), np.nan, np.float32)  # type: ignore[method-assign]
                else:
                    mixer.policy.scores = lambda: _raise(NetworkError("no run"))  # type: ignore[method-assign]
                with pytest.raises((MessageError, NetworkError)):
                    mixer.answer(broken)
                mixer.policy.scores = scores  # type: ignore[method-assign]
            explained = mixer.answer(whole).explanation
            assert not isinstance(explained, msgspec.UnsetType)
            reasons.append([candidate.reason for candidate in explained.candidates])
        assert any("left out by rate" in each for each in reasons)
        return reasons, snapshot.encode(mixer).partition(b"requests")[2]

    assert decisions(refused=True) == decisions(refused=False)


def _raise(error: Exception) -> Any:
    raise error


def test_requests_without_a_time_come_in_order_and_begin_anew_with_a_day() -> None:
    """The time that the policy is told: by the clock, but never before one that was told."""
    now = [1000.0]
    book = make_book(env_config(mode="all"))
    mixer = Mixer(book, linear_policy(book, value=1.0), clock=lambda: now[0], day_seconds=100.0)
    moments: list[float] = []
    mixer.journal = lambda request, moment, decision: moments.append(moment)
    for seconds in (50.0, 90.0, 80.0):  # the clock was set back
        now[0] = 1000.0 + seconds
        mixer.choose(request_of(book, time=None))
    now[0] = 1100.0
    mixer.begin_day()
    for seconds in (110.0, 120.0):
        now[0] = 1000.0 + seconds
        mixer.choose(request_of(book, time=None))
    assert moments == pytest.approx([0.5, 0.9, 0.9, 0.1, 0.2])


def test_a_decision_that_fails_leaves_pacing_as_it_was() -> None:
    fields = {"ad_fields": ["pace"], "prior": "demand", "pace_step": 2.0}
    mixer, never = (small_mixer({"pace": 0.0}, mode="bonuses", repeat=1, **fields) for _ in range(2))
    for each in (mixer, never):
        each.choose(request_of(each.book, 1, time=0.2))
    before = snapshot.encode(mixer).partition(b"requests")[2]
    scores = mixer.policy.scores
    mixer.policy.scores = lambda: np.full((1, mixer.book.spec.action.size), np.nan, np.float32)  # type: ignore[method-assign]
    with pytest.raises(NetworkError):
        mixer.choose(request_of(mixer.book, 2, time=0.6))
    assert snapshot.encode(mixer).partition(b"requests")[2] == before
    mixer.policy.scores = scores  # type: ignore[method-assign]
    for each in (mixer, never):
        each.choose(request_of(each.book, 3, time=0.8))
    assert snapshot.encode(mixer).partition(b"requests")[2] == snapshot.encode(never).partition(b"requests")[2]


def test_a_policy_for_other_features_is_refused_and_the_old_one_goes_on() -> None:
    mixer = small_mixer()
    other = make_book(env_config(mode="all", ad_fields=["ad_id", "slot_id", "kind", "ecpm", "ctr"]))
    with pytest.raises(CheckpointError, match=r"than this server has \(ad: float32 \[11, 3\], here float32 \[11, 10\]"):
        mixer.use(linear_policy(other, ecpm=1.0))
    assert mixer.choose(request_of(mixer.book)).version == mixer.policy.version


def test_each_decision_is_named_after_the_policy_that_made_it() -> None:
    mixer = small_mixer()
    cheap = linear_policy(mixer.book, mixer.policy, value=-1.0)
    assert cheap.version != mixer.policy.version
    first = mixer.choose(request_of(mixer.book, contracts=0))
    mixer.use(cheap)
    second = mixer.choose(request_of(mixer.book, contracts=0))
    assert (first.ad, second.ad) == (10_002, 10_000)  # bounded below by 0, the scores are equal: the first bid
    assert second.version == cheap.version


def test_billing_news_move_the_estimate_and_never_exceed_what_was_shown() -> None:
    mixer = small_mixer({"kind": 1.0}, billed=0.8)
    ad, request = int(mixer.book.contracts.ad_id[0]), request_of(mixer.book, contracts=1)
    for _ in range(10):
        mixer.choose(afresh(request))
    with pytest.raises(MessageError, match="10 impressions await their billing"):
        mixer.bill(Billing([ad], [11], [0]))
    with pytest.raises(MessageError, match="no contract"):
        mixer.bill(Billing([99_999], [1], [0]))
    mixer.bill(Billing([ad], [10], [2]))
    mixer.choose(afresh(request))
    assert mixer.contracts()[0].billed_estimate == pytest.approx(2)
    with pytest.raises(MessageError, match="0 billed of 5"):
        mixer.bill(Billing([ad], [5], [0]))


def test_what_was_billed_survives_a_restart(tmp_path: Path) -> None:
    first, again = (small_mixer({"kind": 1.0}, billed=0.8) for _ in range(2))
    ad, request = int(first.book.contracts.ad_id[0]), request_of(first.book, contracts=1)
    for _ in range(10):
        first.choose(afresh(request))
    first.bill(Billing([ad], [8], [2]))
    snapshot.save(tmp_path / "state", snapshot.encode(first))
    snapshot.restore(tmp_path / "state", again)
    with pytest.raises(MessageError, match="2 impressions await their billing"):
        again.bill(Billing([ad], [3], [0]))
    for mixer in (first, again):
        mixer.choose(afresh(request))
    assert again.contracts() == first.contracts()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("contracts", 0, "rate"), 5),
        (("contracts", 0, "theta"), -0.1),
        (("contracts", 0, "shown"), -1e300),
        (("contracts", 0, "seen_billed"), 7.0),
        (("contracts", 1, "ad"), None),
        (("began",), 1e300),
        (("requests",), -1),
        (("sums", 0), 1e308),
    ],
)
def test_counters_that_cannot_be_are_refused(place: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    mixer = small_mixer()
    snapshot.save(tmp_path / "state", snapshot.encode(mixer))
    document = json.loads((tmp_path / "state").read_text())
    inner = document
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = document["contracts"][0]["ad"] if value is None else value
    document["checksum"] = ""  # who edits a file can write the checksum too
    (tmp_path / "state").write_text(json.dumps(document))
    before = snapshot.encode(mixer)
    with pytest.raises(CheckpointError, match="--new-day"):
        snapshot.restore(tmp_path / "state", mixer)
    assert snapshot.encode(mixer) == before


@pytest.mark.parametrize("kind", ["a hole", "a device", "a fifo"])
def test_counters_that_are_no_file_are_neither_read_nor_written(kind: str, tmp_path: Path) -> None:
    mixer = small_mixer()
    state = tmp_path / "state"
    if kind == "a fifo":
        os.mkfifo(state)
    elif kind == "a device":
        state.symlink_to("/dev/zero")
    else:
        with state.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="--new-day"):
        snapshot.restore(state, mixer)
    if kind != "a hole":  # which is a file, and is replaced
        with pytest.raises(DdrlError, match="state"):
            snapshot.save(state, snapshot.encode(mixer))


def test_no_flipped_bit_of_the_counters_is_other_counters(tmp_path: Path) -> None:
    mixer = small_mixer()
    for number in range(20):
        mixer.choose(request_of(mixer.book, number))
    whole = snapshot.encode(mixer)
    (tmp_path / "state").write_bytes(whole)
    assert snapshot.restore(tmp_path / "state", mixer)
    for bit in range(0, 8 * len(whole), 5):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        (tmp_path / "state").write_bytes(flipped)
        with contextlib.suppress(CheckpointError):
            assert snapshot.restore(tmp_path / "state", mixer), "an earlier version's file"
        assert snapshot.encode(mixer) == whole, bit
    (tmp_path / "state").write_bytes(whole.replace(json.loads(whole)["checksum"].encode(), b""))
    assert not snapshot.restore(tmp_path / "state", mixer)


def test_what_pacing_knows_survives_a_restart(tmp_path: Path) -> None:
    def made() -> Mixer:
        fields = {"ad_fields": ["pace"], "prior": "demand", "pace_step": 2.0}
        return small_mixer({"pace": 0.0}, mode="bonuses", repeat=1, **fields)

    first, again = made(), made()
    for number in range(4):
        first.choose(request_of(first.book, number, time=0.2 * (number + 1)))
    snapshot.save(tmp_path / "state", snapshot.encode(first))
    snapshot.restore(tmp_path / "state", again)
    assert (first.tables.pacing.state[1] > 0).all()  # type: ignore[union-attr]
    for mixer in (first, again):
        mixer.choose(request_of(mixer.book, 9, time=0.95))
    np.testing.assert_array_equal(first.tables.prior, again.tables.prior)
    assert not np.allclose(first.tables.prior, made().tables.prior)


def test_any_subset_of_the_state_can_be_served() -> None:
    fields = {"ad_fields": ["value"], "overall_fields": ["time", "shortfall"], "traffic_fields": ["age"]}
    mixer = small_mixer({"value": 1.0}, **fields)
    assert mixer.choose(request_of(mixer.book)).ad == 10_002


def test_a_policy_whose_prior_is_yesterdays_duals_is_served_with_those_of_the_markets_first_day() -> None:
    fields = {"ad_fields": ["pace"], "prior": "yesterday"}
    prior = small_mixer({"pace": 0.0}, mode="bonuses", repeat=20, **fields).tables.prior[0]
    config = MarketConfig(**SMALL)
    day = Market(config).day(0)
    np.testing.assert_allclose(prior, 1000 * day.contracts.billed_rate * day.yesterday_alpha, rtol=1e-5)
    assert prior.any()


@pytest.mark.parametrize("times", [2, 3, 5])
def test_a_request_that_is_sent_again_gets_the_same_decision_and_counts_once(times: int) -> None:
    mixer = small_mixer({"kind": 1.0})
    request = request_of(mixer.book, contracts=1)
    decisions = [mixer.choose(request) for _ in range(times)]
    assert all(decision == decisions[0] for decision in decisions)
    assert (mixer.requests, mixer.shown[0]) == (1, 1.0)
    mixer.choose(afresh(request))
    assert (mixer.requests, mixer.shown[0]) == (2, 2.0)


def test_no_more_decisions_are_remembered_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddrl.admix.mixer.MAX_REMEMBERED", 3)
    mixer = small_mixer({"kind": 1.0})
    requests = [request_of(mixer.book, contracts=1) for _ in range(5)]
    for request in requests:
        mixer.choose(request)
    assert list(mixer._decided) == [request.request_id for request in requests[2:]]


@pytest.mark.parametrize("ad", [2**31, 5_000_000_000, 2**63 - 1])
def test_ids_of_64_bits_are_served(ad: int) -> None:
    mixer = small_mixer()
    assert mixer.choose(request_of(mixer.book, contracts=0, bids=1, ad=[ad], kind=[1])).ad == ad


PACED = {"ad_fields": ["pace"], "prior": "yesterday", "pace_step": 2.0, "mode": "bonuses", "repeat": 1}


def test_a_rule_is_served_in_the_place_of_the_policy_that_departs_from_it() -> None:
    learned, rule = small_mixer({"pace": 1.0}, **PACED), small_mixer({"pace": 1.0}, **PACED)
    rule.follow("adaptive_pacing")
    assert rule.policy_info().version == "adaptive_pacing"
    assert rule.changes == 0
    for time in (0.2, 0.4, 0.6, 0.8):
        request = request_of(rule.book, time=time, explain=True)
        versions = [mixer.choose(request).version for mixer in (learned, rule)]
        assert versions[1] == "adaptive_pacing" != versions[0]
    explanation = rule.choose(afresh(request)).explanation
    contracts = [
        place for place, each in enumerate(explanation.candidates) if each.kind == 0 and each.score is not None
    ]
    bonuses = [explanation.candidates[place].score - explanation.candidates[place].worth for place in contracts]
    assert len(bonuses) > 1
    np.testing.assert_allclose(bonuses, rule.tables.prior[0, contracts], rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"pace_step": 0.0}, "adaptive_pacing"),
        ({}, "yesterday_duals"),
        ({"prior": "off", "pace_step": 0.0}, "yesterday_duals"),
    ],
)
def test_a_rule_that_the_policy_does_not_depart_from_is_refused(changes: dict[str, object], rule: str) -> None:
    mixer = small_mixer({"pace": 1.0}, **PACED | changes)
    with pytest.raises(ConfigError, match=r"serve\.policy = .*departs from another rule"):
        mixer.follow(rule)
