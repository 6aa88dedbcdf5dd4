"""Steering a run from outside: what pause, resume, checkpoint, set and stop mean to a task.

The commands come over `telemetry.ControlServer`, which acknowledges and records each one; this module only acts on
them. What was set live is part of the task's live settings, which checkpoints keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddrl.channels.board import Command
from ddrl.run.training import Training

Handlers = dict[str, Callable[..., Any]]


class Steering:
    """What was asked of a task from outside."""

    def __init__(self, training: Training, checkpoint: Callable[[], object], ask_scheme: Callable[[str], None]) -> None:
        self._training = training
        self._checkpoint = checkpoint
        self._ask_scheme = ask_scheme
        self.paused = False
        self.stop_requested = False

    def restore(self) -> None:
        """Apply again what had been set live before the checkpoint, or what the settings say now."""
        live = self._training.live
        configured = self._training.config.replay.samples_per_insert
        self._training.source.pacing.change(configured if live.samples_per_insert is None else live.samples_per_insert)
        if live.scheme is not None:
            self._ask_scheme(live.scheme)

    def handlers(self) -> Handlers:
        """A function per command."""
        return {
            "status": self._status,
            "pause": self._pause,
            "resume": self._resume,
            "stop": self._stop,
            "set": self._set,
            "checkpoint": lambda: {"path": str(self._checkpoint())},
        }

    def _status(self) -> dict[str, Any]:
        state = self._training.state
        return {"env_steps": state.env_steps, "updates": state.updates, "paused": self.paused}

    def _pause(self) -> None:
        self.paused = True
        self._training.ends.board.command = Command.PAUSE

    def _resume(self) -> None:
        self.paused = False
        self._training.ends.board.command = Command.RUN

    def _stop(self) -> None:
        self.stop_requested = True

    def _set(self, name: str, value: Any) -> None:
        live = self._training.live
        if name == "learner.lr":
            live.lr = float(value)
        elif name == "rollout.epsilon":
            live.epsilon = None if value is None else float(value)
        elif name == "replay.samples_per_insert":
            self._training.source.pacing.change(float(value))
            live.samples_per_insert = float(value)
        else:  # cluster.scheme; the server has refused all other names
            self._ask_scheme(str(value))
            live.scheme = str(value)
