"""n ad-mixing environments that step together, in numpy across the environments (`ddrl.core.specs.VectorEnv`).

A step takes the scores of the present queue, shows the ad of the highest score that may play, counts it, and brings the
next request. Rules, in this order:

1. A contract is in the queue when it is targeted, not filtered, below its cap, and drawn with probability `rate`.
2. A contract of the queue may play with probability `theta`; support policies set both aside for some contracts.
3. The highest score is shown; of equal scores the lowest slot of the unshuffled queue, so contracts before bids.
4. In a queue without a playable ad nothing is shown: revenue 0, counted in `events`.

In mode "bonuses" an action is not a score but what is added to the value of a click, for the next `repeat` requests;
the state then holds contracts alone, and its mask those below their cap.

The reward is value shown minus the growth of penalties for what is due by now and not billed; with weights of 1 the
rewards of a day add up to V of `optimum` (billed impressions as drawn).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import ConfigError, EnvError
from ddrl.core.specs import EnvStep
from ddrl.envs.admix.block import play_block
from ddrl.envs.admix.delivery import Delivery
from ddrl.envs.admix.feed import Days, Feed, alpha_of, prior_of
from ddrl.envs.admix.joint import dtype_of, make_spec
from ddrl.envs.admix.pacing import Pacing
from ddrl.envs.admix.places import draw_order, present_columns, presented, scores_by_slot
from ddrl.envs.admix.settings import PlayConfig
from ddrl.envs.admix.state import StateWriter
from ddrl.envs.admix.tally import Tally


class AdmixVectorEnv:
    """`count` environments; `days(seed, episode)` gives each its days, all of the same contracts."""

    def __init__(self, days: Days, count: int, play: PlayConfig, click_value: float, bids: int) -> None:
        self.num_envs = count
        self.play = play
        self.click_value = click_value
        self._days = days
        first = days(0, 0)
        if play.prior == "yesterday" and "yesterday_alpha" not in dir(first):  # which computes nothing
            raise ConfigError('play.prior = "yesterday": a log holds one day; set play.prior = "demand" or "off"')
        self.contracts = first.contracts
        self.bids = bids
        self._contracts = self.contracts.count
        self._windows = first.windows
        self.queue = self._contracts + bids
        self._bonuses = play.mode == "bonuses"
        self._writer = StateWriter(count, self.contracts, 0 if self._bonuses else bids, play)
        observed = self._contracts if self._bonuses else self.queue
        high = np.full(observed if play.mode == "all" else self._contracts, self.contracts.penalty.max() + click_value)
        if self._bonuses:
            high = self.contracts.penalty  # no bonus above the penalty is ever of use
        self._by_contract = play.reward_by == "contract"
        rewards = (self._contracts,) if self._by_contract else ()
        self._whole_penalty = np.maximum(self.contracts.penalty * self.contracts.demand, 1e-12)
        self.spec = make_spec(self._writer.fields, observed, (1000 * high).tolist(), rewards)
        self._dtype = dtype_of(self.spec)
        self._delay = round(play.delay * first.inventory.requests)
        self._all = np.arange(count)
        self.rate = np.full((count, self._contracts), play.rate)
        self.theta = np.ones((count, self._contracts))
        self._pacing = Pacing(self.contracts, play.pace_step, count) if play.pace_step else None
        self._tally = Tally(count, self._contracts)
        self._started = False

    @property
    def events(self) -> dict[str, int]:
        """How often things happened since this object was made, in all environments together."""
        return self._tally.events

    def reset(self, seed: int) -> NDArray[Any]:
        """New days everywhere. Returns states [N]; the same seed gives the same run for the same scores."""
        words = np.random.SeedSequence(seed).generate_state(self.num_envs + 1, np.uint32)
        self._seeds = words[:-1].tolist()
        self._rng = np.random.Generator(np.random.SFC64(int(words[-1])))
        self._episode = [0] * self.num_envs
        n = self.num_envs
        contracts = self._contracts
        self._feed = Feed(n)
        self.delivery = Delivery(n, self.contracts.billed_rate, self._delay, self.play.own_counts)
        self._curve = np.zeros((n, self._windows + 1, contracts))
        self._billed_rate = np.zeros((n, self._windows, contracts))
        self._required = np.zeros((n, contracts))
        self._prior = np.zeros((n, contracts))
        self._charged = np.zeros((n, contracts))  # penalties that rewards have counted so far
        self._over = np.zeros(n, bool)
        self._continues = np.zeros(n, bool)
        for env in range(n):
            self._begin_day(env)
        self._writer.prepare(self._dtype, self._required, self.theta)
        self._started = True
        self._read()
        self._first_window = self._window.copy()
        if self.play.first_window:
            self._charged = self._shortfall.copy()
        return self._observe()

    def step(self, action: NDArray[Any]) -> EnvStep:
        """Take `action` [N, Q] or [N, C], the scores of the queue as it was observed; EnvError for NaN in a place of
        the mask."""
        if not self._started:
            raise EnvError("admix: step before reset; call reset(seed) first")
        playing = ~self._over
        order = self._order
        action = self._check(action)
        starting = self._over & ~self._continues
        value = np.zeros((self.num_envs, self._contracts + 1))
        revenue = np.zeros(self.num_envs)
        chosen = np.full(self.num_envs, -1)
        score = np.zeros(self.num_envs)
        logged = self._logged
        moving = playing
        self._gain = np.zeros((self.num_envs, self._contracts))
        whole = (
            self._bonuses and self.play.support == "off" and bool((self.rate >= 1).all() and (self.theta >= 1).all())
        )
        if whole:  # nothing is drawn by chance: many requests at once
            self._start_days(starting)
            logged = self._show_blocks(action, playing, chosen, score, revenue, value)
        for turn in range(0 if whole else self.play.repeat):
            if turn:
                moving = playing & self._feed.has_request
                self._read(with_news=False)
            logged = np.where(moving, self._logged, logged)
            self._show(action, moving, chosen, score, revenue, value)
            if not turn:
                self._start_days(starting)
            self._feed.advance(moving)
        self._read()
        columns = {
            "chosen": presented(chosen, order).astype(np.int32),
            "score": score.astype(np.float32),
            "revenue": (1000 * revenue).astype(np.float32),
            "logged": presented(logged, order).astype(np.int32),
        }
        terminated = playing & ~self._feed.has_request
        self._first_window[self._over] = self._window[self._over]
        past = playing & ~terminated & (self._window >= (self.play.last_window or self._windows))
        truncated = past | (playing & ~terminated & self._limit_reached())
        self._over = terminated | truncated
        self._continues = truncated & ~past
        observation = self._observe()
        if self.play.first_window:  # what was due before an episode began is nobody's doing
            self._charged[starting] = self._shortfall[starting]
        growth = np.where(playing[:, None], self._shortfall - self._charged, 0.0)
        self._charged += growth
        value[:, :-1] -= self.play.shortfall_weight * growth
        raw = value.sum(1)
        own = self._gain - self.play.shortfall_weight * growth
        reward = own / self._whole_penalty if self._by_contract else raw
        reward = (self.play.reward_scale * reward).astype(np.float32)
        return EnvStep(observation, reward, terminated, truncated, raw, columns)

    def control(self, rate: NDArray[np.float64] | None = None, theta: NDArray[np.float64] | None = None) -> None:
        """Set the play-control probabilities of contracts, [C] or [N, C], from the next request on."""
        for name, values in (("rate", rate), ("theta", theta)):
            if values is None:
                continue
            if not (np.isfinite(values).all() and (np.asarray(values) >= 0).all() and (np.asarray(values) <= 1).all()):
                raise EnvError(f"admix: {name} must be probabilities in [0, 1]")
            getattr(self, name)[...] = values
        if theta is not None and self._started:
            self._writer.prepare(self._dtype, self._required, self.theta)

    def close(self) -> None:
        """Nothing is held but memory."""

    def _show(
        self,
        action: NDArray[Any],
        moving: NDArray[np.bool_],
        chosen: NDArray[np.int64],
        score: NDArray[np.float64],
        revenue: NDArray[np.float64],
        value: NDArray[np.float64],
    ) -> None:
        """Play the present request of the environments `moving`. Updates the slot shown last [N] and its score, and
        adds to the revenue [N] and to the weighted value by contract [N, C + 1], the last place for bids."""
        slot, best, worth = self._choose(self._scores(action, moving), moving)
        contract = np.where(slot < self._contracts, slot, -1)
        rate = self._billed_rate[self._all, self._window, contract]
        known = (slot == self._logged) & (self._request["logged_billed"] >= 0)
        billed = np.where(known, self._request["logged_billed"] == 1, self._request["billing"] < rate) & (contract >= 0)
        self.delivery.show(contract, billed, moving)
        now = {name: self._request[name][:, None] for name in ("ctr", "bid_ctr", "ecpm")}
        self._tally.count(slot[:, None], billed[:, None], moving, now)
        chosen[moving] = slot[moving]
        score[moving] = best[moving]
        revenue += worth
        weighted = np.where(contract >= 0, self.play.ctr_weight, self.play.bid_weight) * worth
        if self._by_contract:
            taken = np.flatnonzero(contract >= 0)
            self._gain[taken, contract[taken]] += weighted[taken] - np.maximum(self._second[taken], 0) / 1000
        if self.play.relative and self.bids:
            weighted -= np.where(moving, self.play.bid_weight * self._request["ecpm"].max(1) / 1000.0, 0.0)
        value[self._all, contract] += weighted

    def _show_blocks(
        self,
        action: NDArray[Any],
        playing: NDArray[np.bool_],
        chosen: NDArray[np.int64],
        score: NDArray[np.float64],
        revenue: NDArray[np.float64],
        value: NDArray[np.float64],
    ) -> NDArray[np.int64]:
        """As `_show`, the next `repeat` requests of the environments `playing`; the slot logged last [N]."""
        logged = np.full(self.num_envs, -1)
        left = self.play.repeat
        rows = self._all[:, None]
        while left and (moving := playing & self._feed.has_request).any():
            request = self._feed.block(moving, min(left, self._delay or left))
            room = self.contracts.cap - self.delivery.shown
            block = play_block(request, action.astype(np.float32), room, moving, self.click_value)
            count = block.slot.shape[1]
            contract = block.contract
            request = {name: values[:, :count] for name, values in request.items()}
            rate = self._billed_rate[rows, request["window"], contract]
            known = (block.slot == request["logged"]) & (request["logged_billed"] >= 0)
            billed = np.where(known, request["logged_billed"] == 1, request["billing"] < rate) & (contract >= 0)
            self.delivery.show_block(contract, billed, moving)
            self._tally.count(block.slot, billed, moving, request)
            last = block.slot[:, -1]
            chosen[moving] = last[moving]
            score[moving] = block.score[moving, -1]
            logged[moving] = request["logged"][moving, -1]
            revenue += block.worth.sum(1)
            weighted = np.where(contract >= 0, self.play.ctr_weight, self.play.bid_weight) * block.worth
            self._gain += block.by_contract(weighted - block.other / 1000)
            if self.play.relative and self.bids:
                weighted -= self.play.bid_weight * request["ecpm"].max(2) * moving[:, None] / 1000.0
            value[:, :-1] += block.by_contract(weighted)
            value[:, -1] += (weighted * (contract < 0)).sum(1)
            self._feed.advance(moving, count)
            left -= count
        return logged

    def _start_days(self, starting: NDArray[np.bool_]) -> None:
        self._continues[:] = False
        for env in np.flatnonzero(starting):
            self._begin_day(int(env))
        if starting.any():
            self._writer.prepare(self._dtype, self._required, self.theta)

    def _begin_day(self, env: int) -> None:
        day = self._days(self._seeds[env], self._episode[env])
        self._episode[env] += 1
        inventory = day.inventory
        self._curve[env] = inventory.curve
        self._billed_rate[env] = day.billed_rate
        self._required[env] = inventory.split()
        if self.play.theta != "off":
            self.theta[env] = self._required[env] if self.play.theta == "split" else inventory.water()
        self._prior[env] = prior_of(self.play, day)
        if self._pacing:
            self._pacing.begin(env, alpha_of(self.play, day), midway=self.play.first_window > 0)
        self.delivery.reset(env)
        self._tally.begin_day(env)
        self._charged[env] = 0
        self._feed.begin(env, day, self.play.first_window)

    def _read(self, *, with_news: bool = True) -> None:
        """Take over the present request; what is due by now, and which contracts are in the queue and may play.

        Without news, what was due and delivered stands as it was read before, where no support policy asks for it."""
        request = self._request = self._feed.read()
        present = self._feed.has_request
        self._window = request["window"]
        if with_news or self.play.support != "off":
            self._read_news(request, present)
        usable = request["eligible"] & (self.delivery.shown < self.contracts.cap) & present[:, None]
        self._mask = np.empty((self.num_envs, self.queue), bool)
        self._mask[:, self._contracts :] = (request["ecpm"] > 0) & present[:, None]
        plays = usable
        entered = usable
        if (self.rate < 1).any() or (self.theta < 1).any():
            supported = self._supported()
            draws = self._rng.random((2, *usable.shape))
            entered = usable & ((draws[0] < self.rate) | supported)
            plays = entered & ((draws[1] < self.theta) | supported)
        self._mask[:, : self._contracts] = entered
        self._playable = self._mask.copy()
        self._playable[:, : self._contracts] = plays
        self._value = np.float32(1000 * self.click_value) * request["ctr"]
        self._logged = np.where(present, request["logged"], -1)
        self._order = (
            draw_order(self._rng, self.num_envs, self.queue, self._contracts if self.play.mode == "contracts" else 0)
            if self.play.shuffle
            else None
        )

    def _read_news(self, request: dict[str, NDArray[Any]], present: NDArray[np.bool_]) -> None:
        time = np.where(present, request["time"], 1.0)
        place = time * self._windows
        left = np.minimum(place.astype(np.int64), self._windows - 1)
        part = (place - left)[:, None]
        share = self._curve[self._all, left] * (1 - part) + self._curve[self._all, left + 1] * part
        self._due = share * self.contracts.demand
        self._time = time
        missing = np.maximum(self._due - self.delivery.billed, 0)
        self._shortfall = missing * self.contracts.penalty
        self._estimate = self.delivery.estimate

    def _supported(self) -> NDArray[np.bool_]:
        """Contracts [N, C] that a support policy lets in and lets play."""
        gap = self.play.support_gap * self.contracts.demand
        if self.play.support == "late":
            return self._due - self._estimate > gap
        if self.play.support == "fresh":
            return self._estimate < gap
        return np.zeros(self._estimate.shape, bool)

    def _check(self, action: NDArray[Any]) -> NDArray[Any]:
        action = np.asarray(action)
        wanted = (self.num_envs, *self.spec.action.shape)
        if action.shape != wanted:
            raise EnvError(f"admix: scores of shape {action.shape}; mode {self.play.mode} takes {wanted}")
        return action

    def _scores(self, action: NDArray[Any], moving: NDArray[np.bool_]) -> NDArray[np.float64]:
        needed = self._mask & moving[:, None]
        if self._bonuses:
            return scores_by_slot(action + self._value, self._request["ecpm"], None, needed)
        return scores_by_slot(action, self._request["ecpm"], self._order, needed)

    def _choose(
        self, scores: NDArray[np.float64], playing: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Slot shown [N] (-1: none), its score, and what showing it is worth [currency]."""
        scores = np.where(self._playable, scores, -np.inf)
        best = scores.argmax(1)
        score = scores[self._all, best]
        if self._by_contract:
            scores[self._all, best] = -np.inf
            self._second = scores.max(1)  # what the ad shown keeps from being shown, by its own score
        shows = (score > -np.inf) & playing
        worth = np.concatenate([self._value, self._request["ecpm"]], 1)[self._all, best] / 1000.0
        return np.where(shows, best, -1), np.where(shows, score, 0.0), np.where(shows, worth, 0.0)

    def _limit_reached(self) -> NDArray[np.bool_]:
        length = self.play.episode_windows
        return (self._window - self._first_window >= length) & (length > 0)

    def _observe(self) -> NDArray[Any]:
        due = self._due.sum(1)
        late = np.maximum(self._due - self._estimate, 0).sum(1)
        overall = {
            "shortfall": np.divide(late, due, out=np.zeros_like(due), where=due > 0),
            "time": self._time,
            **self._tally.means(),
        }
        if self._pacing:
            news = self.delivery.seen_billed, self.delivery.seen_shown
            self._prior = 1000 * self._pacing.decide(self._due, self._estimate, *news)
        mask = self._mask
        if self._bonuses:
            mask = (self.delivery.shown < self.contracts.cap) & self._feed.has_request[:, None]
        state = self._writer.write(
            self._request,
            self._feed.has_request,
            mask,
            self.delivery,
            self._estimate,
            self._due,
            overall,
            self._value,
            self._prior,
        )
        if self._order is not None:
            present_columns(state, self._order)
        return state
