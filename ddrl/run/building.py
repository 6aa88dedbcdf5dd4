"""What a task is made of, from its topology: the learner, which loads torch, and the source of its experience."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddrl.run.host import HostChannels
from ddrl.run.topology import Topology

if TYPE_CHECKING:
    from ddrl.acting.model import ActingModel
    from ddrl.learner.learner import Learner
    from ddrl.replay.sources import Experience


def build_learner(topology: Topology) -> tuple[Learner, ActingModel]:
    """The learner and its acting model; the only place where a run loads torch."""
    from ddrl.learner import Learner

    learner = Learner.of(topology.config, topology.spec)
    return learner, learner.acting_model()


def build_source(topology: Topology, channels: HostChannels) -> Experience:
    """The source that the algorithm declares, or the replays of the nodes."""
    if topology.config.learner.node_replay == "own":
        from ddrl.run.nodes.replays import NodeReplays

        return NodeReplays(topology.config, topology.schema, topology.declaration.experience)
    from ddrl.replay.sources import make_source

    return make_source(topology.config, topology.schema, topology.declaration.experience, channels.areas)
