"""Micro-batch sizes for nodes of unequal speed, and the rules by which their gradients are collected.

Imports numpy and ddrl.core only: no torch, no MPI. `Balancer` serves a program's own training loop; `python -m
ddrl.balance --nodes ...` prints sizes without training anything."""

from ddrl.balance.sizers import Balancer, make_sizer
from ddrl.balance.sizes import Cluster, Observation

__all__ = ["Balancer", "Cluster", "Observation", "make_sizer"]
