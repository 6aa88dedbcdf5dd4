"""The Python of docs runs as it stands there; a page whose blocks nothing runs is found."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddrl.core.errors import RunDirError
from tests.admix.material import env_config, save_run
from tests.admix.test_server import serving
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE, wait_until

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WITH_TESTS_OF_THEIR_OWN = {
    "README.md": "test_readme.py",
    "docs/extending.md": "test_extending.py",
    "docs/own_data.md": "test_own_data.py",
    "docs/replay.md": "../replay/test_documentation.py",
}
RUN_HERE = {
    "docs/admix.md": 2,
    "docs/distribution.md": 2,
    "docs/learning.md": 2,
    "docs/microbatch.md": 1,
    "docs/serving.md": 2,
    "docs/telemetry.md": 3,
}


def blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def run(code: str, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """The names after a block; its file name makes a traceback say where it is from."""
    names = {"__name__": "a block of docs"} if names is None else names
    exec(compile(code, "a block of docs", "exec", dont_inherit=True), names)
    return names


def test_every_block_is_run_by_some_test() -> None:
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
    found = {page: len(blocks(page)) for page in pages if blocks(page)}
    for page, test in WITH_TESTS_OF_THEIR_OWN.items():
        assert Path(page).name in (ROOT / "tests" / "docs" / test).resolve().read_text()
        found.pop(page, None)
    assert found == RUN_HERE


def test_the_market_steps_and_a_baseline_is_tuned() -> None:
    environment, baseline = blocks("docs/admix.md")
    names = run(environment)
    assert names["step"].reward.shape == (4,)
    smaller = baseline.replace("requests=4000", "requests=400")
    assert smaller != baseline
    settings = run(smaller)["settings"]
    assert settings.kp > 0.0


def test_a_scheme_of_ones_own_plans() -> None:
    scheme, _ = blocks("docs/distribution.md")
    imports = """
from dataclasses import dataclass
from ddrl.core.config import setting
from ddrl.distribution.schemes import Scheme, whole_models
"""
    plan = run(imports + scheme)["Hops"].plan(5, 1000, hop=2)
    assert set(zip(plan.source, plan.target, strict=True)) == {(0, 1), (1, 2), (0, 3), (3, 4), (0, 5)}


def test_a_broadcast_of_one_rank_is_published_loaded_and_pinned() -> None:
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    _, alone = blocks("docs/distribution.md")
    done = subprocess.run(  # MPI is started in a process of its own
        [sys.executable, "-c", alone], capture_output=True, text=True, timeout=PATIENCE, env=environment()
    )
    assert done.returncode == 0, done.stderr


def test_a_network_acts_and_a_learner_learns(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs the extra [train]")
    import numpy as np

    from ddrl.core.config import Config
    from ddrl.learner import Learner
    from tests.learner.learner_cases import VECTOR, random_batch

    network, learner = blocks("docs/learning.md")
    values = run(network)["Net"](VECTOR)(torch.zeros(2, *VECTOR.observation.shape))
    assert values.shape == (2, VECTOR.num_actions)

    class Slot:
        data = np.zeros(Learner.of(Config(), VECTOR).parameters.layout.nbytes, np.uint8)

    given = {"config": Config(), "spec": VECTOR, "batch": random_batch(VECTOR, 8, seed=1), "slot": Slot}
    names = run(learner, {"Learner": Learner, "env_steps": 100, "path": tmp_path / "state", **given})
    assert Slot.data.any()
    assert names["result"].figures["loss"] > 0.0


def test_sizes_follow_what_nodes_took() -> None:
    names = run(blocks("docs/microbatch.md")[0])
    assert sum(names["sizes"]) == 256
    assert min(names["sizes"]) == names["sizes"][3]


def test_a_policy_is_asked_over_http_and_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    http, process = blocks("docs/serving.md")
    save_run(tmp_path / "runs" / "NAME", env_config(regions=4, ages=4), penalty=1.0)
    monkeypatch.chdir(tmp_path)
    with serving(tmp_path / "runs" / "NAME") as server:
        names = run(http.replace("8700", str(server.port)))
    names["connection"].close()
    run(process)


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Any]:
    """A run that would last for long."""
    import ddrl

    endless = {"run.max_env_steps": 10**9, "run.target_return": float("inf")}
    run = ddrl.start({"env.id": "CartPole-v1", "run.dir": str(tmp_path / "run"), **endless})
    try:
        yield run
    finally:
        run.stop()


def test_a_run_is_read_steered_and_listened_to(living: Any) -> None:
    import ddrl

    for package in ("torch", "pandas"):
        pytest.importorskip(package, reason="needs the extras [train] and [plots]")
    reading, steering, listening = (
        re.sub(r'"runs/[^"]*"', repr(str(living.path)), b) for b in blocks("docs/telemetry.md")
    )

    def begun() -> bool:
        with contextlib.suppress(RunDirError), ddrl.Run(living.path):
            return True
        return False

    wait_until(begun, "the run writes no telemetry")
    names = run(reading)
    assert names["run"].path == living.path
    run(listening)
    run(steering)
    living.stop()
    with ddrl.Run(living.path) as ended:
        assert ended.state == "ended"
