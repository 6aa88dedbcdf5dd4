"""Refused means unchanged: a pool that refuses what no other is asked goes on as that other one."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ddrl.core.errors import RunDirError
from ddrl.pool import mode
from ddrl.pool.mode import Pool, new_setup
from ddrl.pool.records import PoolSetup
from ddrl.run.cli import parse
from ddrl.telemetry.control import Request
from tests.run.launch import settings

ODD: list[Any] = [None, "", "\x00", "x" * 300, -1.0, 0.0, 1e308, float("nan"), float("inf"), 3.5]
FILES = {
    "broken.toml": "[learner]\nlr = -1.0\n",
    "cut.toml": "[learner",
    "other.toml": '[pool]\npolicy = "nonesuch"\n',
    "code.toml": '[env]\nid = "gift.evil:X"\n',
    "outside.toml": '[run]\ndir = "/tmp/elsewhere"\n',
    "weight.toml": "[pool]\nweight = -1.0\n",
    "pool.toml": "",
    "first.toml": "",
    f"{'x' * 80}.toml": "",
    os.fsdecode(b"\xff.toml"): "",
}


class Asked:
    """A pool whose tasks are started as names alone."""

    def __init__(self, folder: Path, name: str, stack: ExitStack) -> None:
        setup = new_setup(
            parse(["--tasks", str(folder / "first.toml"), *settings(f"run.dir={folder / name}", "pool.devices=cpu:0")])
        )
        self.folder = Path(setup.directory)
        self.pool = Pool(setup, stack)
        self.sent: list[tuple[int, int]] = []
        self.pool._keeper.start = self._start  # type: ignore[method-assign]
        for task in setup.tasks:
            self.pool._start(task)

    def _start(self, place: int) -> Any:
        return SimpleNamespace(place=place, pid=place, send=lambda number: self.sent.append((place, number)))

    def ask(self, command: str, **arguments: Any) -> Any:
        """The answer, without the times and the folder, in which two pools differ."""
        reply = self.pool._control._answer(Request(1, command, arguments))
        assert "\n" not in reply.text
        tasks = [
            {name: value for name, value in task.items() if name != "waits_seconds"}
            for task in reply.fields.get("tasks", ())
        ]
        fields = {name: value for name, value in reply.fields.items() if name not in ("wall_seconds", "run", "devices")}
        return reply.ok, reply.text, fields | {"tasks": tasks}

    def state(self) -> Any:
        pool = self.pool
        files = {path.name: path.read_bytes() for path in (self.folder / "pool").iterdir() if path.is_file()}
        tasks = {name: member.weight for name, member in pool._master._members.items()}
        children = (list(pool._running), sorted(pool._cancelled), self.sent, list(pool._keeper.places), pool._ends)
        names = [slot.name for slot in pool._master.table.slots]
        memory = Path(os.environ["XDG_STATE_HOME"], "ddrl", "trusted")
        trusted = memory.read_bytes() if memory.exists() else b""
        return files, tasks, repr(children), names, repr(pool._setup), sorted(self.folder.iterdir()), trusted


class Commands(RuleBasedStateMachine):
    """Two pools get the same sound commands; one of them broken ones as well."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="ddrl-pool-"))
        for name, text in FILES.items():
            (self.folder / name).write_text(text)
        os.mkfifo(self.folder / "fifo.toml")
        self.stack = ExitStack()
        self.pools = [Asked(self.folder, name, self.stack) for name in ("asked", "never")]
        self.added = 0

    def teardown(self) -> None:
        self.stack.close()
        shutil.rmtree(self.folder)

    def both(self, command: str, **arguments: Any) -> None:
        answers = [pool.ask(command, **arguments) for pool in self.pools]
        assert answers[0] == answers[1]

    def broken(self, command: str, **arguments: Any) -> None:
        before = self.pools[0].state()
        ok, text, _ = self.pools[0].ask(command, **arguments)
        assert not ok, text
        assert self.pools[0].state() == before

    @rule(weight=st.floats(1e-6, 1e6), number=st.integers(0, 3))
    def reweight(self, weight: float, number: int) -> None:
        self.both("reweight", task=f"task{number}" if number else "first", weight=weight)

    @rule()
    def add(self) -> None:
        self.added += 1
        file = self.folder / f"task{self.added}.toml"
        file.write_text("[pool]\nweight = 2.0\n")
        self.both("add", file=str(file))  # the third is one too many for both

    @rule()
    def cancel(self) -> None:
        self.both("cancel", task="first")

    @rule(name=st.sampled_from([*FILES, "absent.toml", "fifo.toml", "asked", "never/pool/plan.json"]))
    def add_what_is_no_task(self, name: str) -> None:
        self.broken("add", file=str(self.folder / name))

    @rule(value=st.sampled_from(ODD))
    def add_an_odd_value(self, value: Any) -> None:
        self.broken("add", file=value)

    @rule()
    def add_on_a_full_disk(self) -> None:
        (self.folder / "more.toml").write_text("")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(PoolSetup, "write", refuse)
            self.broken("add", file=str(self.folder / "more.toml"))

    @rule(task=st.sampled_from(["first", "", "none"]), weight=st.sampled_from(["1", None, *ODD[3:-1]]))
    def reweight_by_an_odd_value(self, task: str, weight: Any) -> None:
        if task == "first" and weight == 1e308:
            return self.both("reweight", task=task, weight=weight)
        return self.broken("reweight", task=task, weight=weight)

    @rule(command=st.sampled_from(["cancel", "status", "stop", "", "add", "reweight"]), value=st.sampled_from(ODD))
    def ask_anything(self, command: str, value: Any) -> None:
        self.broken(command, task=value, more=value)

    @invariant()
    def they_answer_alike(self) -> None:
        self.both("status")


def refuse(setup: PoolSetup) -> None:
    raise RunDirError("no room")


def test_refused_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(mode, "MAX_ADDED", 2)
    machine = hypothesis_settings(max_examples=10, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Commands, settings=machine)
