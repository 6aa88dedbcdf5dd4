"""One sentence that names what holds a run back - rollout, network, replay or learner - and why. Pure: series in, words
out.

Reasoning: if the trainer is rarely idle, it is the limit, and its shares of time say whether learning or replay is. If
it waits, the rows come too slowly: rollouts that stand at full lanes mean that the rows do not get through (network),
rollouts that do not mean that there are too few. All shares are measured times over the window of the series. So that
the sentence does not flip where two causes are close, a stage stays named until another one is clearly ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

_IDLE = 0.25  # share of its time that the trainer may wait before it is called starved
_FULL = 0.10  # share of their time that rollouts may stand at full lanes
_AHEAD = 0.10  # by which another stage must be ahead of the one that is named


@dataclass(frozen=True)
class Bottleneck:
    """The stage that limits the run, and why, in words for the user."""

    stage: Literal["rollout", "network", "replay", "learner", "paused", "unknown"]
    sentence: str
    starved: bool = False  # the trainer waits for rows


def follow_bottleneck(table: Mapping[str, Sequence[float]]) -> Bottleneck:
    """The bottleneck after a few records [T] of the run-level series, one after the other."""
    found: Bottleneck | None = None
    for values in zip(*table.values(), strict=True):
        found = name_bottleneck(dict(zip(table, values, strict=True)), found)
    return found or name_bottleneck({})


def name_bottleneck(series: Mapping[str, float], before: Bottleneck | None = None) -> Bottleneck:
    """Name the bottleneck from the newest values of the run-level series (ddrl.telemetry.SERIES); `before` is what was
    named last."""
    last = before.stage if before else ""

    def value(name: str) -> float:
        found = series.get(name, math.nan)
        return 0.0 if math.isnan(found) else min(found, 1.0) if name.endswith("_share") else found

    learn = value("learn_share")
    wait = value("trainer_wait_share")
    replay = value("sample_share") + value("record_share")
    other = value("publish_share") + value("checkpoint_share")
    standing = value("rollout_wait_share")
    held = value("rollout_hold")
    if math.isnan(series.get("env_steps_per_s", math.nan)):
        return Bottleneck("unknown", "Not known yet: fewer than two records have arrived.")
    if value("env_steps_per_s") == 0 and value("updates_per_s") == 0:
        return Bottleneck(
            "paused",
            "Nothing moves: no environment steps and no updates in the last seconds. The run is paused, saving, "
            "or stuck (see the ranks page).",
        )
    if value("updates_per_s") == 0:
        return Bottleneck(
            "rollout",
            f"Rollouts: no updates yet, replay is still filling ({value('replay_fill'):.0%} of its capacity).",
        )
    favor = {stage: _AHEAD if stage == last else 0.0 for stage in ("learner", "replay", "network")}
    waited = _AHEAD if before and before.starved else 0.0
    if wait + waited > max(_IDLE, learn + favor["learner"], replay + favor["replay"]):
        if standing > (_FULL / 2 if last == "network" else _FULL):
            return Bottleneck(
                "network",
                f"Network: the trainer waits for data {wait:.0%} of its time while rollouts stand at full lanes "
                f"{standing:.0%} of theirs, so rows do not get through between them.",
                starved=True,
            )
        act = value("act_share")
        env = value("env_share")
        inside = f"their time goes to the {'environments' if env >= act else 'policy'} ({max(env, act):.0%})"
        return Bottleneck(
            "rollout",
            f"Rollouts: the trainer waits for data {wait:.0%} of its time and nothing queues on the way; "
            f"{inside}. More rollouts, or a larger replay.samples_per_insert, would use its time.",
            starved=True,
        )
    why = ", held back to keep samples_per_insert" if held > 0 else ", their rows not taken yet"
    slowed = f"rollouts wait {standing:.0%} of their time{why}" if standing > _FULL else "rollouts keep up"
    if learn + favor["learner"] >= max(replay + favor["replay"], other + favor["network"]):
        return Bottleneck(
            "learner", f"Learner: {learn:.0%} of the trainer's time goes to optimizer steps, and {slowed}."
        )
    if replay + favor["replay"] >= other + favor["network"]:
        return Bottleneck(
            "replay",
            f"Replay: {replay:.0%} of the trainer's time goes to recording ({value('record_share'):.0%}) and "
            f"drawing ({value('sample_share'):.0%}), and {slowed}.",
        )
    if value("checkpoint_share") > value("publish_share"):
        return Bottleneck(
            "learner",
            f"Learner: {value('checkpoint_share'):.0%} of the trainer's time goes to checkpoints, and {slowed}.",
        )
    return Bottleneck(
        "network",
        f"Network: {value('publish_share'):.0%} of the trainer's time goes to publishing parameters, and {slowed}.",
    )
