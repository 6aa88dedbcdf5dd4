"""Copies of the working tree in which faults stand, and what the tests say there."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutations.named import Fault

ROOT = Path(__file__).parents[2]
KERNEL = "ddrl/kernel/"
PYTEST = ("-m", "pytest", "-x", "-vv", "-m", "not long and not browser", "--no-header", "--tb=line", "-rfE")
NO_TESTS = 5  # pytest's exit status where none is left to run
BY_TIME = re.compile(
    r"[Tt]imeout|timed out|no end|exit status -9|within [\d.]+ s"
)  # a reason that a busy machine can give as well


class Outcome(NamedTuple):
    """Of one run of pytest. `failed`: the name of the first test that failed, was running when the process died, or had
    not ended in time; empty where all passed. `reason`: in pytest's words."""

    failed: str
    reason: str
    seconds: float

    @property
    def by_time(self) -> bool:
        """Whether the reason may be a machine that is busy."""
        return bool(BY_TIME.search(self.reason))


def stands(fault: Fault) -> bool:
    """Whether a named fault's text stands once in its file."""
    path = ROOT / fault.path
    return path.exists() and path.read_text().count(fault.old) == 1


class Copy:
    """A copy of every tracked file, with the compiled kernel, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self, source: Path = ROOT) -> None:
        """Begin with clean sources: those of another copy, or the tracked files as they stand."""
        shutil.rmtree(self.path, ignore_errors=True)
        if source != ROOT:
            shutil.copytree(source, self.path)
            return
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        compiled = [str(path.relative_to(ROOT)) for path in ROOT.glob("ddrl/_kernel*.so")]
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

    def test(
        self, tests: Sequence[str], timeout: float, under: Sequence[str] = (), without: Sequence[str] = ()
    ) -> Outcome:
        """Run the tests until the first one fails; `under`: a command that runs another one, as nice does; `without`:
        names of tests that are left out."""
        begin = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
        command = [*under, sys.executable, *PYTEST, *tests, *(f"--deselect={name}" for name in without)]
        late = False
        with tempfile.TemporaryFile() as written:  # not a pipe: what a test leaves running would hold it open
            process = subprocess.Popen(
                command, cwd=self.path, env=environment, stdout=written, stderr=written, start_new_session=True
            )
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _end(process)
            written.seek(0)
            output = written.read().decode(errors="replace")
        seconds = round(time.monotonic() - begin, 1)
        if process.returncode in (0, NO_TESTS) and not late:
            return Outcome("", "", seconds)
        if said := re.search(r"^(?:FAILED|ERROR) (tests/\S+?\.py(?:::.+?)?)(?: - (.*))?$", output, re.MULTILINE):
            return Outcome(said[1], (said[2] or "")[:200], seconds)
        started = re.findall(r"^(tests/\S+?\.py::.+?)(?: PASSED.*| SKIPPED.*)?$", output, re.MULTILINE)
        if not started:
            raise RuntimeError(f"pytest cannot run {' '.join(tests)}:\n{output[-2000:]}")
        reason = f"no end within {timeout:g} s" if late else f"exit status {process.returncode}"
        return Outcome(started[-1].strip(), reason, seconds)


class KernelBuild:
    """The compiled kernel of a faulty header: sources of their own, whose objects stay from one fault to the next."""

    def __init__(self, path: Path, clean: Path, under: Sequence[str] = ()) -> None:
        self._sources, self._build, self._clean = Copy(path), path / "build" / "faulty", clean
        self._under = under
        self._fault: Fault | None = None  # the one that stands there

    def into(self, copy: Copy, fault: Fault) -> bool:
        """Compile with the fault and put the result into `copy`; whether it compiles."""
        if not self._fault:
            self._sources.make(self._clean)
            self._sources.put(Fault("compiled in half the time", "CMakeLists.txt", "PRIVATE -O3", "PRIVATE -O1"))
        elif self._fault != fault:  # as it was, and newer than the objects
            (self._sources.path / self._fault.path).write_bytes((self._clean / self._fault.path).read_bytes())
        if self._fault != fault:
            self._sources.put(fault)
        self._fault = fault
        configure = ["cmake", "-S", ".", "-B", str(self._build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        configure.append(f"-DPython_EXECUTABLE={sys.executable}")
        for command in (configure, ["cmake", "--build", str(self._build), "--parallel", "2"]):
            if subprocess.run([*self._under, *command], cwd=self._sources.path, capture_output=True).returncode:
                return False
        (compiled,) = self._build.glob("_kernel*.so")
        shutil.copy2(compiled, copy.path / "ddrl" / compiled.name)
        return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what a test run has left behind, its own children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
