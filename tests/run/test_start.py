"""The start, as a user sees it: what runs, where, how to watch it, before anything that takes seconds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ddrl.core.config import Config
from ddrl.core.forks import SIGNALS
from ddrl.run import slot
from ddrl.run.__main__ import main
from ddrl.run.cli import parse
from ddrl.run.directory import RunDirectory
from ddrl.run.preparation import _banner, announce
from ddrl.run.process import signals_handled
from ddrl.telemetry.sinks import ProgressLine, ready_text
from tests.run.launch import MPI_ENVIRONMENT, TINY, ddrl, mpirun, mpirun_command, settings
from tests.run.preloaded import forked
from tests.sources import environment
from tests.telemetry.test_progress_and_summary import records
from tests.waiting import PATIENCE, wait_until


def test_the_banner_stands_before_mpi_and_torch_are_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    heavy = {"torch", "mpi4py", "gymnasium", "onnxruntime", "zmq"}
    before = heavy & set(sys.modules)
    path = announce(parse([]), "1a2b3c4d", 60)
    assert heavy & set(sys.modules) == before
    said = capsys.readouterr().err
    assert "train CartPole-v1 by dqn, 60 ranks under mpirun" in said
    assert path is not None
    assert f"run:      {path.relative_to(tmp_path)}" in said
    assert "watch it: python -m ddrl.dashboard" in said
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("ranks", [0, pytest.param(4, marks=pytest.mark.long)])
def test_the_directory_that_is_announced_is_the_one_of_the_run(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*TINY, *settings("run.max_env_steps=300")]
    done = mpirun(ranks, *words) if ranks else forked(*words)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert f"run:      runs/{run.name}\n" in done.stderr
    assert done.stderr.index("run:  ") < done.stderr.index("steps")
    went_on = forked("--resume", str(run), "--set", "run.max_env_steps=400")
    assert went_on.returncode == 0, went_on.stderr
    assert "go on with CartPole-v1" in went_on.stderr


def test_ranks_that_are_not_there_yet_are_counted() -> None:
    record = list(records(3))[-1]
    assert ready_text(record) == ""
    assert len(record.table) > 3
    record.series["env_steps_per_s"] = 0.0
    record.table[3:, record.columns.index("heartbeat")] = np.nan
    assert ready_text(record) == f"starting: 3 of {len(record.table)} ranks ready"
    record.table[2:, record.columns.index("role")] = np.nan
    assert ready_text(record) == f"starting: 2 of {len(record.table)} ranks here"


def test_the_panel_fits_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None: ...

    monkeypatch.setenv("COLUMNS", "80")
    terminal = Terminal()
    line = ProgressLine(Config(), terminal, live=True)  # pyright: ignore[reportArgumentType]
    for record in records(5):
        line.record(record)
    lines = re.sub(r"\r|\x1b\[[0-9]*[A-Z]", "\n", terminal.text).split("\n")
    assert max(map(len, lines)) < 80
    assert "left" in terminal.text
    assert "loss" in terminal.text


def test_an_environment_without_a_task_gets_neutral_settings_and_is_told_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = parse(["--set", "env.id=Taxi-v3", "--set", "learner.lr=0.5"])
    config = command.config()
    assert (config.learner.lr, config.run.target_return) == (0.5, float("inf"))
    assert config.replay == Config().replay
    announce(command, "1a2b3c4d", 0)
    assert "neutral settings: no task ships for Taxi-v3" in capsys.readouterr().err


def test_an_environment_that_a_task_ships_for_gets_that_task() -> None:
    assert parse([]).config().learner.lr == parse(["cartpole"]).config().learner.lr
    assert parse(["--set", "env.id=LunarLander-v3"]).config() == parse(["lunarlander"]).config()
    assert parse(["cartpole", "--set", "env.id=Acrobot-v1"]).config().learner.lr == parse([]).config().learner.lr


def test_a_directory_made_for_another_run_is_still_refused(tmp_path: Path) -> None:
    command = parse(settings(f"run.dir={tmp_path / 'run'}"))
    RunDirectory.create(command.config(), "1").release()
    done = ddrl(*settings(f"run.dir={tmp_path / 'run'}"))
    assert done.returncode == 1
    assert "holds a run already" in done.stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (b"run\xff".decode(errors="surrogateescape"), "its name is not UTF-8"),
        ("r" * 300, "File name too long"),
        (None, "the working directory is gone"),
    ],
)
def test_a_place_that_no_run_can_have_is_refused_in_one_line(
    name: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    if name is None:
        gone.rmdir()
    assert main(["--serial", *settings(f"run.dir={tmp_path / (name or 'run')}")]) == 1
    said = capfd.readouterr().err
    assert words in said
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1
    monkeypatch.chdir(tmp_path)


def test_a_run_is_not_resumed_from_a_folder_that_is_gone(tmp_path: Path) -> None:
    leave = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    code = f"{leave}; from ddrl.run.__main__ import main; raise SystemExit(main(['--serial', '--resume', 'run']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 1
    assert "the working directory is gone" in done.stderr
    assert len(done.stderr.splitlines()) == 1


THREADS = {"OMP_NUM_THREADS": "1"}
NO_FABRIC = {"OMPI_MCA_btl": "^ofi,uct", "OMPI_MCA_pml": "^ucx", "OMPI_MCA_mtl": "^ofi"}


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({}, THREADS | NO_FABRIC),
        ({"OMPI_MCA_btl": "self,tcp"}, THREADS | {name: NO_FABRIC[name] for name in ("OMPI_MCA_pml", "OMPI_MCA_mtl")}),
        ({"OMPI_MCA_pml": "cm"}, THREADS | {"OMPI_MCA_btl": "^ofi,uct"}),
        ({"OMPI_MCA_mtl": "ofi"}, THREADS | {"OMPI_MCA_btl": "^ofi,uct"}),
        ({"OMP_NUM_THREADS": "3"}, NO_FABRIC),
    ],
)
def test_a_users_choice_of_transports_and_threads_is_kept(
    given: dict[str, str], added: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot, "set_timer_slack", lambda nanoseconds: None)
    monkeypatch.setattr(slot, "FABRICS", (str(tmp_path / "none"),))
    monkeypatch.setattr(os, "environ", dict(given))
    slot.prepare_mpi(2)
    assert os.environ == {**added, **given}


def test_a_fabric_of_the_host_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot, "set_timer_slack", lambda nanoseconds: None)
    monkeypatch.setattr(slot, "FABRICS", (str(tmp_path / "none"), str(tmp_path)))
    monkeypatch.setattr(slot, "_does_without_shared_memory", lambda: True)
    monkeypatch.setattr(slot, "_forget_peers", lambda: pytest.fail("a fabric's transports know the ranks of a host"))
    monkeypatch.setattr(os, "environ", {})
    slot.prepare_mpi(2)
    assert os.environ == {"OMPI_MCA_btl": "^ofi,sm"} | THREADS


@pytest.mark.parametrize(
    ("given", "lines", "recovers", "expected"),
    [
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "300"}, 3, False, "^ofi,uct,sm"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "64"}, 2, False, "^ofi,uct,sm"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "63"}, 3, False, "^ofi,uct"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "513"}, 3, False, "^ofi,uct"),  # of 1,024 files that rank 0 may open
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "300"}, 1, False, "^ofi,uct"),  # the loopback interface alone
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "300"}, 0, False, "^ofi,uct"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "300"}, 3, True, "^ofi,uct"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "many"}, 3, False, "^ofi,uct"),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "300", "OMPI_MCA_btl": "self,sm"}, 3, False, "self,sm"),
    ],
)
def test_many_ranks_of_a_host_talk_by_tcp_where_they_can(
    given: dict[str, str], lines: int, recovers: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = tmp_path / "route"
    routes.write_text("".join(["Iface\tDestination\n", "eth0\t00000000\n", "eth0\t000200C0\n"][:lines]))
    monkeypatch.setattr(slot, "ROUTES", str(routes if lines else tmp_path / "none"))
    monkeypatch.setattr(slot, "set_timer_slack", lambda nanoseconds: None)
    monkeypatch.setattr(slot, "FABRICS", ())
    monkeypatch.setattr(slot, "may_lose_ranks", lambda launcher: recovers and launcher == os.getppid())
    monkeypatch.setattr(os, "environ", dict(given))
    alone: list[bool] = []
    monkeypatch.setattr(slot, "_forget_peers", lambda: alone.append(True))
    slot.prepare_mpi(300)
    assert os.environ.items() >= {"OMPI_MCA_btl": expected}.items()
    assert bool(alone) == expected.endswith("uct,sm")


MPICH = "MPICH Version: 5.0.2\nMPICH Device:       ch4:ucx ofi\n"


@pytest.mark.parametrize(
    ("given", "library", "lines", "netmod"),
    [
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, MPICH, 2, "ofi"),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "2"}, MPICH, 2, None),  # hosts, which may have fabrics
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, MPICH, 1, None),  # the loopback interface alone, which may be down
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, MPICH.replace(" ofi", ""), 2, None),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4", "MPIR_CVAR_CH4_NETMOD": "ucx"}, MPICH, 2, "ucx"),
        ({}, MPICH, 2, None),
    ],
)
def test_ranks_of_one_host_start_without_a_connection_to_each_other(
    given: dict[str, str],
    library: str,
    lines: int,
    netmod: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What MPICH finds in its environment when it is begun, once, and whether its end is left to the process's end."""
    routes = tmp_path / "route"
    routes.write_text("".join(["Iface\tDestination\n", "eth0\t00000000\n"][:lines]))
    monkeypatch.setattr(slot, "ROUTES", str(routes))
    monkeypatch.setattr(os, "environ", dict(given))
    begun: list[str | None] = []
    mpi = SimpleNamespace(
        Get_library_version=lambda: library,
        Is_initialized=lambda: bool(begun),
        Init_thread=lambda: begun.append(os.environ.get("MPIR_CVAR_CH4_NETMOD")),
    )
    package = SimpleNamespace(MPI=mpi, rc=SimpleNamespace(initialize=True, finalize=None))
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    slot.begin_mpi()
    slot.begin_mpi()
    assert begun == [netmod]
    assert (package.rc.initialize, package.rc.finalize) == (False, True)


def test_sources_without_the_extension_that_was_built_start_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = sys.getdlopenflags()
    monkeypatch.setitem(sys.modules, "ddrl.run._peers", None)
    slot._forget_peers()
    assert sys.getdlopenflags() == flags


ASKING = """
from ddrl.run import slot
slot.MANY_RANKS = range(3, 4)
slot.prepare_mpi(3)
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"of this host: {world.Split_type(MPI.COMM_TYPE_SHARED).Get_size()}, sum {world.allreduce(world.Get_rank())}")
"""


@pytest.mark.parametrize(("ranks", "known"), [(3, 1), (2, 2)])
def test_many_ranks_of_a_host_are_strangers_to_mpi(ranks: int, known: int) -> None:
    """So that MPI_Init asks for none of them, and they reach each other all the same."""
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    head = mpirun_command(ranks)[: -len(("-m", "ddrl.run"))]
    told = environment(**MPI_ENVIRONMENT)
    done = subprocess.run([*head, "-c", ASKING], capture_output=True, text=True, timeout=PATIENCE, env=told)
    total = sum(range(ranks))
    assert sorted(done.stdout.splitlines()) == [f"of this host: {known}, sum {total}"] * ranks, done.stderr


@pytest.mark.parametrize(
    ("env", "shared"), [("CartPole-v1", True), ("gymnasium.envs.classic_control.cartpole:CartPoleEnv", False)]
)
def test_what_members_need_is_imported_before_they_are_forked(env: str, shared: bool, tmp_path: Path) -> None:
    """What a rollout imports by itself is memory of its own; the code of a factory may be anybody's."""
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "ddrl.run",
        *TINY,
        *settings(f"run.dir={run}", f"env.id={env}", "run.max_env_steps=400"),
    ]
    told = environment(PYTHONVERBOSE="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True, env=told)
    imports = re.compile(r"^import '([\w.]+)'", re.MULTILINE)
    by_keeper = set(imports.findall(done.stderr))
    by_members = {name for path in (run / "output").glob("rank-*.txt") for name in imports.findall(path.read_text())}
    assert "ddrl.run.members" in by_keeper
    cartpole = {"gymnasium.envs.classic_control", "gymnasium.envs.classic_control.cartpole"}
    assert cartpole <= (by_keeper if shared else by_members)
    assert not shared or not by_members


WARM = """
import os, sys
from pathlib import Path

def private():
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.partition("Private_Dirty:")[2].split()[0])

import ddrl.run.members
from ddrl.acting.graph import _IDENTITY, Graph
threads = len(os.listdir("/proc/self/task"))
if sys.argv[1] == "warm":
    from ddrl.run.keeper import import_for_members
    import_for_members()
assert len(os.listdir("/proc/self/task")) == threads
if os.fork() == 0:
    private()
    before = private()
    Graph(_IDENTITY)
    print(private() - before)
    os._exit(0)
os.wait()
"""


def test_rollouts_share_what_the_runtime_makes_once() -> None:
    first, warm = (
        int(subprocess.check_output([sys.executable, "-c", WARM, how], env=environment(), timeout=PATIENCE))
        for how in ("cold", "warm")
    )
    assert first - warm > 1000  # [KiB] of 3,500


@pytest.mark.parametrize("how", [[], ["--serial"]], ids=["local", "serial"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_before_training_ends_the_command_with_a_line(how: list[str], number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ddrl.run", *how, *TINY, *settings(f"run.dir={tmp_path / 'run'}")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    caught = 1 << signal.SIGTERM - 1  # the second handler of the two; Python catches SIGINT from its start
    status = Path(f"/proc/{process.pid}/status")
    wait_until(
        lambda: int(status.read_text().partition("SigCgt:")[2].split()[0], 16) & caught, "the signal is not caught"
    )
    process.send_signal(number)
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode in (128 + number, 130)
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith(("ddrl: ended by ", "ended at once by a signal"))
    assert not (tmp_path / "run").exists()


def test_the_first_lines_of_a_run_move_no_cursor():
    config = Config()
    config = replace(config, env=replace(config.env, id="\x1b[31mX-v0"))
    said = _banner(parse(["--serial", "--resume", "x"]), config, Path("runs/\u202eR"), 0)
    assert "\x1b" not in said
    assert "\u202e" not in said


def test_signals_mean_what_they_meant_once_the_end_is_said() -> None:
    """A program that calls `main` goes on, and starts others."""
    before = [signal.getsignal(number) for number in SIGNALS]
    with signals_handled(signal.SIG_IGN):
        assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * len(SIGNALS)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_garbage_collector_visits_nothing_that_torch_has_made() -> None:
    code = """
import gc
from ddrl.run.process import load_torch
load_torch()
before = [each["collections"] for each in gc.get_stats()]
few = [[] for _ in range(100)]
assert gc.isenabled() and gc.get_freeze_count() > 100_000
assert before == [each["collections"] for each in gc.get_stats()]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, env=environment())
