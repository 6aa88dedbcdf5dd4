"""One sentence that names what holds a run back - rollout, network, replay or learner - and why. Pure: series in, words
out.

Reasoning: if the trainer is rarely idle, it is the limit, and its shares of time say whether learning or replay is. If
it waits, the rows come too slowly: rollouts that stand at full lanes mean that the rows do not get through (network),
rollouts that do not mean that there are too few."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_IDLE = 0.25  # share of its time that the trainer may wait before it is called starved
_FULL = 0.10  # share of their time that rollouts may stand at full lanes


@dataclass(frozen=True)
class Bottleneck:
    """The stage that limits the run, and why, in words for the user."""

    stage: Literal["rollout", "network", "replay", "learner", "paused", "unknown"]
    sentence: str


def name_bottleneck(series: Mapping[str, float]) -> Bottleneck:
    """Name the bottleneck from the newest values of the run-level series (ddrl.telemetry.SERIES)."""

    def value(name: str) -> float:
        found = series.get(name, math.nan)
        return 0.0 if math.isnan(found) else min(found, 1.0) if name.endswith("_share") else found

    learn, wait = value("learn_share"), value("trainer_wait_share")
    replay = value("sample_share") + value("record_share")
    other = value("publish_share") + value("checkpoint_share")
    standing, held = value("rollout_wait_share"), value("rollout_hold")
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
    if wait > max(_IDLE, learn, replay):
        if standing > _FULL:
            return Bottleneck(
                "network",
                f"Network: the trainer waits for data {wait:.0%} of its time while rollouts stand at full lanes "
                f"{standing:.0%} of theirs, so rows do not get through between them.",
            )
        act, env = value("act_share"), value("env_share")
        inside = f"their time goes to the {'environments' if env >= act else 'policy'} ({max(env, act):.0%})"
        return Bottleneck(
            "rollout",
            f"Rollouts: the trainer waits for data {wait:.0%} of its time and nothing queues on the way; "
            f"{inside}. More rollouts, or a smaller replay.samples_per_insert, would speed it up.",
        )
    slowed = (
        f"rollouts are held back {held:.0%} of the time to keep samples_per_insert"
        if held > _FULL
        else f"rollouts stand at full lanes {standing:.0%} of their time"
        if standing > _FULL
        else "rollouts keep up"
    )
    if learn >= replay and learn >= other:
        return Bottleneck(
            "learner", f"Learner: {learn:.0%} of the trainer's time goes to optimizer steps, and {slowed}."
        )
    if replay >= other:
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
