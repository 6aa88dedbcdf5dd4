"""Each setting that README.md or a page of docs/ names exists; the table of algorithms gives each exactly its own,
and limits that are no settings are those of the code."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the extra [train]")

from ddrl.admix.mixer import MAX_CANDIDATES
from ddrl.core import plugins
from ddrl.core.config import CORE_SECTIONS, ClusterConfig
from ddrl.core.plugins import installed_slices
from ddrl.core.settings import describe_plugin_settings, describe_settings
from ddrl.distribution.models import bases_kept
from ddrl.envs.spaces import MAX_COMBINATIONS
from ddrl.learner.algorithms.td3 import TARGET_NOISE_CLIP
from ddrl.pool.policies import Fair, Request
from ddrl.run.keeper import FIRST_PAUSE, MAX_PAUSE
from ddrl.telemetry.causes import RARE
from ddrl.telemetry.control import MAX_LIVE
from tests.docs.test_names import PAGES, PAST
from tests.sources import ROOT

EVERY = [page for page in PAGES if page.name not in PAST]
NAME = rf"(?:{'|'.join((*CORE_SECTIONS, *installed_slices()))})(?:\.\w+)+"
GIVEN = re.compile(rf"--set '?({NAME})=")
NAMED = re.compile(rf"`({NAME})(?: ?=[^`]*)?`")
OWN_SETTINGS = {"learner.munchausen.scale"}  # of a plug-in that a page writes
NO_SETTINGS = {  # attributes, modules and files of the same form
    *("channels.segment.start_time", "env.events", "env.py", "learner.batches.draw_rows", "replay.prioritized"),
    *("replay.snapshot", "run.about", "run.figures", "run.frame", "telemetry.sqlite"),
}
ALGORITHMS = "ddrl.learner.algorithms"


def seconds_until_due(weight: float) -> int:
    """How long a task waits in a pool until it goes before one that has just asked and has more to do."""
    fair = Fair()
    for task, own in (("waits", weight), ("other", 1.0)):
        fair.join(task, own)
        fair.asked(Request(task, 0.0))
        fair.released(task, 0, 1.0, 1.0)
    request = Request("waits", 1.0, 1, 1.0)
    fair.asked(request)
    for seconds in range(100):
        newer = Request("other", 1.0 + seconds, 1, 50.0)
        fair.asked(newer)
        if fair.choose([newer, request], [0], 1.0 + seconds)[0] is request:
            return seconds
    raise AssertionError("it is never due")


TWICE = {0.5: "halves", 2.0: "doubles"}
KEPT = [bases_kept(ClusterConfig(codec="xor_zstd", versions_in_flight=count)) for count in (1, 2)]
LIMITS = (  # a page, and what it says of them
    ("codecs", f"`{KEPT[1] - KEPT[0]} versions_in_flight + {2 * KEPT[0] - KEPT[1]}`"),
    ("environments", f"each combination is one action, at most {MAX_COMBINATIONS:,} of them"),
    ("serving", f"one entry a candidate (at most {MAX_CANDIDATES})"),
    ("learning", f"cut off at\n  {TARGET_NOISE_CLIP:g}, both in units of half the bounds' distance"),
    ("pool", f"A weight of 2 {TWICE[seconds_until_due(2.0) / seconds_until_due(1.0)]} the patience and"),
    ("deaths", f"after {FIRST_PAUSE:g} s, and each further pause is twice as long, at most {MAX_PAUSE:g} s"),
    ("telemetry", f"`replay.samples_per_insert` below 1/{1 / RARE:g}"),
    (
        "telemetry",
        f"at most {MAX_LIVE['learner.lr']:g} (`learner.lr`), "
        f"10^{math.log10(MAX_LIVE['replay.samples_per_insert']):g} (`replay.samples_per_insert`) "
        f"and {MAX_LIVE['run.processes']} (`run.processes`)",
    ),
)
ROW = re.compile(r"^\| `(\w+)` \| (.*?) \|", re.MULTILINE)


@cache
def known() -> frozenset[str]:
    return frozenset(info.name for info in (*describe_settings(installed_slices()), *describe_plugin_settings()))


def names_of(page: Path) -> set[str]:
    """Of settings, as `--set` or the running text gives them; without what an environment itself takes, and places to
    fill in, as in `env.NAME`."""
    text = page.read_text()
    found = {*GIVEN.findall(text), *NAMED.findall(text)}
    return {name for name in found if not name.startswith("env.kwargs.") and not re.search("[A-Z]{2}", name)}


@pytest.mark.parametrize("page", EVERY, ids=lambda page: page.stem)
def test_each_setting_that_a_page_names_exists(page: Path) -> None:
    assert names_of(page) - known() <= OWN_SETTINGS | NO_SETTINGS


def test_settings_are_found() -> None:
    assert len(set.union(*map(names_of, EVERY)) & known()) > 60


@pytest.mark.parametrize(("page", "words"), LIMITS)
def test_a_page_gives_the_limit_that_the_code_has(page: str, words: str) -> None:
    assert words in (ROOT / "docs" / f"{page}.md").read_text()


def test_the_table_of_algorithms_gives_each_its_settings() -> None:
    section = (ROOT / "docs" / "learning.md").read_text().partition("| algorithm | table |")[2].partition("\n\n")[0]
    listed = {name: re.findall(r"`(\w+)`", settings) for name, settings in ROW.findall(section)}
    kinds = {name: plugins.load("learner.algorithm", ALGORITHMS, name) for name in plugins.names(ALGORITHMS)}
    assert listed == {
        name: [item.name for item in fields(kind.Settings)] if kind.Settings else [] for name, kind in kinds.items()
    }
