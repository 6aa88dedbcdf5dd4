"""How runs learn: the figures on top of the overview, return, any run-level series, where the trainer's time goes, and
settings; one run, or several compared. And the distribution of returns that a critic predicts, beside the returns that
followed; what replay holds, how it is drawn from, and who waits for whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ddrl.core.settings import REMOVED, describe_settings
from ddrl.core.specs import Array, Floats
from ddrl.plots.frame import (
    COLORS,
    DASHES,
    add_level,
    add_line,
    in_columns,
    legend_below,
    lines_over_time,
    new_figure,
    rates,
    say_nothing_yet,
    share_axis,
    time_unit,
)
from ddrl.telemetry.reading import Table
from ddrl.telemetry.series import SERIES
from ddrl.telemetry.sinks import count_text, duration_text, value_text
from ddrl.telemetry.summary import Account, Facts

_SERIES = {series.name: series for series in SERIES}  # where a table does not say what its series are
_TITLES = {
    "env_steps_per_s": "Environment steps per second",
    "grad_norm": "Gradient norm",
    "episode_steps_mean": "Episode length",
    "arrival_lag_p50": "Age of experience on arrival, median",
    "arrival_lag_p99": "Age of experience on arrival, 99th percentile",
    "updates_per_s": "Updates per second",
    "loss": "Loss",
    "td_error": "TD error",
    "q_mean": "Mean Q of a batch",
    "lag_p50": "Age of what is drawn, median",
    "lag_p99": "Age of what is drawn, 99th percentile",
    "return_mean": "Return",
    "epsilon": "Share of random actions",
    "replay_fill": "Replay fill",
    "model_mb_per_s": "Parameters sent between hosts",
}
_NO_ROWS = Table({}, 0)
DIVERGED = 20.0  # times the median of the runs' largest values: beyond, a run does not set the scale
_X_NAMES = {"env_steps": "environment steps", "updates": "updates", "samples": "transitions learned from"}


def headline(facts: Facts, max_env_steps: float) -> list[tuple[str, str, str]]:
    """(name, value, words below) of each figure on top of the overview. `max_env_steps`: the limit in the run's
    settings, against which the steps of all its lives count."""
    newest = facts.newest
    share = facts.env_steps / max_env_steps
    goal = f"{share:.{1 if share < 0.1 else 0}%} of {count_text(max_env_steps)}"
    rollouts = newest.get("rollouts", math.nan)
    arrival = count_text(newest.get("arrival_lag_p99", math.nan))
    drawn = count_text(newest.get("lag_p50", math.nan))
    best = f"best of {facts.evaluations}: {value_text(facts.best)}"
    so_far = duration_text(facts.wall_seconds)
    is_running = facts.state == "running"
    return [
        ("Environment steps", count_text(facts.env_steps), "-" if math.isnan(share) else goal),
        ("Steps / s", count_text(facts.env_steps_per_s), f"{value_text(rollouts, 0)} rollout{'s' * (rollouts != 1)}"),
        ("Updates / s", count_text(facts.updates_per_s), f"{count_text(facts.updates)} in all"),
        ("Return", value_text(newest.get("return_mean", math.nan)), "in training"),
        ("Evaluation, last", value_text(facts.last), best if facts.evaluations else "none yet"),
        ("Confirmed", value_text(facts.confirmed), "best policy, fresh episodes"),
        (
            "Lag on arrival",
            count_text(newest.get("arrival_lag_p50", math.nan)),
            f"p99 {arrival}; when drawn {drawn}",
        ),
        ("Time left", duration_text(facts.seconds_left), f"{so_far} so far")
        if is_running
        else ("Time", so_far, facts.state),
    ]


class _Curves:
    """Curves of groups of runs on one figure. Runs of one label are one group, drawn as their interquartile mean and
    its interval."""

    def __init__(
        self,
        runs: Mapping[str, Table],
        x: str,
        labels: Mapping[str, str] | None,
        smoothing: float,
    ) -> None:
        self.runs = runs
        self.x = x
        self.scale = 1.0
        self.x_name = _X_NAMES.get(x, x)
        self._smoothing = smoothing
        self.groups: dict[str, list[str]] = {}
        for name in runs:
            self.groups.setdefault((labels or {}).get(name, name), []).append(name)
        if x == "wall_seconds":
            ends = [table[x][-1] for table in runs.values() if len(table)]
            self.scale, self.x_name = time_unit(np.array([max(ends, default=0.0)]))

    def draw(self, figure: go.Figure, series: str, alone: str = "") -> None:
        """A curve of `series` for each group that has reported it; `alone`: the name of a single run's."""
        for index, (label, names) in enumerate(self.groups.items()):
            lines = [line for name in names for line in self._line(name, series)]
            name = label if len(self.runs) > 1 else alone or label
            if len(lines) == 1:
                add_line(figure, *lines[0], name, index)
            elif lines:
                self.draw_group(figure, lines, f"{name} (IQM of {len(lines)})", index)

    def _line(self, name: str, series: str) -> list[tuple[Floats, Floats]]:
        """The run's line (x, y) as a list; an empty one where it has reported nothing."""
        table = self.runs[name]
        kept = np.isfinite(table[series]) & np.isfinite(table[self.x])
        return (
            [(table[self.x][kept] * self.scale, smoothed(table[series][kept], self._smoothing))] if kept.any() else []
        )

    def draw_group(
        self,
        figure: go.Figure,
        lines: Sequence[tuple[Floats, Floats]],
        name: str,
        index: int,
        *,
        dash: str = "",
    ) -> None:
        """The interquartile mean of several lines (x, y) over the part of the axis that all have, and its interval."""
        begin = max(x[0] for x, _ in lines)
        end = min(x[-1] for x, _ in lines)
        grid = np.linspace(begin, max(begin, end), 200)
        values = np.array([np.interp(grid, x, y) for x, y in lines])
        mean, low, high = interquartile(values)
        color = COLORS[index % len(COLORS)]
        figure.add_scatter(
            x=np.concatenate([grid, grid[::-1]]),
            y=np.concatenate([high, low[::-1]]),
            fill="toself",
            fillcolor=f"rgba({int(color[1:3], 16)},{int(color[3:5], 16)},{int(color[5:7], 16)},0.18)",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        )
        add_line(figure, grid, mean, name, index, dash=dash)


# Student's 97.5 % quantile by degrees of freedom, from 1; further ones by its expansion (Cornish and Fisher, 1937).
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def interval_of_mean(values: Array) -> tuple[Array, Array]:
    """Mean of `values` [runs, ...] over the runs, and half of its 95 % interval; NaN for one run."""
    freedom = len(values) - 1
    mean = values.mean(axis=0)
    if not freedom:
        return mean, np.full_like(mean, np.nan)
    z = 1.95996
    student = _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else z + (z**3 + z) / (4 * freedom) + 2.823 / freedom**2
    return mean, student * values.std(axis=0, ddof=1) / np.sqrt(len(values))


def smoothed(values: Floats, smoothing: float) -> Floats:
    """Exponential mean with weight `smoothing` (0 to 1) of the past, without bias at its beginning."""
    if not smoothing:
        return values
    result = np.empty(len(values))
    mean = 0.0
    for index, value in enumerate(values):
        mean = smoothing * mean + (1 - smoothing) * value
        result[index] = mean / (1 - smoothing ** (index + 1))
    return result


def learning_curve(
    runs: Mapping[str, Table],
    evaluations: Mapping[str, Table] | None = None,
    *,
    x: str = "env_steps",
    smoothing: float = 0.0,
    labels: Mapping[str, str] | None = None,
) -> go.Figure:
    """Mean return of training episodes (lines) and of greedy evaluations (diamonds) of one run or several.

    `runs`: name -> Run.series() with return_mean and `x` (env_steps, updates or wall_seconds); `evaluations`: name ->
    Run.evaluations(). `labels`: what the legend says of each run (default its name); runs of one label are one group,
    drawn as their interquartile mean (IQM) and its 95 % bootstrap interval: the mean and the range of two or three.
    `smoothing`: of an exponential mean, 0 (none) to 1."""
    several = len(runs) > 1
    curves = _Curves(runs, x, labels, smoothing)
    figure = new_figure("Return", curves.x_name, "return per episode", height=360)
    curves.draw(figure, "return_mean", "training")
    for index, (label, names) in enumerate(curves.groups.items()):
        tables = [table for name in names if len(table := (evaluations or {}).get(name, _NO_ROWS))]
        if len(tables) > 1:
            lines = [(table[x] * curves.scale, table["mean"]) for table in tables]
            curves.draw_group(figure, lines, f"{label}: evaluation (IQM of {len(lines)})", index, dash="dot")
            continue
        for table in tables:
            figure.add_scatter(
                x=table[x] * curves.scale,
                y=table["mean"],
                name=f"{label}: evaluation" if several else "evaluation",
                mode="lines+markers",
                error_y=None if several else {"type": "data", "array": table["std"], "thickness": 1, "width": 3},
                line={"color": COLORS[index % len(COLORS)] if several else COLORS[1], "width": 1.5, "dash": "dot"},
                marker={"symbol": "diamond", "size": 8},
                showlegend=not several,
            )
    return figure if figure.data else say_nothing_yet(figure, "no episode has ended yet")


def series_over(
    runs: Mapping[str, Table],
    name: str,
    *,
    x: str = "env_steps",
    log: bool = False,
    smoothing: float = 0.0,
    labels: Mapping[str, str] | None = None,
    legend: bool = True,
) -> go.Figure:
    """One run-level series of one run or several. `runs`: name -> Run.series() with `name` and `x`; `labels` and
    `smoothing` as for `learning_curve`. A run whose values are far beyond all others' does not set the scale."""
    about = next((table.about[name] for table in runs.values() if name in table.about), _SERIES.get(name))
    curves = _Curves(runs, x, labels, smoothing)
    unit = about.unit if about else ""
    has_legend = legend and len(runs) > 1
    figure = new_figure(_TITLES.get(name, name), curves.x_name, unit, height=240, legend=has_legend)
    curves.draw(figure, name)
    if not figure.data:
        return say_nothing_yet(figure, "not reported yet")
    reported = [table[name] for table in runs.values() if np.isfinite(table[name]).any()]
    tops = sorted(float(np.nanmax(values)) for values in reported)
    is_positive = all(np.nanmin(values) >= 0 for values in reported)
    usual = DIVERGED * tops[(len(tops) - 1) // 2]
    if log:
        figure.update_yaxes(type="log")
    elif is_positive and tops[-1] > usual > 0:
        figure.update_yaxes(range=[0, 1.2 * max(top for top in tops if top <= usual)])
        figure.add_annotation(
            text="a run leaves the picture above", x=1, y=1, xref="paper", yref="paper", showarrow=False, yanchor="top"
        )
    else:
        figure.update_yaxes(rangemode="tozero" if is_positive else "normal")
    return figure


_SHARES = {  # name: (words, pattern of the area)
    "learn_share": ("learning", ""),
    "sample_share": ("drawing", "/"),
    "record_share": ("recording", "."),
    "publish_share": ("publishing", "x"),
    "checkpoint_share": ("checkpoints", "-"),
    "trainer_wait_share": ("waiting", "\\"),
    "other_share": ("other", "|"),
}


def trainer_time(table: Table) -> go.Figure:
    """Where the trainer's time goes, stacked shares of wall time. `table`: Run.series() with the *_share series."""
    reported = np.isfinite([table[name] for name in _SHARES]).any(axis=0)  # nothing is, once the run was stopped
    scale, label = time_unit(table["wall_seconds"])
    figure = new_figure("The trainer's time", label, "share of wall time", height=260)
    for color, (name, (words, shape)) in zip(COLORS, _SHARES.items(), strict=True):
        if np.isfinite(table[name]).any():
            figure.add_scatter(
                x=table["wall_seconds"][reported] * scale,
                y=np.nan_to_num(table[name][reported]),
                name=words,
                mode="lines",
                stackgroup="shares",
                line={"width": 0.5, "color": color},
                fillpattern={"shape": shape, "fgcolor": color, "size": 6, "solidity": 0.25} if shape else None,
            )
    share_axis(figure)
    return figure if figure.data else say_nothing_yet(figure, "not reported yet")


# -- predicted returns ------------------------------------------------------------------------------------------------

BINS = 40
NOT_YET = "drawn when the run ends, for algorithms that learn distributions"


def predicted_returns(values: Mapping[str, Any] | None, moment: int = 0, number: int = 0, *, of: str = "") -> go.Figure:
    """The distribution predicted for the states met at one moment, beside the returns that followed.

    `values`: Run.snapshot("values"); `number`: which of several numbers a reward has, called `of` in the title."""
    figure = new_figure(f"Return predicted and observed{of and ', '}{of}", "discounted return", "share a bin")
    if not values:
        return say_nothing_yet(figure, NOT_YET)
    predicted = _distribution(values, values["predicted"][moment][number])
    observed = np.asarray(values["returns"][moment][number], np.float64)
    edges = _edges(values, [predicted], observed.tolist())
    mean = float(predicted[0] @ predicted[1])
    figure.add_bar(
        x=(edges[1:] + edges[:-1]) / 2,
        y=_shares_by_bin(predicted, edges),
        width=np.diff(edges),
        name=f"predicted, mean {mean:.3g}",
        marker={"color": COLORS[0], "line": {"width": 0}},
        opacity=0.75,
    )
    if len(observed):
        shares = np.histogram(observed, edges)[0] / len(observed)
        _add_steps(figure, edges, shares, f"observed, mean {observed.mean():.3g} of {len(observed)}", 1)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return figure


def state_value(values: Mapping[str, Any] | None, moment: int = 0, number: int = 0) -> go.Figure:
    """The distribution of one state's return: a line for each action; of continuous actions, for the policy's.

    `values`: Run.snapshot("values"); `number`: which of several numbers a reward has."""
    figure = new_figure("Return of one state", "discounted return", "share a bin")
    if not values:
        return say_nothing_yet(figure, NOT_YET)
    discrete = values["discrete"]
    taken = values["taken"][moment]
    lines = [_distribution(values, row) for row in values["state"][moment]]
    lines = lines if discrete else lines[number : number + 1]
    edges = _edges(values, lines)
    for index, line in enumerate(lines):
        name = f"action {index}{' (taken)' if index == taken else ''}" if discrete else "predicted"
        _add_steps(figure, edges, _shares_by_bin(line, edges), f"{name}, mean {float(line[0] @ line[1]):.3g}", index)
    figure.update_yaxes(tickformat=".0%", rangemode="tozero")
    return legend_below(figure, len(lines))


_Line = tuple[Floats, Floats]  # probabilities and values [atoms]


def _distribution(values: Mapping[str, Any], row: Any) -> _Line:
    """Probabilities and the values that have them."""
    row = np.asarray(row, np.float64)
    atoms = np.asarray(values["atoms"], np.float64)
    return (row, atoms) if values["form"] == "probability" else (np.full(len(row), 1 / len(row)), row)


def _edges(values: Mapping[str, Any], lines: Sequence[_Line], observed: Sequence[float] = ()) -> Floats:
    """Bins over all values that have a share worth drawing: one an atom where the atoms are fixed."""
    every = np.concatenate([*(at[share > 1e-3 / len(share)] for share, at in lines), observed])
    low = float(every.min())
    high = float(every.max())
    atoms = np.asarray(values["atoms"], np.float64)
    width = (high - low) / BINS
    if values["form"] == "probability":
        width = float(atoms[1] - atoms[0])
        low, high = (float(atoms[0] + width * np.floor((end - atoms[0]) / width)) for end in (low, high))
    width = max(width, 1e-9)
    return np.float64(low) + width * (np.arange(round((high - low) / width) + 2, dtype=np.float64) - 0.5)


def _shares_by_bin(line: _Line, edges: Floats) -> Floats:
    share, at = line
    return np.histogram(at, edges, weights=share)[0]


def _add_steps(figure: go.Figure, edges: Floats, shares: Floats, name: str, index: int) -> None:
    line = {"color": COLORS[index % len(COLORS)], "dash": DASHES[index // len(COLORS) % len(DASHES)], "shape": "hvh"}
    figure.add_scatter(x=(edges[1:] + edges[:-1]) / 2, y=shares, name=name, mode="lines", line={**line, "width": 2})


# -- settings ----------------------------------------------------------------------------------------------------------

_ABSENT = "-"
_IDENTITY = ("run.seed", "run.dir")  # every run has its own; they make no two runs different


def settings_table(runs: Mapping[str, Mapping[str, Mapping[str, Any]]], *, differing: bool = False) -> dict[str, Array]:
    """One row a setting: its name, its value in every run, the default, unit and meaning.

    `runs`: name -> section -> setting -> value (Run.settings). `differing`: only the settings in which the runs are not
    all alike (with one run: in which it departs from the defaults). Settings that this version does not know are listed
    last."""
    sections = {section for tree in runs.values() for section in tree}
    known = {info.name: info for info in describe_settings(sorted(sections))}
    defaults = _flat({name: info.default for name, info in known.items()})
    values = {name: _flat(tree) for name, tree in runs.items()}
    for tree in values.values():
        for name, removed in REMOVED.items():
            if tree.get(name) == _text(removed.value):
                del tree[name]
    foreign = sorted({setting for tree in values.values() for setting in tree} - set(defaults))
    rows: list[tuple[str, ...]] = []
    for setting in [*defaults, *foreign]:
        texts = [tree.get(setting, _ABSENT) for tree in values.values()]
        default = defaults.get(setting, _ABSENT)
        if differing and len(set(texts)) == 1 and (len(texts) > 1 or texts[0] == default):
            continue
        info = known.get(setting)
        meaning = (info.unit, info.doc) if info else ("", "not known to this version of ddrl")
        rows.append((setting, *texts, default, *meaning))
    names = ["setting", *runs, "default", "unit", "meaning"]
    return {name: np.array(values, object) for name, values in in_columns(names, rows).items()}


MAX_SETTINGS = 12  # columns of settings in a table of runs
RUN_COLUMNS = (
    *("run", "name", "tags", "state", "task", "best return", "last return", "confirmed return"),
    *("env steps", "time [min]", "reason", "note"),
)


def runs_table(facts: Mapping[str, Facts], settings: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """All runs, a row each: what it is and what it reached, then only the settings in which runs differ. Both by the
    run's name."""
    rows = [
        (
            name,
            run.label,
            ", ".join(run.tags),
            run.state,
            run.task,
            run.best,
            run.last,
            run.confirmed,
            run.env_steps,
            run.wall_seconds / 60,
            run.reason.partition("\n")[0],
            run.note,
        )
        for name, run in facts.items()
    ]
    optional = ("name", "tags", "reason", "note")
    columns = in_columns(RUN_COLUMNS, rows).items()
    table: dict[str, Any] = {name: values for name, values in columns if name not in optional or any(values)}
    if len(settings) > 1:
        differing = settings_table(_differing_sections(settings), differing=True)
        shown = [row for row, name in enumerate(differing["setting"]) if name not in ("run.dir", "env.id")]
        shown.sort(key=lambda row: str(differing["setting"][row]).startswith("run."))
        for row in shown[:MAX_SETTINGS]:
            values = [str(differing[name][row]) if name in settings else _ABSENT for name in facts]
            table[str(differing["setting"][row])] = values
    return table


def _differing_sections(
    settings: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The sections in which not all runs are alike: of thousands of runs most sections are."""
    first = next(iter(settings.values()))
    names = {section for tree in settings.values() for section in tree}
    kept = [name for name in names if any(tree.get(name) != first.get(name) for tree in settings.values())]
    return {run: {name: tree[name] for name in kept if name in tree} for run, tree in settings.items()}


def folded_runs(facts: Mapping[str, Facts], labels: Mapping[str, str]) -> dict[str, Any]:
    """Groups of runs of one label, a row each: how many, and the interquartile mean of their best, last and confirmed
    returns with its 95 % interval."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for name, run in facts.items():
        groups.setdefault((run.task, labels.get(name, name)), []).append(run)
    table: dict[str, Any] = {
        "task": [task for task, _ in groups],
        "settings": [label for _, label in groups],
        "runs": [len(runs) for runs in groups.values()],
    }
    for column in ("best", "last", "confirmed"):
        found = [interquartile(np.array([getattr(run, column) for run in runs])) for runs in groups.values()]
        table[f"{column} return"] = [mean for mean, _, _ in found]
        table[f"{column}, 95 %"] = ["-" if math.isnan(low) else f"{low:.1f} to {high:.1f}" for _, low, high in found]
    return table


RESAMPLES = 2000  # of a bootstrap
CURVE_RESAMPLES = 500  # of each point of a curve, which a page draws every second


def interquartile(values: Array) -> tuple[Any, Any, Any]:
    """The mean of the middle half of `values` [runs, ...] over the runs, and the ends of its 95 % bootstrap interval
    (Agarwal et al. 2021; the runs are of one task: one stratum), over the runs that are numbers, each value by itself;
    NaN for none, and no interval for one."""
    kept = np.sort(values[np.isfinite(values).reshape(len(values), -1).all(axis=1)], axis=0)
    nothing = np.full(values.shape[1:], np.nan)[()]
    if not len(kept):
        return nothing, nothing, nothing
    mean = _middle(len(kept)) @ kept
    if len(kept) == 1:
        return mean, nothing, nothing
    samples = _resampled(len(kept))[: RESAMPLES if values.ndim == 1 else CURVE_RESAMPLES]
    low, high = np.quantile(samples @ kept, (0.025, 0.975), axis=0)
    return mean, low, high


def _middle(runs: int) -> Floats:
    """What each of so many sorted values counts in the mean of their middle half: the part of its share of the ranks,
    [i / n, (i + 1) / n], that is in it."""
    return 2.0 * np.diff(np.clip(np.arange(runs + 1) / runs, 0.25, 0.75))


@lru_cache(maxsize=64)
def _resampled(runs: int) -> Floats:
    """The same [RESAMPLES, runs] for samples drawn from the values with replacement: which ranks are drawn does not
    depend on the values, so one product resamples whole curves."""
    ranks = np.sort(np.random.default_rng(0).integers(runs, size=(RESAMPLES, runs)), axis=1)
    weights = np.zeros((RESAMPLES, runs))
    np.add.at(weights, (np.arange(RESAMPLES)[:, None], ranks), _middle(runs))
    return weights


def matches(row: Sequence[object], words: str) -> bool:
    """Whether a row of a table holds every word, in any of its entries, whatever the case."""
    text = " ".join(map(str, row)).lower()
    return all(word in text for word in words.lower().split())


def differing_labels(runs: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, str]:
    """What a legend says of each run: the settings in which it differs (learner.lr=0.001), else its name.

    Runs that differ in their seed alone have one label: they are a group. `runs`: as for `settings_table`."""
    if len(runs) < 2:
        return {name: name for name in runs}
    table = settings_table(runs, differing=True)
    rows = [index for index, setting in enumerate(table["setting"]) if setting not in _IDENTITY]
    if not rows:
        return dict.fromkeys(runs, "all seeds") if "run.seed" in table["setting"] else {name: name for name in runs}
    rows.sort(key=lambda row: str(table["setting"][row]).startswith("run."))  # what is learned with, before limits
    groups = {tuple(table[name][row] for row in rows) for name in runs}
    # Three settings, and as many more as it takes to tell groups apart: runs of one label are drawn as one.
    shown = next(count for count in range(3, len(rows) + 3) if len({group[:count] for group in groups}) == len(groups))
    return {name: ", ".join(f"{table['setting'][row]}={table[name][row]}" for row in rows[:shown]) for name in runs}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Settings by their full name; the table of a plug-in is one level deeper (learner.c51.atoms)."""
    flat: dict[str, str] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": _text(value)}
    return flat


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# -- a sketch ----------------------------------------------------------------------------------------------------------
# A learning curve as a few hundred bytes of SVG, which a notebook's panel redraws every second without flicker or a
# library in the browser.

_SIZE = (640, 200)  # [px], width and height
_LEFT = 52  # [px], edges of the drawing
_RIGHT = 632
_TOP = 18
_BOTTOM = 166


def sketch(lines: Sequence[tuple[str, Floats, Floats]], *, x_name: str = "", y_name: str = "") -> str:
    """SVG of (name, x [N], y [N]) lines on common axes; points that are no numbers are left out. Colors follow the
    page's text, light or dark."""
    kept = [(name, x[known], y[known]) for name, x, y in lines for known in [np.isfinite(x) & np.isfinite(y)]]
    xs = np.concatenate([x for _, x, _ in kept])
    ys = np.concatenate([y for _, _, y in kept])
    parts = [f"<title>{escape(y_name or 'curve')}</title>"]
    if len(xs):
        x_span = (float(xs.min()), float(xs.max()))
        y_span = (min(float(ys.min()), 0.0) if ys.max() > 0 else float(ys.min()), float(ys.max()))
        if y_span[0] == y_span[1]:
            y_span = (y_span[0], y_span[0] + 1.0)
        for share in (0.0, 0.5, 1.0):
            y = _BOTTOM - share * (_BOTTOM - _TOP)
            line = f'x1="{_LEFT}" x2="{_RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(f'<line {line} stroke="currentColor" opacity="0.15"/>')
            parts.append(_label(_LEFT - 6, y + 4, f"{y_span[0] + share * (y_span[1] - y_span[0]):.4g}", "end"))
        parts.append(_label(_LEFT, _BOTTOM + 14, f"{x_span[0]:,.0f}", "start"))
        parts.append(_label(_RIGHT, _BOTTOM + 14, f"{x_span[1]:,.0f}", "end"))
        parts.append(_label((_LEFT + _RIGHT) / 2, _BOTTOM + 14, x_name))
        for index, (name, x, y) in enumerate(kept):
            across = np.interp(x, x_span, (_LEFT, _RIGHT)) if x_span[0] < x_span[1] else np.full(len(x), _LEFT)
            down = np.interp(y, y_span, (_BOTTOM, _TOP))
            points = " ".join(f"{a:.1f},{d:.1f}" for a, d in zip(across, down, strict=True))
            color = COLORS[index % len(COLORS)]
            dash = f' stroke-dasharray="{6 // index + 2} 3"' if index else ""
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
            parts.append(_label(_LEFT + index * 120, 12, name, "start", color))
    else:
        parts.append(_label(_SIZE[0] / 2, _SIZE[1] / 2, "no episode has ended yet"))
    style = f"max-width:{_SIZE[0]}px;color:var(--jp-ui-font-color1,currentColor)"
    head = f'<svg viewBox="0 0 {_SIZE[0]} {_SIZE[1]}" width="100%" style="{style}" font-family="sans-serif" '
    return f'{head}font-size="11" role="img">{"".join(parts)}</svg>'


def _label(x: float, y: float, text: str, anchor: str = "middle", color: str = "currentColor") -> str:
    return f'<text x="{x}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'


# -- replay ------------------------------------------------------------------------------------------------------------


def account_table(accounts: Sequence[Account]) -> dict[str, list[Any]]:
    """One row for each account of the ledger, with its total, and one for each of its parts, which were counted apart;
    what they lack of the total is a part "missing"."""
    rows: list[tuple[str, str, int]] = []
    for account in accounts:
        rows.append((account.name, "in all", account.total))
        rows += [(account.name, part, count) for part, count in account.parts.items()]
        if account.missing:
            rows.append((account.name, "missing", account.missing))
    return in_columns(("account", "part", "rows"), rows)


def replay_fill(table: Table, capacity: int) -> go.Figure:
    """Transitions held against `capacity`, and how many seconds of experience that is at the rate of recording (right
    axis). `table`: Run.series() with replay_size and rows_recorded."""
    wall_seconds = table["wall_seconds"]
    lines = [("held", table["replay_size"])]
    figure = lines_over_time("Replay: fill and age", "transitions", wall_seconds, lines, "nothing recorded yet")
    if not figure.data:
        return figure
    add_level(figure, capacity, "capacity")
    # First in, first out: the oldest was recorded when rows_recorded was lower by what is held.
    recorded = np.nan_to_num(table["rows_recorded"])
    began = np.interp(np.maximum(recorded - table["replay_size"], 0.0), recorded, wall_seconds)
    held: Any = figure.data[0]
    add_line(figure, held.x, wall_seconds - began, "age of the oldest (right)", 1, yaxis="y2")
    right = {"overlaying": "y", "side": "right", "rangemode": "tozero", "showgrid": False, "tickmode": "auto"}
    return figure.update_layout(yaxis2={**right, "title": {"text": "age [s]", "standoff": 8}}, margin={"r": 64})


def sample_balance(table: Table, wanted: float) -> go.Figure:
    """Transitions learned from per transition recorded: over the window, and what the config asks for (`wanted`, 0:
    nothing)."""
    lines = [("measured", table["samples_per_insert"])]
    unit = "samples / transition"
    figure = lines_over_time("Samples per insert", unit, table["wall_seconds"], lines, "no updates yet")
    if wanted > 0 and figure.data:
        add_level(figure, wanted, f"asked for: {wanted:g}")
    return figure


def who_waits(table: Table) -> go.Figure:
    """Who waits for whom: the trainer for data, rollouts at full lanes, and how often they are held back on purpose,
    for samples_per_insert."""
    names = {
        "trainer_wait_share": "trainer for data",
        "rollout_wait_share": "rollouts at full lanes",
        "rollout_hold": "rollouts held back",
    }
    lines = ((words, table[name]) for name, words in names.items())
    nothing = "no records yet"
    return lines_over_time("Who waits for whom", "share of time", table["wall_seconds"], lines, nothing, shares=True)


def recording_rates(table: Table) -> go.Figure:
    """Transitions a second: recorded, and learned from. `table`: Run.series() with rows_recorded and samples."""
    wall_seconds = table["wall_seconds"]
    lines = [
        (words, rates(table[name], wall_seconds))
        for name, words in (("rows_recorded", "recorded"), ("samples", "learned from"))
    ]
    if "learn_share" in table.columns:  # which is not reported after the stop: what is drained then is no speed
        lines = [(words, np.where(np.isfinite(table["learn_share"][1:]), values, np.nan)) for words, values in lines]
    title = "Recorded and learned from"
    figure = lines_over_time(title, "transitions / s", wall_seconds[1:], lines, "no records yet")
    positive = np.concatenate([values[values > 0] for _, values in lines])
    most = positive.max(initial=1.0)
    least = positive.min(initial=most)
    figure.update_yaxes(type="log", dtick=1, range=[np.floor(np.log10(least)), np.ceil(np.log10(most * 1.01))])
    return figure


def draw_probabilities(priorities: Floats, exponent: float) -> go.Figure:
    """How often each transition is drawn under mass = priority ** exponent (Schaul et al. 2016, eq. 1), against uniform
    drawing.

    `priorities` [N]: raw priorities, e.g. absolute TD errors. Shown sorted: the share of all draws that the first k
    percent take."""
    figure = new_figure(
        f"Draws by priority, exponent {exponent:g}", "transitions, highest priority first", "share of draws"
    )
    if not len(priorities):
        return say_nothing_yet(figure, "no priorities yet")
    x = np.linspace(0, 1, 201)
    references = [(power, words) for power, words in ((0.0, "uniform"), (1.0, "proportional")) if power != exponent]
    for index, (power, words) in enumerate([(exponent, f"exponent {exponent:g}"), *references]):
        mass = np.sort(np.maximum(np.asarray(priorities, np.float64), 1e-12) ** power)[::-1]
        share = np.concatenate([[0.0], np.cumsum(mass) / mass.sum()])
        add_line(figure, x, np.interp(x, np.linspace(0, 1, len(share)), share), words, index)
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    share_axis(figure)
    return figure
