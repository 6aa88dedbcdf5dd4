import itertools
import json
import threading
import warnings
from dataclasses import asdict, replace

import numpy as np
import pytest

pytest.importorskip("plotly", reason="needs the extra [plots]")

from ddrl import plots
from ddrl.core.config import Config, LearnerConfig, TelemetryConfig
from ddrl.core.metrics import COLUMNS
from ddrl.core.roles import Evaluation as Judged
from ddrl.core.roles import Returns, Role
from ddrl.plots.frame import COLORS, json_of, lines_over_time, rates
from ddrl.plots.runs import differing_labels
from ddrl.telemetry import Recorder, Run
from ddrl.telemetry.reading import Processes, Table
from ddrl.telemetry.recorder import SAMPLE_PERIOD
from ddrl.telemetry.series import SERIES_NAMES
from ddrl.telemetry.summary import Facts
from notebooks import explore
from tests.telemetry.fake_cluster import FakeCluster
from tests.waiting import PATIENCE

CONFIG = Config(telemetry=TelemetryConfig(period=0.001, live=False))


class Tables:
    """What a page reads of one run."""

    def __init__(self, path, cluster, seconds=60):
        path.mkdir()
        done = threading.Event()
        left = iter(range(seconds))

        def tables():
            if next(left, None) is None:
                done.set()
            else:
                cluster.advance(1.0)
            return cluster.table()

        with Recorder(path, tables, CONFIG, clock=lambda: cluster.now, monotonic=lambda: cluster.now) as recorder:
            assert done.wait(PATIENCE)
            for steps in (1e4, 2e4):
                recorder.record_evaluation(Judged(0, steps, Returns(steps / 100, 5.0, 20)), updates=10)
        with Run(path) as run:
            self.series, self.evaluations = run.series(points=200), run.evaluations()
            self.processes, self.latest = run.processes(points=60), run.latest()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Tables(tmp_path_factory.mktemp("runs") / "small", FakeCluster(12, 3))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return Tables(tmp_path_factory.mktemp("runs") / "large", FakeCluster(300, 40), seconds=20)


@pytest.fixture(scope="module")
def silent(tmp_path_factory):
    """A run in which nobody has reported anything."""
    cluster = FakeCluster(5, 1)
    cluster.values[:] = np.nan
    cluster.advance = lambda seconds: setattr(cluster, "now", cluster.now + seconds)
    return Tables(tmp_path_factory.mktemp("runs") / "silent", cluster, seconds=3)


def y_of(figure, name):
    """The values of the line called `name`."""
    return np.asarray(next(trace.y for trace in figure.data if trace.name == name), float)


def all_figures(tables):
    series, processes = tables.series, tables.processes
    now = processes.time[-1]
    return [
        plots.learning_curve({"a": series}, {"a": tables.evaluations}),
        plots.learning_curve({"a": series, "b": series}, {"a": tables.evaluations}, x="wall_seconds"),
        *(plots.series_over({"a": series}, name, x=x) for name in SERIES_NAMES for x in ("env_steps", "wall_seconds")),
        plots.trainer_time(series),
        plots.relay_bandwidth(processes),
        plots.relay_bandwidth(processes, "received"),
        plots.version_age_heatmap(processes),
        plots.version_flow(series),
        plots.bytes_against_bound(processes),
        plots.seal_times(processes),
        plots.cpu_by_role(processes),
        plots.memory_by_role(processes),
        plots.gpu_use(processes),
        plots.replay_fill(series, 100_000),
        plots.sample_balance(series, 8.0),
        plots.who_waits(series),
        plots.recording_rates(series),
        plots.heartbeat_ages(processes, now),
    ]


@pytest.mark.parametrize("which", ["small", "large", "silent"])
def test_every_figure_is_made_from_any_run_without_a_warning_and_is_valid_json(which, request):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in all_figures(request.getfixturevalue(which)):
            json.loads(figure.to_json())
            assert figure.layout.title.text
            assert figure.data or figure.layout.annotations, "an empty figure must say why"


TIME = "wall time [s]"
AXES = {  # x, y, and what a heatmap's colors are
    "The trainer's time": (TIME, "share of wall time"),
    "MPI bytes sent by each relay": (TIME, "host (0: root)", "MB/s"),
    "MPI bytes received by each relay": (TIME, "host (0: root)", "MB/s"),
    "Version age of every rollout": (TIME, "rank", "versions<br>behind"),
    "Versions on their way": (TIME, "versions"),
    "Bytes a version against the bound": ("", "bytes / S"),
    "From publish to sealed": (TIME, "ms"),
    "Cores in use": (TIME, "cores"),
    "Private memory": (TIME, "GiB"),
    "GPUs": ("", "share"),  # of which there are none
    "Replay: fill and age": (TIME, "transitions"),
    "Samples per insert": (TIME, "samples / transition"),
    "Who waits for whom": (TIME, "share of time"),
    "Recorded and learned from": (TIME, "transitions / s"),
    "Since the last sign of life": ("rank", "seconds"),
}
UNITS = {  # of the charts on the overview
    "Loss": "",
    "Gradient norm": "",
    "Environment steps per second": "env steps/s",
    "Updates per second": "updates/s",
    "Episode length": "env steps",
    "Age of what is drawn, 99th percentile": "versions",
    "Age of experience on arrival, 99th percentile": "versions",
    "Share of random actions": "",
}


def test_the_axes_of_every_figure_say_what_they_show_and_in_which_unit(large):
    said = {}
    for figure in all_figures(large):
        bars = [trace.colorbar.title.text for trace in figure.data if trace.type == "heatmap"]
        axes = (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text, *bars)
        said.setdefault(figure.layout.title.text, []).append(axes)
    assert {title: axes for title, axes in said.items() if title in AXES} == {title: [AXES[title]] for title in AXES}
    for title, unit in UNITS.items():
        assert said[title] == [("environment steps", unit), (TIME, unit)], title
    assert ("environment steps", "return per episode") in said["Return"]
    assert (TIME, "return per episode") in said["Return"]


def test_figures_of_a_run_that_said_nothing_say_so_in_words(silent):
    series, processes = silent.series, silent.processes
    for figure in (
        plots.learning_curve({"a": series}),
        plots.trainer_time(series),
        plots.version_age_heatmap(processes),
        plots.cpu_by_role(processes),
        plots.gpu_use(processes),
        plots.replay_fill(series, 10),
    ):
        assert not figure.data
        assert "no" in figure.layout.annotations[0].text


def test_the_learning_curve_shows_training_and_evaluations_of_each_run(small):
    figure = plots.learning_curve({"a": small.series, "b": small.series}, {"a": small.evaluations})
    assert [trace.name for trace in figure.data] == ["a", "b", "a: evaluation"]
    assert y_of(figure, "a: evaluation").tolist() == [100.0, 200.0]
    assert figure.data[0].line.color == figure.data[2].line.color != figure.data[1].line.color
    assert [trace.name for trace in figure.data if trace.showlegend is not False] == ["a", "b"]


def test_runs_that_differ_in_their_seed_alone_are_one_curve_that_says_how_many_they_are(small):
    trees = [{"run": {"seed": seed}, "learner": {"lr": lr}} for seed, lr in ((1, 0.1), (2, 0.1), (3, 0.5))]
    labels = plots.differing_labels(dict(zip("abc", trees, strict=True)))
    assert labels == {"a": "learner.lr=0.1", "b": "learner.lr=0.1", "c": "learner.lr=0.5"}
    assert plots.differing_labels(dict(zip("ab", trees, strict=False))) == {"a": "all seeds", "b": "all seeds"}
    assert plots.differing_labels({"a": trees[0]}) == {"a": "a"}
    other = Table({**small.series.columns, "loss": small.series["loss"] + 1.0}, 0)
    figure = plots.series_over({"a": small.series, "b": other, "c": other}, "loss", labels=labels)
    assert [trace.name for trace in figure.data if trace.showlegend is not False] == [
        "learner.lr=0.1 (IQM of 2)",
        "learner.lr=0.5",
    ]
    assert y_of(figure, "learner.lr=0.1 (IQM of 2)")[-1] == pytest.approx(small.series["loss"][-1] + 0.5)


@pytest.mark.parametrize("others", ["a", "ab"])
def test_one_diverged_run_does_not_flatten_the_others(small, others):
    wild = Table({**small.series.columns, "loss": small.series["loss"] * 1e6}, 0)
    figure = plots.series_over({**dict.fromkeys(others, small.series), "c": wild}, "loss")
    assert figure.layout.yaxis.range[1] < 2 * np.nanmax(small.series["loss"])
    assert "leaves the picture" in figure.layout.annotations[0].text
    assert plots.series_over({"a": small.series, "b": small.series}, "loss").layout.yaxis.range is None


def test_every_color_of_a_line_can_be_seen_on_white_and_on_the_dark_page():
    def luminance(color):
        parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in COLORS:
        on_white, on_dark = 1.05 / (luminance(color) + 0.05), (luminance(color) + 0.05) / (luminance("#0e1117") + 0.05)
        assert min(on_white, on_dark) >= 3.0, (color, on_white, on_dark)


def test_each_gpu_is_drawn_by_itself(small):
    values = small.processes.values.copy()
    columns = small.processes.columns
    for index, busy in enumerate((0.1, 0.9)):
        values[:, 1, columns.index(f"gpu{index}_utilization")] = busy
        values[:, 1, columns.index(f"gpu{index}_memory")] = busy / 2
    figure = plots.gpu_use(replace(small.processes, values=values))
    assert set(y_of(figure, "host 0 GPU 1")) == {0.9}
    assert set(y_of(figure, "host 0 GPU 0 memory")) == {0.05}
    dashes = [line.line.dash for line in figure.data if line.name.startswith("host 0")]
    assert dashes == ["solid", "dot"] * 2, "memory is dotted, as the page says"
    assert figure.layout.yaxis.tickformat == ".0%"


@pytest.mark.parametrize("hosts", [3, 12])
def test_gpus_are_in_the_order_of_their_hosts(hosts):
    busy = {f"gpu{index}_utilization": 0.5 for index in range(2)} | {f"gpu{index}_memory": 0.25 for index in range(2)}
    figure = plots.gpu_use(moments([0, 1], [Role.RELAY] * hosts, host=range(hosts), **busy))
    if figure.data[0].type == "heatmap":
        assert np.all(np.asarray(figure.data[0].z) == 0.5)  # the time that they compute, not their memory
    names = figure.data[0].y if figure.data[0].type == "heatmap" else [line.name for line in figure.data[::2]]
    assert list(names) == [f"host {host} GPU {index}" for host in range(hosts) for index in range(2)]


def test_relay_bandwidth_is_the_growth_of_the_counters_a_second(small):
    figure = plots.relay_bandwidth(small.processes)
    assert [trace.name for trace in figure.data] == ["host 0 (root)", "host 1", "host 2"]
    assert np.allclose(y_of(figure, "host 0 (root)")[5:50], 20 * 4e5 / 1e6, rtol=0.2)


def test_forty_relays_are_drawn_as_a_heatmap_with_a_row_each(large):
    for direction in ("sent", "received"):
        heat = plots.relay_bandwidth(large.processes, direction).data[0]
        assert heat.type == "heatmap"
        assert np.asarray(heat.z).shape == (40, len(large.processes) - 1)
        assert list(heat.y) == list(range(40))
    assert len(plots.bytes_against_bound(large.processes).data[0].x) == 4


def test_records_close_to_each_other_do_not_make_bandwidth_jump(small):
    processes = small.processes
    time, values = (
        np.append(processes.time, processes.time[-1] + 0.001),
        np.append(processes.values, processes.values[-1:], axis=0),
    )
    wall = np.append(processes.wall_seconds, processes.wall_seconds[-1] + 0.001)
    later = replace(processes, time=time, wall_seconds=wall, values=values, tick=np.arange(len(time)))
    sent = processes.columns.index("bytes_sent")
    later.values[-1, 1, sent] += 4e5  # a table of another host that came just now
    assert y_of(plots.relay_bandwidth(later), "host 0 (root)").max() < 12


def test_the_time_to_seal_is_shown_against_the_bound_of_the_links_where_they_were_measured(small):
    processes = replace(small.processes, values=small.processes.values.copy())
    assert len(plots.seal_times(processes).data) == 2
    root = int(np.flatnonzero(processes.column("role")[-1] == 1)[0])
    processes.values[:, root, processes.columns.index("plan_bound_seconds")] = 0.002
    figure = plots.seal_times(processes)
    assert np.allclose(y_of(figure, "least that the links allow: 2 ms"), 2.0)


def test_a_run_whose_only_relay_is_the_roots_is_told_that_nothing_travels(small):
    values = small.processes.values.copy()
    columns = small.processes.columns.index
    relay = list(Role).index(Role.RELAY)
    values[:, (values[-1, :, columns("role")] == relay) & (values[-1, :, columns("host")] != 0)] = np.nan
    alone = replace(small.processes, values=values)
    (words,) = plots.bytes_against_bound(alone).layout.annotations
    assert words.text == "one host: nothing travels"


def test_bytes_against_the_bound_are_one_where_each_host_gets_each_byte_once(small):
    figure = plots.bytes_against_bound(small.processes)
    assert list(figure.data[0].x) == ["root out", "host 1", "host 2"]
    assert np.allclose(figure.data[0].y, 1.0)
    root, *others = figure.data[0].marker.color
    assert others == others[:1] * 2 != [root] * 2


def test_a_gantt_chart_has_a_bar_a_send_and_a_mark_where_a_host_is_complete():
    trace = np.array([[0.0, 1.0, 1.1, 0, 1, 0], [1.0, 2.0, 2.1, 0, 2, 1], [1.1, 2.1, 2.2, 1, 2, 2]])
    figure = explore.gantt(trace)
    root = np.asarray(figure.data[0].x, float)
    assert root[~np.isnan(root)].tolist() == [0.0, 1000.0, 1000.0, 2000.0]
    assert np.allclose(np.asarray(figure.data[2].x, float), [1100.0, 2200.0])
    assert "nothing" in explore.gantt(np.zeros((0, 6))).layout.annotations[0].text


def test_points_take_the_color_of_their_scheme():
    hosts = np.array([1, 2, 4])
    figure = explore.times_against_hosts(
        hosts, {"direct": hosts * 1.0, "bound": hosts * 0.5}, {"direct, measured": (hosts, hosts * 1.1)}
    )
    assert figure.data[2].marker.color == figure.data[0].line.color
    assert np.allclose(y_of(figure, "lower bound"), hosts * 500)


def test_figures_are_found_by_their_names_in_earlier_versions():
    assert plots.priority_law is plots.draw_probabilities


def test_the_heatmap_has_a_row_a_rollout_and_shows_versions_behind(large):
    figure = plots.version_age_heatmap(large.processes)
    heat = figure.data[0]
    z = np.asarray(heat.z)
    assert z.shape == (300 - 41, len(large.processes))
    assert z.min() >= 0
    assert z.max() <= 4


def test_cores_in_use_add_up_over_the_ranks_of_a_role(small):
    figure = plots.cpu_by_role(small.processes)
    assert np.allclose(y_of(figure, "rollout x 8")[:40], 8 * 0.9)


def test_rates_of_a_counter_that_is_written_every_other_moment_are_smooth():
    times = np.arange(20.0)
    written = np.floor(times / 2) * 2.0  # grows by 1 a second, seen every 2 s
    assert np.allclose(rates(written, times, over=4.0)[5:], 1.0, atol=0.3)
    assert np.allclose(rates(times * 3, times), 3.0)
    restarted = np.where(times < 10, times, times - 10)
    assert np.isnan(rates(restarted, times)[9])


def test_the_oldest_record_is_as_old_as_the_time_it_took_to_record_what_is_held():
    seconds = np.arange(11.0)
    columns = {"wall_seconds": seconds, "rows_recorded": seconds * 100, "replay_size": np.minimum(seconds * 100, 300)}
    figure = plots.replay_fill(Table(columns, 11), 300)
    assert np.allclose(y_of(figure, "age of the oldest (right)"), np.minimum(seconds, 3))
    (capacity,) = (trace for trace in figure.data if trace.name == "capacity")
    assert (list(capacity.x), list(capacity.y)) == ([0, 10], [300, 300])


def test_draw_probabilities_are_uniform_at_exponent_zero_and_proportional_at_one():
    priorities = np.arange(1, 101, dtype=float)
    uniform = plots.draw_probabilities(priorities, 0.0)
    assert np.allclose(y_of(uniform, "exponent 0"), np.linspace(0, 1, 201), atol=1e-9)
    proportional = y_of(plots.draw_probabilities(priorities, 1.0), "exponent 1")
    assert proportional[100] == pytest.approx(sum(range(51, 101)) / 5050)
    assert proportional[-1] == pytest.approx(1.0)


def test_a_rank_that_went_quiet_is_listed_first_and_called_late(small):
    processes = small.latest
    beat = processes.columns.index("heartbeat")
    processes.values[-1, 7, beat] -= 60
    processes.values[-1, 3, beat] = np.nan
    processes.values[-1, 5, [beat, processes.columns.index("ended")]] = np.nan, 1.0
    table = plots.rank_table(processes, float(processes.time[-1]))
    assert table["health"][:3].tolist() == ["silent", "late", "alive"]
    assert table["rank"][:2].tolist() == [3, 7]
    assert table["health"][table["rank"] == 5].tolist() == ["empty"]  # nobody misses it
    assert len(table["rank"]) == 12


def test_settings_are_compared_and_only_differences_stay():
    runs = {"a": asdict(Config()), "b": asdict(Config(learner=LearnerConfig(lr=0.01)))}
    assert plots.settings_table(runs, differing=True)["setting"].tolist() == ["learner.lr"]
    whole = plots.settings_table(runs)
    row = whole["setting"].tolist().index("learner.lr")
    assert (whole["a"][row], whole["b"][row]) == ("0.001", "0.01")
    assert plots.settings_table({"b": runs["b"]}, differing=True)["setting"].tolist() == ["learner.lr"]


def test_settings_of_another_version_are_shown_and_called_unknown():
    old = asdict(Config())
    old["learner"]["momentum"] = 0.9
    del old["replay"]["n_step"]
    table = plots.settings_table({"old": old}, differing=True)
    assert table["setting"].tolist() == ["replay.n_step", "learner.momentum"]
    assert table["old"].tolist() == ["-", "0.9"]
    assert "not known" in table["meaning"][1]


def test_runs_that_differ_in_many_settings_are_told_apart_by_their_labels():
    def settings(lr, steps, gamma=0.9):
        return {
            "learner": {"lr": lr, "discount": gamma, "batch_size": int(steps), "threads": int(steps)},
            "run": {"max_env_steps": steps, "seed": lr},
        }

    labels = differing_labels(
        {"a": settings(0.1, 5), "b": settings(0.2, 5), "c": settings(0.2, 6), "d": settings(0.2, 6)}
    )
    assert len(set(labels.values())) == 3
    assert labels["c"] == labels["d"]
    assert labels["a"].startswith("learner.")
    many = {
        name: {"learner": dict.fromkeys("pqrs", 1) | {"t": value}, "run": {"x": 1}}
        for name, value in (("a", 1), ("b", 2))
    }
    many["c"] = {"learner": dict.fromkeys("pqrst", 9), "run": {"x": 1}}
    assert len(set(differing_labels(many).values())) == 3


def table_of(**columns):
    return Table({name: np.array(values, float) for name, values in columns.items()}, 0)


def test_evaluations_of_seeds_are_folded_by_their_place_on_the_axis_into_mean_and_interval():
    curve = table_of(env_steps=[0, 20], return_mean=[0, 0])
    judged = {
        "a": table_of(env_steps=[0, 10, 20], mean=[0, 10, 20], std=[1, 1, 1]),
        "b": table_of(env_steps=[0, 20], mean=[10, 10], std=[1, 1]),  # another number of evaluations
    }
    figure = plots.learning_curve({"a": curve, "b": curve}, judged, labels=dict.fromkeys("ab", "seeds"))
    name = "seeds: evaluation (IQM of 2)"
    line = next(trace for trace in figure.data if trace.name == name)
    assert np.interp([0, 10, 20], line.x, line.y) == pytest.approx([5, 10, 15])
    edge = figure.data[
        [trace.name for trace in figure.data].index(name) - 1
    ]  # its interval, of two their range, is drawn below it
    assert (min(edge.y), max(edge.y)) == (0, 20)
    alone = plots.learning_curve({"a": curve}, {"a": judged["a"]})
    assert y_of(alone, "evaluation").tolist() == [0, 10, 20]


def test_training_and_evaluations_of_seeds_are_their_interquartile_mean_and_its_interval():
    finals = [0.0, 1.0, 2.0, 100.0]
    runs = {f"{seed}": table_of(env_steps=[0, 10], return_mean=[0, last]) for seed, last in enumerate(finals)}
    judged = {name: table_of(env_steps=[0, 10], mean=run["return_mean"] * 2) for name, run in runs.items()}
    figure = plots.learning_curve(runs, judged, labels=dict.fromkeys(runs, "seeds"))
    # Of four sorted values the middle two count, so each sample's figure is the mean of its second and third.
    samples = [np.mean(sorted(sample)[1:3]) for sample in itertools.product(finals, repeat=4)]
    low, high = np.quantile(samples, (0.025, 0.975))
    for times, names in enumerate(("seeds (IQM of 4)", "seeds: evaluation (IQM of 4)"), 1):
        place = [trace.name for trace in figure.data].index(names)
        assert figure.data[place].y[-1] == pytest.approx(1.5 * times)
        band = figure.data[place - 1].y
        assert (band[200], band[199]) == pytest.approx((low * times, high * times))
        assert (band[0], band[-1]) == (0, 0)


def test_the_heatmap_of_ages_names_each_row_by_its_rank(small):
    figure = plots.version_age_heatmap(small.processes)
    newest = small.processes
    role, rank, host = (newest.column(name)[-1] for name in ("role", "rank", "host"))
    rollouts = [place for place in range(len(role)) if role[place] == list(Role).index(Role.ROLLOUT)]
    rollouts.sort(key=lambda place: (host[place], rank[place]))
    assert list(figure.data[0].y) == [f"{rank[place]:.0f}" for place in rollouts]
    assert figure.layout.yaxis.type == "category"
    version = newest.column("policy_version")
    for row, place in enumerate(rollouts):
        assert figure.data[0].z[row][-1] == version[-1, 0] - version[-1, place]


def moments(seconds, roles, **columns):
    """Counters of processes with these roles: [T] or [T, processes] of each column."""
    values = np.full((len(seconds), len(roles), len(COLUMNS)), np.nan)
    clock = np.array(seconds, float)
    columns |= {"role": [list(Role).index(role) for role in roles], "rank": range(len(roles))}
    for name, column in columns.items():
        values[:, :, COLUMNS.index(name)] = column
    return Processes(np.arange(len(clock)), 1000.0 + clock, clock, values, COLUMNS, len(clock))


def test_bandwidth_is_in_millions_of_bytes_a_second():
    sent = np.array([[0, 0], [2e6, 4e6], [4e6, 8e6]]) * 2.0  # every two seconds
    relays = moments([0, 2, 4], [Role.RELAY, Role.RELAY], bytes_sent=sent, bytes_received=sent * 3, host=[0, 1])
    assert y_of(plots.relay_bandwidth(relays), "host 0 (root)").tolist() == [2, 2]
    assert y_of(plots.relay_bandwidth(relays), "host 1").tolist() == [4, 4]
    assert y_of(plots.relay_bandwidth(relays, "received"), "host 1").tolist() == [12, 12]


def test_times_to_seal_are_milliseconds_of_the_median_and_the_slowest_host_beside_the_bound():
    seconds = [[0.001, 0.010, 0.003]] * 2
    relays = moments([0, 1], [Role.RELAY] * 3, seal_seconds=seconds, plan_bound_seconds=0.0005, host=[0, 1, 2])
    figure = plots.seal_times(relays)
    assert y_of(figure, "median host").tolist() == [3, 3]
    assert y_of(figure, "slowest host").tolist() == [10, 10]
    assert figure.data[2].y[0] == 0.5
    assert "0.5 ms" in figure.data[2].name


@pytest.mark.parametrize(("last", "unit", "shown"), [(90, "s", 90), (600, "min", 10), (7 * 3600, "h", 7)])
def test_an_axis_of_time_says_the_unit_of_its_numbers(last, unit, shown):
    table = table_of(wall_seconds=[0, last], loss=[1, 2])
    figure = plots.series_over({"a": table}, "loss", x="wall_seconds")
    assert figure.data[0].x[-1] == shown
    assert f"[{unit}]" in figure.layout.xaxis.title.text


@pytest.mark.parametrize(("seconds", "unit", "shown"), [(90, "s", 90), (600, "min", 10), (7 * 3600, "h", 7)])
def test_every_figure_over_time_says_the_unit_of_its_numbers(seconds, unit, shown):
    clock = [0, seconds / 2, seconds]
    roles = [Role.TRAINER, Role.RELAY, Role.RELAY, Role.ROLLOUT]
    grown = {name: np.arange(3.0)[:, None] for name in COLUMNS if name not in ("role", "rank", "host")}
    processes = moments(clock, roles, host=[0, 0, 1, 1], **grown)
    table = table_of(wall_seconds=clock, **{name: [0, 1, 2] for name in SERIES_NAMES})
    figures = [
        *(draw(processes) for draw in (plots.relay_bandwidth, plots.version_age_heatmap, plots.seal_times)),
        *(draw(processes) for draw in (plots.cpu_by_role, plots.memory_by_role, plots.gpu_use)),
        *(draw(table) for draw in (plots.version_flow, plots.trainer_time, plots.who_waits, plots.recording_rates)),
        plots.replay_fill(table, 10),
        plots.sample_balance(table, 8.0),
    ]
    for figure in figures:
        assert figure.data[0].x[-1] == pytest.approx(shown), figure.layout.title.text
        assert f"[{unit}]" in figure.layout.xaxis.title.text, figure.layout.title.text


def test_what_is_called_right_is_on_the_right_axis_and_nothing_else():
    figure = plots.replay_fill(table_of(wall_seconds=[0, 1], rows_recorded=[0, 9], replay_size=[0, 9]), 300)
    assert [(trace.name, trace.yaxis) for trace in figure.data] == [
        ("held", None),
        ("capacity", None),
        ("age of the oldest (right)", "y2"),
    ]
    assert (figure.layout.yaxis.title.text, figure.layout.yaxis2.title.text) == ("transitions", "age [s]")
    assert figure.layout.yaxis2.side == "right"


def test_smoothing_keeps_the_axis_and_is_not_biased_to_zero_at_its_beginning():
    table = table_of(env_steps=[0, 10, 20], loss=[4, 8, 0])
    (line,) = plots.series_over({"a": table}, "loss", smoothing=0.5).data
    assert list(line.x) == [0, 10, 20]
    assert list(line.y) == pytest.approx([4, (0.25 * 4 + 0.5 * 8) / 0.75, (0.125 * 4 + 0.25 * 8) / 0.875])


def test_evaluations_lie_at_the_environment_steps_at_which_they_were_made():
    judged = table_of(env_steps=[100, 300], updates=[1, 2], wall_seconds=[60, 400], mean=[5, 6], std=[1, 2])
    curve = table_of(env_steps=[0, 300], updates=[0, 2], wall_seconds=[0, 400], return_mean=[0, 1])
    for x, places in (("env_steps", [100, 300]), ("updates", [1, 2]), ("wall_seconds", [1, 400 / 60])):
        figure = plots.learning_curve({"a": curve}, {"a": judged}, x=x)
        assert list(figure.data[1].x) == pytest.approx(places)
        assert list(figure.data[1].error_y.array) == [1, 2]


def test_folded_runs_have_the_range_of_all_of_them_and_each_group_its_color():
    steps = {"env_steps": [0, 10]}
    runs = {name: table_of(**steps, loss=[low, low]) for name, low in zip("abcd", (1, 3, 10, 30), strict=True)}
    figure = plots.series_over(runs, "loss", labels={"a": "p", "b": "p", "c": "q", "d": "q"})
    first_range, first, second_range, second = figure.data
    assert (min(first_range.y), max(first_range.y), set(first.y)) == (1, 3, {2})
    assert (min(second_range.y), max(second_range.y), set(second.y)) == (10, 30, {20})
    assert first.line.color != second.line.color
    assert first_range.fillcolor != second_range.fillcolor


def test_a_rate_over_a_span_divides_by_the_time_between_the_two_moments_that_it_counts():
    times = np.array([0.0, 1.0, 3.0, 4.0])
    assert rates(times * 5, times, over=2.0).tolist() == [5, 5, 5]
    assert rates(times**2, times, over=3.0).tolist() == [1, 3, 5]  # 1/1, 9/3, (16 - 1)/3


def test_bytes_of_the_root_are_those_sent_by_the_versions_that_reached_the_most_hosts():
    root, sealed, received = [0, 1, 2], [0, 2, 4], [0, 200, 400]
    roles = [Role.TRAINER, *[Role.RELAY] * 3]
    found = moments(
        [0],
        roles,
        host=[0, *root],
        model_nbytes=100,
        versions_sealed=[np.nan, *sealed],
        model_bytes_sent=[np.nan, 1200, 7, 9],
        model_bytes_received=[np.nan, 5, *received[1:]],
    )
    (bars,) = plots.bytes_against_bound(found).data
    assert dict(zip(bars.x, bars.y, strict=True)) == {"root out": 3, "host 1": 1, "host 2": 1}


def test_of_many_hosts_the_least_the_median_and_the_most_bytes_are_named_so():
    hosts = np.arange(19)
    received = np.where(hosts > 0, 100.0 * hosts, 0.0)
    found = moments(
        [0],
        [Role.TRAINER, *[Role.RELAY] * 19],
        host=[0, *hosts],
        model_nbytes=100,
        versions_sealed=[np.nan, np.nan, *[1.0] * 18],
        model_bytes_sent=[np.nan, 700, *[0.0] * 18],
        model_bytes_received=[np.nan, *received],
    )
    (bars,) = plots.bytes_against_bound(found).data
    assert dict(zip(bars.x, bars.y, strict=True)) == {"root out": 7, "least": 1, "median": 9.5, "most": 18}


def test_many_relays_have_the_rows_of_their_hosts_in_order():
    hosts = np.arange(20)[::-1] * 3
    sent = np.array([np.zeros(20), hosts * 1e6])
    relays = moments([0, 1], [Role.RELAY] * 20, bytes_sent=sent, host=hosts, rank=hosts)
    heat = plots.relay_bandwidth(relays).data[0]
    assert list(heat.y) == list(range(0, 60, 3))
    assert np.asarray(heat.z)[:, 0].tolist() == list(range(0, 60, 3))
    assert (heat.zmin, heat.zmax) == (0, 57), "plotly leaves out the one where it has not the other"


def test_the_age_of_versions_is_clipped_in_color_alone():
    version = np.full((1, 201), 100.0)
    version[0, 1] = 0.0  # one of two hundred
    found = moments([0], [Role.TRAINER, *[Role.ROLLOUT] * 200], policy_version=version, host=0)
    heat = plots.version_age_heatmap(found).data[0]
    assert heat.zmax == 1
    assert np.max(heat.z) == 100


def test_cores_and_memory_are_sums_over_a_role_in_the_units_that_their_axes_name():
    roles = [Role.TRAINER, Role.ROLLOUT, Role.ROLLOUT]
    found = moments([0, 10], roles, cpu_seconds=[[0, 0, 0], [5, 10, 20]], memory_bytes=[2**30, 2**30, 2**31])
    cores = plots.cpu_by_role(found)
    assert y_of(cores, "trainer x 1").tolist() == [0.5]
    assert y_of(cores, "rollout x 2").tolist() == [3.0]
    memory = plots.memory_by_role(found)
    assert y_of(memory, "rollout x 2").tolist() == [3, 3]
    assert memory.layout.yaxis.title.text == "GiB"


def test_shares_of_the_trainers_time_are_drawn_as_measured_where_one_is_missing():
    names = ("learn_share", "sample_share", "record_share", "publish_share", "checkpoint_share", "trainer_wait_share")
    missing = {name: [np.nan] for name in (*names[2:], "other_share")}
    table = table_of(wall_seconds=[1], learn_share=[0.3], sample_share=[0.1], **missing)
    figure = plots.trainer_time(table)
    assert y_of(figure, "learning").tolist() == [0.3]
    assert y_of(figure, "drawing").tolist() == [0.1]
    assert len(figure.data) == 2


def test_a_setting_that_one_run_alone_has_differs():
    runs = {"a": {"env": {"id": "A", "extra": 1}}, "b": {"env": {"id": "A"}}}
    table = plots.settings_table(runs, differing=True)
    row = table["setting"].tolist().index("env.extra")
    assert (table["a"][row], table["b"][row]) == ("1", "-")


def test_the_worst_ranks_are_first_and_each_age_is_its_own():
    found = moments([0], [Role.TRAINER, *[Role.ROLLOUT] * 3], heartbeat=[1000, 970, np.nan, 995], ended=0)
    table = plots.rank_table(found, 1001.0)
    assert table["rank"].tolist() == [2, 1, 0, 3]
    assert table["health"].tolist() == ["silent", "late", "alive", "alive"]
    assert table["seconds silent"][1:].tolist() == [31, 1, 6]


def test_runs_whose_records_are_unevenly_spaced_are_folded_by_the_axis():
    early = table_of(env_steps=[0, 1, 2, 100], loss=[0, 1, 2, 100])
    late = table_of(env_steps=[0, 98, 99, 100], loss=[0, 98, 99, 100])
    _, mean = plots.series_over({"a": early, "b": late}, "loss", labels=dict.fromkeys("ab", "seeds")).data
    assert list(mean.y) == pytest.approx(list(mean.x))


def test_the_figures_on_top_of_the_overview_are_those_that_their_names_say():
    newest = {"rollouts": 8.0, "return_mean": 12.5, "arrival_lag_p50": 3.0, "arrival_lag_p99": 9.0, "lag_p50": 40.0}
    facts = Facts(
        "runs/a", "a", "running", "", "", 7, 60.0, 55.0, 58.0, 25_000.0, 400.0, 1200.0, 30.0, 90.0, 150.0, newest
    )
    assert plots.headline(facts, 100_000) == [
        ("Environment steps", "25.0k", "25% of 100k"),
        ("Steps / s", "1200", "8 rollouts"),
        ("Updates / s", "30", "400 in all"),
        ("Return", "12.5", "in training"),
        ("Evaluation, last", "55.0", "best of 7: 60.0"),
        ("Confirmed", "58.0", "best policy, fresh episodes"),
        ("Lag on arrival", "3", "p99 9; when drawn 40"),
        ("Time left", "2m30s", "1m30s so far"),
    ]
    over = plots.headline(replace(facts, state="ended", newest={"rollouts": 1.0}, evaluations=0), 1e6)
    assert over[0][2] == "2.5% of 1.0M"
    assert over[1][2] == "1 rollout"
    assert over[4][2] == "none yet"
    assert over[-1] == ("Time", "1m30s", "ended")
    assert plots.headline(Facts("runs/a", "a", "running"), 1e6)[0] == ("Environment steps", "-", "-")


def test_the_rank_that_ended_a_run_is_marked_and_first():
    assert plots.failed_ranks(
        ["rank 3: ValueError: stuck", "rank 12 (rollout) failed: x", "ranks 5", "no rank 4: x"]
    ) == {3, 12}
    found = moments([0], [Role.TRAINER, *[Role.ROLLOUT] * 3], heartbeat=[1000, np.nan, 1000, 1000], ended=[0, 0, 0, 1])
    table = plots.rank_table(found, 1001.0, {3})
    assert table["rank"].tolist() == [3, 1, 0, 2]
    assert table["health"].tolist() == ["failed", "silent", "alive", "alive"]


def test_names_in_a_figure_are_no_links():
    figure = lines_over_time("t", "s", np.arange(3.0), [("<a href='http://x'>b</A > <b>c</b>", np.arange(3.0))], "none")
    trace = json.loads(json_of(figure))["data"][0]
    assert trace["name"] == "&lt;a href='http://x'>b&lt;/A > <b>c</b>"


def test_a_group_is_drawn_where_all_of_its_runs_were_in_the_unit_of_its_axis():
    runs = {
        "a": table_of(wall_seconds=[0, 600], return_mean=[0, 60]),
        "b": table_of(wall_seconds=[300, 1200], return_mean=[0, 90]),
    }
    judged = {name: table_of(wall_seconds=run["wall_seconds"], mean=run["return_mean"]) for name, run in runs.items()}
    figure = plots.learning_curve(runs, judged, x="wall_seconds", labels=dict.fromkeys("ab", "seeds"))
    for name in ("seeds (IQM of 2)", "seeds: evaluation (IQM of 2)"):
        line = next(trace for trace in figure.data if trace.name == name)
        assert (line.x[0], line.x[-1]) == (5, 10)  # [min]
        assert (line.y[0], line.y[-1]) == pytest.approx((15, 45))


def test_cores_do_not_jump_where_they_are_read_more_often_than_they_are_sampled():
    seconds = np.arange(20) * SAMPLE_PERIOD / 2
    spent = np.floor(seconds / SAMPLE_PERIOD)[:, None] * SAMPLE_PERIOD * 0.5  # half a core
    cores = y_of(plots.cpu_by_role(moments(seconds, [Role.TRAINER], cpu_seconds=spent)), "trainer x 1")
    assert sorted({round(value, 3) for value in cores[5:]}) == [0.4, 0.6]  # two or three samples of 2.5 periods


def test_a_rollouts_version_is_compared_with_the_newest_of_its_moment_and_one_in_a_hundred_is_beyond_the_scale():
    found = moments([0, 1], [Role.TRAINER, Role.ROLLOUT], policy_version=[[5, 4], [9, 6]], host=0)
    assert np.asarray(plots.version_age_heatmap(found).data[0].z).tolist() == [[1, 3]]
    versions = [[100, *range(101)]]
    found = moments([0], [Role.TRAINER, *[Role.ROLLOUT] * 101], policy_version=versions, host=0)
    assert plots.version_age_heatmap(found).data[0].zmax == 99
