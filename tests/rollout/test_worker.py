"""The rollout's loop, on real channels in private memory."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
import pytest

from ddrl.acting.policy import ActingPolicy
from ddrl.channels.board import Board, Command, Counters
from ddrl.channels.lane import Lane, StepWriter
from ddrl.channels.mailbox import Mailbox
from ddrl.core.config import EnvConfig, RolloutConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.rows import RowKind, row_schema
from ddrl.envs import make_vector_env
from ddrl.envs.vectors import LoopVectorEnv
from ddrl.rollout.worker import Place, RolloutWorker
from tests.acting.networks import make_mlp, mlp_values, random_vector

GREEDY = RolloutConfig(warmup_steps=0)


class Job:
    """One rollout with its channels."""

    def __init__(
        self,
        config: RolloutConfig = GREEDY,
        *,
        num_envs: int = 4,
        capacity: int = 4096,
        seed: int = 1,
        env: Any = None,
        index: int = 0,
        count: int = 1,
        counters: Counters | None = None,
        nonfinite: Any = "refuse",
    ) -> None:
        self.env = make_vector_env(EnvConfig(), num_envs) if env is None else env
        model = make_mlp(self.env.spec)
        self.layout = model.layout
        self.lane = Lane.create(None, row_schema(self.env.spec).dtype, capacity)
        self.mailbox = Mailbox.create(None, self.layout.nbytes, 3, 2)
        self.board = Board.create(None)
        self.counters = counters or Counters.create(None, 1)
        self.worker = RolloutWorker(
            self.env,
            ActingPolicy(model),
            self.mailbox.reader(0),
            StepWriter(self.lane, row_schema(self.env.spec), 0, nonfinite=nonfinite),
            self.counters.row(0),
            config,
            Place(index, count, seed),
            self.board,
        )

    def publish(
        self, version: int, *, env_steps: float = 0, epsilon: float = 0.0, seed: int | None = None
    ) -> np.ndarray:
        vector = random_vector(self.layout, version if seed is None else seed)
        assert self.mailbox.publish(vector, version, (env_steps, epsilon))
        return vector

    def rows(self) -> np.ndarray:
        out = np.zeros(self.lane.capacity, self.lane.dtype)
        return out[: self.lane.pop(out)].copy()

    def play(self, steps: int) -> np.ndarray:
        for _ in range(steps):
            self.worker.step()
        return self.rows()

    def figures(self) -> dict[str, float]:
        self.worker.report()
        return dict(zip(self.counters.columns, self.counters.table()[0].tolist(), strict=True))


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a rollout's process; the test's own may have loaded it."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_rows_are_the_episodes_that_were_played() -> None:
    job = Job(seed=7)
    job.publish(3, epsilon=0.3)
    rows = job.play(300)
    env_seed = int(np.random.SeedSequence(7).generate_state(2)[0])
    again = make_vector_env(EnvConfig(), 4)
    observation, step_of, over = again.reset(env_seed), [0] * 4, [False] * 4
    streams = [iter(rows[rows["stream"] == index]) for index in range(4)]
    ends = 0
    for _ in range(300):
        taken = [None if over[index] else next(streams[index]) for index in range(4)]
        step = again.step(np.array([0 if row is None else row["action"] for row in taken]))
        for index, row in enumerate(taken):
            if row is None:
                over[index], step_of[index] = False, 0
                continue
            np.testing.assert_array_equal(row["state"], observation[index])
            assert (row["kind"], row["step"], row["reward"], row["policy_version"]) == (
                RowKind.STEP,
                step_of[index],
                step.reward[index],
                3,
            )
            step_of[index] += 1
            if step.terminated[index] or step.truncated[index]:
                final = next(streams[index])
                np.testing.assert_array_equal(final["state"], step.observation[index])
                assert final["kind"] == (RowKind.TERMINATED if step.terminated[index] else RowKind.TRUNCATED)
                over[index] = True
                ends += 1
        observation = step.observation
    assert all(next(stream, None) is None for stream in streams)
    assert ends > 10


def test_the_newest_version_acts_from_the_next_step_on() -> None:
    job = Job()
    for version in range(1, 12):
        vector = job.publish(version)
        rows = job.play(3)
        steps = rows[rows["kind"] == RowKind.STEP]
        assert np.all(rows["policy_version"] == version)
        np.testing.assert_array_equal(steps["action"], mlp_values(job.layout, vector, steps["state"]).argmax(axis=1))
    assert job.figures()["fetches"] == 11


def test_the_relay_hears_at_once_that_a_new_version_acts_and_of_nothing_else() -> None:
    job = Job()
    told, bell = job.counters.row(0)["policy_version"], job.board.relay_bell
    for version in (3, 4):
        job.publish(version)
        rung = bell.value
        job.worker.step()
        assert told.value == version
        assert bell.value != rung
        rung = bell.value
        job.play(5)
        assert bell.value == rung


def test_with_refresh_at_episode_ends_a_version_stays_until_one_ends() -> None:
    job = Job(RolloutConfig(warmup_steps=0, refresh="episode"), num_envs=1)
    job.publish(1)
    seen = []
    for turn in range(200):
        rows = job.play(1)
        seen += [(int(row["policy_version"]), int(row["kind"])) for row in rows]
        job.publish(turn + 2)
    changes = [place for place in range(1, len(seen)) if seen[place][0] != seen[place - 1][0]]
    assert len(changes) > 3
    assert all(seen[place - 1][1] != RowKind.STEP for place in changes)


def test_actions_are_random_until_something_is_published_and_the_warm_up_is_over() -> None:
    job = Job(RolloutConfig(warmup_steps=100), num_envs=8)
    before = job.play(30)
    assert set(before["policy_version"]) == {0}
    shown = [job.figures()["epsilon"]]
    first = job.publish(1, env_steps=99)
    during = job.play(30)
    shown.append(job.figures()["epsilon"])
    second = job.publish(2, env_steps=100)
    after = job.play(30)
    shown.append(job.figures()["epsilon"])
    assert shown == [1.0, 1.0, 0.0]
    shares = []
    for rows, vector in ((before, first), (during, first), (after, second)):
        best = mlp_values(job.layout, vector, rows["state"]).argmax(axis=1)
        shares.append(np.mean((rows["action"] == best)[rows["kind"] == RowKind.STEP]))
    assert shares[0] < 0.7
    assert shares[1] < 0.7
    assert shares[2] == 1.0


@pytest.mark.parametrize(("index", "epsilon"), [(0, 0.4), (2, 0.4**8)])
def test_the_published_epsilon_is_spread_over_the_rollouts(index: int, epsilon: float) -> None:
    job = Job(RolloutConfig(warmup_steps=0, epsilon_spread=7), index=index, count=3)
    job.publish(1, epsilon=0.4)
    job.play(1)
    assert job.figures()["epsilon"] == pytest.approx(epsilon)


def test_a_rollout_of_a_family_chooses_by_its_own_entry() -> None:
    family = [{}, {"exploration": 0.0}]
    for index, share in ((0, 0.25), (1, 0.0)):  # half the random actions of two are the best one
        job = Job(RolloutConfig(warmup_steps=0, by_rollout=family), index=index, count=2)
        vector = job.publish(1, epsilon=0.5)
        rows = job.play(400)
        rows = rows[rows["kind"] == RowKind.STEP]
        other = np.mean(rows["action"] != mlp_values(job.layout, vector, rows["state"]).argmax(axis=1))
        assert other == pytest.approx(share, abs=0.06 if share else 0.0)


def test_an_action_computed_from_a_slot_that_was_taken_meanwhile_is_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = Job()
    job.publish(1)
    job.play(1)
    newest = {}
    act = job.worker._policy.act

    def overtaken(observation: np.ndarray, vector: np.ndarray) -> dict[str, np.ndarray]:
        outputs = act(observation, vector)
        if not newest:  # another reader holds a slot too, so the fourth version has nowhere else to go
            for version in (2, 3, 4):
                newest[version] = job.publish(version)
                if version == 2:
                    beside.pin()
        return {"q": -outputs["q"]} if job.worker._pin.version == 1 else outputs

    beside = job.mailbox.reader(1)
    monkeypatch.setattr(job.worker._policy, "act", overtaken)
    rows = job.play(1)
    steps = rows[rows["kind"] == RowKind.STEP]
    assert set(steps["policy_version"]) == {4}
    np.testing.assert_array_equal(steps["action"], mlp_values(job.layout, newest[4], steps["state"]).argmax(axis=1))
    assert job.mailbox.revoked == 1


def test_the_same_seed_gives_the_same_rows_and_reset_forgets_what_was_before() -> None:
    first, second, other = Job(seed=5), Job(seed=5), Job(seed=6)
    rows = []
    for job in (first, second, other):
        job.publish(1, epsilon=0.5)
        rows.append(job.play(100))
    np.testing.assert_array_equal(rows[0], rows[1])
    assert not np.array_equal(rows[0], rows[2])
    for job in (first, other):
        job.worker.reset(99)
    np.testing.assert_array_equal(first.play(100), other.play(100))


def test_counters_tell_what_was_played() -> None:
    job = Job()
    job.publish(1, epsilon=1.0)
    rows = job.play(400)
    figures = job.figures()
    steps = rows[rows["kind"] == RowKind.STEP]
    ends = rows[rows["kind"] != RowKind.STEP]
    assert figures["env_steps"] == len(steps)
    assert figures["episodes"] == len(ends) > 20
    assert figures["episode_steps_sum"] == ends["step"].sum()
    assert figures["return_sum"] == ends["step"].sum()  # CartPole gives 1 a step
    assert (figures["policy_version"], figures["epsilon"], figures["rows_dropped"]) == (1, 1, 0)
    assert figures["act_seconds"] > 0
    assert figures["env_seconds"] > 0
    assert figures["heartbeat"] > 1.6e9


class Unwell(gymnasium.Env):
    """Every third state holds what is no number, or every seventh reward."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def __init__(self, *, rewards: bool = False) -> None:
        self.rewards = rewards

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        seen = np.full(2, np.nan if self.steps % 3 == 0 and not self.rewards else 0.0, np.float32)
        reward = np.nan if self.steps % 7 == 0 and self.rewards else 1.0
        return seen, reward, self.steps % 4 == 0, False, {}


def test_what_a_report_has_counted_the_next_one_does_not_count_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddrl.rollout.worker.ROOM_WAIT", 1e-3)
    job = Job(env=LoopVectorEnv("unwell", [Unwell(), Unwell()]), capacity=40, nonfinite="drop")
    job.publish(1)
    job.board.command = Command.STOP  # nobody is waited for beyond the first look
    while not job.lane.waits:
        job.worker.step()
    first, second, third = (job.figures() for _ in range(3))
    assert first["wait_seconds"] == pytest.approx(job.lane.wait_seconds)
    assert first["rows_dropped"] == job.worker._writer.nonfinite > 0
    for name in ("env_steps", "episodes", "episode_steps_sum", "env_seconds", "act_seconds", "fetches"):
        assert first[name] > 0
    for name in first.keys() - {"heartbeat"}:
        assert (second[name], third[name]) == pytest.approx((first[name],) * 2, nan_ok=True), name


def test_an_episode_of_which_a_reward_was_dropped_has_no_return_and_the_others_keep_theirs() -> None:
    job = Job(env=LoopVectorEnv("unwell", [Unwell(rewards=True)]), nonfinite="drop")
    for _ in range(7 * 5):  # seven episodes of four steps and a reset: the 7th, 14th, 21st and 28th reward is none
        job.worker.step()
    figures = job.figures()
    assert (figures["episodes"], figures["return_sum"], figures["episode_steps_sum"]) == (3, 12, 12)
    assert figures["rows_dropped"] > 0


class Paying(gymnasium.Env):
    """Episodes of four steps that pay 5 each."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 5.0, self.steps == 4, False, {}


def test_a_rollout_made_while_another_one_still_plays_in_its_place_adds_to_what_that_one_counts() -> None:
    first = Job(seed=1)
    rows = [first.play(100)]
    first.worker.report()
    second = Job(seed=2, counters=first.counters)
    rows.append(first.play(100))
    first.worker.report()
    rows.append(second.play(100))
    figures = second.figures()
    steps, ends = (sum(int(np.sum((some["kind"] == RowKind.STEP) == are)) for some in rows) for are in (True, False))
    assert (figures["env_steps"], figures["episodes"]) == (steps, ends)
    assert figures["return_sum"] == figures["episode_steps_sum"] <= steps


def test_rewards_are_recorded_clipped_and_returns_counted_as_they_were_paid() -> None:
    job = Job(env=LoopVectorEnv("paying", [Paying(), Paying()], reward_clip=True))
    job.publish(1)
    rows = job.play(21)
    figures = job.figures()
    assert set(rows["reward"][rows["kind"] == RowKind.STEP]) == {1.0}
    assert figures["episodes"] == 8
    assert figures["return_sum"] == 8 * 4 * 5.0


def test_a_rollout_waits_at_a_full_lane_and_a_stop_ends_the_wait(without_torch: None) -> None:
    job = Job(capacity=8)
    thread = threading.Thread(target=job.worker.run)
    thread.start()
    while job.lane.waits == 0:
        job.board.trainer_bell.wait(job.board.trainer_bell.value, 0.01)
    assert len(job.lane) == 8
    job.board.command = Command.STOP
    thread.join()
    figures = job.figures()
    assert figures["wait_seconds"] > 0
    assert figures["env_steps"] <= 12


def test_a_stop_that_is_seen_at_a_full_lane_before_its_bell_ends_the_rollout(without_torch: None) -> None:
    job = Job(capacity=8)
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(job.worker.run)
        while job.lane.waits == 0:
            job.board.trainer_bell.wait(job.board.trainer_bell.value, 0.01)
        job.board._command.set(int(Command.STOP))  # pyright: ignore[reportPrivateUsage]  # it has not rung yet
        ended.result(60)
    assert job.figures()["env_steps"] <= 12


def test_a_pause_holds_the_rollout_until_it_ends(without_torch: None) -> None:
    job = Job()
    job.board.command = Command.PAUSE
    thread = threading.Thread(target=job.worker.run)
    thread.start()
    heartbeat = job.counters.columns.index("heartbeat")
    while np.isnan(job.counters.table()[0][heartbeat]):  # it has been waiting for a while
        job.board.trainer_bell.wait(job.board.trainer_bell.value, 0.01)
    assert job.lane.pushed == 0
    job.board.command = Command.RUN
    while job.lane.pushed < 100:
        job.board.trainer_bell.wait(job.board.trainer_bell.value, 0.01)
    job.board.command = Command.STOP
    thread.join()
    assert job.figures()["wait_seconds"] > 0


def test_after_the_run_the_slot_is_free_and_a_further_step_pins_again(without_torch: None) -> None:
    job = Job()
    job.publish(1)
    job.play(2)
    job.board.command = Command.STOP
    job.worker.run()
    assert job.mailbox.kernel.reader_process(0)[0] != 0
    for version in range(2, 8):
        job.publish(version)
    assert job.mailbox.revoked == 0
    assert set(job.play(1)["policy_version"]) == {7}


def test_a_process_with_torch_does_not_start_to_roll_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setitem(sys.modules, "torch", sys)
    with pytest.raises(NetworkError, match="torch is loaded"):
        job.worker.run()
    assert job.lane.pushed == 0


class Failing(gymnasium.Env):
    """Fails at its tenth step."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> Any:
        self.steps += 1
        if self.steps == 10:
            raise RuntimeError("the robot fell over")
        return np.zeros(2, np.float32), 1.0, False, False, {}


def test_an_environments_exception_ends_the_run_with_its_traceback(without_torch: None) -> None:
    job = Job(env=LoopVectorEnv("failing", [Failing()]))
    with pytest.raises(RuntimeError, match="the robot fell over") as failure:
        job.worker.run()
    assert failure.traceback[-1].name == "step"
    assert job.lane.pushed == 9


def test_continuous_actions_are_refused() -> None:
    job = Job()
    pendulum = make_vector_env(EnvConfig(id="Pendulum-v1"), 1)
    with pytest.raises(ConfigError, match="Pendulum-v1 has continuous actions"):
        RolloutWorker(
            pendulum,
            job.worker._policy,
            job.mailbox.reader(1),
            None,
            job.counters.row(0),
            GREEDY,
            Place(0, 1, 0),
            job.board,
        )


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "ALE/Pong-v5"])
def test_other_environments_roll_out_too(env_id: str) -> None:
    job = Job(env=make_vector_env(EnvConfig(id=env_id), 2))
    job.publish(1, epsilon=0.1)
    rows = job.play(30)
    assert (rows["kind"] == RowKind.STEP).sum() == 60
    assert rows["state"].shape[1:] == job.env.spec.frame.shape
