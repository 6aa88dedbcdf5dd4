"""A log is scored as a server would have answered it."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ddrl.admix import LogWriter, Requests, open_log
from ddrl.admix.journal import requests_of, score_log
from ddrl.admix.logs import to_record
from ddrl.admix.serving import main, open_mixer
from ddrl.core.config import EnvConfig
from ddrl.core.errors import ConfigError, EnvError
from tests.admix.days import contracts, requests
from tests.admix.material import save_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Six requests of two contracts and two bids; the last two queues are empty of bids and of anything."""
    booked = contracts([2, 2], penalty=0.004, cap=2)
    bids = [[1, 2], [3, 0], [1, 1], [5, 4], [0, 0], [0, 0]]
    none = [[True, True]] * 4 + [[False, True], [False, False]]
    day = requests(bids, [[0.02, 0.03]] * 6, eligible=none)
    out = tmp_path / "log"
    with LogWriter(out, to_record(booked, 2, 0.1), booked) as writer:
        writer.write(day, np.array([0, 2, 1, 3, 1, -1]), np.array([True, False, True, False, True, False]))
    return out


@pytest.fixture
def run(tmp_path: Path, folder: Path) -> Path:
    """A policy that scores each ad by its value [eCPM]."""
    env = EnvConfig(id="ddrl.admix:logged", kwargs={"folder": str(folder), "bids": 2, "mode": "all"})
    save_run(tmp_path / "run", env, value=1.0)
    return tmp_path / "run"


def test_each_row_of_the_log_is_decided_once_as_the_mixer_decides_it(run: Path, folder: Path) -> None:
    out = run / "decisions.jsonl"
    assert main([str(run), "--trust", "--log", str(folder), "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    mixer, log = open_mixer(run, trust=True), open_log(folder, 2)
    asked = [request for part in log for request in requests_of(part, log.contracts)]
    assert [(row["request_id"], row["ad"]) for row in rows] == [
        (request.request_id, mixer.choose(request).ad) for request in asked
    ]
    # worth: contracts 2 and 3, bids as written; contract 2 is at its cap after two impressions
    assert [row["ad"] for row in rows] == [2, 2, 1, 100, None, None]
    assert [row["candidates"] for row in rows] == [4, 3, 4, 4, 1, 0]
    assert [row["logged"] for row in rows] == [1, 100, 2, 101, 2, None]
    assert {row["version"] for row in rows} == {mixer.policy.version}


def test_parquet_holds_the_same_rows(run: Path, folder: Path) -> None:
    lines, table = run / "decisions.jsonl", run / "decisions.parquet"
    for out in (lines, table):
        assert score_log(open_mixer(run, trust=True), folder, out) == 6
    assert pyarrow.parquet.read_table(table).to_pylist() == [
        json.loads(line) for line in lines.read_text().splitlines()
    ]


def test_billing_of_the_logs_own_ads_is_the_logs(run: Path, folder: Path) -> None:
    env = EnvConfig(id="ddrl.admix:logged", kwargs={"folder": str(folder), "bids": 2, "mode": "all"})
    save_run(run, env, kind=10.0)
    mixer = open_mixer(run, trust=True)
    score_log(mixer, folder, run / "decisions.jsonl")
    assert mixer.shown.tolist() == [2, 2]
    assert mixer.seen_shown.tolist() == [1, 1]  # request 0 and request 2: the log showed what the mixer shows
    assert mixer.seen_billed.tolist() == [1, 1]


def test_a_broken_log_leaves_no_half_written_decisions(run: Path, folder: Path) -> None:
    out = run / "decisions.parquet"
    with pytest.raises(ConfigError, match=r"ends in \.parquet or \.jsonl"):
        score_log(open_mixer(run, trust=True), folder, run / "decisions.csv")
    track = folder / "track_log.parquet"
    table = pyarrow.parquet.read_table(track)
    place, column = table.schema.get_field_index("region"), table.column("region").to_pylist()
    broken = pyarrow.array([*column[:-1], 9], pyarrow.int32())
    pyarrow.parquet.write_table(table.set_column(place, table.schema.field("region"), broken), track)
    with pytest.raises(EnvError, match=r"row 5 .*region"):
        score_log(open_mixer(run, trust=True), folder, out)
    assert not out.exists()
    assert not list(run.glob(".decisions*"))


def test_a_request_of_a_log_is_a_valid_body(run: Path, folder: Path) -> None:
    mixer, log = open_mixer(run, trust=True), open_log(folder, 2)
    part: Requests = next(iter(log))
    for request in requests_of(part, log.contracts):
        assert json.loads(mixer.decide(msgspec.json.encode(request)))["request_id"] == request.request_id
