"""How fast a rollout is: its whole loop (explore, act, step, record, count) against a bare Gymnasium vector loop with
the same policy.

    python -m benchmarks.run.rollout [--short] [--json FILE]

A rollout and a bare loop alternate in one process. The bare loop is the fastest that Gymnasium offers: its own vector
form of CartPole, SyncVectorEnv for LunarLander, AtariPreprocessing and FrameStackObservation in a SyncVectorEnv for
Pong, all without Gymnasium's checks of actions and of order, which ddrl leaves out too; the same ONNX Runtime session
settings and network, argmax, and nothing else: no exploration, nothing recorded.
Env steps exclude reset steps on both sides; Pong's frames are 4 for each env step.

Rates are per second of processor time: both loops are one thread that never waits, so this is the wall time of a
machine of their own, and neighbors on the machine disturb it little."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import onnxruntime

from benchmarks import harness
from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import ActingModel
from ddrl.channels.board import Board, Counters
from ddrl.channels.lane import Lane, StepWriter
from ddrl.channels.mailbox import Mailbox, MailboxReader
from ddrl.core.config import Config, EnvConfig, LearnerConfig, RolloutConfig
from ddrl.core.rows import row_schema
from ddrl.core.specs import VectorEnv
from ddrl.envs import make_vector_env
from ddrl.rollout.worker import Place, RolloutWorker

LANE_BYTES = 1 << 20
EPSILON = 0.05


class Rollout:
    """The rollout as it runs in a job; its lane is emptied as a trainer on another core would."""

    def __init__(self, env: VectorEnv, model: ActingModel, reader: MailboxReader) -> None:
        dtype = row_schema(env.spec).dtype
        self.lane = Lane.create(None, dtype, max(64, LANE_BYTES // dtype.itemsize))
        self.out = np.zeros(self.lane.capacity, dtype)
        self.counters = Counters.create(None, 1).row(0)
        self.worker = RolloutWorker(
            env,
            ActingPolicy(model, outputs=()),
            reader,
            StepWriter(self.lane, row_schema(env.spec), 0),
            self.counters,
            RolloutConfig(warmup_steps=0),
            Place(0, 1, 1),
            Board.create(None),
        )
        self._turns = max(1, self.lane.capacity // (2 * env.num_envs))

    def play(self, steps: int) -> int:
        """`steps` vector steps; env steps taken."""
        taken = 0
        step = self.worker.step
        for begin in range(0, steps, self._turns):
            for _ in range(min(self._turns, steps - begin)):
                taken += step()
            self.lane.pop(self.out)
        return taken


class Bare:
    """A Gymnasium vector and an ONNX Runtime session."""

    def __init__(self, vector_env: gymnasium.vector.VectorEnv, onnx: bytes, layout: Any, vector: np.ndarray) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.enable_cpu_mem_arena = False
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.session = onnxruntime.InferenceSession(onnx, options, providers=["CPUExecutionProvider"])
        inputs = {value.name for value in self.session.get_inputs()}
        self.parameters = {name: view for name, view in layout.views(vector).items() if name in inputs}
        self.env = vector_env
        self.observation = vector_env.reset(seed=1)[0]
        self.resetting = 0

    def play(self, steps: int) -> int:
        """`steps` vector steps; env steps taken."""
        env = self.env
        run = self.session.run
        parameters = self.parameters
        observation = self.observation
        resetting = self.resetting
        taken = 0
        for _ in range(steps):
            q = run(["q"], {"observation": observation, **parameters})[0]
            observation, _, terminated, truncated, *_ = env.step(q.argmax(1))
            taken += env.num_envs - resetting
            resetting = np.count_nonzero(terminated | truncated)
        self.observation = observation
        self.resetting = resetting
        return taken


def atari(env_id: str) -> gymnasium.Env:
    import ale_py  # noqa: F401  registers the games
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    return FrameStackObservation(AtariPreprocessing(lean(env_id, frameskip=1)), 4)


def lean(env_id: str, **kwargs: Any) -> gymnasium.Env:
    """Without the wrappers that check."""
    spec = copy.deepcopy(gymnasium.spec(env_id))
    spec.order_enforce = False
    return gymnasium.make(spec, disable_env_checker=True, **kwargs)


def gymnasium_vector(env_id: str, num_envs: int) -> gymnasium.vector.VectorEnv:
    if env_id.startswith("CartPole"):
        vector = gymnasium.make_vec(env_id, num_envs)
        vector.unwrapped.action_space = copy.copy(vector.action_space)
        vector.unwrapped.action_space.contains = lambda x: True  # type: ignore[method-assign]
        return vector
    return gymnasium.vector.SyncVectorEnv([lambda: atari(env_id) if "ALE/" in env_id else lean(env_id)] * num_envs)


def measure(env_id: str, num_envs: int, hidden: list[int], steps: int, rounds: int) -> dict[str, Any]:
    """Env steps/s of all cases, by rounds that alternate."""
    from ddrl.learner import Learner

    env = make_vector_env(EnvConfig(id=env_id), num_envs)
    spec = env.spec
    learner = Learner.of(Config(learner=LearnerConfig(hidden=hidden)), spec)
    model = learner.acting_model()
    onnx = model.onnx
    layout = model.layout
    vector = learner.parameters.vector.numpy()
    mailbox = Mailbox.create(None, layout.nbytes, 4, 1)
    mailbox.publish(vector, 1, (0.0, EPSILON))
    players = {
        "rollout": Rollout(env, model, mailbox.reader(0)),
        "bare": Bare(gymnasium_vector(env_id, num_envs), onnx, layout, vector),
    }
    taken: dict[str, list[int]] = {name: [] for name in players}

    def play(name: str) -> None:
        taken[name].append(players[name].play(steps))

    seconds = harness.interleave({name: partial(play, name) for name in players}, rounds, clock=time.process_time)
    rates = {
        name: [count / second for count, second in zip(taken[name][-rounds:], seconds[name], strict=True)]
        for name in players
    }
    found: dict[str, Any] = {"env": env_id, "num_envs": num_envs}
    found["env_steps_per_second"] = {name: harness.Timing.of(values) for name, values in rates.items()}
    found["rollout_to_bare"] = harness.ratios(rates["rollout"], rates["bare"])
    return found


def main() -> None:
    options = harness.arguments("rollout", (__doc__ or "").split("\n", 1)[0]).parse_args()
    rounds, scale = (7, 2) if options.short else (25, 1)
    cases = [
        ("CartPole-v1", 1, [64, 64], 4000),
        ("CartPole-v1", 8, [64, 64], 4000),
        ("CartPole-v1", 64, [64, 64], 2000),
        ("LunarLander-v3", 8, [64, 64], 600),
        ("ALE/Pong-v5", 8, [64, 64], 40),
    ]
    results = [measure(env_id, num_envs, hidden, steps // scale, rounds) for env_id, num_envs, hidden, steps in cases]
    rows = []
    for result in results:
        rates = {name: f"{rate.median:,.0f}" for name, rate in result["env_steps_per_second"].items()}
        name = f"{result['env']} x{result['num_envs']}"
        rows.append({"env steps/s": name, **rates, "rollout over bare": result["rollout_to_bare"]})
    harness.print_rows(rows)
    harness.save(options.json, {"results": results, "epsilon": EPSILON})


if __name__ == "__main__":
    main()
