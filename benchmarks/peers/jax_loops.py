"""Training loops compiled by JAX, sbx's TD3 and rejax's PQN, on the work of benchmarks.learning.compiled; prints one
JSON line. Run by the peer's own interpreter (sbx-rl 0.28.0, rejax 0.1.3 with gymnax 0.0.9): `python jax_loops.py CASE
ENV_STEPS`, CASE being a name of CASES.

Compilation and warm-up are left out: seconds are those of so many env steps of a loop that runs."""

import importlib.metadata
import json
import sys
import time


def clocks():
    return time.perf_counter(), time.process_time()


def td3(steps, batch_size):
    """Of Pendulum-v1, a gradient an env step; the loop's clocks at its first compiled update and at its end."""
    from sbx import TD3
    from stable_baselines3.common.callbacks import BaseCallback

    warm = 1_000

    class Clock(BaseCallback):
        def _on_step(self):
            if self.num_timesteps == warm:
                self.begin = clocks()
            return True

    model = TD3(
        "MlpPolicy",
        "Pendulum-v1",
        seed=1,
        learning_starts=100,
        batch_size=batch_size,
        policy_kwargs={"net_arch": [256, 256]},
    )
    clock = Clock()
    model.learn(warm + steps, callback=clock)
    return clock.begin, clocks()


def pqn(steps, num_envs, num_steps):
    """Of CartPole-v1, 64-64 with layer norm, 16 minibatches, 5 epochs; the second run of one compiled program."""
    import jax
    from rejax import PQN

    algorithm = PQN.create(
        env="CartPole-v1",
        num_envs=num_envs,
        num_steps=num_steps,
        num_minibatches=16,
        num_epochs=5,
        td_lambda=0.65,
        learning_rate=2e-3,
        max_grad_norm=10.0,
        total_timesteps=steps,
        eval_freq=steps,
        skip_initial_evaluation=True,
    ).replace(eval_callback=lambda *_: ())
    train = jax.jit(algorithm.train).lower(jax.random.PRNGKey(0)).compile()
    jax.block_until_ready(train(jax.random.PRNGKey(0)))
    begin = clocks()
    jax.block_until_ready(train(jax.random.PRNGKey(1)))
    return begin, clocks()


CASES = {
    "td3 128": ("sbx-rl", lambda steps: td3(steps, 128)),
    "td3 256": ("sbx-rl", lambda steps: td3(steps, 256)),
    "pqn 16x128": ("rejax", lambda steps: pqn(steps, 16, 128)),
    "pqn 64x32": ("rejax", lambda steps: pqn(steps, 64, 32)),
}
package, loop = CASES[sys.argv[1]]
begin, end = loop(int(sys.argv[2]))
versions = {name: importlib.metadata.version(name) for name in (package, "jax")}
print(json.dumps({"wall_seconds": end[0] - begin[0], "processor_seconds": end[1] - begin[1], "versions": versions}))
