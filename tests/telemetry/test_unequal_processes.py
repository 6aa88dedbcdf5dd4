"""Of several unequal processes each figure is that of the ones that it names: the slowest, all together, or their mean.
Every value differs, so that one in another's place is seen."""

from pathlib import Path

import numpy as np
import pytest

from ddrl.core.config import Config
from ddrl.core.metrics import COLUMNS, METRICS
from ddrl.core.roles import Role
from ddrl.telemetry import find_causes, summarize
from ddrl.telemetry.recorder import process_use
from ddrl.telemetry.series import SeriesWindow
from tests.telemetry.test_causes import frames

NAN = float("nan")
ROLES = [Role.TRAINER, Role.EVALUATOR, *[Role.RELAY] * 3, *[Role.ROLLOUT] * 3, *[Role.NODE] * 2]
HOSTS = [0, 0, 0, 1, 2, 0, 1, 2, 1, 2]


def table(**columns):
    """Counters of these processes: [processes] of each column."""
    values = np.full((len(ROLES), len(COLUMNS)), NAN)
    columns |= {"role": [list(Role).index(role) for role in ROLES], "host": HOSTS, "rank": range(len(ROLES))}
    for name, column in columns.items():
        values[:, COLUMNS.index(name)] = column
    return values


def test_every_series_is_of_the_processes_that_it_names():
    generator = np.random.default_rng(0)
    grown = generator.uniform(0.01, 0.25, (2, len(ROLES), len(COLUMNS)))  # of shares no sum reaches 1 in 2 s
    before, after = (table(**dict(zip(COLUMNS, values.T, strict=True))) for values in (grown[0], grown.sum(0)))
    window = SeriesWindow(Config())
    window.measure(before, 0.0, 0.0)
    found = window.measure(after, 2.0, 2.0)
    for metric in METRICS:
        place = COLUMNS.index(metric.name)
        for across in metric.across:
            of = [index for index, role in enumerate(ROLES) if across.role in (None, role)]
            values = {
                "sum": after[of, place].sum(),
                "mean": after[of, place].mean(),
                "rate": grown[1, of, place].sum() / 2,
                "share": grown[1, of, place].mean() / 2,
            }
            name = across.name or metric.name
            assert found[name] == pytest.approx(values[across.how] / across.scale), name


def test_versions_are_counted_to_the_slowest_host_and_rollout_and_the_oldest_sign_of_life_is_shown():
    behind = [0, 1, 2, 9, 4, 1, 3, 10, 50, 50]  # the evaluator's and the nodes' are no rollout's
    silent = [0.5, 1.0, 0.1, 0.2, 7.0, 0.3, 0.4, 0.6, 0.7, 0.8]
    given = table(policy_version=100.0 - np.array(behind), heartbeat=1000.0 - np.array(silent), env_steps=1.0)
    found = SeriesWindow(Config()).measure(given, 1000.0, 5.0)
    assert found["versions_in_flight"] == 9
    assert (found["version_age_p50"], found["version_age_max"]) == (3, 10)
    assert found["heartbeat_age_max"] == pytest.approx(7.0)
    assert found["rollouts"] == 3


def test_the_host_that_a_version_takes_longest_to_is_the_one_that_is_named():
    late = frames({"publish_deferred": 300.0})
    seconds = [NAN, 0.25, 3.0, 0.5]
    late.values[:, : len(seconds), COLUMNS.index("seal_seconds")] = seconds
    late.values[:, : len(seconds), COLUMNS.index("host")] = range(len(seconds))
    sentence = find_causes(late, Config())[0].sentence
    assert "takes 3 s to host 2" in sentence


def test_steps_are_lost_that_were_neither_recorded_nor_left_out_for_their_age():
    taken = [NAN] * 5 + [500.0, 300.0, 200.0] + [NAN] * 2
    alone = [NAN] * (len(ROLES) - 1)
    given = table(env_steps=taken, rows_recorded=[700.0, *alone], rows_too_old=[180.0, *alone])
    assert summarize(given, wall_seconds=1.0)["steps_lost"] == 120
    assert summarize(given, wall_seconds=1.0, counted_before=50.0)["steps_lost"] == 70


def test_time_without_a_core_is_not_the_time_on_one(monkeypatch):
    read = Path.read_text

    def said(path, *arguments, **options):
        if path.name == "schedstat":
            return "7000000000 2500000000 12\n"  # on a core, ready to run, times that it ran
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", said)
    use = process_use(1)
    assert use is not None
    assert use.queued_seconds == 2.5
