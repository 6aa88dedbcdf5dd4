"""A part to each host, then around the ring."""

from __future__ import annotations

from collections.abc import Sequence

from ddrl.distribution.plan import Plan, cut_evenly
from ddrl.distribution.plans.building import without_empty
from ddrl.distribution.plans.scheme import Scheme


class ScatterRing(Scheme):
    """What MPI libraries use for large messages."""

    name = "scatter_ring"

    @staticmethod
    def plan(hosts: int, nbytes: int) -> Plan:
        """Scatter over a binomial tree, then ring allgather (van de Geijn); blocks that the scatter left behind are not
        sent again."""
        size = hosts + 1
        bounds, blocks = without_empty(cut_evenly(nbytes, size))
        messages: list[tuple[int, int, int, int]] = []
        held: list[set[int]] = [set(range(len(bounds) - 1)), *(set[int]() for _ in range(hosts))]

        def send(source: int, target: int, wanted: Sequence[int]) -> None:
            run: list[int] = []
            for chunk in [*wanted, -1]:
                if run and chunk != run[-1] + 1:
                    messages.append((source, target, run[0], len(run)))
                    run = []
                if chunk >= 0:
                    run.append(chunk)
            held[target].update(wanted)

        def scatter(low: int, high: int) -> None:  # `low` holds the blocks of hosts low .. high - 1
            if high - low < 2:
                return
            middle = (low + high + 1) // 2
            wanted = [blocks[block] for block in range(middle, high) if blocks[block] >= 0]
            send(low, middle, wanted)
            scatter(low, middle)
            scatter(middle, high)

        scatter(0, size)
        for turn in range(size - 1):
            for host in range(size):
                chunk = blocks[(host - turn) % size]
                target = (host + 1) % size
                if chunk >= 0 and target and chunk not in held[target]:
                    send(host, target, [chunk])
        return Plan.of("scatter_ring", hosts, bounds, messages)
