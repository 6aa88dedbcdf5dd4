"""Faults are put where they are said to be, and the tests that are to notice them are there."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.mutations.copies import FASTER_BUILD, Copy, stands
from tests.mutations.named import NAMED, OUTSIDE, from_outside
from tests.mutations.nearest import BROWSER, FOLDERS, FURTHER, PROGRAMS, RUNS, nearest
from tests.mutations.operators import candidates, draw
from tests.sources import ROOT, environment

SOURCE = '''def function(a, b):
    """Not this: 1 < 2."""
    notify(a, b)
    if a < 3:
        return a
    return b
'''


def test_at_least_a_hundred_named_faults_stand_at_one_place_each_in_all_packages() -> None:
    assert [fault.name for fault in NAMED if not stands(fault)] == []  # whose line changes takes its fault along
    assert stands(FASTER_BUILD)  # with which the kernel is compiled for its faults
    assert len(NAMED) >= 100
    assert len({fault.name for fault in NAMED}) == len(NAMED)
    packages = {
        "acting",
        "admix",
        "balance",
        "channels",
        "core",
        "distribution",
        "envs",
        "kernel",
        "learner",
        "plots",
        "pool",
    }
    packages |= {"replay", "rollout", "run", "telemetry"}
    assert packages <= {fault.path.split("/")[1] for fault in NAMED}


def test_faults_from_outside_are_390_of_which_nearly_all_stand_and_have_tests_near_them() -> None:
    faults = [fault for name in OUTSIDE for fault in from_outside(name)]
    assert len({fault.name for fault in faults}) == len(faults) == 390
    assert sum(map(stands, faults)) >= 365  # a line that was written anew takes its fault along
    assert [fault.path for fault in faults if not nearest(fault.path)] == []


def test_the_nearest_tests_are_in_rings_and_exist() -> None:
    for tests in (*FOLDERS.values(), *FURTHER.values(), RUNS):
        for path in tests:
            assert (ROOT / path).exists(), path
    program = "tests/kernel/test_programs.py::test_a_program_passes_as_it_is[{}]".format
    assert nearest("ddrl/kernel/codec.hpp")[0] == (program("test_codec"),)
    assert nearest("ddrl/kernel/ring.hpp")[0][0] == program("test_ring")
    assert nearest("ddrl/admix/kernel/ad_queue.hpp")[0] == (program("test_ad_queue"),)
    assert program("test_replay") in nearest("ddrl/kernel/replay/selectors.hpp")[0]  # through other headers
    assert nearest("ddrl/replay/selectors.py")[0] == ("tests/replay/test_selectors.py",)
    assert "tests/launch/test_local.py" in nearest("mpi_launch/local")[0]
    assert "tests/docs" in nearest("README.md")[-1]
    assert "tests/docs/test_own_data.py" in nearest("docs/own_data.md")[0]
    assert nearest("ddrl/plots/runs.py")[-1] == (BROWSER,)
    own, importing, folder, further = nearest("ddrl/acting/policy.py")
    assert own == ("tests/acting/test_policy.py",)
    assert "tests/rollout/test_worker.py" in importing
    assert folder == ("tests/acting", "tests/rollout")
    assert further == RUNS


def test_every_operator_makes_its_fault_and_no_other_line_changes(tmp_path) -> None:
    (tmp_path / "ddrl").mkdir()
    path = tmp_path / "ddrl" / "module.py"
    path.write_text(SOURCE)
    faults = candidates(path, tmp_path)
    assert {(fault.name, fault.new.strip()) for fault in faults} == {
        ("swapped arguments", "notify(b, a)"),
        ("dropped call", "pass"),
        ("comparison", "if a <= 3:"),
        ("constant", "if a < 4:"),
        ("negated condition", "if (not (a < 3)):"),
    }
    for fault in faults:
        path.write_text(SOURCE)
        Copy(tmp_path).put(fault)
        changed = [line for line in path.read_text().splitlines() if line not in SOURCE.splitlines()]
        assert changed == [fault.new]
        ast.parse(path.read_text())


@pytest.mark.long
def test_random_faults_are_the_same_by_seed_and_more_of_them_begin_alike() -> None:
    assert draw(ROOT, 5, 1) == draw(ROOT, 9, 1)[:5] != draw(ROOT, 5, 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault",
    ["ddrl/kernel/replay/picks.hpp with n-step returns", "ddrl/admix/kernel/ad_queue.hpp of a request with more"],
)
def test_a_fault_in_cpp_is_compiled_into_the_extension_that_python_loads(fault: str, tmp_path) -> None:
    command = [sys.executable, "-m", "tests.mutations", "--only", fault, "--near", "--json", tmp_path / "verdicts.json"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True)
    (row,) = json.loads((tmp_path / "verdicts.json").read_text())["rows"]
    assert row["noticed"]
    assert not row["by"].startswith(PROGRAMS)  # which are compiled by themselves


def test_a_new_line_moves_random_faults_and_replaces_none(tmp_path) -> None:
    (tmp_path / "ddrl").mkdir()
    path = tmp_path / "ddrl" / "module.py"
    path.write_text(SOURCE)
    before = draw(tmp_path, 9, 1)
    path.write_text(f"# A comment.\n{SOURCE}")
    assert draw(tmp_path, 9, 1) == [fault._replace(line=fault.line + 1) for fault in before]
    assert len(before) == len(set(before)) == 5


def test_a_fault_whose_text_is_not_there_is_refused(tmp_path) -> None:
    (tmp_path / "ddrl" / "core").mkdir(parents=True)
    fault = next(fault for fault in NAMED if fault.path == "ddrl/core/files.py")
    (tmp_path / fault.path).write_text("nothing of it\n")
    with pytest.raises(ValueError, match="stands 0 times"):
        Copy(tmp_path).put(fault)


def test_a_copy_has_every_compiled_extension(tmp_path) -> None:
    """Tests of a package whose extension is missing would all fail without a fault, and none would judge."""
    Copy(tmp_path).make()
    compiled = [{path.relative_to(root) for path in root.glob("ddrl/**/*.so")} for root in (ROOT, tmp_path)]
    assert compiled[0] == compiled[1]
