"""What environments set, print and start cannot hold a run, nor its output."""

import contextlib
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from ddrl.telemetry.summary import list_facts
from tests.run.launch import MPI_ENVIRONMENT, UNTIL_STOPPED, mpirun_command, segments_of, settings
from tests.run.preloaded import Job
from tests.sources import environment
from tests.waiting import PATIENCE, wait_until

SHORT = settings(
    "env.id=own_env:E",
    "run.max_env_steps=300",
    "run.processes=1",
    "replay.min_size=50",
    "rollout.warmup_steps=50",
    "env.num_envs=1",
    "learner.hidden=[8]",
    "learner.batch_size=8",
    "evaluation.period=0",
    "run.checkpoint_period=0",
    "telemetry.live=false",
)
BASE = """
import os, pathlib, signal, subprocess, sys, time
import gymnasium
import numpy as np

class Base(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.zeros(2, np.float32), 1.0, False, self.t >= 10, {}
"""


def start(tmp_path, text, *arguments, ranks=0):
    (tmp_path / "own_env.py").write_text(BASE + textwrap.dedent(text))
    variables = environment(**(MPI_ENVIRONMENT if ranks else {}))
    variables["PYTHONPATH"] = f"{variables['PYTHONPATH']}:{tmp_path}"
    words = [*SHORT, "--set", f"run.dir={tmp_path / 'run'}", *arguments]
    return (subprocess.Popen if ranks else Job)(
        [*(mpirun_command(ranks) if ranks else []), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=variables,
        cwd=tmp_path,
        start_new_session=True,
    )


def test_what_environments_print_is_in_a_file_of_their_rank_and_not_on_the_command_s_output(tmp_path):
    job = start(
        tmp_path,
        """
        class E(Base):
            def step(self, action):
                print("printed", flush=True)
                print("complained", file=sys.stderr)
                os.write(1, b"from C\\n")
                return super().step(action)
        """,
    )
    out, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors
    assert "printed" not in out + errors
    assert "from C" not in out + errors
    (path,) = (tmp_path / "run" / "output").glob("rank-*.txt")
    text = path.read_text()
    assert all(word in text for word in ("printed", "complained", "from C"))


def test_the_file_of_a_rank_is_bounded(tmp_path, monkeypatch):
    from ddrl.run import keeper

    monkeypatch.setattr(keeper, "MAX_OUTPUT_FILE", 1000)
    for number in range(1000):
        keeper.keep_output(tmp_path / "output" / "rank-1.txt", f"line {number}\n".encode())
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "output").iterdir()}
    assert set(sizes) <= {"rank-1.txt", "rank-1.1.txt"}
    assert sum(sizes.values()) < 2100
    assert "line 999" in "".join(path.read_text() for path in (tmp_path / "output").iterdir())


@pytest.mark.parametrize(
    "how",
    [
        "subprocess.check_output(['cat', '/proc/self/status'], text=True)",
        pytest.param("subprocess.check_output('cat /proc/self/status', shell=True, text=True)", marks=pytest.mark.long),
        pytest.param(
            "subprocess.run([sys.executable, '-c', 'print(open(\"/proc/self/status\").read())'], capture_output=True, "
            "text=True).stdout",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_an_environment_starts_has_default_signals(how, tmp_path):
    job = start(
        tmp_path,
        f"""
        class E(Base):
            def __init__(self):
                with open({str(tmp_path / "status")!r}, "a") as file:
                    file.write({how})
        """,
    )
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors
    lines = (tmp_path / "status").read_text().splitlines()
    ignored = [int(line.split()[1], 16) for line in lines if line.startswith("SigIgn")]
    blocked = [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
    assert ignored
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        assert not any(mask >> (number - 1) & 1 for mask in (*ignored, *blocked)), number


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN)", ["--serial"]),
        pytest.param("signal.signal(signal.SIGINT, lambda *_: None)", [], marks=pytest.mark.long),
    ],
)
def test_an_environment_s_own_handlers_do_not_make_a_run_unstoppable(text, mode, tmp_path):
    job = start(
        tmp_path,
        f"""
        class E(Base):
            def reset(self, **given):
                {text}
                return super().reset(**given)
        """,
        *UNTIL_STOPPED,
        *mode,
        *settings("run.checkpoint_period=200"),
    )
    wait_until(lambda: any((tmp_path / "run" / "checkpoints").glob("0*")) or job.poll() is not None, "no checkpoint")
    os.kill(job.pid, signal.SIGINT)
    out, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 130, errors
    assert "interrupted after" in out


@pytest.mark.parametrize(
    "stuck",
    [
        "\n                    ".join(("while True:", "    try: time.sleep(9)", "    except BaseException: pass")),
        pytest.param(
            "subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).wait()",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_second_interrupt_ends_a_serial_run_whose_environment_does_not_return(stuck, tmp_path):
    job = start(
        tmp_path,
        f"""
        class E(Base):
            steps = 0
            def step(self, action):
                E.steps += 1
                if E.steps == 500:
                    open({str(tmp_path / "stuck")!r}, "w").close()
                    {stuck}
                return super().step(action)
        """,
        *UNTIL_STOPPED,
        "--serial",
    )
    wait_until(lambda: Path(tmp_path / "stuck").exists() or job.poll() is not None, "it was not stuck")
    for _ in range(int(PATIENCE)):  # a user who presses it again and again, also while the run ends
        os.kill(job.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=1.0)
            break
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 130, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("where", "exists", "ends", "how"),
    [
        ("step", "checkpoints/0*", "os._exit(0)", "exited with status 0"),
        pytest.param(
            "reset",
            "checkpoints/0*",
            "signal.alarm(1); time.sleep(99)",
            "was killed by SIGALRM",
            marks=pytest.mark.long,
        ),
        pytest.param("__init__", "config.toml", "os._exit(0)", "exited with status 0", marks=pytest.mark.long),
    ],
)
def test_a_serial_run_whose_environment_ends_its_process_says_so_and_leaves_nothing(where, exists, ends, how, tmp_path):
    job = start(
        tmp_path,
        f"""
        class E(Base):
            def {where}(self, *given, **named):
                if any(pathlib.Path({str(tmp_path / "run")!r}).glob({exists!r})):
                    {ends}
                return super().{where}({"" if where == "__init__" else "*given, **named"})
        """,
        "--serial",
        *settings("run.checkpoint_period=100"),
    )
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 1, errors
    line = errors.splitlines()[-1]
    assert line.startswith(f"ddrl: env.id = own_env:E: its process {how} before its work was done; "), errors
    assert line.endswith(f"--serial --resume {tmp_path / 'run'}" if exists != "config.toml" else "ends its process")
    assert len(line) < 300
    assert segments_of(tmp_path / "run") == []
    (facts,) = list_facts(tmp_path)
    assert (facts.state, facts.reason) == ("failed", line.removeprefix("ddrl: "))


@pytest.mark.parametrize("mode", [["--serial"], pytest.param([], marks=pytest.mark.long)])
def test_the_process_that_learns_closes_its_environments_when_the_summary_is_written(mode, tmp_path):
    """A close that nothing can leave ends the process."""
    job = start(
        tmp_path,
        f"""
        class E(Base):
            steps = 0  # of this process: the one that only looks at an environment is let go

            def step(self, action):
                E.steps += 1
                return super().step(action)

            def close(self):
                if E.steps > 100 and "torch" in sys.modules:
                    written = pathlib.Path({str(tmp_path / "run" / "summary.json")!r}).exists()
                    with open({str(tmp_path / "closed")!r}, "a") as file:
                        print(written, file=file)
        """,
        *mode,
        *settings("evaluation.period=200", "evaluation.episodes=20"),
    )
    _, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors
    assert set((tmp_path / "closed").read_text().split()) == {"True"}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 5])
def test_a_rollout_s_close_that_cannot_even_be_left_ends_no_run_of_several_processes(ranks, tmp_path):
    job = start(
        tmp_path,
        """
        class E(Base):
            steps = 0  # of this process: the one that only looks at an environment is let go

            def step(self, action):
                E.steps += 1
                return super().step(action)

            def close(self):
                while E.steps > 100:
                    try: time.sleep(9)
                    except BaseException: pass
        """,
        *settings("run.max_env_steps=1000"),
        ranks=ranks,
    )
    out, errors = job.communicate(timeout=PATIENCE)
    assert job.returncode == 0, errors
    assert "run.max_env_steps reached after" in out
    said = "".join(path.read_text() for path in (tmp_path / "run" / "output").iterdir())
    assert "its close does not return, which ends nothing, and cannot be left: its process ends here" in said
    assert segments_of(tmp_path / "run") == []
