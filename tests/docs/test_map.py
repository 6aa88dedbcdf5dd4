"""The map in docs/architecture.md against the code and against a run."""

from __future__ import annotations

import configparser
import gc
import os
import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun
from ddrl.run.task import Outcome, Reason
from tests.run.launch import TINY
from tests.sources import ROOT

PACKAGE = ROOT / "ddrl"
MAP = (ROOT / "docs" / "architecture.md").read_text().partition("## The map")[2]
TABLES = dict(re.findall(r"^\| \| ([\w ]+) \|.*\n((?:\|.*\n)+)", MAP, re.MULTILINE))
DAY = 6000  # lines: six hours at 16 a minute


def files(*tables: str) -> list[str]:
    """The files of these tables of the map, in order."""
    return re.findall(r"`([\w/]+\.\w+)`", "".join(TABLES[name] for name in tables))


def test_every_file_of_the_map_exists_and_stands_there_once() -> None:
    assert list(TABLES) == [
        "the topology",
        "one row",
        "one update",
        "one version",
        "processes and hosts",
        "what is seen of a run",
    ]
    listed = files(*TABLES)
    assert len(listed) > 30
    assert [name for name in listed if not (PACKAGE / name).is_file()] == []
    assert [name for name, count in Counter(listed).items() if count > 1] == []


def test_the_table_of_packages_is_the_contract_of_imports() -> None:
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:stages"]["layers"].split("\n")
    expected = [set(re.findall(r"ddrl\.\w+", layer)) for layer in reversed(layers) if layer.strip()]
    table = (ROOT / "docs" / "architecture.md").read_text().partition("## Packages")[2].partition("## The map")[0]
    rows = [set(re.findall(r"ddrl\.\w+", line.split("|")[1])) for line in table.splitlines() if line.startswith("| `")]
    assert rows == [{"ddrl.kernel"}, *expected]


def test_what_the_map_calls_a_day_is_one() -> None:
    path = [name for name in files("one row", "one update", "one version") if name.endswith(".py")]
    lines = sum(len((PACKAGE / name).read_text().splitlines()) for name in path)
    assert 1000 < lines < DAY
    readme = (ROOT / "README.md").read_text()
    claim = re.search(r"(\d+) files and ([\d,]+) lines", readme)
    assert claim is not None
    assert int(claim[1]) == len(path)
    assert abs(int(claim[2].replace(",", "")) - lines) < 300  # the page says it in round numbers


def test_following_a_row_an_update_and_a_version_no_module_is_called_back_by_what_it_called(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra [train]")
    entered: set[str] = set()
    called_back: set[str] = set()

    def note(frame: FrameType | None, event: str, _: Any) -> None:
        if event != "call":
            return
        stack: list[str] = []
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(f"{PACKAGE}/") and stack[-1:] != [path]:
                stack.append(path)
            frame = frame.f_back
        if stack:
            entered.add(stack[0].removeprefix(f"{PACKAGE}/"))
            if stack[0] in stack[1:]:
                called_back.add(" < ".join(stack[: stack.index(stack[0], 1) + 1]))

    words = [*TINY, "--set", f"run.dir={tmp_path / 'run'}", "--set", "env.id=tests.run.environments:walk"]
    preparation = Preparation(parse(words), f"{os.getpid():08x}")  # two suites at once share no memory
    gc.collect()  # else generators of trainings of earlier tests may be closed, which is a call, below any function
    sys.setprofile(note)
    try:
        run = SerialRun(preparation)
        called_back.clear()  # while channels are made, their classes are called with what Segment has mapped
        while run.task.training.state.policy_version < 2:
            assert run.turn() is not Outcome.DONE
    finally:
        sys.setprofile(None)
    run.task.end(Reason.INTERRUPTED)
    while run.turn() is not Outcome.DONE:
        pass
    run.finish()
    assert called_back == set()
    path = files("one row", "one update", "one version")
    missing = [name for name in path if name.endswith(".py") and name not in entered]
    assert missing == []
