"""A leader and three gradient nodes without environments; rank 0 prints one JSON line with what each case came to.

Node 2 waits at gates, which the leader opens: so who is late is decided by the case, never by speed."""

import json
import math
import sys
import time
import uuid
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from mpi4py import MPI

from ddrl.balance import BalanceConfig
from ddrl.balance.exchange import Exchange
from ddrl.balance.leader import Leader
from ddrl.balance.messages import Rows, arrays_of
from ddrl.balance.nodes import serve
from ddrl.channels.segment import Segment
from ddrl.core.config import Config, EnvConfig, LearnerConfig, ReplayConfig, RunConfig
from ddrl.core.errors import ChannelError, ConfigError, JobFailed
from ddrl.learner import Learner
from tests.learner import continuous_cases, learner_cases
from tests.sources import check_sources

check_sources()

WORLD = MPI.COMM_WORLD
FOLDER = Path(sys.argv[1])
NODES = WORLD.size - 1
SLOW = NODES  # rank of the node that waits
BATCH = 24


def setup(algorithm="dqn", **balance):
    options = {"algorithm": algorithm, "nodes": NODES, "batch_size": BATCH, "hidden": [16], "target_period": 2}
    learner = LearnerConfig(max_grad_norm=1e6, **options)
    replay = ReplayConfig(capacity=3000, min_size=100, n_step=1, samples_per_insert=1.0, samples_tolerance=1000.0)
    env, run = EnvConfig(num_envs=2), RunConfig(seed=2)
    return Config(run=run, env=env, replay=replay, learner=learner).with_section(BalanceConfig(**balance))


def spec(config):
    return continuous_cases.BOX if config.learner.algorithm in ("td3", "d4pg") else learner_cases.VECTOR


def batch_of(config, seed, size=BATCH):
    """A batch whose rows are numbered in pick_pos."""
    cases = continuous_cases if spec(config) is continuous_cases.BOX else learner_cases
    batch = cases.random_batch(spec(config), size, seed)
    return Numbered(*batch, np.arange(seed * BATCH, seed * BATCH + size, dtype=np.uint32))


class Numbered(SimpleNamespace):
    """Transitions with the numbers of their rows."""

    _fields = (*learner_cases.Transitions._fields, "pick_pos")

    def __init__(self, *values):
        super().__init__(**dict(zip(self._fields, values, strict=True)))


def gated(learner, name):
    """The slow node waits before its gradient at update u until the gate of u is open, or all are."""
    evaluations = learner.algorithm.evaluations

    def wait(batch, part):
        here = [FOLDER / f"{name}-{learner.algorithm.updates}", FOLDER / f"{name}-all"]
        while not any(gate.exists() for gate in here):
            time.sleep(0.001)
        return evaluations(batch, part)

    learner.algorithm.evaluations = wait


def until(leader, holds):
    leader._wait(holds)


# ---- cases: what rank 0 does with the leader -------------------------------------------------------------------


def exact(leader, learner, config, gate):
    """Updates by nodes beside updates by one learner: relative errors of gradients, priorities, used rows."""
    alone = Learner.of(config, spec(config))
    errors, priorities, passed = [], [], []
    for seed in range(6):
        batch = batch_of(config, seed)
        for part in learner.parts:
            alone.seed(seed), learner.seed(seed)
            mine = leader.gradient(batch, part)
            # the same random numbers as the nodes drew
            if mine is None:
                passed.append(alone.gradient(batch, part) is None)
                continue
            entropy = [2, *(one.updates for one in learner.parts.values()), *part.encode()]
            alone.seed(int(np.random.SeedSequence(entropy).generate_state(1)[0]))
            whole = alone.gradient(batch, part)
            errors.append(error_of(mine, whole))
            if mine.priority is not None:
                priorities.append(bool(torch.allclose(mine.priority, whole.priority, rtol=1e-3, atol=1e-4)))
            assert mine.batch is None
            alone.apply(whole)
            leader_norm = learner.apply(mine)
            assert torch.isfinite(leader_norm)
            copy(learner, alone)
    leader.gradient(batch, next(iter(learner.parts)))  # every node now has the newest vectors
    found = {"errors": errors, "priorities": priorities, "passed": passed, "vectors": digests(learner)}
    found["mapped"] = [leader._memory_of(node) is not None for node in leader.nodes.values()]
    return {**found, "rung": rung(leader, len(errors))}


def rung(leader, gradients):
    """For each node whether it has the bells; then whether the leader's was rung for each gradient."""
    memory = leader._connection.memory
    return [
        *(node.shares_memory for node in leader.nodes.values()),
        memory is not None and leader._connection.rings >= gradients * NODES,
    ]


def flat(gradient):
    return gradient.vector


def error_of(mine, whole):
    return float(torch.linalg.norm(flat(mine) - flat(whole)) / torch.linalg.norm(flat(whole)))


def copy(source, target):
    a, b = Exchange(source), Exchange(target)
    for name in a.versions():
        b.set_vector(name, a.vector(name).copy())


def digests(learner):
    exchange = Exchange(learner)
    return {name: zlib.crc32(exchange.vector(name)) for name in exchange.versions()}


def counts(leader, part="value"):
    counts = leader.parts[part].collection.counts
    leader.parts[part].collection.check()
    return vars(counts)


def first_of(leader, learner, config, gate):
    """K = 2 of 3: the slow node holds the rows of update 0 through updates 1 and 2, then they come. Nothing learns, so
    each gradient is that of its rows, however late they come."""
    used, sizes, alone, errors = [], [], Learner.of(config, spec(config)), []
    learner.lr = 0.0

    def update(seed):
        gradient = leader.gradient(batch_of(config, seed), "value")
        rows = batch_of(config, seed) if gradient.batch is None else gradient.batch
        errors.append(error_of(gradient, alone.gradient(rows, "value")))
        used.append(rows.pick_pos.tolist())
        sizes.append([gradient.count, len(gradient.priority)])
        learner.apply(gradient)

    for seed in range(3):
        update(seed)
    held = leader.nodes[NODES - 1].rows.pick_pos.tolist()
    gate("all")
    until(leader, lambda: len(leader._free_nodes()) == NODES)
    update(3)
    until(leader, lambda: len(leader._free_nodes()) == NODES)
    update(4)
    until(leader, lambda: len(leader._free_nodes()) == NODES)
    mine = leader.parts["value"]
    again = [rows.pick_pos.tolist() for rows in mine.undealt]
    kept = [answer.rows.pick_pos.tolist() for answer in mine.answers.values()]  # for the next update
    found = {"used": used, "sizes": sizes, "held": held, "again": again, "kept": kept, "errors": errors}
    return {**found, "counts": counts(leader), "rung": rung(leader, 3)}


def waiting(leader, learner, config, gate):
    """K = 2 of 3: the slow node's gradient comes once the waiting time has begun; the next one not before its end."""
    collection, used = leader.parts["value"].collection, []

    def look():
        if math.isfinite(collection.deadline):
            gate(0)

    for seed, wait, leader._check_job in ((0, 100.0, look), (1, 0.1, lambda: None)):
        collection.settings = replace(collection.settings, wait=wait)
        begin = time.perf_counter()
        gradient = leader.gradient(batch_of(config, seed), "value")
        used.append(gradient.count)
        learner.apply(gradient)
    waited = time.perf_counter() - begin
    gate("all")
    until(leader, lambda: len(leader._free_nodes()) == NODES)
    return {"used": used, "waited": waited, "counts": counts(leader)}


def observed(leader, learner, config, gate):
    """What a sizer sees of the nodes' gradients, beside one learner's for the same rows."""
    mine, alone, found = leader.parts["value"], Learner.of(config, spec(config)), []
    propose, batch = mine._sizer.propose, batch_of(config, 0)
    sizes = mine.sizes.tolist()

    def watch(observation):
        found.append(observation)
        return propose(observation)

    mine._sizer.propose = watch
    leader.gradient(batch, "value", False)
    parts, rows = [], np.split(np.arange(BATCH), np.cumsum(sizes)[:-1])
    for place in rows:
        arrays = {name: array[place] for name, array in arrays_of(batch).items()}
        part = alone.gradient(Rows(arrays, (int(place[0]), BATCH)), "value")
        parts.append((flat(part).clone(), float(part.figures["loss"])))
    mean = sum(size / BATCH * one for size, (one, _) in zip(sizes, parts, strict=True))
    expected = [
        [float(torch.linalg.norm(one)), float(torch.cosine_similarity(one, mean, 0)), loss] for one, loss in parts
    ]
    seen = [found[0].norm.tolist(), found[0].cosine.tolist(), found[0].loss.tolist()]
    return {"expected": expected, "seen": list(zip(*seen, strict=True)), "noise_scale": float(found[0].noise_scale)}


def left(leader, learner, config, gate):
    """The slow node fails at update 1: the others go on, and the batch is whole all the same."""
    used = []
    for seed in range(4):
        gradient = leader.gradient(batch_of(config, seed), "value")
        rows = batch_of(config, seed) if gradient.batch is None else gradient.batch
        used.append(sorted(rows.pick_pos.tolist()))
        learner.apply(gradient)
    return {"used": used, "nodes": sorted(leader.nodes), "counts": counts(leader)}


def foreign(leader, learner, config, gate):
    """A node with another network."""
    try:
        leader.gradient(batch_of(config, 0), "value")
    except ConfigError as error:
        until(leader, lambda: not leader._absent)
        own = leader._exchange.signature
        return str(error).replace(own["part value"], "its own")


def nobody(leader, learner, config, gate):
    """All nodes fail."""
    try:
        leader.gradient(batch_of(config, 0), "value")
    except JobFailed as error:
        return str(error)


def capped(leader, learner, config, gate):
    """Sizes stay below what a node's memory holds, and every row is used once."""
    sizes = []
    for seed in range(3):
        gradient = leader.gradient(batch_of(config, seed), "value")
        sizes.append(leader.parts["value"].sizes.tolist())
        learner.apply(gradient)
    return sizes


K = {"first": 2, "sizer": "equal"}
CASES = {
    "exact dqn": (exact, setup(), ""),
    "exact dqn, sent": (exact, setup(), "sent"),
    "exact td3": (exact, setup("td3"), ""),
    "exact d4pg": (exact, setup("d4pg"), ""),
    "late is used": (first_of, setup(**K, threshold=3), "gate"),
    "waiting": (waiting, setup(**K), "gate"),
    "stale is dealt again": (first_of, setup(**K, threshold=2), "gate"),
    "stale is lost": (first_of, setup(**K, threshold=2, dropped_samples="lose"), "gate"),
    "left": (left, setup(), "fail"),
    "foreign": (foreign, setup(), "foreign"),
    "nobody": (nobody, setup(), "all fail"),
    "observed": (observed, setup(sizer="ddqn"), ""),
    "capped": (capped, setup(max_sizes=[20, 3, 4]), ""),
}


def node_exchange(name, config, kind):
    settings = config
    if kind == "foreign" and WORLD.rank == SLOW:
        settings = Config(run=config.run, learner=LearnerConfig(hidden=[8]))
    learner = Learner.of(settings, spec(config))
    if kind == "gate" and WORLD.rank == SLOW:
        gated(learner, name.replace(" ", "_"))
    if kind == "all fail" or (kind == "fail" and WORLD.rank == SLOW):

        def fail(batch, part, evaluations=learner.algorithm.evaluations):
            if learner.algorithm.updates == 1 or kind == "all fail":
                raise MemoryError("no memory left")
            return evaluations(batch, part)

        learner.algorithm.evaluations = fail
    return Exchange(learner)


def no_room(kind, nbytes):
    raise ChannelError(f"{nbytes} bytes of shared memory are not free")


def segment(made, kind, nbytes):
    """Memory that the nodes map; its name goes with `made`."""
    made.append(Segment.create(f"ddrl-{uuid.uuid4().hex[:8]}-h0-{kind}-0", kind, nbytes))
    return made[-1]


def main():
    torch.set_num_threads(1)
    results = {}
    for name, (case, config, kind) in CASES.items():
        comm = WORLD.Dup()
        if WORLD.rank == 0:
            notes = []
            learner = Learner.of(config, spec(config))
            segments = []
            make = no_room if kind == "sent" else partial(segment, segments)
            leader = Leader(comm, Exchange(learner), config, notify=notes.append, make_segment=make)
            gate = lambda at, name=name: (FOLDER / f"{name.replace(' ', '_')}-{at}").touch()  # noqa: E731
            found = case(leader, learner, config, gate)
            leader.close()
            for one in segments:
                one.unlink()
            results[name] = {"found": found, "notes": notes}
            everyone = comm.gather(None)
            if case is exact:
                results[name]["nodes"] = [node["vectors"] for node in everyone[1:]]
        else:
            made = []

            def make(name=name, config=config, kind=kind, made=made):
                made.append(node_exchange(name, config, kind))
                return made[0]

            serve(comm, make, None, lambda: True)
            comm.gather({"vectors": digests(made[0].learner)})
    if WORLD.rank == 0:
        print(json.dumps(results), flush=True)


main()
