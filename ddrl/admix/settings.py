"""Settings of ad mixing: the market that the generator draws, how requests are played, and the server.

Money is in currency per impression, eCPM in currency per 1000 impressions. A log-space level is the logarithm of a
factor. Impossible values raise ConfigError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ddrl.core.config import check_ranges, setting
from ddrl.core.errors import ConfigError

AD_FIELDS = (
    "ad_id", "slot_id", "kind", "ecpm", "ctr", "value", "impressions", "required", "pace", "cap", "penalty", "theta",
)  # fmt: skip
FURTHER_AD_FIELDS = ("late", "need", "rate")  # of contracts, where ad_fields names them
OVERALL_FIELDS = ("shortfall", "contract_ctr", "bidding_ctr", "payment", "time")
TRAFFIC_FIELDS = ("region", "gender", "age")
MAX_LENGTH = 10**8  # numbers in the arrays of a day


@dataclass(frozen=True)
class MarketConfig:
    """What the generator draws: requests of a day, contracts, bids, click rates, billing, drift and noise."""

    requests: int = setting(100_000, "requests", "Mean number of requests of a day.", ge=1)
    windows: int = setting(48, "windows", "Windows of equal length that a day is cut into.", ge=2)
    contracts: int = setting(50, "contracts", "Contract ads.", ge=1)
    bids: int = setting(20, "bids", "Bids that every request has.", ge=0)
    extra_bids: int = setting(4, "bids", "Most further bids of a request; their number is uniform.", ge=0)
    regions: int = setting(10, "regions", "Values of the attribute region.", ge=1)
    ages: int = setting(6, "groups", "Values of the attribute age.", ge=1)
    breadth: float = setting(0.5, "", "Largest share of regions and of ages that one contract targets.", gt=0, le=1)
    demand_low: float = setting(0.1, "", "Least demand of a contract as a share of the supply it may use.", gt=0)
    demand_high: float = setting(0.9, "", "Largest demand as a share of the supply it may use.", gt=0)
    penalty: float = setting(1.5, "", "Median penalty of a missing impression, in mean best bids.", ge=0)
    cap: float = setting(2.0, "", "Impressions after which a contract is shown no more, as a multiple of demand.", ge=1)
    click_value: float = setting(0.1, "currency", "lambda: worth of a click on a contract ad.", ge=0)
    ctr: float = setting(0.02, "", "Mean click rate.", gt=0, le=0.5)
    ctr_count: float = setting(40.0, "", "a + b of the Beta distributions of click rates: larger is narrower.", gt=0)
    ecpm: float = setting(2.0, "currency/1000", "Median bid.", gt=0)
    ecpm_sigma: float = setting(0.6, "", "Standard deviation of the logarithm of a bid.", ge=0)
    daily_curve: float = setting(0.6, "", "Depth of the daily curve of arrivals: 0 is flat.", ge=0, le=0.95)
    filtered: float = setting(
        0.05, "", "Probability that a filter takes a targeted contract out of a queue.", ge=0, le=1
    )
    drift: float = setting(0.3, "", "Standard deviation of the slow log-space levels of supply and prices.", ge=0)
    drift_days: float = setting(5.0, "days", "Time in which a level's correlation falls to 1/e.", gt=0)
    noise: float = setting(0.05, "", "Standard deviation of the log-space levels that are new in each window.", ge=0)
    billed: float = setting(1.0, "", "Mean rate from shown to billed; 1: every impression counts.", gt=0, le=1)
    billed_spread: float = setting(0.0, "", "Standard deviation over contracts of the logit of the billed rate.", ge=0)
    billed_drift: float = setting(0.0, "", "Standard deviation of its slow drift, in logits.", ge=0)
    forecast_error: float = setting(
        0.1, "", "Standard deviation of the log-space error of the forecast, by cell.", ge=0
    )
    law: str = setting(
        "steady",
        "",
        "What a day does to supply and prices beside drift and noise, unknown to the forecast: steady, nothing; prime, "
        "dear evenings; wandering, a dear time that differs by day; rebound, poor mornings before rich evenings or the "
        "reverse; match, on three days of ten few and dear requests in the evening, after a dear morning.",
        choices=("steady", "prime", "wandering", "rebound", "match"),
    )
    seed: int = setting(1, "", "Seed of the market: contracts, their targeting, and the daily curves.", ge=0)

    def __post_init__(self) -> None:
        check_ranges("market", self)
        if self.demand_low > self.demand_high:
            raise ConfigError(
                f"market.demand_low ({self.demand_low}) exceeds market.demand_high ({self.demand_high}): lower it"
            )
        cells = 2 * self.regions * self.ages
        length = max(self.requests, cells) * (self.contracts + self.max_bids) + self.windows * cells
        if length > MAX_LENGTH:
            raise ConfigError(
                f"market: arrays of a day would have {length:g} numbers, more than {MAX_LENGTH:g}: lower requests, "
                "contracts, bids, windows, regions or ages"
            )
        if self.billed == 1 and (self.billed_spread or self.billed_drift):
            raise ConfigError(
                "market.billed = 1 counts every impression: billed_spread and billed_drift have no effect; set billed "
                "below 1, or both to 0"
            )

    @property
    def max_bids(self) -> int:
        """Bid slots of a queue."""
        return self.bids + self.extra_bids


@dataclass(frozen=True)
class PlayConfig:
    """How requests are played: actions, feedback, play control, reward, and the state that is shown."""

    mode: str = setting(
        "contracts",
        "",
        "What the action says: all, the score of every ad of the queue; contracts, those of contract ads, beside bids "
        "at their eCPM; bonuses, what is added to the value of a click on each contract for the next `repeat` "
        "requests.",
        choices=("all", "contracts", "bonuses"),
    )
    repeat: int = setting(1, "requests", "Requests that one action decides; above 1 in mode bonuses alone.", ge=1)
    prior: str = setting(
        "off",
        "",
        "The array prior of the state, a bonus [eCPM] for each contract known before the day begins, from which a "
        "policy departs: off, none; yesterday, the duals of yesterday's requests; demand, theta's split times the "
        "penalty.",
        choices=("off", "yesterday", "demand"),
    )
    pace_step: float = setting(
        0.0,
        "",
        "Above 0 the prior is adaptive pacing that begins with it: at each decision its duals go this many penalties "
        "towards what the remaining demand needs, by the share of the demand that was missed; 0: it stays all day.",
        ge=0,
    )
    relative: bool = setting(
        False,
        "",
        "Whether the best bid of each request is subtracted from the reward: a day's then add up to V - V of bids "
        "alone, less the penalties of its whole demand.",
    )
    delay: float = setting(0.0, "days", "Time from an impression to the news whether it was billed.", ge=0, le=1)
    own_counts: bool = setting(True, "", "Whether the impressions shown are known at once, though not yet the billed.")
    rate: float = setting(1.0, "", "Probability that a contract enters the queue.", ge=0, le=1)
    theta: str = setting(
        "off",
        "",
        "Probability that a contract of the queue may play: off, 1; split, demand over forecast supply; water, the "
        "shares that contracts get from the supply-demand graph in the order of scarcity.",
        choices=("off", "split", "water"),
    )
    support: str = setting(
        "off",
        "",
        "Contracts that enter and may play whatever rate and theta say: off, none; late, those behind what is due by "
        "more than support_gap; fresh, those with fewer impressions than support_gap of the demand.",
        choices=("off", "late", "fresh"),
    )
    support_gap: float = setting(0.1, "", "Share of the demand that support speaks of.", ge=0, le=1)
    shuffle: bool = setting(
        False, "", "Whether each queue comes in a new random order; off: contracts by id, then bids."
    )
    reward_by: str = setting(
        "total",
        "",
        "The reward: total, one number; contract, one for each contract (with relative), as a share of the penalty for "
        "its whole demand: clicks less the best other score at each request that it takes, less its own penalties.",
        choices=("total", "contract"),
    )
    shortfall_weight: float = setting(1.0, "", "Weight of penalties for impressions missing by now.", ge=0)
    ctr_weight: float = setting(1.0, "", "Weight of the value of clicks on contract ads.", ge=0)
    bid_weight: float = setting(1.0, "", "Weight of what bidding ads pay.", ge=0)
    reward_scale: float = setting(1000.0, "", "Factor from currency (or shares) to the reward of a learner.", gt=0)
    first_window: int = setting(0, "windows", "Where in the day an episode begins; what came before is left out.", ge=0)
    last_window: int = setting(0, "windows", "Where an episode ends, and the next day begins; 0: the day's end.", ge=0)
    ad_fields: tuple[str, ...] = setting(
        AD_FIELDS, "", "What is said of each ad of the queue; late, need and rate only where named."
    )
    overall_fields: tuple[str, ...] = setting(OVERALL_FIELDS, "", "What is said of the whole play so far.")
    traffic_fields: tuple[str, ...] = setting(TRAFFIC_FIELDS, "", "What is said of the visitor, one-hot each.")

    def __post_init__(self) -> None:
        check_ranges("play", self)
        if self.repeat > 1 and self.mode != "bonuses":
            raise ConfigError(
                f"play.repeat ({self.repeat}) decides several requests by one action, and play.mode = {self.mode} "
                'scores the ads of one: set play.mode = "bonuses"'
            )
        if self.last_window and self.last_window <= self.first_window:
            raise ConfigError(
                f"play.last_window ({self.last_window}) must be above play.first_window ({self.first_window}), or 0"
            )
        if self.reward_by == "contract" and (not self.relative or self.mode == "all"):
            raise ConfigError(
                'play.reward_by = "contract" needs play.relative = true and bids at their eCPM (play.mode = bonuses or '
                "contracts): what a bid pays belongs to no contract"
            )
        if self.pace_step and self.prior == "off":
            raise ConfigError(f"play.pace_step ({self.pace_step:g}) moves the prior, and play.prior is off: set one")
        if self.shuffle and self.mode == "bonuses":
            raise ConfigError(
                "play.shuffle has no effect in mode bonuses: its actions are by contract; set it to false"
            )
        for name, known in (
            ("ad_fields", AD_FIELDS + FURTHER_AD_FIELDS),
            ("overall_fields", OVERALL_FIELDS),
            ("traffic_fields", TRAFFIC_FIELDS),
        ):
            fields = tuple(getattr(self, name))
            object.__setattr__(self, name, fields)
            unknown = [field for field in fields if field not in known]
            if unknown or len(set(fields)) < len(fields):
                raise ConfigError(f"play.{name} ({', '.join(fields)}): choose from {', '.join(known)}, each once")


# ---- settings -------------------------------------------------------------------------------------------------------
# Settings of the server; each is an option of `python -m ddrl.serve`.


@dataclass(frozen=True)
class ServeConfig:
    """Where it listens, what it refuses, and how often it checks its files."""

    host: str = setting("127.0.0.1", "", "Address to listen on; everyone who reaches it can use it.")
    policy: str = setting(
        "learned",
        "",
        "What chooses: learned, the policy of RUN; adaptive_pacing or yesterday_duals, the rule that it departs from.",
        choices=("learned", "adaptive_pacing", "yesterday_duals"),
    )
    allow_host: str = setting(
        "", "", "Further names by which it may be asked, with commas; on an address beyond loopback any, where empty."
    )
    port: int = setting(8700, "", "Port; 0: a free one, which the first line of output names.", ge=0, le=65535)
    max_body: int = setting(262_144, "B", "Largest body of a request; larger ones get 413.", ge=1024)
    max_policy: int = setting(67_108_864, "B", "Largest body of parameters sent to /v1/policy.", ge=1024)
    max_held: int = setting(
        268_435_456, "B", "Bytes of all bodies that are held at one time; further ones get 429.", ge=1 << 20
    )
    max_open: int = setting(256, "requests", "Requests whose bodies arrive at one time; further ones get 429.", ge=1)
    max_queue: int = setting(512, "requests", "Requests that wait at one time; further ones get 503.", ge=1)
    max_connections: int = setting(2048, "connections", "Open connections; further ones get 503.", ge=1)
    head_seconds: float = setting(
        10.0, "s", "Time from a connection to the end of its first request's header; then it is closed.", gt=0
    )
    body_seconds: float = setting(10.0, "s", "Time that a body may take to arrive; then 408.", gt=0)
    end_seconds: float = setting(10.0, "s", "Time for accepted requests at the end.", gt=0)
    reload_period: float = setting(1.0, "s", "Time between checks for a newer policy in RUN; 0: when asked.", ge=0)
    state_period: float = setting(10.0, "s", "Time between two snapshots of the counters; 0: only at the end.", ge=0)
    day_seconds: float = setting(86400.0, "s", "Length of a day, for requests without a time.", gt=0)
    day_begins: str = setting(
        "",
        "UTC",
        "When a day begins, as HH:MM: counters then begin at zero; empty: when the server starts, without an end.",
    )
    write_log: str = setting("", "", "Folder for the log of decisions, a day each, as training reads it; empty: none.")
    log_days: int = setting(30, "days", "Finished days that the log keeps; 0: all.", ge=0)
    seed: int = setting(0, "", "Seed of the draws by rate and theta.", ge=0)

    def __post_init__(self) -> None:
        check_ranges("serve", self)
        if self.day_begins and not re.fullmatch(r"([01]\d|2[0-3]):[0-5]\d", self.day_begins):
            raise ConfigError(f"serve.day_begins ({self.day_begins}): write a time of the day, as 04:30")
        if not self.host.strip():
            raise ConfigError("--host is empty, which would listen on every interface: name an address")
