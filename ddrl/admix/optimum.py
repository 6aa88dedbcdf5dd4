"""The best that anyone could have done with a day: the linear program, by HiGHS or in its dual with a certified gap.

    max  sum_i e_i (1 - sum_j x_ij) + sum_ij v_ij x_ij - sum_j p_j y_j
    s.t. sum_i r_ij x_ij + y_j >= d_j,  sum_i x_ij <= K_j,  sum_j x_ij <= 1,  x, y >= 0

requests i, contracts j: best bid e_i, click value v_ij = lambda q_ij, billed rate r_ij, demand d_j, penalty p_j, cap
K_j. Its dual in alpha (0 <= alpha_j <= p_j, of demand) and beta (>= 0, of caps) is

    D(alpha, beta) = sum_i max(e_i, max_j v_ij + r_ij alpha_j - beta_j) - sum_j alpha_j d_j + sum_j beta_j K_j,

so the optimal rule shows the largest of e_i and v_ij + r_ij alpha_j - beta_j. Any (alpha, beta) gives an upper bound,
any feasible x a lower one: the two certify each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddrl.admix.contracts import Contracts, Requests
from ddrl.core.errors import EnvError, MissingExtraError
from ddrl.core.specs import Floats, Ints


@dataclass(frozen=True)
class Problem:
    """The program's data; pairs (i, j) that may be shown are in three arrays, ordered by request."""

    bid: Floats  # e_i [R]
    row: Ints  # request of each pair [P], non-decreasing
    column: Ints  # contract of each pair [P]
    value: Floats  # v_ij [P]
    rate: Floats  # r_ij [P]
    demand: Floats  # [C]
    penalty: Floats  # [C]
    cap: Floats  # [C]

    @staticmethod
    def of(requests: Requests, contracts: Contracts, click_value: float, billed_rate: Floats) -> Problem:
        """The program of a day; `billed_rate` [W, C] or [C]."""
        row, column = np.nonzero(requests.eligible)
        rate = billed_rate[requests.window[row], column] if billed_rate.ndim == 2 else billed_rate[column]
        return Problem(
            bid=requests.best_bid,
            row=row,
            column=column,
            value=click_value * requests.ctr[row, column].astype(np.float64),
            rate=np.asarray(rate, np.float64),
            demand=contracts.demand,
            penalty=contracts.penalty,
            cap=contracts.cap,
        )

    def rest(self, begin: int, demand: Floats) -> Problem:
        """The program of the requests from `begin` on, for this demand; caps are left out."""
        first = int(np.searchsorted(self.row, begin))
        return Problem(
            self.bid[begin:],
            self.row[first:] - begin,
            self.column[first:],
            self.value[first:],
            self.rate[first:],
            demand,
            self.penalty,
            np.full(len(demand), np.inf),
        )

    def duals(self) -> Floats:
        """alpha [C] of the whole program by coordinate descent alone."""
        return descend(self, self.penalty / 2, 20)

    @property
    def bid_only(self) -> float:
        """V of showing bids alone: every contract misses its whole demand."""
        return float(self.bid.sum() - self.penalty @ self.demand)


@dataclass(frozen=True)
class Optimum:
    """A solution with its certificate: lower <= V_opt <= upper."""

    lower: float  # V of a feasible (fractional) plan
    upper: float  # D(alpha, beta)
    alpha: Floats  # [C], worth of one more billed impression
    beta: Floats  # [C], price of the cap
    bid_only: float

    @property
    def gap(self) -> float:
        """What is not certified, as a share of what contracts add to bids alone; 0 where they add nothing."""
        gain = self.lower - self.bid_only
        return (self.upper - self.lower) / gain if gain > 0 else 0.0

    def normalised(self, value: float) -> float:
        """(V - V_bid_only) / (V_opt - V_bid_only), V_opt being the certified upper bound."""
        return (value - self.bid_only) / (self.upper - self.bid_only)


def solve_lp(problem: Problem) -> Optimum:
    """The program by HiGHS: exact, and slow above 10,000 requests. Needs scipy; EnvError where HiGHS gives up."""
    value, alpha, beta = _highs(problem)
    alpha = np.clip(alpha, 0, problem.penalty)
    beta = np.maximum(beta, 0)
    return Optimum(value, dual_value(problem, alpha, beta), alpha, beta, problem.bid_only)


def dual_value(problem: Problem, alpha: Floats, beta: Floats) -> float:
    """D(alpha, beta): an upper bound of V_opt for every 0 <= alpha <= p, beta >= 0. O(pairs)."""
    best = problem.bid.copy()
    np.maximum.at(best, problem.row, problem.value + problem.rate * alpha[problem.column] - beta[problem.column])
    return float(best.sum() - alpha @ problem.demand + beta @ problem.cap)


def solve_dual(
    problem: Problem, gap: float = 1e-4, alpha: Floats | None = None, sweeps: int = 20, rounds: int = 6
) -> Optimum:
    """The program in its dual, to a certified `gap`; starts from `alpha` [C] where given.

    Each round runs at most `sweeps` sweeps of exact coordinate descent, then finds a feasible plan: requests with a
    clear margin take what the duals say, the program of the rest (at first 500 requests) is solved by HiGHS, whose
    duals begin the next round. Raises EnvError where `rounds` rounds do not reach the gap."""
    descent = _Descent(problem, np.zeros(len(problem.demand)) if alpha is None else alpha)
    best = None
    free = 500
    for _ in range(rounds):
        descent.run(sweeps)
        lower, alpha, beta = _round(problem, descent.alpha, descent.beta, free)
        for candidate in ((descent.alpha, descent.beta), (alpha, beta)):
            upper = dual_value(problem, *candidate)
            if best is None or upper < best.upper:
                best = Optimum(lower if best is None else best.lower, upper, *candidate, problem.bid_only)
        assert best is not None
        best = replace(best, lower=max(best.lower, lower))
        if best.gap <= gap:
            return best
        descent = _Descent(problem, best.alpha, best.beta)
        free = free * 3
    assert best is not None
    raise EnvError(f"the dual of {len(problem.bid)} requests is at a gap of {best.gap:.1e}, above {gap:.1e}")


def descend(problem: Problem, alpha: Floats, sweeps: int) -> Floats:
    """Duals alpha [C] by coordinate descent alone, uncertified: for policies that solve often, from near by."""
    descent = _Descent(problem, alpha)
    descent.run(sweeps, 1e-3)
    return descent.alpha


class _Descent:
    """Exact coordinate descent on D: alpha_j becomes the threshold at which contract j gets d_j billed impressions.

    With the other duals fixed, request i goes to j once alpha_j exceeds t_i = (best other offer - v_ij + beta_j) /
    r_ij, so the minimum of D along alpha_j is the weighted quantile of t, clipped to [0, p_j]. O(pairs log pairs) a
    sweep."""

    def __init__(self, problem: Problem, alpha: Floats, beta: Floats | None = None) -> None:
        self.problem = problem
        self.alpha = np.clip(alpha, 0, problem.penalty).astype(np.float64)
        self.beta = np.zeros_like(self.alpha) if beta is None else np.maximum(beta, 0).astype(np.float64)
        count = np.bincount(problem.row, minlength=len(problem.bid))
        first = np.concatenate([[0], np.cumsum(count)[:-1]])
        self._place = np.arange(len(problem.row)) - first[problem.row]  # of each pair in its request's list
        self._offer = np.full((len(problem.bid), int(count.max(initial=0)) + 1), -np.inf)  # last: the best bid
        self._offer[:, -1] = problem.bid
        self._offer[problem.row, self._place] = self._scores()
        order = np.argsort(problem.column, kind="stable")
        self._pairs = np.split(order, np.cumsum(np.bincount(problem.column, minlength=len(self.alpha)))[:-1])

    def _scores(self) -> Floats:
        problem = self.problem
        return problem.value + problem.rate * self.alpha[problem.column] - self.beta[problem.column]

    def run(self, sweeps: int, tolerance: float = 1e-5) -> None:
        """At most `sweeps` sweeps; ends once no dual moves by `tolerance` of its penalty."""
        scale = np.maximum(self.problem.penalty, 1e-12)
        for _ in range(sweeps):
            before = self.alpha.copy()
            for contract in range(len(self.alpha)):
                self._move(contract)
            if (np.abs(self.alpha - before) <= tolerance * scale).all():
                break

    def _move(self, contract: int) -> None:
        problem = self.problem
        pairs = self._pairs[contract]
        demand = problem.demand[contract]
        penalty = problem.penalty[contract]
        cap = problem.cap[contract]
        rows = problem.row[pairs]
        places = self._place[pairs]
        self._offer[rows, places] = -np.inf
        other = self._offer[rows].max(1, initial=-np.inf)
        value = problem.value[pairs]
        rate = problem.rate[pairs]
        usable = rate > 0
        threshold = (other - value + self.beta[contract])[usable] / rate[usable]
        order = np.argsort(threshold)
        billed = np.cumsum(rate[usable][order])
        first = int(np.searchsorted(billed, demand))
        alpha = penalty if first == len(order) else float(np.clip(threshold[order[first]], 0, penalty))
        gain = value + rate * alpha - other
        beta = 0.0
        if np.count_nonzero(gain > 0) > cap:  # the cap binds: the K-th largest gain is its price
            beta = float(-np.partition(-gain, int(cap))[int(cap)])
        self.alpha[contract] = alpha
        self.beta[contract] = beta
        self._offer[rows, places] = value + rate * alpha - beta


def _round(problem: Problem, alpha: Floats, beta: Floats, free: int) -> tuple[float, Floats, Floats]:
    """V of a feasible plan near the duals, and the duals of the small program that completed it."""
    requests = len(problem.bid)
    score = problem.value + problem.rate * alpha[problem.column] - beta[problem.column]
    best = problem.bid.copy()
    np.maximum.at(best, problem.row, score)
    winner = np.full(requests, -1)  # pair that wins a request; -1: the bid
    wins = np.flatnonzero((score >= best[problem.row]) & (score > problem.bid[problem.row]))
    winner[problem.row[wins]] = wins
    second = np.where(winner >= 0, problem.bid, -np.inf)
    losing = winner[problem.row] != np.arange(len(score))
    np.maximum.at(second, problem.row[losing], score[losing])
    margin = best - second
    clear = np.ones(requests, bool)
    clear[np.argpartition(margin, min(free, requests) - 1)[:free] if requests else []] = False
    shown = winner[clear & (winner >= 0)]
    columns = len(problem.demand)
    billed = np.bincount(problem.column[shown], problem.rate[shown], columns)
    cap = problem.cap - np.bincount(problem.column[shown], minlength=columns)
    if (cap < 0).any():  # the duals are far off: everything is free where a cap is broken
        return problem.bid_only, alpha, beta
    pairs = np.flatnonzero(~clear[problem.row])
    number = np.cumsum(~clear) - 1
    rest = Problem(
        problem.bid[~clear],
        number[problem.row[pairs]],
        problem.column[pairs],
        problem.value[pairs],
        problem.rate[pairs],
        np.maximum(problem.demand - billed, 0),
        problem.penalty,
        cap,
    )
    value, small_alpha, small_beta = _highs(rest)
    value += problem.bid[clear & (winner < 0)].sum() + problem.value[shown].sum()
    return float(value), np.clip(small_alpha, 0, problem.penalty), np.maximum(small_beta, 0)


def _highs(problem: Problem) -> tuple[float, Floats, Floats]:
    """Optimal value, alpha and beta of a small program."""
    try:
        from scipy import optimize, sparse
    except ModuleNotFoundError:
        raise MissingExtraError("scipy", "admix", "the optimum by linear programming") from None
    requests = len(problem.bid)
    columns = len(problem.demand)
    pairs = len(problem.row)
    pair = np.arange(pairs)
    contract = np.arange(columns)
    rows = np.concatenate([problem.column, contract, columns + problem.column, 2 * columns + problem.row])
    places = np.concatenate([pair, pairs + contract, pair, pair])
    entries = np.concatenate([-problem.rate, -np.ones(columns), np.ones(2 * pairs)])
    matrix = sparse.csr_array((entries, (rows, places)), shape=(2 * columns + requests, pairs + columns))
    cost = np.concatenate([problem.bid[problem.row] - problem.value, problem.penalty])
    scale = max(float(np.abs(cost).max(initial=0)), 1e-12)  # HiGHS has absolute tolerances
    bound = np.concatenate([-problem.demand, problem.cap, np.ones(requests)])
    result: Any = optimize.linprog(cost / scale, A_ub=matrix, b_ub=bound, bounds=(0, None), method="highs")
    if result.status != 0:
        raise EnvError(f"HiGHS could not solve {requests} requests x {columns} contracts: {result.message}")
    duals = -scale * result.ineqlin.marginals
    return float(problem.bid.sum() - scale * result.fun), duals[:columns], duals[columns : 2 * columns]
