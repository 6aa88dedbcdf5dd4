"""A pool under mpirun: tasks with collectors on several hosts share devices; each learns what it learns alone, and each
ends alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import psutil
import pytest

from ddrl.channels.board import Counters
from ddrl.channels.segment import segment_name, unlink_run
from ddrl.core.errors import ConfigError, DdrlError
from ddrl.core.roles import Role
from ddrl.core.settings import load_config
from ddrl.envs import environment_seeds
from ddrl.pool.__main__ import ask_pool
from ddrl.pool.mode import new_setup
from ddrl.pool.ranks import PoolRanks, TaskRelays, assign_relays
from ddrl.pool.records import PoolSetup
from ddrl.run.cli import parse
from ddrl.run.members import member_seed
from ddrl.telemetry.series import COLUMN, ROLES
from tests.pool.test_hosts import keeper_elsewhere
from tests.pool.test_rounds import BY_WORKER, COLD, ONE, ROUNDS, lines, run
from tests.run.launch import MPI_ENVIRONMENT, TINY, mpirun, mpirun_command, segments_of, settings, summary
from tests.run.test_bad_input import refused
from tests.run.test_serial import learned, newest, recorded
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

HOSTS = settings("cluster.relays=2")
WORKER, ROUND = 2, 1  # whose collector is killed: the first one of host 1


def without(name: str, words: list[str]) -> list[str]:
    return settings(*(word for word in words[1::2] if not word.startswith(f"{name}=")))


COMMON = [*without("run.max_env_steps", [*TINY, *ROUNDS]), *BY_WORKER, *HOSTS, *settings(ONE)]


def start(*arguments: str, fault: str = "-1::0", places: int = 0) -> subprocess.Popen[str]:
    """places: beside those of the tasks."""
    ranks = 1 + 2 * (places + sum(word.endswith(".toml") for word in arguments))
    return subprocess.Popen(
        mpirun_command(ranks, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(Path(__file__).parents[1] / "run" / "faults", **MPI_ENVIRONMENT, DDRL_TEST_FAULT=fault),
    )


def finish(job: subprocess.Popen[str]) -> str:
    """Wait for its end; what it printed."""
    try:
        return job.communicate(timeout=PATIENCE)[0]
    finally:
        job.kill()


def two_tasks(folder: Path, text: str) -> list[str]:
    """Files of two tasks of the same settings."""
    files = [folder / "one.toml", folder / "two.toml"]
    for file in files:
        file.write_text(text)
    return [str(file) for file in files]


def pid_of(pool: Path, task: str) -> int | None:
    """The process of a task of a living pool that has a checkpoint."""
    if not any((pool / task / "checkpoints").glob("[0-9]*/state.json")):
        return None
    with contextlib.suppress(DdrlError):
        return next(one["pid"] for one in ask_pool(pool, "status")["tasks"] if one["task"] == task)
    return None


# -- four tasks on one device, two hosts with two collectors for each ----------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks that end well, of one seed, and a third that is added; one that is killed; one whose collectors cannot
    start; a broken file. A collector of host 1 is killed too."""
    folder = tmp_path_factory.mktemp("pool")
    of_episodes, _ = np.random.SeedSequence(member_seed(7, WORKER, ROUND)).generate_state(2)
    victim = environment_seeds(int(of_episodes), 4)[0]
    walk = f'[env]\nid = "tests.run.environments:doomed"\nkwargs = {{ victim = {victim}, mark = "{folder}/mark", '
    good = f'[run]\nseed = 7\nmax_env_steps = 1200\n{walk} after = "{folder}" }}\n[pool]\ncollectors = '
    files = {
        "cold": f'{good}"cold"\n',
        "prewarm": f'{good}"prewarm"\n',
        "victim": '[run]\nmax_env_steps = 100_000_000\n[pool]\ncollectors = "cold"\n',
        "brittle": f'[env]\nid = "tests.run.environments:brittle"\nkwargs = {{ probed = "{folder}/probed" }}\n'
        '[pool]\ncollectors = "cold"\n',
        "mistyped": "[learner]\nbatchsize = 3\n",
        "added/late": f'{good}"alive"\n',
        "added/late2": f'{good}"cold"\n',
        "added/without": "",
    }
    (folder / "added").mkdir()
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def pool(folder: Path) -> tuple[Path, str, list[str]]:
    """Its directory, what it printed, and what was answered where a task was to be added."""
    files, home = [str(path) for path in sorted(folder.glob("*.toml"))], folder / "pool"
    job = start("--tasks", *files, *COMMON, *settings(f"run.dir={home}"), places=1)
    try:
        victim = wait_until(lambda: pid_of(home, "victim") or job.poll() is not None, "the victim has no checkpoint")
        assert job.poll() is None, job.communicate()[0]
        answers = [add(home, folder / "added" / f"{name}.toml") for name in ("without", "late", "late2")]
        kill_beside_a_relay_that_is_late(job, victim, json.loads((home / "victim" / "run.json").read_text())["run_id"])
        said = finish(job)
    finally:
        job.kill()
    assert job.returncode == 1, said
    return home, said, answers


def kill_beside_a_relay_that_is_late(job: subprocess.Popen[str], task: int, run_id: str) -> None:
    """Kill a task while its relay of host 1 stands still: that of host 0 waits for it, and sees that the task's process
    is gone."""
    relay = ROLES.index(Role.RELAY)
    tables = [Counters.attach(segment_name(run_id, 0, *of)) for of in (("counters",), ("mirror", 1))]
    pids = [int(table.table()[table.table()[:, COLUMN["role"]] == relay, COLUMN["pid"]][0]) for table in tables]
    row = int(np.flatnonzero(tables[0].table()[:, COLUMN["pid"]] == pids[0])[0])
    cpu_seconds = tables[0].row(row)["cpu_seconds"]
    killed, late = psutil.Process(task), psutil.Process(pids[1])
    late.suspend()
    try:
        killed.kill()
        killed.wait(PATIENCE)  # the pool's master has heard of it
        for _ in range(2):  # relay 0 has looked at its host's processes, all of them
            before = cpu_seconds.value
            wait_until(
                lambda before=before: cpu_seconds.value != before or job.poll() is not None, "the relay does not look"
            )
        assert job.poll() is None, job.communicate()[0]
    finally:
        late.resume()
        for table in tables:
            table.segment.close()


def add(pool: Path, file: Path) -> str:
    """`python -m ddrl.pool POOL --add FILE`; what it said."""
    command = [sys.executable, "-m", "ddrl.pool", str(pool), "--add", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, env=environment())
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.mark.long
def test_a_task_that_is_added_takes_a_free_place_and_is_refused_where_none_is(pool):
    _, said, (without, late, late2) = pool
    assert "1 task(s) more can be added" in said
    assert "task 'without': under mpirun a pool's tasks have collectors on every host" in without
    assert late.startswith("added: late")
    assert "no place is free" in late2
    assert "with more ranks: 2 for each task" in late2


def test_a_task_learns_what_it_learns_alone_bit_for_bit_also_where_a_collector_of_another_host_was_killed(folder, pool):
    assert (folder / "mark").exists(), "no collector was killed"
    doomed = settings("env.id=tests.run.environments:doomed", f'env.kwargs={{mark = "{folder}/mark"}}')
    alone = run(folder / "alone", *COLD, *BY_WORKER, *doomed, *settings("run.processes=4"))
    for name in ("cold", "prewarm", "late"):
        assert learned(newest(pool[0] / name)) == learned(newest(alone))
        assert recorded(newest(pool[0] / name)) == recorded(newest(alone))


def test_each_task_ends_alone_with_its_reason_said_once_and_leaves_nothing(pool):
    home, said, _ = pool
    tasks = summary(home)["tasks"]
    reasons = {
        "cold": "run.max_env_steps reached",
        "prewarm": "run.max_env_steps reached",
        "late": "run.max_env_steps reached",
        "victim": "killed by SIGKILL",
        "brittle": "the corridor has no licence",
        "mistyped": "did you mean 'learner.batch_size'",
    }
    for name, words in reasons.items():
        assert words in tasks[name]["reason"]
        assert tasks[name]["ok"] == (name in ("cold", "prewarm", "late"))
        assert said.count(f"task {name}: ") == 1, said
    assert "3 of 6 tasks ended well" in said
    assert f"go on:    mpirun -n 13 python -m ddrl.run --resume {home}" in said
    assert "Traceback" not in said
    for name in ("cold", "prewarm", "late", "victim", "brittle"):
        assert segments_of(home / name) == []


def test_every_task_has_its_collectors_on_all_hosts_and_one_device_is_shared(pool):
    own = lines(pool[0] / "pool" / "collectors.jsonl")
    for name in ("cold", "prewarm", "late"):
        rounds = Counter((one["round"], one["worker"]) for one in own if one["task"] == name)
        assert {worker for _, worker in rounds} == {0, 1, 2, 3}
        assert max(rounds.values()) == 1
    held = sorted((one["granted"], one["released"], one["task"]) for one in lines(pool[0] / "pool" / "leases.jsonl"))
    assert {task for *_, task in held} >= {"cold", "prewarm", "victim"}
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(held)), "two tasks held one device"


@pytest.mark.long
def test_a_killed_task_goes_on_by_resume_under_mpirun(pool):
    home = pool[0]
    steps = int(newest(home / "victim").name) + 600
    (home.parent / "mistyped.toml").write_text("[learner]\nbatch_size = 16\n[pool]\ncollectors = 'alive'\n")
    done = mpirun(13, "--resume", str(home), *settings(f"run.max_env_steps={steps}"))
    assert done.returncode == 1, "the one without an environment fails again"
    tasks = summary(home)["tasks"]
    assert {name for name, task in tasks.items() if not task["ok"]} == {"brittle"}
    assert int(newest(home / "victim").name) >= steps
    assert tasks["cold"]["rounds"] == 0, "it had ended"


@pytest.mark.long
def test_one_host_is_enough(tmp_path):
    files, home = two_tasks(tmp_path, "[run]\nseed = 7\nmax_env_steps = 1200\n"), tmp_path / "pool"
    more = [*without("cluster.relays", COMMON), *settings("pool.collectors=prewarm", f"run.dir={home}")]
    done = mpirun(3, "--tasks", *files, *more)
    assert done.returncode == 0, done.stderr
    alone = run(tmp_path / "alone", *COLD, *BY_WORKER)
    for name in ("one", "two"):
        assert learned(newest(home / name)) == learned(newest(alone))


@pytest.mark.long
def test_hosts_with_names_and_a_network_of_their_own_learn_the_same(tmp_path, cluster):
    files = two_tasks(tmp_path, "[run]\nseed = 7\nmax_env_steps = 1200\n")
    common = [*without("cluster.relays", COMMON), *COLD, *settings(f"run.dir={tmp_path / 'pool'}")]
    program = [sys.executable, "-m", "ddrl.run", "--tasks", *files]
    sources = {"PYTHONPATH": environment()["PYTHONPATH"]}
    cluster.up(["100mbit"] * 2)
    try:
        done = subprocess.run(
            cluster.mpirun([*program, *common], ranks=[3, 2], environment=sources),
            env=cluster.mpi_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        cluster.down()
    assert done.returncode == 0, done.stderr
    alone = run(tmp_path / "alone", *COLD, *BY_WORKER, *settings("run.processes=4"))
    for name in ("one", "two"):
        assert learned(newest(tmp_path / "pool" / name)) == learned(newest(alone))
    assert {one["worker"] for one in lines(tmp_path / "pool" / "pool" / "collectors.jsonl")} == {0, 1, 2, 3}


@pytest.mark.long
@pytest.mark.parametrize(
    ("rank", "function", "count"),
    [
        (1, "HostChannels.attach", 1),
        (1, "LinesOut.progress", 99),
        (1, "RootCommands._all_done", 1),
        (3, "HostKeeper.__init__", 1),
        (3, "StarterLink.__init__", 1),
        (3, "StarterLink.write", 2),
        (3, "StarterLink.end", 1),
        (3, "Membership.leave", 1),
    ],
)
def test_an_exception_in_a_relay_ends_its_task_alone(rank, function, count, tmp_path):
    """Ranks 1 and 3 are the relays of the first task."""
    home = tmp_path / "pool"
    files = two_tasks(tmp_path, "[run]\nmax_env_steps = 1200\n[pool]\ncollectors = 'cold'\n")
    job = start("--tasks", *files, *COMMON, *settings(f"run.dir={home}"), fault=f"{rank}:{function}:{count}")
    said = finish(job)
    assert job.returncode == 1, said
    tasks = summary(home)["tasks"]
    assert "the injected fault" in tasks["one"]["reason"]
    assert tasks["two"]["reason"] == "run.max_env_steps reached"
    assert "Traceback" not in said
    assert segments_of(home / "two") == []
    if (home / "one" / "run.json").exists():
        assert segments_of(home / "one") == []


# -- deaths that end the job ---------------------------------------------------------------------------------------


@pytest.fixture
def living(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path, list[psutil.Process]]]:
    """A pool of two tasks that would go on for long, its directory, and all its processes."""
    files = two_tasks(tmp_path, "[run]\nmax_env_steps = 100_000_000\n")
    more = settings("pool.collectors=alive", f"run.dir={tmp_path / 'pool'}")
    job = start("--tasks", *files, *COMMON, *more)
    try:
        for name in ("one", "two"):
            wait_until(lambda name=name: pid_of(tmp_path / "pool", name), f"{name} has no checkpoint")
        yield job, tmp_path / "pool", [*psutil.Process(job.pid).children(recursive=True)]
    finally:
        job.kill()


@pytest.mark.long
@pytest.mark.parametrize("who", ["relay", "mpirun"])
def test_the_death_of_a_rank_or_of_mpirun_ends_the_job_and_leaves_no_process(who, living):
    job, home, family = living
    victim = psutil.Process(job.pid) if who == "mpirun" else cast(psutil.Process, keeper_elsewhere(job)).parent()
    assert victim is not None
    victim.kill()
    said = finish(job)
    assert job.returncode != 0
    assert "Traceback" not in said
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    assert who == "mpirun" or "signal 9" in said, said
    plan = PoolSetup.read(home)
    for name in ("one", "two"):
        end = plan.read_end(name)
        assert end is not None
        assert not end.final, "it cannot go on"


@pytest.mark.long
def test_sigusr1_to_mpirun_saves_all_tasks_and_ends_the_job_in_order(living):
    job, home, family = living
    job.send_signal(signal.SIGUSR1)
    said = finish(job)
    assert job.returncode == 130, said
    assert psutil.wait_procs(family, timeout=PATIENCE)[1] == []
    for name in ("one", "two"):
        assert summary(home)["tasks"][name]["reason"] == "interrupted"
        assert int(newest(home / name).name) == summary(home / name)["env_steps"]
        assert segments_of(home / name) == []


# -- ranks and settings that fit no pool ---------------------------------------------------------------------------


def test_each_task_has_a_relay_on_every_host_beside_the_master():
    assert assign_relays(["a"] * 3, 2, 0) == ((1,), (2,))
    assert assign_relays(["a", "a", "a", "b", "b"], 2, 0) == ((1, 3), (2, 4))
    assert assign_relays(["a", "b", "a"], 1, 0) == ((2, 1),)
    assert assign_relays(["a"] * 5, 2, 2) == ((1, 3), (2, 4))


def test_more_ranks_on_every_host_are_places_for_tasks_that_are_added():
    assert assign_relays(["a"] * 4, 2, 0) == ((1,), (2,), (3,))
    assert assign_relays(["a", "a", "a", "b", "b"], 1, 0) == ((1, 3), (2, 4))
    assert assign_relays(["a"] * 5, 1, 2) == ((1, 3), (2, 4))


def test_a_relay_knows_its_task_and_the_ranks_of_its_relays():
    ranks = PoolRanks({"x": "0a", "y": "0b"}, ((1, 3), (2, 4)), (0,))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ranks), type=PoolRanks) == ranks
    place = ranks.place(4)
    assert (place.task, place.run_id, place.host, place.members) == ("y", "0b", 1, (2, 4))


@pytest.mark.parametrize(
    ("machines", "tasks", "relays", "words"),
    [
        ("aa", 2, 0, "-n 3"),
        ("aa", 2, 2, "-n 5"),
        ("aaab", 2, 0, "-n 5 --host a:3,b:2"),
        ("aabbb", 2, 0, "-n 5 --host a:3,b:2"),
        ("aaaa", 2, 2, "-n 5"),
        ("aabaa", 2, 2, "each 2 ranks of one machine"),
        ("abbbb", 2, 2, "each 2 ranks of one machine"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_with_the_number_that_does(machines, tasks, relays, words):
    with pytest.raises(ConfigError, match=r"ranks do not fit a pool of 2 tasks on \d host") as refusal:
        assign_relays(list(machines), tasks, relays)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["", "[pool]\ncollectors = 'cold'\n"], "task 'a': under mpirun a pool's tasks have collectors on every host"),
        (["[cluster]\nrelays = 1\n", ""], "do not agree on cluster.relays (a: 1, b: 0)"),
    ],
)
def test_settings_that_fit_no_ranks_are_refused(texts, words, tmp_path):
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    arguments = ["--tasks", *map(str, files), *settings(ONE, f"run.dir={tmp_path / 'pool'}")]
    with pytest.raises(ConfigError) as refusal:
        TaskRelays(cast(Any, None), new_setup(parse(arguments)), ["here"] * 3, "", 0)
    assert words in str(refusal.value)


def test_a_task_with_other_relays_than_the_pool_takes_no_place(tmp_path):
    files = two_tasks(tmp_path, "[pool]\ncollectors = 'cold'\n")
    plan = new_setup(parse(["--tasks", files[0], *settings(ONE, f"run.dir={tmp_path / 'pool'}")]))
    relays = TaskRelays(cast(Any, None), plan, ["here"] * 3, "", 0)
    try:
        config = load_config(Path(files[1]), plan.overrides)
        with pytest.raises(ConfigError, match=r"cluster\.relays is 0 in this pool"):
            relays.check_room("two", replace(config, cluster=replace(config.cluster, relays=1)))
        relays.check_room("two", config)
        assert relays.free == 1
        relays.add("two")
        assert relays.run_id("two") == list(relays.ranks.run_ids.values())[1]
    finally:
        for run_id in relays.ranks.run_ids.values():
            unlink_run(run_id)


def test_under_mpirun_rank_0_alone_refuses_a_pool(tmp_path):
    arguments = ["--tasks", *two_tasks(tmp_path, ""), *COLD, *settings(ONE, f"run.dir={tmp_path / 'pool'}")]
    refused(mpirun(2, *arguments), "2 ranks do not fit", "-n 3")
    assert not (tmp_path / "pool").exists()
