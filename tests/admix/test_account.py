"""The account of a policy: the same days for all, by the environment's rules."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ddrl.acting.policy_file import load_policy
from ddrl.admix import LogWriter, Market, MarketConfig
from ddrl.admix.account import BINS, NAME, SEED, account, read_account, write_account
from ddrl.admix.baselines import Case, Decision, Feedback, Outlook
from ddrl.admix.environment import market_and_play
from ddrl.admix.logs import to_record
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, ConfigError, RunDirError
from ddrl.evaluate import main
from tests.admix.material import SMALL, env_config, save_run

SHARE = 0.6  # of its penalty that each contract bids beside its clicks
ENV = env_config(
    mode="bonuses", repeat=5, relative=True, reward_by="contract", delay=0.1, ad_fields=["penalty", "pace"],
    traffic_fields=[], billed=0.8,
)  # fmt: skip


class Constant:
    """What the policy under test does, as a baseline."""

    name: ClassVar[str] = "constant"
    grid: ClassVar[dict[str, tuple[float, ...]]] = {}

    @dataclass(frozen=True)
    class Settings:
        """None."""

    def __init__(self, outlook: Outlook, settings: Settings) -> None:
        self._bonus = SHARE * np.tile(outlook.contracts.penalty, (len(outlook.inventories), 1))

    def decide(self, feedback: Feedback) -> Decision:
        """Always the same."""
        return Decision(self._bonus)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save_run(tmp_path / "run", ENV, penalty=SHARE)
    return tmp_path / "run"


def test_policy_and_baselines_play_the_same_days_by_the_same_rules(run: Path) -> None:
    names = [f"{__name__}:Constant", "bid_only", "hindsight"]
    made = account(load_policy(run), 2, baselines=names)
    policy, constant, bids, best = made.rules
    np.testing.assert_allclose(policy.scores, constant.scores, rtol=1e-5, atol=1e-5)
    assert policy.value[-1] == pytest.approx(constant.value[-1], rel=1e-4)
    np.testing.assert_allclose(policy.value[::24], constant.value[::24], atol=0.05)  # courses stop at other requests
    assert bids.value[-1] == pytest.approx(made.bid_only)
    assert best.value[-1] <= made.optimum
    assert bids.scores == pytest.approx([0, 0], abs=1e-6)
    assert min(best.scores) > 0.9
    assert {len(rule.value) for rule in made.rules} == {len(made.times)}
    for one in made.contracts:
        assert one.due[-1] == pytest.approx(one.demand)
        assert (np.diff(one.billed) >= 0).all()
    write_account(run, made)
    assert read_account(run) == made


def test_scores_stand_beside_the_displays_that_they_led_to(tmp_path: Path) -> None:
    config, _ = market_and_play(ENV.kwargs)
    day = Market(config).day(SEED, 1)
    requests = day.requests()
    score = 1000 * (SHARE * day.contracts.penalty + config.click_value * requests.ctr)
    above = requests.eligible & (score > 1000 * requests.best_bid[:, None])
    shown = np.zeros_like(above)
    won = np.flatnonzero(above.any(1))
    shown[won, np.where(requests.eligible, score, -1.0)[won].argmax(1)] = True
    order = np.argsort(score[requests.eligible], kind="stable")

    def means(values: Any) -> list[float]:
        return [float(values[requests.eligible][part].mean()) for part in np.array_split(order, BINS)]

    for repeat in (1, 5):
        env = env_config(**(ENV.kwargs | {"repeat": repeat, "cap": 100.0}))
        save_run(tmp_path / str(repeat), env, penalty=SHARE)
        made = account(load_policy(tmp_path / str(repeat)), 1, baselines=["bid_only"]).calibration
        assert made is not None
        assert made.score == pytest.approx(means(score), rel=1e-5)
        assert made.above_bids == pytest.approx(means(above), abs=1e-3)
        assert np.mean(made.shown) == pytest.approx(np.mean(means(shown)), abs=1e-3)
        if repeat == 1:
            assert made.shown == pytest.approx(means(shown), abs=1e-3)

    save_run(tmp_path / "capped", env_config(**(ENV.kwargs | {"cap": 1.0})), penalty=SHARE)
    capped = account(load_policy(tmp_path / "capped"), 1, baselines=["bid_only"]).calibration
    assert capped is not None
    assert np.mean(capped.shown) > 0.5  # 0.34 with the requests of full contracts
    save_run(tmp_path / "all", env_config(mode="all"), value=1.0)
    assert account(load_policy(tmp_path / "all"), 1, baselines=["bid_only"]).calibration is None


def test_baselines_are_tuned_on_other_days_than_those_that_are_reported(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[Any] = []
    tuned: list[Any] = []
    make = Case.of

    def of(*arguments: Any) -> Case:
        cases.append(make(*arguments))
        return cases[-1]

    def tune(baseline: Any, case: Case, *arguments: Any) -> Any:
        tuned.append(case)
        return baseline.Settings()

    monkeypatch.setattr(Case, "of", of)
    monkeypatch.setattr("ddrl.admix.account.tune", tune)
    made = account(load_policy(run), 2, baselines=["bid_only"])
    reported, others = cases
    assert tuned == [others]
    assert len(reported.optima) == made.days == 2
    bids = {tuple(day[:50]) for case in cases for day in case.days.requests["ecpm"][..., 0]}
    assert len(bids) == len(reported.optima) + len(others.optima)  # no day is in both
    assert made.gap == max(best.gap for best in reported.optima)


def test_the_command_writes_the_account_without_loading_torch(run: Path) -> None:
    code = "import sys; from ddrl.evaluate import main; status = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code, str(run), "--days", "1", "--trust"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "policy" in done.stdout
    found = read_account(run)
    assert found is not None
    assert len(found.rules) == 11


def test_a_policy_of_a_log_is_judged_on_another_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    market = Market(MarketConfig(**SMALL))
    for name, day in (("monday", 1), ("tuesday", 2)):
        part = market.day(0, day)
        writer = LogWriter(
            tmp_path / name, to_record(market.contracts, 4, 0.1, part.inventory.supply), market.contracts
        )
        with writer:
            requests = part.requests()
            writer.write(requests, np.full(len(requests), -1), np.zeros(len(requests), bool))
    env = EnvConfig(id="ddrl.admix:logged", kwargs={"folder": str(tmp_path / "monday"), "mode": "contracts", "bids": 5})
    save_run(tmp_path / "run", env, value=1.0)
    assert main([str(tmp_path / "run"), "--days", "1", "--trust"]) == 1
    assert "--log FOLDER" in capsys.readouterr().err
    assert main([str(tmp_path / "run"), "--days", "1", "--log", str(tmp_path / "tuesday")]) == 0


def test_what_cannot_be_accounted_is_said(run: Path, tmp_path: Path) -> None:
    saved = load_policy(run)
    with pytest.raises(ConfigError, match="trained on a log"):
        account(saved, 1, log=tmp_path)
    save_run(tmp_path / "other", env_config(mode="all"), value=1.0)
    other = load_policy(tmp_path / "other")
    with pytest.raises(CheckpointError, match="other contracts, bid slots or fields"):
        account(type(other)(other.model, other.vector, ENV, {}), 1)
    with pytest.raises(CheckpointError, match="not in ad mixing"):
        account(type(saved)(saved.model, saved.vector, EnvConfig(), {}), 1)
    (run / NAME).write_text('{"format": "torn')
    with pytest.raises(RunDirError, match="cannot be read"):
        read_account(run)
