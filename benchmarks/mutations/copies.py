"""Copies of the working tree in which faults stand, and what the tests say there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.mutations.named import Fault

ROOT = Path(__file__).parents[2]
KERNEL = "ddrl/kernel/"
PYTEST = ("-m", "pytest", "-x", "-m", "not long and not browser", "--no-header", "--tb=line", "-rf")


class Verdict(NamedTuple):
    """`noticed`: the tests failed, timed out or could not even start; `by`: the first failure, in pytest's words."""

    noticed: bool
    by: str
    seconds: float


def stands(fault: Fault) -> bool:
    """Whether a named fault's text stands once in its file."""
    path = ROOT / fault.path
    return path.exists() and path.read_text().count(fault.old) == 1


class Copy:
    """A copy of every tracked file, with the compiled kernel, at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Begin with clean sources."""
        shutil.rmtree(self.path, ignore_errors=True)
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

    def test(self, tests: tuple[str, ...], timeout: float, under: Sequence[str] = ()) -> Verdict:
        """Run the tests until the first one fails; `under`: a command that runs another one, as nice does."""
        begin = time.monotonic()
        environment = {**os.environ, "PYTHONPATH": str(self.path), "PYTHONDONTWRITEBYTECODE": "1"}
        process = subprocess.Popen(
            [*under, sys.executable, *PYTEST, *tests],
            cwd=self.path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            output = f"FAILED no end within {timeout:g} s"
        finally:
            _end(process)
        if process.returncode in (4, 5):
            raise RuntimeError(f"pytest cannot run {' '.join(tests)}:\n{output[-2000:]}")
        failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        seconds = round(time.monotonic() - begin, 1)
        return Verdict(process.returncode != 0, failed[0][:200] if failed else "", seconds)


class KernelBuild:
    """The compiled kernel of a faulty header: sources of their own, whose objects stay from one fault to the next."""

    def __init__(self, path: Path) -> None:
        self._sources, self._build = Copy(path), path / "build" / "faulty"
        self._fault: Fault | None = None  # the one that stands there

    def into(self, copy: Copy, fault: Fault) -> bool:
        """Compile with the fault and put the result into `copy`; whether it compiles."""
        if not self._fault:
            self._sources.make()
        elif self._fault != fault:  # as it was, and newer than the objects
            (self._sources.path / self._fault.path).write_bytes((ROOT / self._fault.path).read_bytes())
        if self._fault != fault:
            self._sources.put(fault)
        self._fault = fault
        configure = ["cmake", "-S", ".", "-B", str(self._build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
        configure.append(f"-DPython_EXECUTABLE={sys.executable}")
        for command in (configure, ["cmake", "--build", str(self._build)]):
            if subprocess.run(command, cwd=self._sources.path, capture_output=True).returncode:
                return False
        (compiled,) = self._build.glob("_kernel*.so")
        shutil.copy2(compiled, copy.path / "ddrl" / compiled.name)
        return True


def _end(process: subprocess.Popen[str]) -> None:
    """End what a test run has left behind, its own children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
