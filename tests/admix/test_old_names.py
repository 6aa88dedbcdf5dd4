"""Names of earlier versions, which programs, settings and saved runs hold, lead to the slice."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import ddrl
from ddrl.core.config import EnvConfig
from ddrl.core.plugins import foreign_code
from ddrl.envs import make_vector_env
from ddrl.run.cli import task_for
from tests.waiting import PATIENCE

# Put together here, so that no tool that renames modules changes them.
ENVIRONMENTS = ".".join(("ddrl", "envs", "admix"))
SERVING = ".".join(("ddrl", "run", "serving"))
SERVER = ".".join(("ddrl", "serve"))


def test_a_module_has_one_object_by_both_names() -> None:
    present = {
        ".".join(("ddrl", "core", "algorithm")): "ddrl.core.specs",
        ".".join(("ddrl", "envs", "partial")): "ddrl.envs.making",
        ".".join(("ddrl", "video")): "ddrl.evaluate",
        ".".join(("ddrl", "telemetry", "facts")): "ddrl.telemetry.summary",
        ENVIRONMENTS: "ddrl.admix",
        SERVER: "ddrl.admix",
        SERVING: "ddrl.admix.serving",
        f"{SERVER}.load": "ddrl.admix.load",
        f"{ENVIRONMENTS}.market": "ddrl.admix.market",
    }
    for old, new in present.items():
        assert importlib.import_module(old) is importlib.import_module(new)
    assert importlib.import_module("ddrl.admix").__spec__.name == "ddrl.admix"


def test_names_that_users_import_are_there() -> None:
    for module, names in ((ENVIRONMENTS, ("Problem", "logged", "open_log", "solve_dual")),
                          (SERVER, ("DisplayRequest", "Mixer", "Billing")), (SERVING, ("open_mixer",))):  # fmt: skip
        for name in names:
            assert getattr(importlib.import_module(module), name) is getattr(ddrl.admix, name)


def test_an_environment_of_a_saved_run_is_made_found_and_trusted() -> None:
    old = f"{ENVIRONMENTS}:generated"
    env = make_vector_env(EnvConfig(id=old, num_envs=2, kwargs={"requests": 50, "contracts": 3}))
    assert env.num_envs == 2
    assert env.spec.networks == "ddrl.admix.networks"
    task = task_for([f"env.id={old}"])
    assert task is not None
    assert task.stem == "admix"
    assert foreign_code({"env": {"id": old}}, Path()) == {}
    assert foreign_code({"env": {"id": "ddrl.admixture:generated"}}, Path()) != {}


def test_commands_by_old_names_run_and_unknown_ones_are_refused() -> None:
    for module, words in ((SERVER, "Serve the ad-mixing policy"), (f"{SERVER}.load", "load generator")):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        assert words in done.stdout
    done = subprocess.run([sys.executable, "-m", f"{SERVER}.none"], capture_output=True, text=True, timeout=PATIENCE)
    assert "No module named" in done.stderr


def test_nothing_of_the_slice_is_imported_before_it_is_asked_for() -> None:
    program = "import sys, ddrl.run.cli, ddrl.evaluate; print([name for name in sys.modules if 'admix' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "[]\n", done.stderr
