"""The episode that was drawn least goes; running episodes only where no ended one is there."""

from ddrl.replay.evictions import KernelEviction


class Lfu(KernelEviction):
    """The episode that was drawn least goes; running episodes only where no ended one is there."""

    name = "lfu"
