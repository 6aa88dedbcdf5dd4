"""What a serial run learned and what it learned from, as hashes that do not depend on the processor.

    python tests/run/saved_bits.py CASE FOLDER          one JSON object with the hashes of a case
    python tests/run/saved_bits.py all FOLDER           FOLDER/CASE.json of each, and its output as FOLDER/CASE.txt

Run as a process of its own (`environment` holds the variables that it needs): numerical libraries are told to use
only the instructions that every x86-64 processor has. The hashes are taken from the rows that replay is given, the
batches that it returns, and the tensors of the checkpoint, so they outlive a change of the files' formats.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

SHORT = {
    "run.max_env_steps": 1500,
    "run.checkpoint_period": 700,
    "run.target_return": 1e9,
    "env.num_envs": 4,
    "replay.min_size": 200,
    "replay.samples_per_insert": 4,
    "rollout.warmup_steps": 100,
    "rollout.epsilon_decay_steps": 1000,
    "learner.batch_size": 16,
    "learner.target_period": 20,
    "learner.lr_end_fraction": 0.1,
    "learner.device": "cpu",
    "evaluation.period": 0,
    "telemetry.live": False,
}
SCREENS = {"env.id": "saved_bits:screens", "run.max_env_steps": 900, "run.checkpoint_period": 0}
CASES: dict[str, dict[str, Any]] = {
    "default": {"learner.hidden": [32, 32], "run.seed": 11},
    "plain": {
        "learner.hidden": [32],
        "learner.dueling": "none",
        "learner.double": False,
        "learner.loss": "mse",
        "replay.selector": "uniform",
        "replay.n_step": 1,
        "run.seed": 12,
    },
    "softmax": {"learner.hidden": [16, 16], "learner.dueling": "softmax", "run.seed": 13},
    "screens": {**SCREENS, "learner.network": "small_cnn", "learner.batch_size": 8, "run.seed": 14},
    "resumed": {
        "learner.hidden": [24],
        "replay.capacity": 600,
        "replay.eviction": "second_chance",
        "rollout.epsilon_spread": 3.0,
        "run.seed": 15,
    },
}
RESUMED_STEPS = 2400  # env steps at which the resumed case ends
CLASSES = ("online", "target", "first_moment", "second_moment")  # of tensors in learner.safetensors


class Screens:
    """N screens [2, 25, 25] of uint8, two frames stacked: a bright column moves by the action and pays at the right."""

    def __init__(self, num_envs: int) -> None:
        from ddrl.core.specs import ArraySpec, EnvSpec

        self.num_envs = num_envs
        self.spec = EnvSpec("screens", ArraySpec((2, 25, 25), "uint8"), 3, frame_stack=2)

    def reset(self, seed: int) -> np.ndarray:
        self._random = np.random.default_rng(seed)
        self._place = np.zeros(self.num_envs, np.int64)
        self._steps = np.zeros(self.num_envs, np.int64)
        self._over = np.zeros(self.num_envs, bool)
        self._stack = np.zeros((self.num_envs, *self.spec.observation.shape), np.uint8)
        for index in range(self.num_envs):
            self._begin(index)
        return self._stack.copy()

    def step(self, action: np.ndarray) -> Any:
        from ddrl.core.specs import EnvStep

        resetting = self._over
        self._place = np.clip(self._place + 2 * (np.asarray(action) - 1), 0, 24)
        self._steps += 1
        terminated = (self._place >= 22) & ~resetting
        truncated = (self._steps >= 30) & ~terminated & ~resetting
        self._stack[:, 0] = self._stack[:, 1]
        self._stack[:, 1] = self._frames()
        for index in np.flatnonzero(resetting):
            self._begin(int(index))
        reward = np.where(terminated, 1.0, -0.01) * ~resetting
        self._over = terminated | truncated
        return EnvStep(self._stack.copy(), reward.astype(np.float32), terminated, truncated, reward.astype(np.float64))

    def close(self) -> None:
        """Nothing is held."""

    def _begin(self, index: int) -> None:
        self._place[index] = self._random.integers(4, 12)
        self._steps[index] = 0
        self._stack[index] = self._frames()[index]

    def _frames(self) -> np.ndarray:
        frames = np.zeros((self.num_envs, 25, 25), np.uint8)
        frames[np.arange(self.num_envs), :, self._place] = 200
        return frames


def screens(num_envs: int) -> Screens:
    """The factory that env.id names."""
    return Screens(num_envs)


def environment() -> dict[str, str]:
    """The variables under which every x86-64 processor computes the same bits."""
    return {
        **os.environ,
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


class _Recorded:
    """Hashes what replay is given and what it returns."""

    def __init__(self) -> None:
        from ddrl.learner import checks
        from ddrl.replay import ExperienceReplay

        self.rows, self.batches, self.updates = hashlib.sha256(), hashlib.sha256(), 0
        self._record, self._sample = ExperienceReplay.record_rows, ExperienceReplay.sample
        recorded = self
        paused = False  # while an algorithm is checked on a replay of its own
        check = checks.checked_learner

        def checked_learner(*given: Any) -> Any:
            nonlocal paused
            paused = True
            learner = check(*given)
            paused = False
            return learner

        def record_rows(replay: Any, rows: np.ndarray, *more: Any, **named: Any) -> Any:
            if paused:
                return recorded._record(replay, rows, *more, **named)
            for name in ("stream", "step", "kind", "reward", "action", "state", "policy_version"):
                recorded.rows.update(np.ascontiguousarray(rows[name]).tobytes())
            return recorded._record(replay, rows, *more, **named)

        def sample(replay: Any, *more: Any, **named: Any) -> Any:
            batch = recorded._sample(replay, *more, **named)
            if paused:
                return batch
            recorded.updates += 1
            for name in ("s_tm1", "a_tm1", "r_t", "discount_t", "s_t", "pick_pos", "weight", "policy_version"):
                recorded.batches.update(np.ascontiguousarray(getattr(batch, name)).tobytes())
            return batch

        checks.checked_learner = checked_learner
        ExperienceReplay.record_rows, ExperienceReplay.sample = record_rows, sample  # type: ignore[method-assign]


def parameters(folder: Path) -> str:
    """Hash of the networks and moments in a run's newest checkpoint, by name; the name of a part is left out."""
    from safetensors.numpy import load_file

    newest = max((folder / "checkpoints").iterdir())
    tensors = {}
    for name, array in load_file(newest / "learner.safetensors").items():
        words = name.split(".")
        for kind in CLASSES:
            if kind in words[:2]:
                tensors[".".join(words[words.index(kind) :])] = array
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def hashes(case: str, folder: Path) -> dict[str, Any]:
    """Play a case into `folder`."""
    from ddrl.core.config import ReplayConfig
    from ddrl.run.__main__ import main

    settings = {**SHORT, **CASES[case], "run.dir": str(folder)}
    if hasattr(ReplayConfig(), "priority_offset"):
        settings["replay.priority_offset"] = 0.0
    recorded = _Recorded()
    arguments = ["cartpole", "--serial"]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={json.dumps(value)}"]
    assert main(arguments) == 0
    if case == "resumed":
        assert main(["--serial", "--resume", str(folder), "--set", f"run.max_env_steps={RESUMED_STEPS}"]) == 0
    return {
        "updates": recorded.updates,
        "parameters": parameters(folder),
        "rows": recorded.rows.hexdigest(),
        "batches": recorded.batches.hexdigest(),
    }


def all_hashes(folder: Path) -> None:
    """Play each case in a fork of its own: the import of torch is most of what a process takes."""
    from ddrl.run.process import load_torch

    load_torch()
    for case in CASES:
        pid = os.fork()
        if pid == 0:
            output = os.open(folder / f"{case}.txt", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                (folder / f"{case}.json").write_text(json.dumps(hashes(case, folder / case)))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    if sys.argv[1] == "all":
        all_hashes(Path(sys.argv[2]))
    else:
        print(json.dumps(hashes(sys.argv[1], Path(sys.argv[2]))))
