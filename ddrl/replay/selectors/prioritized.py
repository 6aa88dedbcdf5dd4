"""P = p^alpha / sum p^alpha (Schaul et al. 2016, eq. 1)."""

from ddrl.replay.selectors import PrioritySelector


class Prioritized(PrioritySelector):
    """P = p^alpha / sum p^alpha (Schaul et al. 2016, eq. 1)."""

    name = "prioritized"
