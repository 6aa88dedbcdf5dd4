"""Micro-batch sizes for nodes of unequal speed, and the rules by which their gradients are collected.

Importing the package needs numpy and ddrl.core only: no torch, no MPI. `Balancer` serves a program's own training loop;
`python -m ddrl.balance --nodes ...` prints sizes without training anything. `docs/microbatch.md` describes it.

    settings, sizes            settings; integer sizes that sum to the batch, what sizers are given, the filter of times
    sizers                     the rules that choose sizes
    ddqn                       parts of the learned sizer: objectives, features, network, actions
    collection                 which gradients an update waits for and uses; the samples of an epoch
    leader, nodes              the trainer's side and a node's side of a run with learner.nodes
    messages, exchange         what both send and share; vectors and gradients of a learner, the only module with torch
    page                       figures
"""

from ddrl.balance.sizers import Balancer, make_sizer
from ddrl.balance.sizes import Cluster, Observation

__all__ = ["Balancer", "Cluster", "Observation", "make_sizer"]
