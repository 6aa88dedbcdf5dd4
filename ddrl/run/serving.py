"""`python -m ddrl.serve`: a run's policy and a day of `ddrl.envs.admix` become a mixer, which serves or scores a log.

What serving shares with the environment (contracts, forecast, the state's fields) is handed to `ddrl.serve` here, as a
`Book`."""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import numpy as np

from ddrl.acting.policy_file import SavedPolicy, load_policy
from ddrl.core.config import EnvConfig
from ddrl.core.errors import CheckpointError, DdrlError
from ddrl.core.trust import check_trust, foreign_code
from ddrl.envs.admix.contracts import GENDERS
from ddrl.envs.admix.feed import alpha_of, prior_of
from ddrl.envs.admix.making import Morning, morning
from ddrl.envs.admix.pacing import Pacing
from ddrl.envs.admix.settings import OVERALL_FIELDS
from ddrl.envs.admix.state import StateWriter
from ddrl.envs.admix.vector import AdmixVectorEnv
from ddrl.run.lock import RunLock
from ddrl.serve import snapshot
from ddrl.serve.book import Book, Play
from ddrl.serve.mixer import Mixer
from ddrl.serve.served_policy import ServedPolicy
from ddrl.serve.settings import ServeConfig

_MODULE = "ddrl.envs.admix"
STATE = "serving.json"


def make_book(env: EnvConfig, contracts: Path | None = None) -> Book:
    """The book of the day that `env` (of an ad-mixing run) begins with, or of the contracts in the log folder
    `contracts`.

    CheckpointError for another environment; ConfigError, EnvError for settings and files that cannot be used."""
    module, _, factory = env.id.rpartition(":")
    if module not in (_MODULE, f"{_MODULE}.making"):
        raise CheckpointError(
            f"the policy was trained in {env.id}, not in ad mixing: only policies of {_MODULE}:generated and :logged "
            "can be served"
        )
    return book_of(morning(factory, env.kwargs, contracts))


def book_of(day: Morning) -> Book:
    """The book of a day before it begins."""
    contracts = day.contracts
    play = day.play
    required = day.inventory.split()
    theta = {"off": np.ones(contracts.count), "split": required, "water": None}[play.theta]
    theta = day.inventory.water() if theta is None else theta

    def always(seed: int, episode: int) -> Any:
        return day

    spec = AdmixVectorEnv(always, 1, play, day.click_value, day.bids).spec
    prior = prior_of(play, day)
    writer = StateWriter(1, contracts, 0 if play.mode == "bonuses" else day.bids, play)
    rows = np.zeros((contracts.count, 0), np.float32)
    bid_row = np.zeros(0, np.float32)
    if writer.ad_fields:
        writer.prepare(spec.observation.numpy, required[None], theta[None])
        rows, bid_row = writer.constant_rows()
    pacing = None
    if play.pace_step:
        pacing = Pacing(contracts, play.pace_step, 1)
        pacing.begin(0, alpha_of(play, day))
    shown = Play(**{item.name: getattr(play, item.name) for item in fields(Play)})
    return Book(
        spec=spec, play=shown, ids=contracts.ad_id, demand=contracts.demand, limit=contracts.cap,
        penalty=contracts.penalty, billed_rate=contracts.billed_rate, eligible=contracts.eligible,
        curve=day.inventory.curve, theta=theta, prior=prior.astype(np.float32), rows=rows, bid_row=bid_row,
        fields=writer.ad_fields,
        overall=OVERALL_FIELDS, bids=day.bids, regions=contracts.regions.shape[1], genders=GENDERS,
        ages=contracts.ages.shape[1], click_value=day.click_value, pacing=pacing,
    )  # fmt: skip


def open_mixer(run: Path, contracts: Path | None = None, *, trust: bool = False, **settings: Any) -> Mixer:
    """A mixer for the policy saved in `run`; `settings` of `Mixer`. Counters begin at zero."""
    return make_mixer(run, load_policy(run), contracts, trust=trust, **settings)


def make_mixer(run: Path, saved: SavedPolicy, contracts: Path | None, *, trust: bool, **settings: Any) -> Mixer:
    """The same with a policy that is read already."""
    check_trust(run, foreign_code({"rollout": {"chooser": saved.model.chooser}}), trust=trust)
    book = make_book(saved.env, contracts)
    book.require(saved.model.spec)
    return Mixer(book, ServedPolicy(saved.model, saved.vector, saved.evaluation), **settings)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status. Trouble that ddrl knows is one line on standard error."""
    options = _parser().parse_args(arguments)
    try:
        config = ServeConfig(**{item.name: getattr(options, item.name) for item in fields(ServeConfig)})
        saved = load_policy(options.run)
        mixer = make_mixer(
            options.run, saved, options.contracts or options.log, trust=options.trust, seed=config.seed,
            day_seconds=config.day_seconds,
        )  # fmt: skip
        if options.log is not None:
            from ddrl.run.log_scoring import score_log

            score_log(mixer, options.log, options.out)
        else:
            _serve(mixer, options, config)
    except DdrlError as error:
        print(f"ddrl.serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ddrl.serve: interrupted", file=sys.stderr)
        return 130
    return 0


def _serve(mixer: Mixer, options: argparse.Namespace, config: ServeConfig) -> None:
    from ddrl.serve.server import serve

    state: Path = options.state or options.run / STATE
    lock = RunLock(state.parent, f".{state.name}.lock")
    try:
        if state.exists() and not options.new_day:
            snapshot.restore(state, mixer)
        snapshot.save(state, snapshot.encode(mixer))  # a place that cannot be written is refused before any request
        gc.collect()
        gc.freeze()  # what stands now is never looked at again
        signal.signal(signal.SIGTERM, _pass_over)  # the server's own handler stands while it serves
        serve(mixer, options.run, config, state, _say)
    finally:
        lock.release()


def _say(words: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # whoever read it has gone
        print(words, flush=True)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """A signal that was obeyed already."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.serve",
        description="Serve the ad-mixing policy of a run over HTTP, or score a log with it. See docs/serving.md.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory with policy.json")
    parser.add_argument("--contracts", type=Path, metavar="FOLDER", help="log folder whose contracts.json is served")
    parser.add_argument("--state", type=Path, metavar="FILE", help=f"file of the counters (RUN/{STATE})")
    parser.add_argument("--new-day", action="store_true", help="begin with counters of zero")
    parser.add_argument("--log", type=Path, metavar="FOLDER", help="score this log instead, and end")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("decisions.parquet"),
                        help="where the decisions go: .parquet or .jsonl")  # fmt: skip
    parser.add_argument("--trust", action="store_true", help="run a chooser of one's own that the policy names")
    kinds = get_type_hints(ServeConfig)
    for item in fields(ServeConfig):
        unit = f" [{item.metadata['unit']}]" if item.metadata["unit"] else ""
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kinds[item.name], default=item.default,
                            metavar=kinds[item.name].__name__.upper(), help=item.metadata["doc"] + unit)  # fmt: skip
    return parser
