"""What a mixer knows of its contracts before the day begins, and the names that a state's arrays have.

`ddrl.run.serving` makes a book from a day of `ddrl.envs.admix` and hands it in: stages do not import each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import CheckpointError
from ddrl.core.specs import EnvSpec

SUPPORT = ("off", "late", "fresh")  # the kernel's numbers


@dataclass(frozen=True)
class Play:
    """How requests are played, as in the environment's settings of the same names."""

    mode: str
    repeat: int  # requests that one action decides
    own_counts: bool
    rate: float
    support: str
    support_gap: float
    overall_fields: tuple[str, ...]
    traffic_fields: tuple[str, ...]


class Pacer(Protocol):
    """A prior that follows delivery, for one day; `state` is all that it keeps from one decision to the next."""

    state: NDArray[np.float64]  # [3, 1, C]

    def decide(
        self,
        due: NDArray[np.float64],
        estimate: NDArray[np.float64],
        seen_billed: NDArray[np.float64],
        seen_shown: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """The next prior [1, C] [currency], from what is due by now and billed as estimated [1, C], and known [C]."""
        ...


@dataclass(frozen=True)
class Book:
    """Contracts [C] of a day in W windows, for visitors of `regions` x `genders` x `ages` cells."""

    spec: EnvSpec  # what a policy must see and give to be served
    play: Play
    ids: NDArray[np.int64]  # [C], ad ids
    demand: NDArray[np.float64]  # [C], billed impressions due by the day's end
    limit: NDArray[np.float64]  # [C], impressions after which the ad is not shown
    penalty: NDArray[np.float64]  # [C], currency for each missing impression
    billed_rate: NDArray[np.float64]  # [C], of the past
    eligible: NDArray[np.bool_]  # [cells, C], targeting
    curve: NDArray[np.float64]  # [W + 1, C], share of a contract's supply that has come by a window's begin
    theta: NDArray[np.float64]  # [C], the first probabilities
    prior: NDArray[np.float32]  # [C], actions that a policy departs from
    rows: NDArray[np.float32]  # [C, fields], what stays of a contract's row of "ad"
    bid_row: NDArray[np.float32]  # [fields], what stays of a bid's row
    fields: tuple[str, ...]  # of a row of "ad"
    overall: tuple[str, ...]  # all that is known of the whole play, in the kernel's order
    bids: int  # slots for bids
    regions: int
    genders: int
    ages: int
    click_value: float  # of a click on a contract ad [currency]
    pacing: Pacer | None = None  # moves the prior at each decision; None: it stays

    @property
    def bonuses(self) -> bool:
        """Whether an action is added to the value of a click, and a policy sees contracts alone."""
        return self.play.mode == "bonuses"

    def cell(self, region: int, gender: int, age: int) -> int:
        """The visitor's cell; ValueError for an attribute value that does not exist."""
        for name, value, count in (("region", region, self.regions), ("gender", gender, self.genders)):
            if not 0 <= value < count:
                raise ValueError(f"{name} = {value} is outside 0 .. {count - 1}")
        if not 0 <= age < self.ages:
            raise ValueError(f"age = {age} is outside 0 .. {self.ages - 1}")
        return (region * self.genders + gender) * self.ages + age

    def traffic_rows(self) -> NDArray[np.float32]:
        """The one-hot array "traffic" of each cell [cells, size]."""
        cells = np.arange(len(self.eligible))
        values = {
            "region": (cells // (self.genders * self.ages), self.regions),
            "gender": (cells // self.ages % self.genders, self.genders),
            "age": (cells % self.ages, self.ages),
        }
        hot = [np.eye(count, dtype=np.float32)[place] for place, count in map(values.get, self.play.traffic_fields)]  # type: ignore[misc]
        return np.ascontiguousarray(np.concatenate([np.zeros((len(cells), 0), np.float32), *hot], 1))

    def require(self, spec: EnvSpec) -> None:
        """CheckpointError unless a policy trained in `spec` can be served: the same arrays in, the same scores out."""
        wanted = self.spec.observation.arrays
        given = spec.observation.arrays
        if wanted == given and spec.action == self.spec.action:
            return
        wrong = [
            f"{name}: {_words(given.get(name))}, here {_words(wanted.get(name))}"
            for name in sorted({*wanted, *given})
            if wanted.get(name) != given.get(name)
        ]
        if spec.action != self.spec.action:
            wrong.append(f"scores: {_words(spec.action)}, here {_words(self.spec.action)}")
        raise CheckpointError(
            f"the policy was trained for other features than this server has ({'; '.join(wrong)}): serve it with the "
            "contracts, bid slots and fields of its training (env.kwargs), with env.observation = named"
        )


def _words(array: Any) -> str:
    return "none" if array is None else f"{array.dtype} {list(array.shape)}"
