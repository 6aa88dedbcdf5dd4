"""How each published model reaches every host, and how experience reaches the trainer's.

A scheme (`schemes`) makes a `Plan`, the simulator runs it on a modeled network, and auto chooses the best; `executor`
runs it over MPI straight out of and into mailbox slots; `links` measures the network. `relay` composes one relay per
host of these and of its other duties (`flows`). `broadcast` is models alone, for programs without `ddrl.run`: `join` on
every rank, `subscribe` elsewhere. MPI is imported when it is used: plans, costs and simulations work where it is not
installed. Must not import another stage, nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddrl.distribution.broadcast import join, subscribe

__all__ = ["join", "subscribe"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ddrl.distribution' has no attribute {name!r}")
    from ddrl.distribution import broadcast

    return getattr(broadcast, name)
