# type: ignore (the imports are those of the peer's own interpreter)
"""rejax's PQN on CartPole until it is solved; prints one JSON line. Run by the peer's own interpreter (rejax 0.1.3,
gymnax 0.0.9): `python rejax_solve.py SEED SETTINGS TARGET`, SETTINGS being a name of SETTINGS.

Stops by ddrl's rule: once 20 episodes, played every 4,096 env steps, and then 100 further ones both reach the target.
The time of those episodes, and of compiling what plays them, is reported apart, so that it can be left out. Training is
compiled as a whole between two evaluations; warm seconds are those without its compilation and what comes before."""

import importlib.metadata
import json
import sys
import time

began = time.perf_counter(), time.process_time()

import jax  # noqa: E402
from rejax import PQN  # noqa: E402
from rejax.evaluate import evaluate  # noqa: E402

MOST = 524_288  # env steps, those of its own settings
COMMON = {
    "env": "CartPole-v1",
    "num_envs": 16,
    "num_steps": 128,
    "num_minibatches": 16,
    "num_epochs": 5,
    "max_grad_norm": 10.0,
    "eps_start": 1.0,
    "eps_end": 0.05,
    "gamma": 0.99,
    "total_timesteps": MOST,
}
SETTINGS = {
    "own": {"learning_rate": 3e-4, "td_lambda": 0.9, "exploration_fraction": 0.5},  # of its repository
    "ours": {"learning_rate": 2e-3, "td_lambda": 0.65, "exploration_fraction": 50_000 / MOST},  # of ddrl's task
}
ITERATIONS = 2  # between two evaluations: 4,096 env steps

seed = int(sys.argv[1])
target = float(sys.argv[3])


def now():
    return time.perf_counter(), time.process_time()


def since(begin):
    return [after - before for after, before in zip(now(), begin, strict=True)]


class Spent:
    """Seconds of the wall's clock and of processors."""

    def __init__(self):
        self.seconds = [0.0, 0.0]

    def add(self, begin):
        self.seconds = [before + more for before, more in zip(self.seconds, since(begin), strict=True)]


algorithm = PQN.create(**COMMON, **SETTINGS[sys.argv[2]])


def play(state, episodes, key):
    act = algorithm.make_act(state)
    return evaluate(act, key, algorithm.env, algorithm.env_params, episodes, 500)[1].mean()


def iterate(state):
    return jax.lax.scan(lambda state, _: (algorithm.train_iteration(state), None), state, None, ITERATIONS)[0]


state = algorithm.init_state(jax.random.PRNGKey(seed))
train = jax.jit(iterate).lower(state).compile()
key = jax.random.PRNGKey(1_000_000 + seed)
evaluation = Spent()
confirmation = Spent()
begin = now()
judge = {episodes: jax.jit(play, static_argnums=1).lower(state, episodes, key).compile() for episodes in (20, 100)}
evaluation.add(begin)
training = Spent()
env_steps = 0
reached = False
while env_steps < MOST and not reached:
    begin = now()
    state = jax.block_until_ready(train(state))
    training.add(begin)
    env_steps += ITERATIONS * COMMON["num_envs"] * COMMON["num_steps"]
    key, first, second, third = jax.random.split(key, 4)
    begin = now()
    mean = float(judge[20](state, first))
    evaluation.add(begin)
    if mean >= target:
        begin = now()
        reached = float(judge[100](state, second)) >= target
        evaluation.add(begin)
begin = now()
confirmed = float(judge[100](state, third))
confirmation.add(begin)
whole = since(began)
print(
    json.dumps(
        {
            "env_steps": env_steps,
            "reached": reached,
            "confirmed_mean": confirmed,
            "evaluation_seconds": evaluation.seconds[0],
            "confirmation_seconds": confirmation.seconds[0],
            "processor_seconds": whole[1] - evaluation.seconds[1] - confirmation.seconds[1],
            "warm_seconds": training.seconds[0],
            "versions": {name: importlib.metadata.version(name) for name in ("rejax", "gymnax", "jax")},
        }
    )
)
