"""Ours, with the device given back between the gradients of one round.

A task does not hold its device while it waits for its slower workers' data; it pays with a queue and a switch for each
gradient, and with more than one lease a task and round. The bound of `fair` holds for each single wait."""

from __future__ import annotations

from ddrl.pool.policies.fair import Fair, FairSettings


class BetweenGradients(Fair):
    """`fair`, one lease a gradient."""

    name = "between_gradients"
    Settings = FairSettings
    splits_rounds = True
