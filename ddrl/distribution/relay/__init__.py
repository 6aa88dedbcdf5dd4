"""The relays: one per host, speaking MPI. `RootRelay` stands beside the trainer, `HostRelay` on every other host."""

from ddrl.distribution.relay.core import LocalHost, readers_needed, slots_needed
from ddrl.distribution.relay.host import HostRelay
from ddrl.distribution.relay.membership import Membership, RelayFailed
from ddrl.distribution.relay.root import RootRelay

__all__ = ["HostRelay", "LocalHost", "Membership", "RelayFailed", "RootRelay", "readers_needed", "slots_needed"]
