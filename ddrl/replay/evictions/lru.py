"""The episode whose last draw is longest ago goes; running episodes only where no ended one is there."""

from ddrl.replay.evictions import KernelEviction


class Lru(KernelEviction):
    """The episode whose last draw is longest ago goes; running episodes only where no ended one is there."""

    name = "lru"
