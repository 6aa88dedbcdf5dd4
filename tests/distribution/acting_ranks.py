"""Run under mpirun by test_relays.py: a torch network on rank 0, relays on all ranks, acting policies on the bytes that
the mailboxes pin.

Rank 0 alone loads torch. It prints one JSON line: what each host found of each version.
"""

import hashlib
import sys

import numpy as np
from ranks import RANK, WORLD, Host, report

from ddrl.acting.policy import ActingPolicy
from ddrl.acting.policy_file import ActingModel
from ddrl.core.config import ClusterConfig, LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec

SPECS = {
    "vector": EnvSpec("Vector-v0", ArraySpec((8,), "float32"), 4),
    "image": EnvSpec("Image-v0", ArraySpec((4, 40, 40), "uint8"), 6, frame_stack=4),
}
BATCH, VERSIONS, CHUNK = 256, 3, 4096


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array)).hexdigest()


def act(policy, observation, vector):
    """What acting on `vector` gives, bit for bit."""
    values = policy.act(observation, vector)["q"].copy()
    return {"vector": digest(vector), "values": digest(values), "greedy": policy.greedy(observation, vector).tolist()}


class Trainer:
    """A network that learns nonsense, its flat vector, and what torch itself computes."""

    def __init__(self, spec):
        import torch

        from ddrl.learner import FlatParameters, export_acting, make_network

        torch.set_num_threads(1)
        self.torch, self.network = torch, make_network(LearnerConfig(hidden=[96, 96]), spec, seed=3).eval()
        self.model = export_acting(self.network, spec)
        self.flat = FlatParameters(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr=1e-3)

    def learn(self, observation):
        """Some steps of the optimizer towards values drawn at random, so that the actions become as many as there
        are."""
        generator = self.torch.Generator().manual_seed(0)
        wanted = self.torch.randn((len(observation), SPECS[sys.argv[1]].num_actions), generator=generator)
        for _ in range(8):
            self.optimizer.zero_grad()
            (self.network(self.torch.from_numpy(observation)) - wanted).square().mean().backward()
            self.optimizer.step()

    def nudge(self):
        """Change one parameter, the first of the last tensor, by one unit in its last place."""
        last = self.flat.layout.views(self.flat.host_view())[self.flat.layout.entries[-1].name].reshape(-1)
        last[0] = np.nextafter(last[0], np.float32(np.inf))

    def values(self, observation):
        """Of torch, in the learner's own process."""
        with self.torch.no_grad():
            return self.network(self.torch.from_numpy(observation)).numpy()


def main():
    spec = SPECS[sys.argv[1]]
    trainer = Trainer(spec) if RANK == 0 else None
    model = ActingModel.from_bytes(WORLD.bcast(trainer.model.to_bytes() if trainer else None))
    layout = model.layout
    generator = np.random.default_rng(5)
    shape = (BATCH, *spec.observation.shape)
    observation = (
        generator.integers(0, 256, shape, np.uint8)
        if spec.observation.dtype == "uint8"
        else generator.standard_normal(shape).astype(np.float32)
    )
    policy = ActingPolicy(model)
    cluster = ClusterConfig(scheme="stripes", chunk_bytes=CHUNK, versions_in_flight=1)
    host = Host(layout.nbytes, cluster, local={"layout": layout})
    found, argmax, near_tie, published = {}, [], [], -1
    while not host.relay.finished:
        host.relay.progress()
        if trainer and host.relay.models.settled and host.relay.models.sent_version == published:
            if published == VERSIONS - 1:
                host.stop()
                continue
            if published == 0:
                trainer.learn(observation)
            elif published == 1:
                trainer.nudge()
            published += 1
            vector = trainer.flat.numpy()  # the trainer's own, never in a mailbox
            found[published] = act(policy, observation, vector)
            values = trainer.values(observation)
            best, error = np.sort(values, axis=1), np.abs(values - policy.act(observation, vector)["q"]).max()
            near_tie.append(bool((best[:, -1] - best[:, -2]).min() <= 2 * error))  # there rounding could decide
            argmax.append(values.argmax(1).tolist())
            host.mailbox.publish(vector, published)
        elif not trainer:
            pin = host.reader.pin()
            if pin is not None and pin.version not in found:
                found[pin.version] = act(policy, observation, pin.data)
    report(
        found=[found.get(version) for version in range(VERSIONS)],
        argmax=argmax,
        near_tie=near_tie,
        torch="torch" in sys.modules,
        chunks=host.relay.models.executor.plan.chunks,
        forwarded=int(host.counters.row(0)["model_bytes_sent"].value),
        model=layout.nbytes,
        problems=host.problems(),
    )


if __name__ == "__main__":
    main()
