"""`python -m ddrl.run` with an exception injected into one relay.

`python failing_run.py WHERE HOST MOMENT_FILE ARGUMENTS`: WHERE names a place in `PLACES`. The file gets
the time of the exception. Started under mpirun by test_failures.py."""

import sys

import ddrl.run.relay as run_relay
from ddrl.distribution import links
from ddrl.distribution.executor import Executor
from ddrl.distribution.membership import Membership
from ddrl.distribution.models import Models
from ddrl.distribution.relay import Relay
from tests.sources import check_sources

MESSAGES_BEFORE = 30  # that an executor has received when it fails: versions are under way then
# of each place: its owner, its name there, and the relay's rank and whether it is time, from the first argument
PLACES = {
    "start": (run_relay, "_share_policy", lambda membership: membership.rank, None),
    "measuring": (links._Probe, "round", lambda probe: probe.rank, None),
    "processor": (links, "_message_seconds", lambda probe: probe.rank, None),
    "planning": (Models, "_build", lambda models: models._membership.rank, None),
    "receiving": (
        Executor,
        "progress",
        lambda executor: executor._host,
        lambda executor: executor.traffic.messages_received + executor.traffic.messages_sent > MESSAGES_BEFORE,
    ),
    "running": (Relay, "_count", lambda relay: relay.rank, lambda relay: relay._local.mailbox.newest >= 3),
    "end": (Relay, "_end", lambda relay: relay.rank, None),
    "leaving": (Membership, "leave", lambda membership: membership.rank, None),
}


def inject(where, host):
    owner, name, rank_of, is_time = PLACES[where]
    inner = getattr(owner, name)

    def failing(first, *arguments, **keywords):
        if rank_of(first) == host and (is_time is None or is_time(first)):
            raise RuntimeError("injected here")
        return inner(first, *arguments, **keywords)

    setattr(owner, name, failing)


if __name__ == "__main__":
    check_sources()
    inject(sys.argv[1], int(sys.argv[2]))
    from ddrl.run.__main__ import main

    sys.exit(main(sys.argv[3:]))
