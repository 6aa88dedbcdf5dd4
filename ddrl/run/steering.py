"""Steering a run from outside: what pause, resume, checkpoint, set and stop mean to a session.

The commands come over `telemetry.ControlServer`, which acknowledges and records each one; this module only acts on
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddrl.channels.board import Command
from ddrl.run.trainer import Trainer

Handlers = dict[str, Callable[..., Any]]


class Steering:
    """What was asked of a session from outside."""

    def __init__(self, trainer: Trainer, checkpoint: Callable[[], object], ask_scheme: Callable[[str], None]) -> None:
        self._trainer = trainer
        self._checkpoint = checkpoint
        self._ask_scheme = ask_scheme
        self.paused = False
        self.stop_requested = False

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
        state = self._trainer.state
        return {"env_steps": state.env_steps, "updates": state.updates, "paused": self.paused}

    def _pause(self) -> None:
        self.paused = True
        self._trainer.board.command = Command.PAUSE

    def _resume(self) -> None:
        self.paused = False
        self._trainer.board.command = Command.RUN

    def _stop(self) -> None:
        self.stop_requested = True

    def _set(self, name: str, value: Any) -> None:
        trainer = self._trainer
        if name == "learner.lr":
            trainer.lr_override = float(value)
        elif name == "rollout.epsilon":
            trainer.epsilon_override = None if value is None else float(value)
        elif name == "replay.samples_per_insert":
            trainer.limiter.change(float(value))
        else:  # cluster.scheme; the server has refused all other names
            self._ask_scheme(str(value))
