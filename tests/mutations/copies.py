"""Copies of the working tree in which faults stand, and what the tests say there."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Collection, Sequence, Set
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from tests.mutations.named import Fault
from tests.mutations.nearest import BROWSER

ROOT = Path(__file__).parents[2]
KERNELS = ("ddrl/kernel/", "ddrl/admix/kernel/", "ddrl/run/peers.cpp")  # what is compiled
PYTEST = ("-x", "-vv", "--no-header", "--tb=line", "-rfE")
FASTER_BUILD = Fault(
    "compiled in half the time", "ddrl/kernel/CMakeLists.txt", "(_kernel PRIVATE -O3", "(_kernel PRIVATE -O1"
)
NO_TESTS = 5  # pytest's exit status where none is left to run
BY_TIME = re.compile(
    r"[Tt]imeout|timed out|no end|exit status -9|within [\d.]+ s"
)  # a reason that a busy machine can give as well


class Outcome(NamedTuple):
    """Of one run of pytest. `failed`: the name of the first test that failed, was running when the process died, or had
    not ended in time; empty where all passed. `reason`: in pytest's words. `passed`: the names of those before it."""

    failed: str
    reason: str
    passed: tuple[str, ...] = ()

    @property
    def by_time(self) -> bool:
        """Whether the reason may be a machine that is busy."""
        return bool(BY_TIME.search(self.reason))


def stands(fault: Fault) -> bool:
    """Whether a named fault's text stands once in its file."""
    path = ROOT / fault.path
    return path.exists() and path.read_text().count(fault.old) == 1


class Copy:
    """A copy of every tracked file, with the compiled kernel and what Python has compiled, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, source: Path = ROOT) -> None:
        """Begin with clean sources: those of another copy, or the tracked files as they stand."""
        shutil.rmtree(self.path, ignore_errors=True)
        if source != ROOT:
            shutil.copytree(source, self.path)
            return
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        compiled = [str(path.relative_to(ROOT)) for path in ROOT.glob("ddrl/**/*.so")]
        compiled += [str(path.relative_to(ROOT)) for path in ROOT.glob("ddrl/**/*.pyc")]
        for name in [*filter(None, listed.split("\0")), *compiled]:
            if (ROOT / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.path / name)

    def put(self, fault: Fault) -> None:
        """Write the fault into this copy. ValueError where its line does not stand there once."""
        file = self.path / fault.path
        text = file.read_text()
        if fault.line:
            lines = text.splitlines(keepends=True)
            if lines[fault.line - 1].rstrip("\n") != fault.old:
                raise ValueError(f"{fault.name}: line {fault.line} of {fault.path} reads otherwise")
            lines[fault.line - 1] = fault.new + "\n"
            file.write_text("".join(lines))
            return
        if text.count(fault.old) != 1:
            raise ValueError(f"{fault.name}: {fault.old!r} stands {text.count(fault.old)} times in {fault.path}")
        file.write_text(text.replace(fault.old, fault.new))

    def test(self, tests: Sequence[str], timeout: float, without: Collection[str] = ()) -> Outcome:
        """Run the tests until the first one fails, the long ones only where each is named by itself, those in a
        browser also where their file is all that is run; `without`: names of tests that are left out."""
        slow = "not long" if tests == (BROWSER,) else "not long and not browser"
        marks = "" if all("::" in name for name in tests) else slow
        sys.stdout.flush()
        with tempfile.TemporaryFile() as written:  # not a pipe: what a test leaves running would hold it open
            child = os.fork()
            if not child:
                self._become_pytest([*PYTEST, "-m", marks, *tests], frozenset(without), written.fileno())
            try:
                ended = _await(child, timeout)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                self._kill_what_is_left()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            written.seek(0)
            output = written.read().decode(errors="replace")
        if status in (0, NO_TESTS):
            return Outcome("", "")
        passed = tuple(re.findall(r"^(tests/\S+?\.py::.+?) PASSED", output, re.MULTILINE))
        if said := re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.+?)?)(?: - (.*))?$", output, re.MULTILINE):
            return Outcome(said[1], (said[2] or "")[:200], passed)
        started = re.findall(r"^(tests/\S+?\.py::.+?)(?: PASSED.*| SKIPPED.*)?$", output, re.MULTILINE)
        if not started:
            raise RuntimeError(f"pytest cannot run {' '.join(tests)}:\n{output[-2000:]}")
        reason = f"exit status {status}" if ended else f"no end within {timeout:g} s"
        return Outcome(started[-1].strip(), reason, passed)

    def _kill_what_is_left(self) -> None:
        """The processes that a test has left behind: those that work in this copy."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if Path(os.readlink(process / "cwd")).is_relative_to(self.path):
                    os.kill(int(process.name), signal.SIGKILL)

    def _become_pytest(self, arguments: Sequence[str], without: Set[str], written: int) -> NoReturn:
        """Of a fresh child process: pytest in this copy. What `preload` has imported is there already."""
        status = 3
        try:
            os.setsid()
            os.dup2(written, 1)
            os.dup2(written, 2)
            for number in (signal.SIGTERM, signal.SIGHUP):  # nohup ignores the latter, and so would the runs of tests
                signal.signal(number, signal.SIG_DFL)
            os.chdir(self.path)
            os.environ.update(PYTHONPATH=str(self.path), PYTHONDONTWRITEBYTECODE="1", COLUMNS="400")
            sys.dont_write_bytecode = True
            for name in [
                name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "ddrl", "tests", "__main__")
            ]:
                del sys.modules[name]
            sys.modules["__main__"] = ModuleType("__main__")
            sys.path[:] = [str(self.path), *(entry for entry in sys.path if entry and Path(entry).resolve() != ROOT)]
            importlib.invalidate_caches()
            import pytest

            status = int(pytest.main(list(arguments), [LeaveOut(without)]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


class LeaveOut:
    """A plugin of pytest that leaves tests out by their whole names; --deselect takes what names begin with."""

    def __init__(self, names: Set[str]) -> None:
        self._names = names

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Pytest's hook."""
        items[:] = [item for item in items if item.nodeid not in self._names]


def preload() -> None:
    """Import what most tests import and no fault stands in: it takes longer than most tests."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("numpy", "torch", "gymnasium", "pytest"):
        importlib.import_module(name)


def _await(child: int, timeout: float) -> bool:
    """Whether the process ends in time."""
    ended = os.pidfd_open(child)
    try:
        return bool(select.select([ended], [], [], timeout)[0])
    finally:
        os.close(ended)


class KernelBuild:
    """The extensions compiled with a fault: sources of their own, whose objects stay from one fault to the next."""

    def __init__(self, path: Path, clean: Path) -> None:
        self._sources = Copy(path)
        self._build = path / "build" / "faulty"
        self._clean = clean
        self._fault: Fault | None = None  # the one that stands there

    def into(self, copy: Copy, fault: Fault) -> None:
        """Compile with the fault and put the result into `copy`. RuntimeError where it does not compile: no test has
        noticed anything then."""
        if not self._fault:
            self._sources.make(self._clean)
            self._sources.put(FASTER_BUILD)
        elif self._fault != fault:  # as it was, and newer than the objects
            (self._sources.path / self._fault.path).write_bytes((self._clean / self._fault.path).read_bytes())
        if self._fault != fault:
            self._sources.put(fault)
        self._fault = fault
        configure = ["cmake", "-S", ".", "-B", str(self._build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        configure.append(f"-DPython_EXECUTABLE={sys.executable}")
        for command in (configure, ["cmake", "--build", str(self._build), "--parallel", "2"]):
            done = subprocess.run(command, cwd=self._sources.path, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{fault.name}: it does not compile\n{(done.stdout + done.stderr)[-2000:]}")
        for name, folder in (("_kernel*.so", "ddrl"), ("admix/_kernel*.so", "ddrl/admix"), ("_peers*.so", "ddrl/run")):
            (compiled,) = (self._build / "ddrl/kernel").glob(name)
            shutil.copy2(compiled, copy.path / folder / compiled.name)
