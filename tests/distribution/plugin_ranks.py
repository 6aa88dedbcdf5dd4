"""Relays of emulated hosts with a scheme and a codec from outside; `python plugin_ranks.py HOP MASK`. Rank 0 prints one
JSON line of findings."""

import sys

import numpy as np
import outside
from ranks import RANK, Host, model, report

from ddrl.core.config import ClusterConfig

NBYTES = 5000


def main():
    hop, mask = int(sys.argv[1]), int(sys.argv[2])
    cluster = ClusterConfig(scheme="outside:Hops", codec="outside:Masked")
    host = Host(NBYTES, cluster, tables={"cluster.hops": {"hop": hop}, "cluster.masked": {"mask": mask}}, trace=True)
    if RANK == 0:
        host.publish(0)
    travelled = []
    decode = outside.Masked.decode

    def noted(self, model, wire, base, start, stop):
        if start == 0:
            travelled.append(int(wire[0]))
        return decode(self, model, wire, base, start, stop)

    outside.Masked.decode = noted
    while not host.relay.finished:
        host.relay.progress()
        if RANK == 0 and host.relay.models.confirms and host.relay.models.settled:
            host.stop()
    pin = host.reader.pin()
    plan = host.relay.models.executor.plan
    report(
        scheme=plan.scheme,
        source=plan.source.tolist(),
        whole=bool(np.array_equal(pin.data, model(0, NBYTES))),
        first_byte=int(model(0, NBYTES)[0]),
        travelled=travelled[0] if travelled else None,
        problems=host.problems(),
    )


if __name__ == "__main__":
    main()
