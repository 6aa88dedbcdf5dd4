"""What relays noted while models travelled, in the shape of the simulator's trace, so that both draw the same Gantt
chart. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddrl.distribution.plan import Plan

Note = tuple[int, str, int, int, int]  # ns, what, sequence, message, peer: `executor.Traffic.trace`


def merge_traces(plan: Plan, traces: Sequence[Sequence[Note]]) -> NDArray[np.float64]:
    """Notes of all hosts [hosts + 1] as sends: [sends, 6] of begin, end of the send, arrival [s from the first],
    source, target and sequence * messages + message. Hosts must share a clock (one machine, or clocks in step). Sends
    whose arrival nobody noted are left out."""
    begun: dict[tuple[int, int], int] = {}
    left: dict[tuple[int, int], int] = {}
    arrived: dict[tuple[int, int], int] = {}
    for notes in traces:
        for moment, what, sequence, message, _ in notes:
            for name, moments in (("send", begun), ("sent", left), ("received", arrived)):
                if what == name:
                    moments[sequence, message] = moment
    if not begun:
        return np.zeros((0, 6))
    start = min(begun.values())
    rows = [
        (
            (moment - start) * 1e-9,
            (left.get(key, arrived[key]) - start) * 1e-9,
            (arrived[key] - start) * 1e-9,
            float(plan.source[key[1]]),
            float(plan.target[key[1]]),
            float(key[0] * plan.messages + key[1]),
        )
        for key, moment in sorted(begun.items(), key=lambda item: item[1])
        if key in arrived
    ]
    return np.asarray(rows, np.float64).reshape(-1, 6)
