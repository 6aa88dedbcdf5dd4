"""A run directory that a stranger prepared: no command imports its code before consent, or changes one of its files.

Every command runs in a process of its own, whose audit hook sees each import and each file that is opened to be
written, renamed or removed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddrl.run.task import Reason
from tests.run.test_resume import go_on, start
from tests.sources import ROOT

# Marks what is imported of the folder `gift`, and where ddrl opened something of it for writing.
HOOK = """
import os, sys
def hook(event, args):
    if event in ("import", "exec", "compile"):
        words = repr(args)
        if "gift.evil" in words or "gift/evil" in words or "evil_elsewhere" in words:
            os.write(9, ("IMPORT " + words[:200] + chr(10)).encode())
sys.addaudithook(hook)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    run = start(folder / "run")
    go_on(run, 300)
    run.task.end(Reason.INTERRUPTED)
    run.finish()
    return folder / "run"


def edit_config(run: Path, section: str, line: str) -> None:
    path = run / "config.toml"
    name = line.partition("=")[0].strip()
    lines = [text for text in path.read_text().splitlines() if not text.startswith(f"{name} =") or section == ""]
    at = lines.index(f"[{section}]")
    path.write_text("\n".join([*lines[: at + 1], line, *lines[at + 1 :]]) + "\n")


def edit_manifest(run: Path, change: Callable[[dict[str, object]], object]) -> None:
    path = run / "policy.json"
    document = json.loads(path.read_text())
    change(document)
    document["checksum"] = ""  # as earlier versions wrote it
    path.write_text(json.dumps(document))


def network(run: Path) -> None:
    edit_config(run, "learner", 'network = "gift.evil:X"')
    edit_manifest(run, lambda document: document.update(chooser="gift.evil:X"))


def dashed(run: Path) -> None:
    edit_config(run, "learner", 'network = "gift.evil-mod:X"')
    edit_manifest(run, lambda document: document.update(chooser="gift.evil-mod:X"))


def digit(run: Path) -> None:
    edit_config(run, "replay", 'source = "gift.evil:0"')
    edit_manifest(run, lambda document: document["env"].update(id="gift.evil:0"))  # type: ignore[attr-defined]


def two_colons(run: Path) -> None:
    edit_config(run, "env", 'id = "gift.evil:X:y"')
    edit_manifest(run, lambda document: document["env"].update(id="gift.evil:X:y"))  # type: ignore[attr-defined]


def own_factory(run: Path) -> None:
    table = '"ddrl.envs.making:partly_observed"'
    edit_config(run, "env", f"id = {table}")
    edit_config(run, "env", 'kwargs = {id = "gift.evil:Env-v0", keep = [0]}')
    edit_manifest(
        run,
        lambda document: document["env"].update(  # type: ignore[attr-defined]
            id="ddrl.envs.making:partly_observed", kwargs={"id": "gift.evil:Env-v0", "keep": [0]}
        ),
    )


def live_scheme(run: Path) -> None:
    from ddrl.run.checkpoint import _checksum

    [state] = (run / "checkpoints").glob("*/state.json")
    document = json.loads(state.read_text())
    document["live"]["scheme"] = "gift.evil:X"
    kept = {name: value for name, value in document.items() if name not in ("format", "checksum")}
    state.write_text(json.dumps(document | {"checksum": _checksum(kept)}))
    edit_manifest(run, lambda document: document.update(chooser="evil_elsewhere:X"))


COMMANDS = {
    "resume": ("-m", "ddrl.run", "--serial", "--resume", "gift"),
    "evaluate": ("-m", "ddrl.evaluate", "gift", "--episodes", "1"),
    "days": ("-m", "ddrl.evaluate", "gift", "--days", "1"),
    "film": ("-m", "ddrl.evaluate", "gift", "--video"),
    "serve": ("-m", "ddrl.serve", "gift", "--port", "0"),
    "play": ("-c", "import ddrl; ddrl.play('gift')"),
    "read": ("-c", "import ddrl; run = ddrl.Run('gift'); run.status; run.config; run.series(); run.close()"),
    "runs": ("-m", "ddrl.plan", "gift"),
}


def state_of(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.blake2b(path.read_bytes()).hexdigest() + oct(path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    "damage",
    [
        network,
        own_factory,
        live_scheme,
        *(pytest.param(one, marks=pytest.mark.long) for one in (dashed, digit, two_colons)),
    ],
)
def test_no_command_imports_a_strangers_code_or_changes_his_files(
    damage: Callable[[Path], None], template: Path, tmp_path: Path
) -> None:
    run = tmp_path / "gift"
    shutil.copytree(template, run)
    for name in ("evil.py", "evil-mod.py", "__init__.py"):
        (run / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "evil_elsewhere.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks" / "sitecustomize.py").write_text(HOOK)
    damage(run)
    before = state_of(run)
    report = tmp_path / "report"
    for command, arguments in COMMANDS.items():
        with report.open("ab") as file:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=tmp_path,
                env={
                    **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
                    "PYTHONPATH": f"{tmp_path / 'hooks'}:{tmp_path}:{ROOT}",
                    "XDG_STATE_HOME": str(tmp_path / "state"),
                },
                preexec_fn=lambda: os.dup2(file.fileno(), 9),
                pass_fds=(9,),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        words = done.stderr
        assert report.read_bytes() == b"", command
        assert not (tmp_path / "ran").exists(), command
        after = state_of(run)
        after.pop("lock", None)
        before.pop("lock", None)
        assert after == before, command
        if command not in ("read", "runs"):
            assert done.returncode, command
        if command not in ("read", "runs", "play"):
            assert "Traceback" not in words, words
