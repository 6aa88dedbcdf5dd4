"""docs/extending.md: each file and each command as it stands there, in an empty folder."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ddrl.core.config import Config
from ddrl.core.settings import config_from_toml
from ddrl.pool.records import read_pool
from ddrl.telemetry import Run
from tests.docs.pages import Section, sections
from tests.run.launch import MPI_ENVIRONMENT
from tests.run.preloaded import forked
from tests.sources import ROOT
from tests.sources import environment as sources_first
from tests.waiting import PATIENCE

SHARED, *REST = sections(ROOT / "docs" / "extending.md")
SECTIONS = {section.title: section for section in REST}
AS_WRITTEN = "An environment"  # whose command a shell runs


def environment(folder: Path) -> dict[str, str]:
    """A shell in `folder` whose `python` is this one and imports the sources."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return sources_first(folder, **MPI_ENVIRONMENT, PATH=path)


def follow(section: Section, folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Write the files, run the command; the run directory.

    A shell runs it as it stands where several processes are started, and for one section of the others; for these the
    words of the command are given to a fork of a process that has imported torch."""
    SHARED.write(folder)
    section.write(folder)
    (command,) = section.commands
    words = shlex.split(command)
    if words[:3] == ["python", "-m", "ddrl.run"] and section.title != AS_WRITTEN:
        patch.chdir(folder)
        done = forked(*words[3:])
    else:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run directory of a section, which is followed once, in a folder of its own."""
    runs: dict[str, Path] = {}

    def of(title: str) -> Path:
        if title not in runs:
            with pytest.MonkeyPatch.context() as patch:
                runs[title] = follow(SECTIONS[title], tmp_path_factory.mktemp("section"), patch)
        return runs[title]

    return of


def figure(run: Path, name: str) -> float:
    """The last value of a series."""
    with Run(run) as opened:
        values = opened.series()[name]
    return float(values[~np.isnan(values)][-1])


def algorithm(run: Path, config: Config) -> None:
    assert config.learner.algorithm == "munchausen:Munchausen"
    assert config.tables["learner.munchausen"] == {"scale": 0.5}
    assert figure(run, "log_policy") < 0


def column(run: Path, config: Config) -> None:
    assert config.env.id == "careful:Cart"
    assert figure(run, "distance") > 0


def chooser(run: Path, config: Config) -> None:
    assert config.rollout.chooser == "boltzmann:Boltzmann"


def selector(run: Path, config: Config) -> None:
    assert config.replay.selector == "tournament:Tournament"


def eviction(run: Path, config: Config) -> None:
    assert config.replay.eviction == "lottery:Lottery"
    assert figure(run, "rows_recorded") > config.replay.capacity >= figure(run, "replay_size")


def scheme(run: Path, config: Config) -> None:
    assert config.cluster.scheme == "hops:Hops"
    with Run(run) as opened:
        assert "hops" in opened.events(kinds=["plan"])["text"][-1]
        assert np.nanmax(opened.latest().column("host")) == 2


def codec(run: Path, config: Config) -> None:
    assert config.cluster.codec == "deflate:Deflate"
    assert figure(run, "checksum_failures") == 0
    with Run(run) as opened:
        latest = opened.latest()
    assert (latest.column("policy_version")[latest.column("host") == 1] > 0).all(), "a host acts without a model"


def policy(run: Path, config: Config) -> None:
    record = read_pool(run.parent)
    assert record.policy == "least_served:LeastServed"
    assert {lease.task for lease in record.leases} == {"short", "other"}


def env(run: Path, config: Config) -> None:
    assert config.env.kwargs == {"length": 7}
    summary = json.loads((run / "summary.json").read_text())
    assert summary["episodes"] > 0
    assert 0 <= summary["evaluation"]["mean"] <= 1


PROOFS: dict[str, Callable[[Path, Config], None]] = {
    "An algorithm": algorithm,
    "A column": column,
    "A chooser": chooser,
    "A selector": selector,
    "An eviction": eviction,
    "A scheme": scheme,
    "A codec": codec,
    "A pool policy": policy,
    "An environment": env,
}


def test_every_section_is_run() -> None:
    assert set(SECTIONS) == {*PROOFS, "A dashboard page"}


@pytest.mark.parametrize("title", PROOFS)
def test_a_section_runs_as_it_stands(title: str, followed: Callable[[str], Path]) -> None:
    if title in ("A scheme", "A codec"):
        pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    run = followed(title)
    if title == "A pool policy":
        run /= "short"  # one of its two tasks
    config = config_from_toml((run / "config.toml").read_text(), "the run")
    PROOFS[title](run, config)
    with Run(run) as opened:
        assert opened.status.state == "ended"
    assert figure(run, "updates") > 0


DRAW = """
import sys
from streamlit.testing.v1 import AppTest
app, runs, page, key = sys.argv[1:]
sys.argv = [app, runs]
test = AppTest.from_file(app, default_timeout=600)
test.session_state["wanted page"] = page
test.run()
assert not test.exception, test.exception
assert not test.warning, test.warning
assert f"key={key!r}" in str(test.main), test.main  # of the chart that the page alone draws
"""


def test_a_dashboard_page_is_found_by_its_name_and_draws(followed: Callable[[str], Path], tmp_path: Path) -> None:
    pytest.importorskip("streamlit", reason="needs the extra [dashboard]")
    run = followed("An environment")
    package = tmp_path / "ddrl" / "dashboard"
    shutil.copytree(ROOT / "ddrl" / "dashboard", package, ignore=shutil.ignore_patterns("__pycache__"))
    SECTIONS["A dashboard page"].write(tmp_path)
    app = package / "app.py"
    (page,) = SECTIONS["A dashboard page"].files
    done = subprocess.run(
        [sys.executable, "-c", DRAW, str(app), str(run.parent), Path(page).stem.partition("_")[2], "norm"],
        cwd=package,
        env=environment(run.parents[1]),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
