"""First in, first out: the episode that began first goes."""

from ddrl.replay.evictions import KernelEviction


class Fifo(KernelEviction):
    """First in, first out: the episode that began first goes."""

    name = "fifo"
