"""For all tests: torch computes in one thread, as a run does by default. Two threads that wait for each other on a busy
machine take many times as long. What a user trusts is remembered in a directory of the tests' own. Every child process
imports the sources beside the tests, also one that a test starts with the environment as it is. Every test has its own
folder for what mpirun keeps: one that was killed leaves a folder named by its process id, and a later mpirun with the
same id refuses to start."""

import contextlib
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import hypothesis
import psutil
import pytest

from tests.sources import environment

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy machine")

# They take longest: begun last, one of them would end minutes after all others.
LONGEST = (
    "tests/run/test_processes.py",
    "tests/dashboard/test_dashboard.py",
    "tests/notebooks/test_notebooks.py",
    "tests/run/",
    "tests/distribution/",
    "tests/dashboard/",
    "tests/docs/",
)

# jsonschema, which notebooks' format needs, imports it for a format that none of them has: its grammar is compiled at
# each start, which takes as long as the import of torch.
sys.modules.setdefault("rfc3987_syntax", None)  # pyright: ignore[reportArgumentType]

_state = tempfile.TemporaryDirectory(prefix="ddrl-tests-")
os.environ["XDG_STATE_HOME"] = _state.name

# A shell lets what it starts with & in a script ignore Ctrl-C, and all children inherit that: tests that interrupt one
# would wait for it until their limit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ["PYTHONPATH"] = environment()["PYTHONPATH"]
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Files are handed to workers in the order below, not by how many tests each has."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first where several workers share them; a person alone sees the quick ones first."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in LONGEST])


def pytest_collection_finish() -> None:
    """What the tests' modules have imported lives for ever: visits of the garbage collector to torch's million objects
    were a tenth of the tests' processor time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """A test that learns in this process lets its thread take denormal numbers as zero; the next one has them again.
    Fixtures that use `monkeypatch` come after it, so that what a test has put in the place of torch is gone by then."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].set_flush_denormal(False)


@pytest.fixture(autouse=True)
def mpirun_folder(denormal_numbers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A short path: mpirun makes sockets there."""
    with tempfile.TemporaryDirectory(prefix="mpi-", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("PRTE_MCA_prte_tmpdir_base", folder)
        yield


@pytest.fixture(autouse=True)
def processes(denormal_numbers: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test has started ends with it, also where the test fails: a job that went on would slow all others."""
    begun: list[subprocess.Popen[Any]] = []
    begin = subprocess.Popen.__init__

    def remember(self: subprocess.Popen[Any], *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        begun.append(self)

    monkeypatch.setattr(subprocess.Popen, "__init__", remember)
    yield
    left = [child for child in begun if child.poll() is None]
    for child in left:
        family = [psutil.Process(child.pid)]  # there until it is waited for
        with contextlib.suppress(psutil.NoSuchProcess):
            family += family[0].children(recursive=True)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                process.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):  # somebody else may hold the other end: do not read
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
    assert not left, f"still there at the test's end: {[child.args for child in left]}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of emulated hosts with a name of its own, beside a cluster that somebody uses. It is loaded once more,
    for it reads its name when it is loaded, which other tests may have done before."""
    from benchmarks.distribution import cluster

    if reason := cluster.available():
        pytest.skip(reason)
    monkeypatch.setenv("DDRL_CLUSTER", f"dd{os.environ.get('PYTEST_XDIST_WORKER', 'test')}")
    spec = importlib.util.spec_from_file_location("tests_own_cluster", cluster.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
