"""`python -m ddrl.serve`: a run's policy and a day of `ddrl.admix` become a mixer, which serves or scores a log.

A whole log is decided request by request, as a server would: counters grow with what the mixer shows. Where that is the
log's own ad, its billing is the log's; other impressions stay under way, and count at the contract's estimated rate.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any, get_type_hints

import msgspec
import numpy as np

from ddrl.acting.policy_file import SavedPolicy, load_policy
from ddrl.admix import mixer as snapshot
from ddrl.admix.contracts import Contracts, Requests
from ddrl.admix.logs import LogDay, arrow, open_log
from ddrl.admix.making import make_book
from ddrl.admix.messages import Billing, DisplayRequest
from ddrl.admix.mixer import Mixer, ServedPolicy, require
from ddrl.admix.settings import ServeConfig
from ddrl.core.errors import ConfigError, DdrlError, RunDirError
from ddrl.core.files import replacement
from ddrl.core.trust import check_trust, foreign_code
from ddrl.run.directory import RunLock

STATE = "serving.json"


def open_mixer(run: Path, contracts: Path | None = None, *, trust: bool = False, **settings: Any) -> Mixer:
    """A mixer for the policy saved in `run`; `settings` of `Mixer`. Counters begin at zero."""
    return make_mixer(run, load_policy(run), contracts, trust=trust, **settings)


def make_mixer(run: Path, saved: SavedPolicy, contracts: Path | None, *, trust: bool, **settings: Any) -> Mixer:
    """The same with a policy that is read already."""
    check_trust(run, foreign_code({"rollout": {"chooser": saved.model.chooser}}), trust=trust)
    book = make_book(saved.env, contracts)
    require(book, saved.model.spec)
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
    from ddrl.admix.server import serve

    state: Path = options.state or options.run / STATE
    lock = RunLock(state.parent, f".{state.name}.lock")
    try:
        if state.exists() and not options.new_day:
            snapshot.restore(state, mixer)
        snapshot.save(state, snapshot.encode(mixer))  # a place that cannot be written is refused before any request
        gc.collect()
        gc.freeze()  # what exists now is never collected
        signal.signal(signal.SIGTERM, _pass_over)  # the server has a handler of its own while it serves
        serve(mixer, options.run, config, state, _say)
    finally:
        lock.release()


def _say(words: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # its reader has ended
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
    parser.add_argument("--trust", action="store_true", help="run a chooser from outside ddrl that the policy names")
    kinds = get_type_hints(ServeConfig)
    for item in fields(ServeConfig):
        unit = f" [{item.metadata['unit']}]" if item.metadata["unit"] else ""
        parser.add_argument(f"--{item.name.replace('_', '-')}", type=kinds[item.name], default=item.default,
                            metavar=kinds[item.name].__name__.upper(), help=item.metadata["doc"] + unit)  # fmt: skip
    return parser


# ---- scoring a log ---------------------------------------------------------------------------------------------------

BATCH = 4096  # rows written at once


class Scored(msgspec.Struct):
    """One row of the result; ad and kind are null where nothing could be shown, logged where the log shows nothing."""

    request_id: int
    ad: int | None
    kind: int | None
    score: float
    worth: float  # [eCPM]
    candidates: int
    logged: int | None  # the ad that the log shows
    version: str


def score_log(mixer: Mixer, folder: Path, out: Path, on_error: str = "raise") -> int:
    """Write a row for each request of the log in `folder` to `out` (.parquet or .jsonl); their number.

    EnvError for a broken log, ConfigError for another suffix, RunDirError where `out` cannot be written."""
    if out.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"--out {out}: write to a file that ends in .parquet or .jsonl")
    log = open_log(folder, mixer.book.bids, on_error)
    count = 0
    try:
        with replacement(out) as temporary, _rows_into(temporary, out.suffix) as write:
            for part in log:
                rows = list(_decide(mixer, part, log))
                for begin in range(0, len(rows), BATCH):
                    write(rows[begin : begin + BATCH])
                count += len(rows)
                print(
                    f"\r{count} requests, window {int(part.window[-1]) + 1} of {log.windows}", end="", file=sys.stderr
                )
    except OSError as error:
        raise RunDirError(f"cannot write {out}: {error.strerror or error}") from None
    left = ", ".join(f"{name}: {number}" for name, number in log.counts.items() if number)
    print(f"\r{count} requests scored to {out}" + (f" ({left})" if left else ""), file=sys.stderr)
    return count


def requests_of(part: Requests, contracts: Contracts) -> Iterator[DisplayRequest]:
    """The requests of a part of a log as a server is asked them; contracts before bids."""
    ids = contracts.ad_id
    visitors = np.stack(np.unravel_index(part.cell, contracts.visitors), 1).tolist()
    for row, (region, gender, age) in enumerate(visitors):
        listed = np.flatnonzero(part.eligible[row])
        bids = np.flatnonzero(part.ecpm[row] > 0)
        yield DisplayRequest(
            request_id=int(part.request_id[row]),
            region=region,
            gender=gender,
            age=age,
            ad=ids[listed].tolist() + part.bid_ad[row, bids].tolist(),
            kind=[0] * len(listed) + [1] * len(bids),
            ecpm=[0.0] * len(listed) + part.ecpm[row, bids].tolist(),
            ctr=part.ctr[row, listed].tolist() + part.bid_ctr[row, bids].tolist(),
            slot=int(part.slot[row]),
            time=float(part.time[row]),
        )


def _decide(mixer: Mixer, part: Requests, log: LogDay) -> Iterator[Scored]:
    count = log.contracts.count
    ids = log.contracts.ad_id.tolist()
    for row, request in enumerate(requests_of(part, log.contracts)):
        decision = mixer.answer(request)
        at = int(part.logged[row])
        logged = None if at < 0 else ids[at] if at < count else int(part.bid_ad[row, at - count])
        if decision.kind == 0 and logged is not None and decision.ad == logged and part.logged_billed[row] >= 0:
            mixer.bill(Billing([logged], [1], [int(part.logged_billed[row])]))
        yield Scored(
            decision.request_id, decision.ad, decision.kind, decision.score, decision.worth, len(request.ad), logged,
            decision.version,
        )  # fmt: skip


@contextlib.contextmanager
def _rows_into(path: Path, suffix: str) -> Generator[Callable[[list[Scored]], object]]:
    """Write a new file by calls with its next rows."""
    if suffix == ".jsonl":
        encoder = msgspec.json.Encoder()
        with path.open("wb") as file:
            yield lambda rows: file.write(encoder.encode_lines(rows))
        return
    package = arrow()
    kinds = {int: "int64", int | None: "int64", float: "double", str: "string"}
    schema = package.schema(
        [(item.name, kinds[item.type]) for item in msgspec.structs.fields(Scored)], {"ddrl.admix": "decisions/1"}
    )
    with package.parquet.ParquetWriter(path, schema) as writer:
        yield lambda rows: writer.write_table(package.Table.from_pylist(msgspec.to_builtins(rows), schema))
