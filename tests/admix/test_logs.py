"""Logs are written, streamed back and joined; what is broken is refused by file, row and field, or counted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from ddrl.admix import LogWriter, Market, Requests, logged, logged_env, open_log
from ddrl.admix import logs as columns
from ddrl.admix.logs import to_record
from ddrl.core.errors import ConfigError, EnvError, MissingExtraError
from tests.admix.days import SMALL, contracts, requests


def write_day(folder, seed=1, config=SMALL):
    """A day of the market under a rule that shows contracts to half of the visitors; what it showed."""
    market = Market(config)
    day = market.day(seed)
    rng = np.random.default_rng(seed)
    parts, slots, counted = [], [], []
    with LogWriter(
        folder, to_record(market.contracts, day.windows, config.click_value, day.inventory.supply), market.contracts
    ) as log:
        for part in day:
            shown = market.contracts.count + part.ecpm.argmax(1)
            takes = part.eligible.any(1) & (rng.random(len(part)) < 0.5)
            shown[takes] = part.eligible[takes].argmax(1)
            shown[rng.random(len(part)) < 0.1] = -1
            billed = rng.random(len(part)) < 0.7
            log.write(part, shown, billed)
            parts.append(part), slots.append(shown), counted.append(billed)
    return market, Requests.join(parts), np.concatenate(slots), np.concatenate(counted)


def rewrite(path, change):
    """Change one file of a log as a broken pipeline would."""
    table = pyarrow.parquet.read_table(path)
    values = {name: table[name].to_pylist() for name in table.schema.names}
    change(values)
    pyarrow.parquet.write_table(pyarrow.table(values, schema=table.schema), path)


def tiny(folder):
    """Three requests of two contracts and one bid; the second shows a contract, the third the bid."""
    booked = contracts([5, 5], cap=50)
    day = requests([[2.0], [3.0], [4.0]], [[0.1, 0.2]] * 3)
    with LogWriter(folder, to_record(booked, 2, 0.1), booked) as log:
        log.write(day, np.array([-1, 1, 2]), np.array([False, True, False]))
    return folder


def test_a_log_comes_back_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "BATCH", 97)  # batches end anywhere, within windows and row groups
    market, day, shown, billed = write_day(tmp_path)
    log = open_log(tmp_path, 6)
    back = log.requests()
    for name in ("request_id", "time", "window", "cell", "slot", "bid_ad", "ecpm", "bid_ctr", "eligible"):
        assert np.array_equal(getattr(back, name), getattr(day, name)), name
    assert np.array_equal(back.ctr, np.where(day.eligible, day.ctr, 0))
    assert np.array_equal(back.logged, shown)
    known = np.where(shown < 0, -1, billed | (shown >= 6))
    assert np.array_equal(back.logged_billed, known)
    assert log.counts["requests without an exposure"] == (shown < 0).sum()
    assert np.allclose(log.contracts.demand, market.contracts.demand)
    assert np.allclose(log.inventory.supply, market.day(1).inventory.supply, atol=1e-3)


def test_parts_lie_within_one_window_and_only_a_batch_is_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "BATCH", 50)
    write_day(tmp_path)
    parts = list(open_log(tmp_path, 6))
    assert max(len(part) for part in parts) <= 50
    assert all(len(set(part.window.tolist())) == 1 for part in parts)


def test_several_readers_of_one_log_do_not_disturb_each_other(tmp_path):
    write_day(tmp_path)
    log = open_log(tmp_path, 6)
    first, second = iter(log), iter(log)
    pairs = list(zip(first, second, strict=True))
    assert all(np.array_equal(one.request_id, two.request_id) for one, two in pairs)


def test_the_log_is_an_environment_that_bills_what_the_log_billed(tmp_path):
    _, day, shown, billed = write_day(tmp_path)
    env = logged(str(tmp_path), 2, bids=6, mode="all")
    state = env.reset(0)
    for row in range(300):
        scores = np.zeros((2, 12))
        scores[0, shown[row]] = 1e6 * (shown[row] >= 0)
        before = env.delivery.billed[0].sum()
        assert state["queue_mask"][0].sum() == day.eligible[row].sum() + (day.ecpm[row] > 0).sum()
        step = env.step(scores)
        assert step.columns["logged"].tolist() == [shown[row]] * 2
        if 0 <= shown[row] < 6:
            assert step.columns["chosen"][0] == shown[row]
            assert env.delivery.billed[0].sum() - before == billed[row]
        state = step.observation
    env = logged_env(str(tmp_path), bids=6)
    assert env.reset(seed=1)[0]["queue_mask"].shape == (12,)


def test_an_ad_other_than_the_logged_one_is_billed_at_the_past_rate(tmp_path):
    booked = contracts([1e4, 1e4], cap=1e5, billed_rate=0.3)
    day = requests(np.full((3000, 1), 1.0), np.full((3000, 2), 0.1))
    with LogWriter(tmp_path, to_record(booked, 2, 0.1), booked) as log:
        log.write(day, np.zeros(3000, int), np.ones(3000, bool))
    env = logged(str(tmp_path), 1, bids=1)
    env.reset(0)
    for row in range(3000):
        env.step(np.array([[9.0, 1.0] if row % 2 else [1.0, 9.0]]))
    assert env.delivery.billed[0, 0] == 1500
    assert abs(env.delivery.billed[0, 1] / 1500 - 0.3) < 4 * np.sqrt(0.21 / 1500)


def test_without_a_forecast_the_log_itself_is_the_forecast(tmp_path):
    log = open_log(tiny(tmp_path))
    assert log.inventory.supply.sum() == 3
    assert log.inventory.contract_supply.tolist() == [3, 3]
    assert log.counts["contracts nobody can serve"] == 0


def test_contracts_nobody_can_serve_are_counted_or_refused(tmp_path):
    tiny(tmp_path)
    path = tmp_path / "contracts.json"
    record = json.loads(path.read_text())
    record["contracts"][1]["genders"] = [1]  # all three visitors are of gender 0
    path.write_text(json.dumps(record))
    log = open_log(tmp_path)
    assert log.inventory.contract_supply.tolist() == [3, 0]
    assert log.counts["contracts nobody can serve"] == 1
    record["contracts"][1]["genders"] = []
    path.write_text(json.dumps(record))
    with pytest.raises(EnvError, match=r"contracts\.json: contract 2: genders = \[\] .*nobody can serve"):
        open_log(tmp_path)


def test_long_queues_keep_their_highest_bids_and_empty_ones_are_counted(tmp_path):
    booked = contracts([5], cap=50)
    day = requests([[2.0, 5.0, 3.0], [0.0, 0.0, 0.0]], [[0.1]] * 2, eligible=[[True], [False]])
    booked = replace(booked, genders=np.array([[False, True]]))
    day = replace(day, cell=np.array([1, 0]))
    with LogWriter(tmp_path, to_record(booked, 2, 0.1), booked) as log:
        log.write(day, np.array([2, -1]), np.array([True, False]))
    log = open_log(tmp_path, 2)
    back = log.requests()
    assert back.ecpm.tolist() == [[5.0, 3.0], [0.0, 0.0]]
    assert back.logged.tolist() == [1, -1]
    assert log.counts["bids cut from long queues"] == 1
    assert log.counts["empty queues"] == 1
    log = open_log(tmp_path, 1)
    assert log.requests().ecpm.tolist() == [[5.0], [0.0]]


def broken(name, row, value, entry=None):
    def change(values):
        if entry is None:
            values[name][row] = value
        else:
            values[name][row][entry] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken("ecpm", 1, -2.0, 2), "row 1 .request 1.: ecpm is negative"),
        (broken("ecpm", 2, float("nan"), 2), "row 2 .request 2.: ecpm is NaN"),
        (broken("ctr", 0, float("nan"), 0), "row 0 .request 0.: ctr is NaN or outside"),
        (broken("ctr", 0, 1.5, 0), "row 0 .request 0.: ctr is NaN or outside"),
        (broken("request_id", 2, 1), "row 2 .request 1.: request_id is there twice"),
        (broken("time", 2, 1.5), r"row 2 .request 2.: time is NaN or outside \[0, 1\)"),
        (broken("region", 1, 7), r"row 1 .request 1.: region is outside 0 \.\. 0"),
        (broken("gender", 1, -1), r"row 1 .request 1.: gender is outside 0 \.\. 1"),
        (broken("ad", 1, 99, 0), r"row 1 .request 1.: ad names a contract that contracts\.json lacks"),
        (broken("ad", 1, 1, 1), "row 1 .request 1.: ad names one contract twice"),
        (broken("kind", 1, 3, 1), "row 1 .request 1.: kind is neither"),
    ],
)
def test_broken_requests_are_refused_by_row_and_field_or_dropped_and_counted(tmp_path, change, message):
    rewrite(tiny(tmp_path) / "track_log.parquet", change)
    with pytest.raises(EnvError, match=r"track_log\.parquet: " + message):
        open_log(tmp_path).requests()
    log = open_log(tmp_path, on_error="drop")
    assert len(log.requests()) == 2
    assert sum(count for rule, count in log.counts.items() if rule in message or rule.split()[0] in message) >= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (broken("ecpm", 1, -2.0), "row 1 .request 2.: ecpm is negative"),
        (broken("ecpm", 1, float("inf")), "row 1 .request 2.: ecpm is NaN or infinite"),
        (broken("request_id", 1, 1), "row 1 .request 1.: request_id is there twice"),
        (broken("kind", 0, 5), "row 0 .request 1.: kind is neither"),
    ],
)
def test_broken_exposures_are_refused_by_row_and_field_or_dropped_and_counted(tmp_path, change, message):
    rewrite(tiny(tmp_path) / "joined_exposure.parquet", change)
    with pytest.raises(EnvError, match=r"joined_exposure\.parquet: " + message):
        open_log(tmp_path).requests()
    log = open_log(tmp_path, on_error="drop")
    assert (log.requests().logged >= 0).sum() == 1
    assert sum(log.counts[rule] for rule in log.counts if rule.startswith(("ecpm", "request_id", "kind"))) == 1


def test_exposures_and_requests_without_partners_are_counted(tmp_path):
    tiny(tmp_path)
    rewrite(tmp_path / "joined_exposure.parquet", broken("request_id", 1, 77))
    log = open_log(tmp_path)
    assert log.requests().logged.tolist() == [-1, 1, -1]
    assert log.counts["exposures without a request"] == 1
    assert log.counts["requests without an exposure"] == 2
    rewrite(tmp_path / "joined_exposure.parquet", broken("ad", 0, 99))
    log = open_log(tmp_path)
    assert log.requests().logged.tolist() == [-1, -1, -1]
    assert log.counts["exposures of an ad outside its queue"] == 1


def test_files_out_of_order_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(columns, "BATCH", 1)  # the order holds across batches
    rewrite(tiny(tmp_path) / "track_log.parquet", broken("request_id", 0, 5))
    with pytest.raises(EnvError, match=r"row 1: request_id = 1 comes after 5; order the file by request_id"):
        open_log(tmp_path, on_error="drop").requests()
    rewrite(tiny(tmp_path) / "track_log.parquet", broken("time", 0, 0.9))
    with pytest.raises(EnvError, match="row 1: time falls"):
        open_log(tmp_path).requests()


def test_missing_columns_files_and_foreign_versions_are_refused(tmp_path):
    tiny(tmp_path)
    path = tmp_path / "track_log.parquet"
    table = pyarrow.parquet.read_table(path)
    pyarrow.parquet.write_table(table.drop_columns(["ctr"]), path)
    with pytest.raises(EnvError, match=r"track_log\.parquet: the column ctr \(list<float>\) is missing"):
        open_log(tmp_path).requests()
    pyarrow.parquet.write_table(table.set_column(1, "time", pyarrow.array(["a", "b", "c"])), path)
    with pytest.raises(EnvError, match="the column time has the type string; it must be double"):
        open_log(tmp_path).requests()
    pyarrow.parquet.write_table(table.replace_schema_metadata({b"ddrl.admix": b"track_log/9"}), path)
    with pytest.raises(EnvError, match="reads track_log/1"):
        open_log(tmp_path).requests()
    path.write_bytes(b"no parquet")
    with pytest.raises(EnvError, match="is not a Parquet file"):
        open_log(tmp_path).requests()
    path.unlink()
    with pytest.raises(EnvError, match=r"track_log\.parquet does not exist"):
        open_log(tmp_path).requests()
    with pytest.raises(EnvError, match=r"contracts\.json does not exist"):
        open_log(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "version 2; this ddrl reads version 1"),
        ("windows", 1, r"Expected `int` >= 2 - at `\$.windows`"),
        ("regions", 10**12, r"Expected `int` <= 100000 - at `\$.regions`"),
        ("click_value", -1.0, "click_value"),
        ("contracts", [], r"length >= 1 - at `\$.contracts`"),
        ("forecast", [[1.0]], "forecast has the shape"),
        ("extra", 1, "unknown field `extra`"),
        ("windows", "many", "Expected `int`"),
    ],
)
def test_a_broken_contracts_file_is_refused_by_field(tmp_path, field, value, message):
    tiny(tmp_path)
    path = tmp_path / "contracts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    with pytest.raises(EnvError, match=r"contracts\.json.*" + message):
        open_log(tmp_path)


def as_others_write(path, writer):
    """The file anew, by the types that another library gives the columns, without our metadata."""
    table = pyarrow.parquet.read_table(path)
    if writer == "pandas":
        table.to_pandas().to_parquet(path)
        return
    wide = {"polars": pyarrow.large_list, "duckdb": pyarrow.list_}[writer]
    fields = []
    for field in table.schema:
        inner = getattr(field.type, "value_type", field.type)
        inner = pyarrow.float64() if pyarrow.types.is_floating(inner) else pyarrow.int64()
        fields.append(pyarrow.field(field.name, wide(inner) if hasattr(field.type, "value_type") else inner))
    pyarrow.parquet.write_table(table.cast(pyarrow.schema(fields)), path)


@pytest.mark.parametrize("writer", ["pandas", "polars", "duckdb"])
def test_files_with_the_types_of_other_libraries_are_read(tmp_path, writer):
    if writer == "pandas":
        pytest.importorskip("pandas")
    wanted = open_log(tiny(tmp_path / "ours")).requests()
    tiny(tmp_path / "theirs")
    for name in ("track_log", "joined_exposure"):
        as_others_write(tmp_path / "theirs" / f"{name}.parquet", writer)
    found = open_log(tmp_path / "theirs").requests()
    for name, values in vars(wanted).items():
        np.testing.assert_array_equal(getattr(found, name), values, err_msg=name)


def test_a_number_that_its_column_cannot_hold_is_refused_by_row(tmp_path):
    path = tiny(tmp_path) / "joined_exposure.parquet"
    table = pyarrow.parquet.read_table(path)
    for name, value, words in (
        ("kind", 0.5, "truncated"),
        ("kind", 1000, "not in range"),
        ("billed", 2, "neither 0 nor 1"),
    ):
        column = pyarrow.array([0 * value, value])
        pyarrow.parquet.write_table(table.set_column(table.schema.names.index(name), name, column), path)
        with pytest.raises(EnvError, match=rf"row 1: {name} cannot be \w+: .*{words}"):
            open_log(tmp_path).requests()


def test_a_null_in_a_list_is_refused_by_row(tmp_path):
    path = tiny(tmp_path) / "track_log.parquet"
    table = pyarrow.parquet.read_table(path)
    values = table["ecpm"].to_pylist()
    values[1][0] = None
    column = pyarrow.array(values, pyarrow.list_(pyarrow.float32()))
    pyarrow.parquet.write_table(table.set_column(table.schema.names.index("ecpm"), "ecpm", column), path)
    with pytest.raises(EnvError, match="row 1: ecpm holds a null"):
        open_log(tmp_path).requests()


def test_a_market_too_large_for_memory_is_refused(tmp_path):
    path = tiny(tmp_path) / "contracts.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "regions": 100_000, "windows": 100_000}))
    with pytest.raises(EnvError, match="name fewer regions"):
        open_log(tmp_path)


def test_a_null_is_refused(tmp_path):
    tiny(tmp_path)
    path = tmp_path / "joined_exposure.parquet"
    table = pyarrow.parquet.read_table(path)
    loose = pyarrow.schema([field.with_nullable(True) for field in table.schema], table.schema.metadata)
    values = {name: table[name].to_pylist() for name in table.schema.names}
    values["billed"][1] = None
    pyarrow.parquet.write_table(pyarrow.table(values, schema=loose), path)
    with pytest.raises(EnvError, match="row 1: billed is null"):
        open_log(tmp_path).requests()


def test_settings_of_the_log_environment_are_checked(tmp_path):
    tiny(tmp_path)
    with pytest.raises(EnvError, match="on_error"):
        logged(str(tmp_path), on_error="ignore")
    with pytest.raises(ConfigError, match="no setting 'modes'; did you mean 'mode'"):
        logged(str(tmp_path), modes="all")
    with pytest.raises(EnvError, match=r"bids .-1. must be at least 0"):
        open_log(tmp_path, -1)


def test_a_missing_pyarrow_is_said_with_the_extra(tmp_path, monkeypatch):
    tiny(tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"needs the package 'pyarrow'.*pip install 'ddrl\[admix\]'"):
        open_log(tmp_path).requests()
