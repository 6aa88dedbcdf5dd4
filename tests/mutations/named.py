"""Named one-line faults: each is a mistake that somebody could make, in every package. Written before the tests were
looked at. A line of code is replaced by another one; its text stands once in its file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

OUTSIDE = (
    "outside",
    "held_out",
    "held_out_again",
    "held_out_third",
    "held_out_fourth",
)  # files of faults by somebody who had not seen the tests


class Fault(NamedTuple):
    """`old` becomes `new` in the file `path`, at its only place, or in line `line` (from 1) where that is given."""

    name: str
    path: str
    old: str
    new: str
    line: int = 0


_NAMED = {
    "run/training.py": (
        (
            "mean_unpublished lacks one update",
            "self.lag.consumed(used.versions, self.state.policy_version, self._unpublished + (updates + 1) / 2)",
            "self.lag.consumed(used.versions, self.state.policy_version, self._unpublished)",
        ),
        (
            "priorities are never written back",
            "self.source.learned(batch, priority)",
            "self.source.learned(batch, None)",
        ),
        ("nothing is annealed", "self.learner.anneal(progress)", "pass"),
        ("importance weights are not annealed", "self.source.anneal(progress)", "pass"),
        ("no exploration", "epsilon_at(self.config.rollout, state.env_steps) if", "0.0 if"),
        ("updates are not counted", "self.state.updates += updates", "pass"),
        (
            "a publish every update",
            "self._unpublished = 0\n        self._count",
            "self._unpublished = 99\n        self._count",
        ),
        (
            "lag is counted from the next version",
            "self.lag.consumed(used.versions, self.state.policy_version,",
            "self.lag.consumed(used.versions, self.state.policy_version + 1,",
        ),
        ("more steps than max_env_steps", "room = min(room, left)", "room = max(room, 1)"),
        ("rollouts hear of no new version", "board.rollout_bell.ring()", "pass"),
        ("a live epsilon is ignored", "if self.live.epsilon is None else self.live.epsilon", "if True else 0.0"),
    ),
    "run/checkpoint.py": (
        (
            "the worst policy is kept",
            "self._rank(evaluation) >= self._rank(self.evaluation)",
            "self._rank(evaluation) <= self._rank(self.evaluation)",
        ),
        (
            "confirmation is ignored",
            "return min(evaluation.played.mean, evaluation.best.mean) >= target",
            "return evaluation.played.mean >= target",
        ),
        ("the target is never reached", "self.target_reached = self.target_reached or reached", "pass"),
        ("old checkpoints stay", "for old in _complete(folder)[:-keep]:", "for old in []:"),
        ("a damaged file passes", "if actual != digest:", "if False:"),
        (
            "checkpoints at every look",
            "self.next_steps = (self._training.state.env_steps // period + 1) * period if period else math.inf",
            "self.next_steps = self._training.state.env_steps",
        ),
    ),
    "run/lag.py": (
        (
            "after a window is full, recent percentiles keep old values",
            "self._next = (self._next + len(newest)) % RECENT",
            "self._next = min(self._next + len(newest), RECENT - 1)",
        ),
        ("lag of rows at arrival is zero", '_recent["arrived"].add(lag)', '_recent["arrived"].add(lag * 0)'),
    ),
    "run/task.py": (
        ("a resumed run has an empty replay", "source.load(resume.path, resume.state.source)", "pass"),
        ("a pause is ignored", "moved = not paused and training.turn()", "moved = training.turn()"),
        (
            "max_seconds is ignored",
            "return Reason.MAX_SECONDS if self.training.seconds >= run.max_seconds else None",
            "return None",
        ),
        (
            "the best policy is not confirmed",
            "self.best.confirm(evaluator.confirm(self.best.vector(), self.best.states, stopped))",
            "pass",
        ),
    ),
    "acting/choosers.py": (
        ("epsilon never falls", "progress = min(env_steps / config.epsilon_decay_steps, 1.0)", "progress = 0.0"),
        ("all rollouts explore alike", "config.epsilon_spread * index / (count - 1)", "0.0 * index / (count - 1)"),
        ("epsilon counts once a vector step", "where=self._uniform[place] < exploration)", "where=True)"),
        ("the worst action is greedy", 'return outputs["q"].argmax(1)', 'return outputs["q"].argmin(1)'),
        (
            "actions leave their bounds",
            "action = np.clip(drawn, self._low, self._high).astype(self._dtype)",
            "action = drawn.astype(self._dtype)",
        ),
        ("log-probability without its constant", "- log_std - 0.5 * LOG_TWO_PI", "- log_std"),
    ),
    "rollout/worker.py": (
        (
            "versions of actions are not recorded",
            "terminated, truncated, following, self._version)",
            "terminated, truncated, following, 0)",
        ),
        ("an action of two versions counts", "if self._pin.valid():", "if self._pin is not None:"),
        (
            "warm-up is skipped",
            "self._warming = values[ENV_STEPS] < self._config.warmup_steps",
            "self._warming = False",
        ),
        ("returns run on over episodes", "returns[index] = 0.0", "pass"),
        (
            "clipped rewards are reported",
            "np.add(returns, raw_reward, out=returns)",
            "np.add(returns, reward, out=returns)",
        ),
        (
            "a new version waits for the episode's end",
            "elif self._by_step or (self._wrote() if self._by_write else self._resetting):",
            "elif self._resetting:",
        ),
    ),
    "envs/atari.py": (
        ("returns are reported clipped", "truncated, raw)", "truncated, reward.astype(np.float64))"),
        ("frames are not the maximum of two", "np.maximum(newest, before, out=newest)", "pass"),
        ("no no-ops", "for _ in range(noops):", "for _ in range(0):"),
        ("a new episode keeps old frames", "frames[:-1] = frames[-1]", "pass"),
    ),
    "envs/vectors.py": (
        (
            "every reward is clipped",
            "(np.clip(raw, -1.0, 1.0) if self._reward_clip else raw)",
            "np.clip(raw, -1.0, 1.0)",
        ),
        (
            "time limits are terminal",
            "terminations[index] = terminated",
            "terminations[index] = terminated or truncated",
        ),
    ),
    "admix/contracts.py": (
        (
            "more than a cell holds is dealt",
            "rest[cells] -= np.minimum(rest[cells], theta[contract] * supply[cells])",
            "rest[cells] -= theta[contract] * supply[cells]",
        ),
    ),
    "admix/market.py": (
        ("every day has the same walk", "for past in range(day + 1):", "for past in range(1):"),
        ("filters hold nothing back", "eligible &= rng.random(eligible.shape, np.float32) >= config.filtered", "pass"),
    ),
    "acting/policy.py": (
        ("recurrent state stays", "np.copyto(self._held[name], self._outputs[following])", "pass"),
        ("an ended episode keeps its state", "held[places] = declared.initial", "pass"),
        (
            "the first vector acts for ever",
            "if vector is not self._vector or count != self._count:",
            "if self._vector is None or count != self._count:",
        ),
    ),
    "channels/mailbox.py": (
        ("places of the dead stay taken", "if self.release_dead():", "if False:"),
        (
            "a firm pin is revoked",
            "os.getpid(), start_time(os.getpid()), firm)",
            "os.getpid(), start_time(os.getpid()), False)",
        ),
    ),
    "channels/lane.py": (
        (
            "lanes of other rows are accepted",
            "if not np.array_equal(segment.array[:_DIGEST_NBYTES], _digest(dtype)):",
            "if False:",
        ),
    ),
    "channels/board.py": (
        (
            "fresh counters are zero",
            "array[offset:].view(np.float64)[:] = np.nan",
            "array[offset:].view(np.float64)[:] = 0",
        ),
    ),
    "core/files.py": (("a failed write leaves its file", "temporary.unlink(missing_ok=True)", "pass"),),
    "core/rows.py": (("tensors are not aligned", "offset += -offset % ALIGNMENT", "offset += 0"),),
    "core/roles.py": (
        (
            "the evaluator stands on any host",
            "elif host == 0 and first_host:",
            "elif first_host:",
        ),
    ),
    "core/settings.py": (("a setting that does not exist passes", "if name not in known:", "if False:"),),
    "learner/losses.py": (
        (
            "the maximum in place of the double choice",
            "best = selector.argmax(dim=1, keepdim=True)",
            "best = q_t.argmax(dim=1, keepdim=True)",
        ),
        (
            "importance weights are left out of the slope",
            "slope_taken = inside * weight * (-1.0 / len(weight))",
            "slope_taken = inside * (-1.0 / len(weight))",
        ),
        (
            "quantiles are weighed from the wrong side",
            "torch.where(error < 0, 1.0 - tau, tau)",
            "torch.where(error < 0, tau, 1.0 - tau)",
        ),
        ("one critic alone", "values_t.amin(dim=0)", "values_t[0]"),
    ),
    "learner/part.py": (
        (
            "buffers of a target that follows softly stay as at the start",
            "            target[self._learned :].copy_(online[self._learned :])",
            "            pass",
        ),
        ("the target never follows", "self._follow(self._config.target_rate)", "pass"),
        ("a saved optimizer begins anew", "self._adam.steps = updates", "pass"),
        (
            "gradients are not clipped",
            "shrink = (norm / self._max_grad_norm).clamp_(min=1.0)",
            "shrink = (norm / self._max_grad_norm).clamp_(min=1.0, max=1.0)",
        ),
    ),
    "learner/engine.py": (
        (
            "a derivative by an input is lost",
            "slopes.add(of, (slope * columns.scale.on(slope.device).factor).view(of.shape))",
            "slopes.add(of, torch.zeros_like(of))",
        ),
    ),
    "learner/learner.py": (
        ("the random state is not saved", 'self._random[0] = torch.from_numpy(np.array(state["torch_rng"]))', "pass"),
        ("divergence passes", "if not math.isfinite(value):", "if False:"),
        ("the step size stays", "return lr * (1.0 + (end_fraction - 1.0) * progress)", "return lr"),
    ),
    "learner/algorithms/c51.py": (("the selector is the target network", 'outputs.get("logits_t_selector")', "None"),),
    "learner/algorithms/pqn.py": (
        (
            "every minibatch is the same",
            "np.random.default_rng((self._seed, epoch)).permutation(steps) for epoch",
            "np.zeros(steps, np.int64) for epoch",
        ),
        (
            "a terminal state bootstraps",
            "following[rows[terminated], last[terminated]] = 0.0",
            "pass",
        ),
    ),
    "learner/algorithms/td3.py": (
        ("the actor learns at every update", "self.actor_delay = settings.actor_delay", "self.actor_delay = 1"),
        (
            "target noise is not clipped",
            "return noise.clamp(-TARGET_NOISE_CLIP, TARGET_NOISE_CLIP)",
            "return noise",
        ),
    ),
    "learner/algorithms/d4pg.py": (
        (
            "weights are left out",
            "return Loss((batch.weight * each).mean(), each",
            "return Loss(each.mean(), each",
        ),
    ),
    "learner/algorithms/r2d2.py": (
        (
            "short sequences get lower priorities by their padding",
            "priority = ETA * size.amax(dim=1) + (1 - ETA) * size.sum(dim=1) / count",
            "priority = ETA * size.amax(dim=1) + (1 - ETA) * size.mean(dim=1)",
        ),
        (
            "R2D2 chooses the bootstrap's action by the wrong state",
            "selector = losses.at(q.detach(), there) if self.double else bootstrap",
            "selector = losses.at(q.detach(), here) if self.double else bootstrap",
        ),
        (
            "values are not rescaled",
            "batch.r_t + batch.discount_t * losses.unscale(best, settings.rescaling)",
            "batch.r_t + batch.discount_t * best",
        ),
        ("burn-in is learned from", "there = (here + batch.ahead).clamp(max=q.shape[1] - 1)", "there = here"),
    ),
    "replay/sources.py": (
        ("the ratio is not kept", "return min(count, band) - self.samples_behind <= band", "return True"),
        (
            "a new ratio owes for the past",
            "self.samples = round(self.samples_per_insert * max(0, self.inserts - self.min_size))",
            "pass",
        ),
        (
            "a TD error of zero is never drawn again",
            "np.asarray(priority, np.float32) + np.float32(self._config.replay.priority_offset)",
            "np.asarray(priority, np.float32)",
        ),
        (
            "discount is zero",
            "self.selector, learner.discount)",
            "self.selector, 0.0)",
        ),
        ("beta stays", "start + min(1.0, progress) * (1.0 - start)", "start"),
    ),
    "replay/replay.py": (
        (
            "n_step is 1",
            "            n_step=n_step,\n            burn_in=burn_in,\n            eviction=eviction.name",
            "            n_step=min(1, n_step),\n            burn_in=burn_in,\n            eviction=eviction.name",
        ),
    ),
    "distribution/plan.py": (
        (
            "slow receivers are taken for fast relays",
            "wire = max(send_seconds[holder], receive_seconds[child])",
            "wire = send_seconds[holder]",
        ),
        (
            "cores cost nothing",
            "heapq.heappush(self.core_free, begin + seconds)",
            "heapq.heappush(self.core_free, begin)",
        ),
        (
            "latency is lost where the sender's link is the slower",
            "arrival = max(end + network.latency, self.down_free[target])",
            "arrival = max(end, self.down_free[target])",
        ),
        (
            "the bound forgets the receivers",
            "return max(S / up[0], S / min(down[1:]), n * S / sum(up))",
            "return max(S / up[0], n * S / sum(up))",
        ),
        ("links receive many at once", "max(first_byte - ahead, self.down_free[target])", "first_byte - ahead"),
    ),
    "distribution/chunks.py": (
        (
            "checksums are not compared",
            "elif wanted != self.headers.checksum(index, payload):",
            "elif False:",
        ),
        (
            "a chunk of another version is taken",
            "foreign = (epoch, sequence, place) != (self._epoch, self._sequence, index)",
            "foreign = False",
        ),
    ),
    "distribution/models.py": (
        ("more versions in flight than allowed", "or len(self._open) >= self._in_flight or", "or"),
        (
            "a refused version is not sent again",
            "            self._refused = True",
            "            self._refused = False",
        ),
        (
            "versions leave before they are used",
            "if self._in_use is not None and not self._in_use(self.sent_version):",
            "if False:",
        ),
        ("confirmed before it is used", "and not self._in_use(report.version)", "and False"),
    ),
    "distribution/flows.py": (
        ("rows without room are lost", "room = min(len(rows), lane.capacity - len(lane))", "room = len(rows)"),
    ),
    "balance/collection.py": (
        (
            "late gradients are as good as new",
            "fresh = self._staleness(now, version) <= self.settings.threshold or version == self.version",
            "fresh = True",
        ),
        ("the wait never ends", "return self._opened_at + self.settings.wait", "return math.inf"),
        (
            "a dead node's samples are lost",
            "self.counts.requeued += samples\n            self._begun",
            "self.counts.lost += samples\n            self._begun",
        ),
        (
            "every gradient has the same weight",
            "{key: size / samples for key, size in self._held.items()}",
            "{key: 1 / len(self._held) for key, size in self._held.items()}",
        ),
        ("a subset given back is lost", "self._queue.appendleft(self._pop(node))", "self._pop(node)"),
    ),
    "balance/sizes.py": (
        (
            "remainders go to the first nodes",
            "remainder = np.where(sizes < upper, exact - sizes, -np.inf)",
            "remainder = np.where(sizes < upper, 0.0, -np.inf)",
        ),
        ("jumps are followed slowly", "(surprise > settings.jump)", "(surprise > np.inf)"),
    ),
    "pool/leases.py": (
        (
            "two processes of one task",
            "if is_alive(pid, started):\n                raise",
            "if False:\n                raise",
        ),
        ("a dead task keeps its device", "if member.pidfd == descriptor:", "if False:"),
    ),
    "pool/policies.py": (
        (
            "a task may hold two devices",
            "if request.task in self._holds or request.task in self._waiting:",
            "if False:",
        ),
        ("seconds held are not counted", "self.held_seconds[task] += now - hold.at", "pass"),
        ("nobody is ever due", "if account.due <= now:", "if False:"),
        ("a new task catches up", "account.served = weight * min(", "account.served = 0.0 * min("),
    ),
    "admix/mixer.py": (
        ("an ad that was chosen does not count as shown", "queue.show(slot)", "pass"),
        ("more is billed than was shown", "or news.shown[at] > under_way:", "or False:"),
        ("an action stands for ever", "if self._held_for % self.book.play.repeat else None", "if True else None"),
    ),
    "admix/journal.py": (
        (
            "billing is forgotten at a restart",
            'COUNTERS = ("shown", "seen_shown", "seen_billed", "rate", "theta")',
            'COUNTERS = ("shown", "rate", "theta")',
        ),
    ),
    "admix/serving.py": (
        ("a newer policy is not looked for", "self.mixer.use(fresh)", "pass"),
        (
            "counters are lost at the end",
            "        snapshot.save(state, snapshot.encode(mixer))  # all",
            "        # all",
        ),
    ),
    "telemetry/store.py": (
        ("coarse rows are the newest value", "else 'avg'}", "else 'max'}"),
        ("frames grow without end", "if self._frame_bytes > self._frame_budget:", "if False:"),
    ),
    "telemetry/series.py": (
        (
            "replay fill is a share of min_size",
            'window.now.sum("replay_size", Role.TRAINER) / window.config.replay.capacity',
            'window.now.sum("replay_size", Role.TRAINER) / window.config.replay.min_size',
        ),
        (
            "versions in flight are counted to the fastest host",
            "return max(newest - float(sealed.min()), 0.0) if sealed.size else NAN",
            "return max(newest - float(sealed.max()), 0.0) if sealed.size else NAN",
        ),
        (
            "shares of several rollouts add up instead of being means",
            "found = self.rate(metric.name, across.role) / processes if processes else NAN",
            "found = self.rate(metric.name, across.role)",
        ),
        (
            "samples per insert are those of the whole run",
            'window.ratio("samples", "rows_recorded", Role.TRAINER)',
            'window.now.sum("samples", Role.TRAINER) / window.now.sum("rows_recorded", Role.TRAINER)',
        ),
        (
            "a share counts all processes as one",
            "self.rate(metric.name, across.role) / processes if processes else NAN",
            "self.rate(metric.name, across.role)",
        ),
    ),
    "telemetry/summary.py": (
        ("the best is that of a thinned table", 'run.evaluations()["mean"]', 'run.evaluations(points=20)["mean"]'),
        ("the last evaluation is the best", "float(judged.max())", "float(judged[-1])"),
        ("confirmed is the mean that chose the policy", '("best", "confirmed", "mean")', '("best", "mean")'),
        ("an ended run has the speed of its last seconds", "if not status.is_active:", "if False:"),
        (
            "rows left out for their age are reported as lost",
            '_RECORDED = ("rows_recorded", "rows_too_old")',
            '_RECORDED = ("rows_recorded",)',
        ),
        (
            "a resumed run forgets what it did",
            "total = float(values.sum()) + (before or 0.0) if values.size else before",
            "total = float(values.sum()) if values.size else before",
        ),
    ),
    "telemetry/causes.py": (
        (
            "the fastest host is named as the slow one",
            "place = int(np.nanargmax(seconds))",
            "place = int(np.nanargmin(seconds))",
        ),
        ("full lanes are not seen", "if full > FULL:", "if False:"),
        ("time without a core is not seen", "own = 1 - queued / max(sum(work.values()), 1e-9)", "own = 1.0"),
        ("a slow rank is not compared", "if steps[place] < SLOW * usual and busy[place] > 0.5:", "if False:"),
        (
            "a silent rank is not seen",
            "places = np.flatnonzero((ages > SILENT) & ~excused)",
            "places = np.flatnonzero(excused & ~excused)",
        ),
    ),
    "core/errors.py": (
        (
            "what fails beside training ends it",
            "except Exception as error:  # whatever it is, what runs beside it continues",
            "except ZeroDivisionError as error:",
        ),
    ),
    "plots/distribution.py": (
        (
            "memory of a GPU is a solid line",
            'add_line(figure, x, memory, f"{name} memory", index, dash="dot")',
            'add_line(figure, x, memory, f"{name} memory", index)',
        ),
        ("cores over too short a span", "over=2.5 * SAMPLE_PERIOD", "over=0.0"),
        (
            "memory in GiB is in GB",
            'processes.column("memory_bytes") / 2**30',
            'processes.column("memory_bytes") / 1e9',
        ),
        (
            "the trainer's host is behind itself",
            "0.0 if host == trainers else max(float(behind), 0.0),",
            "max(float(behind), 0.0),",
        ),
        (
            "versions behind of a host is its rollouts' first",
            "behind = published - version[relay[0]] if relay.size else np.nan",
            "behind = published - version[rollouts][0] if rollouts.any() else np.nan",
        ),
        (
            "version age beside the first trainer record",
            "version[:, trainer[:1]] - version[:, rollouts]",
            "version[-1:, trainer[:1]] - version[:, rollouts]",
        ),
        ("ages' scale by the median", "np.nanquantile(ages, 0.99)", "np.nanquantile(ages, 0.5)"),
        ("bytes sent and received are swapped", "np.where(hosts == 0, sent, received)", "received"),
        ("the slowest host is the last", "np.nanmax(values, axis=1)", "values[:, -1]"),
        (
            "hosts are counted by rows",
            "wall_seconds * scale, hosts, values.T",
            "wall_seconds * scale, np.arange(len(hosts)), values.T",
        ),
        ("ages are clipped in the numbers too", "names, ages.T", "names, np.minimum(ages, top).T"),
        ("the root is divided by one host's versions", ".max(initial=0.0)", "[0]"),
    ),
    "plots/runs.py": (
        (
            "a group's curve ends with its longest run",
            "end = min(x[-1] for x, _ in lines)",
            "end = max(x[-1] for x, _ in lines)",
        ),
        (
            "a group's curve begins with its first run",
            "begin = max(x[0] for x, _ in lines)",
            "begin = min(x[0] for x, _ in lines)",
        ),
        (
            "evaluations of a group on another time unit",
            'lines = [(table[x] * curves.scale, table["mean"]) for table in tables]',
            'lines = [(table[x], table["mean"]) for table in tables]',
        ),
        ("taken action is the first", 'taken = values["taken"][moment]', 'taken = values["taken"][0]'),
        (
            "the age is drawn on the axis of transitions",
            'add_line(figure, held.x, wall_seconds - began, "age of the oldest (right)", 1, yaxis="y2")',
            'add_line(figure, held.x, wall_seconds - began, "age of the oldest (right)", 1)',
        ),
        (
            "90 % intervals are called 95 %",
            "low, high = np.quantile(samples @ kept, (0.025, 0.975), axis=0)",
            "low, high = np.quantile(samples @ kept, (0.05, 0.95), axis=0)",
        ),
        ("smoothing begins at zero", "mean / (1 - smoothing ** (index + 1))", "mean"),
        (
            "runs are folded by position",
            "np.interp(grid, x, y) for x, y in lines",
            "np.interp(np.linspace(0, 1, 200), np.linspace(0, 1, len(y)), y) for x, y in lines",
        ),
        (
            "a curve of seeds is that of one run",
            "mean, low, high = interquartile(values)",
            "mean, low, high = interquartile(values[:1])",
        ),
        (
            "the lag on arrival is shown as the lag when drawn",
            'drawn = count_text(newest.get("lag_p50"',
            'drawn = count_text(newest.get("arrival_lag_p50"',
        ),
        (
            "priorities are shown from the lowest",
            "np.maximum(np.asarray(priorities, np.float64), 1e-12) ** power)[::-1]",
            "np.maximum(np.asarray(priorities, np.float64), 1e-12) ** power)",
        ),
    ),
    "evaluate.py": (
        (
            "the evaluator plays zeros",
            "step = env.step(policy.greedy(observation, vector))\n        observation",
            "step = env.step(policy.greedy(observation, vector) * 0)\n        observation",
        ),
        ("the first episodes to end count", "if len(returns[index]) < quotas[index]:", "if missing:"),
        ("the reset counts as a step", "began[index] = turn + (not cut[index])", "began[index] = turn"),
        (
            "a changed environment passes",
            "if replace(env.spec, env_id=saved.model.spec.env_id) != saved.model.spec:",
            "if False:",
        ),
    ),
    "kernel/plain_networks.hpp": (("a second gradient replaces the first", "if (first) *first = true;", ""),),
    "kernel/replay/selectors.hpp": (
        ("the past does not fade", "std::exp2(-shift / half_life_)", "std::exp2(-0.0 / half_life_)"),
        (
            "new picks have priority 1",
            "max_priority_ = std::max(max_priority_, priority[i]);\n            if (index[i] != NONE) tree_",
            "if (index[i] != NONE) tree_",
        ),
        (
            "the largest weight is not 1",
            "for (float& w : weight) w = std::pow(least / w, beta_);",
            "for (float& w : weight) w = std::pow(1.0f / w, beta_);",
        ),
        (
            "alpha is 1",
            "std::clamp(std::pow(priority, alpha_), FLT_MIN, FLT_MAX)",
            "std::clamp(priority, FLT_MIN, FLT_MAX)",
        ),
    ),
    "kernel/replay/gather_loops.hpp": (
        (
            "n-step sums take one reward too many",
            "after = window.states() - 1 - window.position, steps = after < n ? after : n;",
            "after = window.states() - window.position, steps = after < n ? after : n;",
        ),
        (
            "rewards are not discounted",
            "for (u32 j = 0; j < steps; ++j, factor *= discount) total +=",
            "for (u32 j = 0; j < steps; ++j) total +=",
        ),
    ),
    "kernel/replay/evictions.hpp": (
        (
            "draws do not renew an episode",
            "if (entries_[episode].key < clock_) entries_.change(episode).key = clock_;",
            "static_cast<void>(episode);",
        ),
    ),
    "kernel/step_writer.hpp": (
        (
            "an end row carries the state before",
            "newest_frame(given.next_state, env), format_.state.bytes);\n        for (size_t c = 0; c < format_.columns"
            ".size(); ++c) {",
            "newest_frame(given.state, env), format_.state.bytes);\n        for (size_t c = 0; c < format_.columns"
            ".size(); ++c) {",
        ),
        (
            "time limits are terminal rows",
            "given.terminated[env] ? RowKind::terminated : RowKind::truncated",
            "RowKind::terminated",
        ),
        (
            "a row that is not finite leaves no gap",
            "at.gap = true;\n            }\n            ++at.step;",
            "}\n            ++at.step;",
        ),
    ),
    "kernel/mailbox.hpp": (
        (
            "a pin is not looked at again",
            "if (header_->newest.load(std::memory_order_seq_cst) != pinned.word) continue;",
            "",
        ),
        ("firm pins are revoked in the kernel", "readers_[i].firm.load(std::memory_order_relaxed) ? 2 : 1;", "1;"),
        ("an older version replaces a newer one", "if (version <= newest_version()) return false;", ""),
    ),
    "kernel/ring.hpp": (
        (
            "rows wrap one place early",
            "const size_t first = std::min(taken, capacity_ - begin);\n        std::memcpy(out, data_",
            "const size_t first = std::min(taken, capacity_ - begin - 1);\n        std::memcpy(out, data_",
        ),
    ),
    "kernel/codec.hpp": (
        ("int8 scales are too large", "top / 127.0f)", "top / 128.0f)"),
        ("the kernel does not compare checksums", "found.checksum == checksum_of(index);", "true;"),
        ("the kernel takes a chunk of another version", "found.sequence == sequence &&", ""),
    ),
    "admix/account.py": (
        (
            "baselines are tuned on the days that are reported",
            "settings = tune(baseline, tuning, play.delay, play.own_counts, period)",
            "settings = tune(baseline, case, play.delay, play.own_counts, period)",
        ),
        (
            "the stated gap is the best day's",
            "gap=float(max(best.gap for best in case.optima))",
            "gap=float(min(best.gap for best in case.optima))",
        ),
    ),
    "admix/page.py": (("the latest contract by impressions", "one.penalty * max(one.demand", "max(one.demand"),),
    "dashboard/watch.py": (("alerts the oldest first", "return alerts[::-1]", "return alerts"),),
    "plots/frame.py": (
        (
            "shares without %",
            'figure.update_yaxes(range=[0, 1.02], tickformat=".0%")',
            "figure.update_yaxes(range=[0, 1.02])",
        ),
        (
            "long runs are labelled in seconds for ever",
            "longest = float(wall_seconds[-1]) if len(wall_seconds) else 0.0",
            "longest = float(wall_seconds[0]) if len(wall_seconds) else 0.0",
        ),
    ),
    "learner/algorithm.py": (
        (
            "actor_start has no effect",
            "self.updates >= self.actor_start and self.updates % self.actor_delay == 0",
            "self.updates % self.actor_delay == 0",
        ),
    ),
    "distribution/schemes.py": (
        (
            "of plans of one period the slow one may be chosen",
            "cost = (period + LAG_WEIGHT * lag) * (1 + SENDERS_COST * (1 - 1 / senders))",
            "cost = period * (1 + SENDERS_COST * (1 - 1 / senders))",
        ),
        (
            "slow ways down are not seen in the closed forms",
            "return min(float(np.median(self.network.up)), float(np.median(self.network.down)))",
            "return float(np.median(self.network.up))",
        ),
    ),
    "telemetry/recorder.py": (
        (
            "time on a core is reported as time without one",
            "read_text().split()[1]) / 1e9",
            "read_text().split()[0]) / 1e9",
        ),
        (
            "space: looked for once",
            "self._space_due = record.wall_seconds + SPACE_PERIOD",
            "self._space_due = math.inf",
        ),
    ),
    "pool/page.py": (
        (
            "held and busy swapped",
            '"held [s]": [round(own["held_seconds"], 2)',
            '"held [s]": [round(own["busy_seconds"], 2)',
        ),
    ),
    "balance/page.py": (
        (
            "late and dropped swapped",
            '"late": last["gradients_late"][nodes]',
            '"late": last["gradients_dropped"][nodes]',
        ),
    ),
}

NAMED = tuple(Fault(name, f"ddrl/{path}", old, new) for path, faults in _NAMED.items() for name, old, new in faults)


def from_outside(name: str) -> list[Fault]:
    """The faults of a file of `OUTSIDE`."""
    rows = tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text())["faults"]
    return [Fault(row["name"], row["path"], row["old"], row["new"]) for row in rows]
