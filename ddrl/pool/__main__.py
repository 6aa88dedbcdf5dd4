"""`python -m ddrl.pool POOL`: who computes, who waits, what the devices do; add or cancel a task, change its weight."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from ddrl.core.errors import DdrlError, PoolError, RunDirError
from ddrl.core.files import read_json
from ddrl.core.forks import checked_output, keep_streams
from ddrl.core.plugins import remember_trust
from ddrl.pool.records import OWN, PoolSetup
from ddrl.telemetry import ControlClient, is_listening

TIMEOUT = 10.0  # [s] for a command and its answer


class EndedTask(msgspec.Struct):
    """A task, as the summary of its pool has it."""

    ok: bool
    reason: str
    rounds: int
    wait_seconds: float
    held_seconds: float
    busy_seconds: float


class EndedDevice(msgspec.Struct):
    """A device of a pool that has ended."""

    device: str
    leases: int
    busy_per_held: float | None
    busy_per_wall: float | None


class PoolSummary(msgspec.Struct):
    """What is read of a pool's summary.json."""

    makespan_seconds: float
    tasks: dict[str, EndedTask]
    devices: list[EndedDevice]


def main(arguments: list[str] | None = None) -> int:
    """Show or command the pool; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ddrl.pool", description=__doc__)
    parser.add_argument("pool", type=Path, help="directory of the pool")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--add", type=Path, metavar="FILE", help="begin one more task, from its file of settings")
    action.add_argument("--cancel", metavar="TASK", help="let a task save and end")
    action.add_argument("--reweight", nargs=2, metavar=("TASK", "WEIGHT"), help="change a task's weight in the queue")
    parser.add_argument("--json", action="store_true", help="print the pool's answer as JSON")
    known = parser.parse_args(arguments)
    try:
        command, arguments_of = _command(known.add, known.cancel, known.reweight)
        answer = ask_pool(known.pool, command, **arguments_of)
    except DdrlError as error:
        print(f"ddrl: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer) if known.json else _text(answer))
    return 0


def _command(add: Path | None, cancel: str | None, reweight: list[str] | None) -> tuple[str, dict[str, Any]]:
    """A command and its arguments."""
    if add is not None:
        return "add", {"file": str(add.absolute())}
    if cancel is not None:
        return "cancel", {"task": cancel}
    if reweight is None:
        return "status", {}
    try:
        return "reweight", {"task": reweight[0], "weight": float(reweight[1])}
    except ValueError:
        raise PoolError(f"--reweight {reweight[0]} {reweight[1]}: give a number") from None


def ask_pool(pool: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """The answer of a pool that runs; DdrlError with the reason where it refuses, or where no pool runs there."""
    setup = PoolSetup.read(pool)  # else there is no pool
    if not is_listening(pool / OWN):
        if command == "status" and (pool / "summary.json").exists():
            return ended_pool(pool, setup)
        end = "it has ended" if (pool / "summary.json").exists() else "it did not end in order"
        raise PoolError(
            f"the pool {pool} does not run: {end}; go on with python -m ddrl.run --resume {shlex.quote(str(pool))}"
        )
    if command == "add":  # who names the file here trusts what it names
        from ddrl.pool.mode import add_task, code_of_task

        wider, config = add_task(setup, Path(arguments["file"]))
        directory = Path(setup.directory)
        remember_trust(directory, code_of_task(wider.tasks[-1], config, directory))
    with ControlClient(pool / OWN, timeout=TIMEOUT) as client:
        return client.ask(command, **arguments).fields


def ended_pool(pool: Path, setup: PoolSetup) -> dict[str, Any]:
    """What `status` answers, of a pool that has ended: from its summary."""
    path = pool / "summary.json"
    summary = read_json(path, PoolSummary, RunDirError, f"{path} is no summary of a pool")
    weights = {task.name: task.weight for task in setup.tasks}
    tasks = [
        {
            **msgspec.structs.asdict(end),
            "task": name,
            "state": "ended" if end.ok else "failed",
            "device": None,
            "weight": weights.get(name, 1.0),
        }
        for name, end in summary.tasks.items()
    ]
    devices = [msgspec.structs.asdict(device) for device in summary.devices]
    return {"wall_seconds": summary.makespan_seconds, "ended": True, "tasks": tasks, "devices": devices}


def _text(answer: dict[str, Any]) -> str:
    if "tasks" not in answer:
        return ", ".join(f"{name}: {value}" for name, value in answer.items())
    lines = [
        f"{'task':<16} {'state':<10} {'device':<10} {'weight':>6} {'rounds':>7} {'waited':>9} {'held':>9} {'busy':>9}"
    ]
    for task in answer["tasks"]:
        reason = "" if task["reason"] is None else "   " + task["reason"].partition("\n")[0]
        seconds = "".join(f" {task[name]:>7.1f} s" for name in ("wait_seconds", "held_seconds", "busy_seconds"))
        lines.append(
            f"{task['task']:<16} {task['state']:<10} {task['device'] or '-':<10} {task['weight']:>6g} "
            f"{task['rounds']:>7}{seconds}{reason}"
        )
    lines.append(f"the pool has ended, after {answer['wall_seconds']:.1f} s" if "ended" in answer else "")
    for device in answer["devices"]:
        held = device["busy_per_held"]
        wall = device["busy_per_wall"]
        lines.append(
            f"{device['device']:<16} {device['leases']:>7} rounds   busy/held {_share(held)}   busy/wall {_share(wall)}"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    keep_streams(patience=None)
    sys.exit(checked_output(main()))
