"""iPinYou's columns become a log; broken rows are refused by file, row and field, or dropped and counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from ddrl.admix import open_log
from ddrl.core.errors import EnvError
from docs.examples.ipinyou import COLUMNS, convert, read_impressions
from tests.admix.days import contracts

ROW = {
    "bid_id": "b1", "timestamp": "20131019120000500", "log_type": "1", "ipinyou_id": "u", "user_agent": "Mozilla",
    "ip": "1.2.3.*", "region": "216", "city": "217", "ad_exchange": "3", "domain": "d", "url": "u",
    "anonymous_url": "null", "slot_id": "s", "slot_width": "300", "slot_height": "250", "slot_visibility": "1",
    "slot_format": "0", "slot_floor_price": "5", "creative_id": "c", "bidding_price": "277", "paying_price": "66",
    "key_page_url": "null", "advertiser_id": "2821", "user_tags": "10006,10111",
}  # fmt: skip


def write(path, *rows):
    path.write_text("".join("\t".join({**ROW, **row}[name] for name in COLUMNS) + "\n" for row in rows))
    return path


def test_impressions_become_requests_with_the_market_price_as_their_bid(tmp_path):
    source = write(
        tmp_path / "imp.20131019.txt",
        {},
        {"bid_id": "b2", "timestamp": "20131019180000000", "region": "3", "user_tags": "10110", "paying_price": "20"},
        {"bid_id": "b3", "timestamp": "20131019235959999", "advertiser_id": "3358", "user_tags": "null"},
    )
    booked = contracts([2, 1], cap=10)
    booked = replace(
        booked, regions=np.array([[True, True], [False, True]]), genders=np.array([[True, True], [False, True]])
    )
    total = convert(read_impressions([source]), tmp_path / "log", booked, {216: 1, 3: 0}, 0.1, 0.01, windows=4)
    assert total == 3
    log = open_log(tmp_path / "log", 1)
    day = log.requests()
    assert day.window.tolist() == [2, 3, 3]
    assert day.time[0] == pytest.approx(0.5 + 0.5 / 86_400)
    assert day.cell.tolist() == [
        3,
        0,
        2,
    ]  # (region, gender): (1, female), (0, male), (1, male where the tag is missing)
    assert day.ecpm[:, 0].tolist() == [66, 20, 66]
    assert day.bid_ad[:, 0].tolist() == [2 + 1 + 2821, 2 + 1 + 2821, 2 + 1 + 3358]
    assert day.eligible.tolist() == [[True, True], [True, False], [True, False]]
    assert day.logged.tolist() == [2, 2, 2]
    assert not +log.counts


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"paying_price": "-3"}, "paying_price"),
        ({"paying_price": "nan"}, "paying_price"),
        ({"paying_price": ""}, "paying_price"),
        ({"timestamp": "2013-10-19"}, "timestamp"),
        ({"timestamp": "20131019250000000"}, "timestamp"),
        ({"region": "north"}, "region"),
        ({"bid_id": "b0"}, "bid_id"),
        ({"user_tags": "1\t2"}, "columns"),
    ],
)
def test_broken_rows_are_refused_by_file_row_and_field_or_counted(tmp_path, change, field):
    source = write(tmp_path / "imp.txt", {"bid_id": "b0"}, {"bid_id": "b1", **change}, {"bid_id": "b2"})
    with pytest.raises(EnvError, match=rf"imp\.txt: row 1: {field} "):
        list(read_impressions([source]))
    counts: Counter[str] = Counter()
    assert len(list(read_impressions([source], "drop", counts))) == 2
    assert counts == {field: 1}


def test_clicks_and_conversions_are_counted_and_left_out(tmp_path):
    source = write(tmp_path / "imp.txt", {}, {"bid_id": "b2", "log_type": "2"})
    counts: Counter[str] = Counter()
    assert len(list(read_impressions([source], counts=counts))) == 1
    assert counts == {"other log type": 1}


def test_missing_files_wrong_order_and_wrong_settings_are_refused(tmp_path):
    with pytest.raises(EnvError, match=r"nowhere\.txt does not exist"):
        list(read_impressions([tmp_path / "nowhere.txt"]))
    with pytest.raises(EnvError, match="on_error"):
        list(read_impressions([], "skip"))
    source = write(tmp_path / "imp.txt", {}, {"bid_id": "b2", "timestamp": "20131019110000000"})
    with pytest.raises(EnvError, match="sort by timestamp"):
        convert(read_impressions([source]), tmp_path / "log", contracts([1]), {}, 0.1, 0.01)
    with pytest.raises(EnvError, match="contract_ctr"):
        convert([], tmp_path / "log", contracts([1]), {}, 0.1, 1.5)
