"""Memory, shared memory and disk are added up before anything starts."""

from pathlib import Path

import pytest

from ddrl.core.errors import ConfigError
from ddrl.core.settings import load_config
from ddrl.run import preparation
from ddrl.run.local import local_ranks
from ddrl.run.preparation import describe_environment
from ddrl.run.topology import Topology

GIB = float(1 << 30)


def topology_of(*settings):
    config = load_config(None, ["env.id=CartPole-v1", "learner.algorithm=dqn", "run.processes=2", *settings])
    spec, declaration = describe_environment(config)
    return Topology("room", config, spec, declaration, local_ranks(config))


@pytest.mark.parametrize(
    ("settings", "free", "named"),
    [
        (["replay.capacity=500000000"], "memory", "replay.capacity"),
        (["replay.capacity=500000000", "replay.file=/nowhere/replay"], "disk", "replay.capacity"),
        (["channels.lane_rows=100000000"], "shared", "channels.lane_rows"),
        (["replay.source=areas", "areas.block=50000000"], "shared", "areas.block"),
    ],
)
def test_what_a_run_surely_fills_is_refused_with_the_setting_to_lower(settings, free, named, monkeypatch):
    place = {"memory": GIB, "disk": 100 * GIB, "shared": 100 * GIB} | {free: GIB / 8}
    monkeypatch.setattr(preparation, "free_memory", lambda: place["memory"] if free != "shared" else 1e15)
    monkeypatch.setattr(
        preparation,
        "free_disk",
        lambda folder: place["shared"] if folder == preparation.SHARED_MEMORY else place["disk"],
    )
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")) as refusal:
        preparation.check_room(topology_of("run.max_env_steps=1000000000", *settings), Path("/nowhere/run"))
    assert "are needed" in str(refusal.value)
    assert "free" in str(refusal.value)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize("steps", [1_000, 100_000])
def test_what_a_short_run_will_not_fill_is_a_line(steps, monkeypatch):
    monkeypatch.setattr(preparation, "free_memory", lambda: GIB)
    monkeypatch.setattr(preparation, "free_disk", lambda folder: 100 * GIB)
    topology = topology_of("replay.capacity=500000000", f"run.max_env_steps={steps}", "run.checkpoint_period=0")
    (line,) = preparation.check_room(topology, Path("/nowhere/run"))
    assert "replay.capacity = 500,000,000" in line
    assert "MiB free" in line


@pytest.mark.parametrize(
    ("settings", "has_spare", "lines"),
    [
        ([], True, 1),
        (["replay.capacity=2000000"], True, 1),
        ([], False, 0),
        (["rollout.restarts=0"], True, 0),
        (["replay.source=areas"], True, 0),
        (["pool.collectors=cold"], True, 0),
    ],
)
def test_the_process_that_may_take_the_trainers_place_counts(settings, has_spare, lines, monkeypatch):
    spare = 200e6
    topology = topology_of("run.max_env_steps=1000000", "run.checkpoint_period=0", *settings)
    taken = sum(need.sure for need in preparation.needs_of(topology, Path("/nowhere/run"), has_spare))
    monkeypatch.setattr(preparation, "free_disk", lambda folder: 100 * GIB)
    monkeypatch.setattr(preparation, "free_memory", lambda: taken + spare + 1)
    assert preparation.check_room(topology, Path("/nowhere/run"), has_spare=has_spare) == []
    monkeypatch.setattr(preparation, "free_memory", lambda: taken + spare - 1)
    found = preparation.check_room(topology, Path("/nowhere/run"), has_spare=has_spare)
    assert len(found) == lines
    assert all("190.7 MiB" in line and "lower rollout.restarts to 0, or" in line for line in found)


def test_what_has_room_is_not_mentioned(tmp_path):
    assert preparation.check_room(topology_of("run.max_env_steps=1000"), tmp_path / "run") == []


def group(proc, groups, own, limits):
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    (proc / "self" / "cgroup").write_text(own)
    for name, (limit, used, cached) in limits.items():
        folder = groups / name
        folder.mkdir(parents=True, exist_ok=True)
        one = "memory" not in name
        (folder / ("memory.max" if one else "memory.limit_in_bytes")).write_text(f"{limit}\n")
        (folder / ("memory.current" if one else "memory.usage_in_bytes")).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{'' if one else 'total_'}inactive_file {cached}\n")


@pytest.mark.parametrize(
    ("own", "limits", "free"),
    [
        ("0::/a/b\n", {"a/b": ("max", 5, 0), "a": (3000, 1000, 400)}, 2400.0),
        ("0::/a/b\n", {"a/b": (700, 900, 0), "a": (3000, 1000, 0)}, -200.0),
        ("4:memory:/a\n0::/\n", {"memory/a": (5000, 4000, 0)}, 1000.0),
        ("4:memory:/a\n0::/\n", {"memory/a": (9223372036854771712, 4000, 0)}, 8000000 * 1024.0),
        ("0::/not/seen\n", {}, 8000000 * 1024.0),
    ],
)
def test_control_groups_of_both_versions_and_their_parents_count(own, limits, free, tmp_path):
    group(tmp_path / "proc", tmp_path / "groups", own, limits)
    assert preparation.free_memory(tmp_path / "proc", tmp_path / "groups") == free
