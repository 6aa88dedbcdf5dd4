"""The example in docs runs with two processes and trains what one process trains."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.waiting import PATIENCE

pytest.importorskip("torch", reason="needs the extra [train]")

ROOT = Path(__file__).parents[2]
# The example, then the threads that its group left: such a one aborts the process, now and then, at its exit.
SCRIPT = f"""
import pathlib, runpy, sys
sys.argv[0] = {str(ROOT / "docs" / "examples" / "microbatch_torch.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
left = [name for file in pathlib.Path("/proc/self/task").glob("*/comm") if "gloo" in (name := file.read_text())]
sys.exit(f"the group left {{left}}" if left else 0)
"""
# The launcher passes lines of two processes on as they come: a line break may stand after the next line.
LINE = re.compile(r"rank (\d+) step (\d+) sizes \[(.*?)\] loss (\d+\.\d{6}) parameters (-?\d+\.\d{9})")


def train(folder: Path, processes: int, *arguments: str) -> list[tuple[int, int, list[int], float, float]]:
    """(rank, step, sizes, loss, sum of the parameters) of every line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    (script := folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [*command, str(script), *arguments], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = LINE.findall(done.stdout)
    return [
        (int(r), int(s), [int(b) for b in sizes.split(",")], float(loss), float(p)) for r, s, sizes, loss, p in found
    ]


@pytest.mark.long
def test_two_unequal_processes_train_the_model_of_one_and_the_slow_one_gets_less(tmp_path):
    alone, together = train(tmp_path, 1, "--steps", "30"), train(tmp_path, 2, "--steps", "30", "--slow-rank", "1")
    assert len(alone) == 30
    assert len(together) == 60
    by_step = {(rank, step): rest for rank, step, *rest in together}
    for _, step, sizes, loss, parameters in alone:
        assert sizes == [512]
        for rank in (0, 1):
            cut, their_loss, theirs = by_step[rank, step]
            assert sum(cut) == 512
            assert their_loss == pytest.approx(loss, rel=1e-4)
            assert theirs == pytest.approx(parameters, rel=1e-4, abs=1e-4)
        assert by_step[0, step] == by_step[1, step]  # bit for bit
    late = np.array([by_step[0, step][0] for step in range(15, 30)]).mean(0)
    assert late[0] > 1.5 * late[1]
    assert alone[-1][3] < 0.7 * alone[0][3]
