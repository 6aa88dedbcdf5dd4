"""First in, first out, but an episode that was drawn since the pointer passed it last is passed over once."""

from ddrl.replay.evictions import KernelEviction


class SecondChance(KernelEviction):
    """First in, first out, but an episode that was drawn since the pointer passed it last is passed over once."""

    name = "second_chance"
