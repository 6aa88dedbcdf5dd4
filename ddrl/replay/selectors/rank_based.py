"""P = rank^-alpha / sum rank^-alpha (Schaul et al. 2016, section 3.3)."""

from ddrl.replay.selectors import PrioritySelector


class RankBased(PrioritySelector):
    """P = rank^-alpha / sum rank^-alpha (Schaul et al. 2016, section 3.3)."""

    name = "rank_based"
