import asyncio
import json
import re
import sys
from queue import Empty
from types import SimpleNamespace

import pytest

pytest.importorskip("nbclient", reason="needs the extra [test]")

import nbformat
from nbclient.exceptions import CellExecutionError, CellTimeoutError
from nbformat.v4 import new_code_cell, new_notebook

from notebooks.execute import REPLY_LIMIT, Client, execute, look, notebooks
from notebooks.photograph import FIGURE, draw

FOLDER = notebooks()

# Less than a reader's budget of each notebook (its cell "parameters").
SMALL = {
    "01_replay": {"K": (5, 7), "S": (6, 8), "REPEATS": 2},
    "02_distribution": {"SECONDS": 60, "STEPS": 3000, "SCHEMES": ("sharded", "direct")},
    "03_microbatch": {"STEPS": 8_000, "EPISODES": 3},
    "04_admix": {"STEPS": 400, "DAYS": 2},
    "05_gpu_pool": {"STEPS": 20_000},
}

# A last cell, run in the notebook's kernel: the data behind its figures, and that widgets do what they say.
CHECKS = {
    "00_quickstart": """
(line, diamonds) = curve.data
kept = np.isfinite(series["return_mean"])
np.testing.assert_allclose(line.x, series["env_steps"][kept])
np.testing.assert_allclose(line.y, series["return_mean"][kept])
np.testing.assert_allclose(diamonds.x, evaluations["env_steps"])
np.testing.assert_allclose(diamonds.y, evaluations["mean"])
assert (curve.layout.xaxis.title.text, curve.layout.yaxis.title.text) == ("environment steps", "return per episode")
assert [trace.name for trace in (*curve.data, *flight.data)] == ["training", "evaluation", "ball", "paddle"]
ball, paddle = flight.data
np.testing.assert_allclose([ball.x, ball.y, paddle.y], [path[:, 1], path[:, 0], path[:, 3]], rtol=1e-6)
assert len(result.returns) == 20 and 0 <= result.returns.min() <= result.returns.max() <= 10
assert policy(path[0]) in range(3) and policy(path).shape == (len(path),)
assert (policy(path) == policy.outputs(path)["q"].argmax(1)).all()
assert run.summary["best"]["mean"] > 2, "random play catches one or two of ten balls"
assert film.path.stat().st_size > 1000
assert "torch" not in sys.modules and "onnx" not in sys.modules
import psutil
def own():  # [MB] that no other process shares and no file holds, which does not depend on what else the machine runs
    rollup = open("/proc/self/smaps_rollup").read()
    return int(rollup.partition("Pss_Anon:")[2].split()[0]) * 1024 / 1e6
pss = psutil.Process().memory_full_info().pss / 1e6
assert pss < 130 and own() < 100, f"{pss:.0f} MB, {own():.0f} its own, with a panel, plots, ONNX Runtime and a film"
assert not {"pandas", "kaleido", "jsonschema", "imageio"} & set(sys.modules)
table = run.frame("env_steps", "updates", "return_mean", "env_steps_per_s")
assert list(table.columns) == ["wall_seconds", "env_steps", "updates", "return_mean", "env_steps_per_s"]
np.testing.assert_array_equal(table["return_mean"], series["return_mean"])
# What pages of pandas' and pyarrow's files count depends on who else has mapped them.
assert own() < 140, f"{own():.0f} MB of its own with a pandas frame"
import torch
pss = psutil.Process().memory_full_info().pss / 1e6
assert pss < 400, f"{pss:.0f} MB with torch"
""",
    "01_replay": """
assert available == [0, 0, 1, 2, 3, 4]
assert (batch.batch_state[:, 1, 0] == batch.batch_state[:, 0, 0] + 1).all()
assert (batch.batch_pick_pos == batch.batch_state[:, 0, 0]).all()
assert set((batch.seq_len - batch.seq_len_next).tolist()) <= {0, 1} and (batch.seq_len == 3).all()
assert columns["mood"].shape == (5, 1)
assert ends == {False: [(0, 3, 3), (1, 3, 3), (2, 3, 3)], True: [(0, 3, 3), (1, 3, 3), (2, 3, 3), (3, 2, 2), (4, 1, 1)]}
assert [trace.name for trace in figure.data[::2]] == ["uniform", "prioritized", "rank_based", "recency"]
for kind, promised, dots in zip(frequencies, figure.data[::2], figure.data[1::2]):
    assert (dots.name, dots.marker.color) == (f"{kind}, drawn", promised.line.color)
    np.testing.assert_allclose(promised.y, expected[kind])
    np.testing.assert_allclose(dots.y, frequencies[kind])
    assert np.abs(frequencies[kind] - expected[kind]).max() < 5 * np.sqrt(0.25 / 20_000), kind
np.testing.assert_allclose(expected["prioritized"], (1 + np.arange(20)) / 210, rtol=1e-5)
assert stale == 1 and all(agreed) and len(agreed) == 9
assert history[5] == [2, 1, 2, 1, 0, 0, 0] and history[7] == [1, 0, 1, 0, 1, 1, 0]
np.testing.assert_array_equal(drawn.data[0].z, history)
np.testing.assert_array_equal(drawn.data[0].text, history)
assert drawn.data[0].x[6] == "episode 6" and drawn.data[0].y[4] == "5: draw 0"
assert drawn.layout.yaxis.autorange == "reversed"
for index in (0, 1):
    surface = surfaces[index].data[0]
    np.testing.assert_allclose(surface.z, grid[..., index], rtol=1e-6)
    assert (list(surface.x), list(surface.y)) == (list(S), list(K))
    np.testing.assert_array_equal(surface.text, grid[..., index].round())
    assert [part.title.text[-1] for part in (surfaces[index].layout.xaxis, surfaces[index].layout.yaxis)] == ["s", "k"]
cells, middle, python = bend.data
assert (middle.name, python.name) == ("kernel, median", "plain Python at lb N = 14") and set(python.y) == {plain_get}
assert (bend.layout.xaxis.title.text, bend.layout.yaxis.title.text, bend.layout.yaxis.type) == ("lb N", "us", "log")
np.testing.assert_array_equal(cells.x, [k + s for k in K for s in S])
np.testing.assert_array_equal(cells.y, grid[..., 1].ravel())
by_size = {size: np.median(np.array(cells.y)[np.array(cells.x) == size]) for size in cells.x}
assert dict(zip(middle.x, middle.y)) == by_size
assert plain_get > 5 * np.median(grid[..., 1])
assert [array.shape for array in plain.get_batch(7)] == [(7, 8, 8), (7, 8), (7, 8)]
from types import SimpleNamespace
ticks = iter(np.cumsum([0, 0.75, 1, 0.25]))
time, real = SimpleNamespace(process_time=lambda: next(ticks)), time
assert fastest(lambda: None) == 0.25e6, "the fastest of two, in microseconds"
time = real
""",
    "02_distribution": """
import pathlib
assert sent["trainer"] == len(model) and sum(sent.values()) == hosts * len(model) and refused
assert all(np.array_equal(each, model) for each in joined.values()) and len(joined) == hosts
assert plan.messages == hosts * hosts
titles = [shown.layout.title.text for shown in Out.values() if hasattr(shown, "layout") and hasattr(shown, "to_json")]
assert titles[:2] == ["sharded: 30.7 ms", "direct: 128.4 ms"], "(m+n-1)a + (1+(n-1)/m)S/B and n(a+S/B)"
assert sharded.seconds < 0.5 * direct.seconds and weighted.seconds < 0.5 * slow.seconds
# The simulator meets the closed forms of the cost model.
for count, preset in ((100, 10), (298, 30)):
    S, B, a = 20e6, 1.25e9, 50e-6
    np.testing.assert_allclose(tables[count]["direct"], 1e3 * count * (a + S / B), rtol=0.01)
    expected = (preset + count - 1) * a + (1 + (count - 1) / preset) * S / B
    np.testing.assert_allclose(tables[count][f"sharded, m={preset}"], 1e3 * expected, rtol=0.03)
    assert min(tables[count], key=tables[count].get).startswith("sharded, best m")
for bars, (count, row) in zip(figure.data, tables.items()):
    np.testing.assert_allclose(bars.y, list(row.values()))
    assert bars.name == f"{count} hosts" and list(bars.text) == [f"{value:.0f}" for value in row.values()]
    assert list(bars.x) == ["direct", "tree", "sharded, m", "sharded, best m", "chain"]
bars, diamonds = beside.data
assert list(bars.x) == list(diamonds.x) and len(bars.x) == 7
assert (bars.name, diamonds.name) == ("simulated", "measured")
assert list(bars.x) == [f"{name}, {count} hosts" for count in measured for name in measured[count]]
ratios = np.divide(diamonds.y, bars.y)
assert (ratios > 0.7).all() and (ratios < 1.7).all() and np.median(ratios) < 1.1, ratios
np.testing.assert_allclose(bars.y[:2], [19 * 3.2, 10.9 * 3.2], rtol=0.02)
names = ["root out", "host 1", "host 2", "host 3"]
assert [(line.y0, line.y1) for line in links.layout.shapes] == [(1, 1)]
for scheme, bars in zip(counted, links.data):
    assert bars.name == scheme and list(bars.x) == names
    (file,) = [file for file in pathlib.Path("runs").glob("*/config.toml") if f'"{scheme}"' in file.read_text()]
    with ddrl.Run(file.parent) as one:
        versions = one.processes(points=60).column("versions_sealed")[-1]
    # At the moment of the record one version is under way, and may be that much of all, where the machine is slow.
    np.testing.assert_allclose(bars.y, [3 if scheme == "direct" else 1, 1, 1, 1], rtol=0.05 + 2 / np.nanmax(versions))
for child, value in zip(sliders.children[:4], (4, 2, 100, 500)):  # what they draw: tests/plots/test_explore.py
    child.value = value
assert sliders.kwargs == {"hosts": 4, "m": 2, "megabits": 100, "microseconds": 500}
z = np.asarray(ages.data[0].z, float)
assert len(z) > 1, z
assert np.isfinite(z).any() and np.nanmin(z) >= 0, z  # NaN: before a rank's first version
""",
    "03_microbatch": """
for p in (np.ones(4), np.array([0.5, 1, 1, 1]), np.array([100, 1, 1, 1])):
    found = sizes_of(c, p)
    assert found.sum() == 256 and found.min() >= 1 and found.max() <= 160
from ddrl.balance.sizes import proportional_sizes
np.testing.assert_array_equal(sizes_of(c, np.ones(4)), proportional_sizes(256, c, np.ones(4, int), np.full(4, 160)))
np.testing.assert_allclose(joined, gradient(np.arange(256)))
computes, waits = figure.data
assert (computes.name, waits.name) == ("computes", "waits")
rows = [f"{kind}, node {node}" for kind in ("equal", "formula") for node in range(4)]
assert list(computes.y) == list(waits.y) == rows
np.testing.assert_allclose(computes.x, np.concatenate([0.02 + 64 / v, 0.02 + fitted / v]))
np.testing.assert_allclose(np.add(computes.x, waits.x)[:4], arrivals["equal"].max())
assert np.max(waits.x[4:]) < 0.2 * np.max(waits.x[:4])
assert update.samples == 192 and collection.counts.dropped == 1
assert max(times[rule] for rule in RULES) < times["formula, p = 1"] < times["equal"]
assert times["rhythm"] == times["affine"], "one slow-down has no rhythm"
assert times["DDQN"] < times["equal"]
late = -4 * played["equal"][:, :, 2]  # of four nodes with equal sizes: whole nodes are dropped
np.testing.assert_allclose(late, late.round(), atol=1e-6)
np.testing.assert_allclose(dropped["equal"], late.mean() / 4)
assert late.max() >= 1
for line, way in zip(compared.data, ways):
    assert line.name == way
    np.testing.assert_allclose(line.y.mean(), times[way])
assert taken["affine"] == 1 and taken["ddqn"] < min(taken[rule] for rule in RULES) - 0.02, taken
assert [line.name for line in ahead.data] == list(beats)
for line, (way, seconds) in zip(ahead.data, beats.items()):
    np.testing.assert_allclose(line.y[-1], np.mean(seconds.sum(1) / beats["affine"].sum(1)))
    assert np.isclose(line.y[-1], taken[way]) and line.x[-1] == 149
one, two = Beats(0), Beats(0)
one.slow[:], one.part[:], two.slow[:], two.part[:] = 1, 0.5, 2, 1
alone = one.iterate(np.full(16, 64))
np.testing.assert_allclose(two.iterate(np.full(16, 64)), 2 * alone)
np.testing.assert_allclose(np.median(alone / (one.a + 64 / one.v)), 1, atol=0.05)
np.testing.assert_allclose(pareto.data[0].x, front[:, 0])
np.testing.assert_allclose(pareto.data[0].y, front[:, 1])
assert list(pareto.data[0].text) == ["w = 0", "w = 0.25", "w = 0.5", "w = 0.75", "w = 1"]
assert pareto.layout.xaxis.title.text == "time beyond the best possible"
assert pareto.layout.yaxis.title.text == "dropped share"
assert [line.name for line in resized.data] == ["node 0", "node 1", "node 2"]
np.testing.assert_array_equal([line.y for line in resized.data], real.sizes.T)
assert (real.sizes.sum(1) == 900).all()
# What else the machine does meanwhile is in the times: the sizes are those that the filter makes of them.
rule = Balancer(900, 3, "affine")
for sizes, seconds in zip(real.sizes, real.seconds):
    np.testing.assert_array_equal(sizes, rule.sizes)
    rule.update(seconds)
assert real._factors == [1.0, 4.0, 1.0] and len(real.sizes) == 60
np.testing.assert_allclose(target, reward + discount * older[:, policy.outputs(following)["q"].argmax()])
np.testing.assert_allclose(target.mean(), reward + discount * online.max(), atol=0.03)
assert plain.mean() > target.mean() + 0.05 and len(curve.data) == 2
assert "torch" not in sys.modules if "sys" in globals() else True
""",
    "04_admix": """
import numpy as np
penalties, marks, served = day_of_ads.duals_of_contracts(contracts.ad_id, contracts.penalty, duals).data
assert [trace.name for trace in (penalties, marks, served)] == ["penalty", *duals]
assert list(penalties.x) == list(marks.x) == list(served.x) == [str(ad) for ad in contracts.ad_id]
np.testing.assert_allclose(served.y, 1000 * np.array(known))
np.testing.assert_allclose(penalties.y, 1000 * contracts.penalty)
np.testing.assert_allclose(marks.y, 1000 * best.alpha)
bars, points = day_of_ads.rule_scores(rules).data
assert bars.y[0] == "hindsight" and len(points.x) == DAYS * len(names)
np.testing.assert_allclose(bars.x, sorted((np.mean(rules[name]) for name in names), reverse=True))
assert np.mean(rules["adaptive_pacing"]) > np.mean(rules["contract_first"])
assert [trace.name.partition(":")[0] for trace in learned.data] == [*laws, "hindsight", "the rule"]
for trace, days in zip(learned.data, laws.values()):
    np.testing.assert_allclose(trace.x, 100 * np.subtract(days["hindsight"], days["rule"]))
    np.testing.assert_allclose(trace.y, 100 * np.subtract(days["learned"], days["rule"]))
    mean, low, high = day_of_ads.gain(days)
    assert 0 < low < mean < high and np.isclose(mean, np.mean(trace.y))
(swings,) = plots.revenue_swings({"admix": evaluations}).data
np.testing.assert_allclose(swings.x, evaluations["env_steps"])
np.testing.assert_allclose(swings.y, evaluations["mean"])
candidates = answer["explanation"]["candidates"]
assert answer["ad"] == max(candidates, key=lambda one: one["score"] or 0.0)["ad"]
assert run.state == "ended" and "kaleido" not in __import__("sys").modules
""",
    "05_gpu_pool": """
import numpy as np
figure = busy_against_tasks(tasks, {"simulated, fair": shares}, bound)
(line,) = (trace for trace in figure.data if trace.name == "simulated, fair")
np.testing.assert_allclose(line.x, list(tasks))
np.testing.assert_allclose(line.y, shares)
variation = min(typical.variation, 1.0)
np.testing.assert_allclose(shares, steady_shares(tasks, duty=typical.duty, devices=1, variation=variation)[0])
assert figure.data[0].name.startswith("bound") and list(figure.data[0].y) == list(bound)
diamond = busy_against_tasks(tasks, {}, bound, pool_of_tasks.measured_point(pool)).data[-1]
assert list(diamond.x) == [3] and 0 < diamond.y[0] <= 1
# How long anybody waited is a matter of the machine's speed; that the figure shows it is not.
times = np.array([[lease.asked, lease.granted, lease.released] for lease in pool.leases])
asked, granted, released = times.T
who = [pool.tasks.index(lease.task) for lease in pool.leases]
overlaps = np.minimum(granted[:, None], released) - np.maximum(asked[:, None], granted)
waited = np.zeros((3, 3))
np.add.at(waited, np.ix_(who, who), overlaps.clip(0))
np.fill_diagonal(waited, 0)
heatmap = pool_waits(pool).data
np.testing.assert_allclose(heatmap[0].z if heatmap else np.zeros((3, 3)), waited, atol=1e-9)
titles = [pool_waits(pool).layout[axis].title.text for axis in ("xaxis", "yaxis")]
assert titles == ["holds the device", "waits"]
assert not heatmap or list(heatmap[0].x) == list(heatmap[0].y) == list(pool.tasks)
assert set(who) == {0, 1, 2}
assert (np.sort(granted)[1:] >= np.sort(released)[:-1]).all(), "one device, one holder"
drawn = []
draw = pool_of_tasks.busy_against_tasks
pool_of_tasks.busy_against_tasks = lambda *given: drawn.append(given) or draw(*given)
sliders = pool_of_tasks.pool_sliders(pool)
for child, value in zip(sliders.children[:4], (4, 0.25, 2, 0.5)):
    child.value = value
sliders.update()
moved, simulated, limit, _ = drawn[-1]
wanted, highest = steady_shares(range(1, 5), duty=0.25, devices=2, variation=0.5)
assert list(moved) == [1, 2, 3, 4]
np.testing.assert_allclose(simulated["simulated, fair"], wanted)
np.testing.assert_allclose(limit, highest)
""",
}


@pytest.mark.timeout(1200)  # a kernel that is lost ends here: nothing is run twice
@pytest.mark.parametrize("path", FOLDER, ids=[path.stem for path in FOLDER])
def test_a_notebook_runs_from_top_to_bottom_and_its_figures_show_its_data(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(path.parents[1]))
    further = [CHECKS[path.stem]] if path.stem in CHECKS else []
    try:
        notebook = execute(path, tmp_path, parameters=SMALL.get(path.stem), further=further)
    except CellExecutionError as error:
        pytest.fail(str(error)[-3000:])
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    said = "".join(output.text for cell in code for output in cell.outputs if output.output_type == "stream")
    assert all(float(low) <= float(high) for low, high in re.findall(r"\bfrom ([\d.]+) to ([\d.]+)\b", said))
    live = [output.data[FIGURE] for cell in code for output in cell.outputs if FIGURE in output.get("data", {})]
    assert len(live) >= 2
    assert {figure["layout"]["template"]["layout"]["plot_bgcolor"] for figure in live} == {"white"}
    # Kaleido's and Jupyter's notes on standard error are no outputs of ours; a traceback would be.
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


def test_a_cell_that_hangs_is_interrupted_and_its_traceback_says_where(tmp_path):
    hangs = "import threading\nevent = threading.Event()\nevent.wait()"
    nbformat.write(new_notebook(cells=[new_code_cell(hangs)]), tmp_path / "hangs.ipynb")
    with pytest.raises(CellExecutionError, match=r"(?s)event\.wait\(\).*KeyboardInterrupt"):
        execute(tmp_path / "hangs.ipynb", tmp_path, timeout=1.0)


class Deaf:
    """A channel whose first wait misses the message that is there."""

    def __init__(self):
        self.waits = []

    async def get_msg(self, timeout):
        self.waits.append(timeout)
        if len(self.waits) == 1:
            raise Empty
        return "reply"


def test_a_reply_whose_arrival_was_missed_is_found_long_before_the_time_limit():
    channel, alone = Deaf(), Deaf()
    look(channel)
    assert asyncio.run(channel.get_msg(timeout=300.0)) == "reply"
    assert channel.waits == [1.0, 1.0]
    look(alone)
    with pytest.raises(Empty):
        asyncio.run(alone.get_msg(timeout=0.5))
    assert len(alone.waits) == 1
    assert alone.waits[0] <= 0.5


def test_a_kernel_has_time_to_answer_an_interrupt_and_its_cell_is_given_up_after_the_last(monkeypatch):
    cells, clock, interrupts = [new_code_cell("first()"), new_code_cell("second()")], [0.0], []
    client = Client(new_notebook(cells=cells), interrupt_on_timeout=True)
    client.km = SimpleNamespace(interrupt_kernel=lambda: interrupts.append(clock[0]))
    monkeypatch.setattr("notebooks.execute.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("notebooks.execute.LOOK_AGAIN", 0.0)

    def waits_in_vain(cell, seconds):
        for _ in range(int(seconds)):
            asyncio.run(client._async_handle_timeout(1, cell))
            clock[0] += 1.0

    waits_in_vain(cells[0], 2.5 * REPLY_LIMIT)
    assert interrupts == [0.0, REPLY_LIMIT, 2 * REPLY_LIMIT]
    interrupts.clear()
    clock[0] = 0.0
    with pytest.raises(CellTimeoutError, match=r"(?s)not answered 3 interrupts.*second\(\)"):
        waits_in_vain(cells[1], 9 * REPLY_LIMIT)
    assert interrupts == [0.0, REPLY_LIMIT, 2 * REPLY_LIMIT], "three of each cell"
    assert clock[0] == 3 * REPLY_LIMIT


def test_the_experiment_of_the_source_is_run_over_its_whole_grid():
    (cell,) = (
        cell for cell in nbformat.read(FOLDER[1], as_version=4).cells if "parameters" in cell.metadata.get("tags", ())
    )
    exec(cell.source, values := {})
    assert [len(values[name]) for name in "KS"] == [13, 13]
    assert [(values[name][0], values[name][-1]) for name in "KS"] == [(5, 11), (6, 12)]


@pytest.mark.parametrize("path", FOLDER, ids=[path.stem for path in FOLDER])
def test_a_notebook_is_committed_with_its_pictures_and_short_cells(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert sum("image/png" in output.get("data", {}) for cell in code for output in cell.outputs) >= 3
    does = [cell.source for cell in code if not re.search("^(class|def) ", cell.source, re.MULTILINE)]
    assert max(len(source.splitlines()) for source in does) <= 16  # what a cell defines may be as long as it is
    assert path.stat().st_size < 200_000
    assert "**What was learned.**" in notebook.cells[-1].source
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


def test_widgets_are_drawn_from_their_saved_state_for_readers_without_a_kernel():
    picture = {"output_type": "display_data", "data": {"image/png": "AAAA", "text/plain": "figure"}}
    children = [f"IPY_MODEL_{name}" for name in ("slider", "out", "html", "button", "gone")]
    states = {
        "box": {"_model_name": "VBoxModel", "children": children},
        "slider": {"_model_name": "IntSliderModel", "description": "m <relays>", "min": 1, "max": 9, "value": 4},
        "out": {"_model_name": "OutputModel", "outputs": [picture, {"output_type": "stream", "text": "said"}]},
        "html": {"_model_name": "HTMLModel", "value": "<b>0.5</b>"},
        "button": {"_model_name": "ButtonModel", "description": "Stop"},
    }
    html = draw("box", states)
    for part in (
        "m &lt;relays&gt;",
        "step=any value=4",
        "data:image/png;base64,AAAA",
        "<b>0.5</b>",
        "<button>Stop</button>",
    ):
        assert part in html
    assert draw("absent", states) == ""


def test_a_kernel_whose_port_another_process_has_taken_is_started_anew_once(tmp_path, monkeypatch):
    died = tmp_path / "died"
    begin = "import os, sys\nwith open(sys.argv[1], 'a+') as file:\n    first = file.tell() < int(sys.argv[2])\n"
    begin += "    file.write('x')\nif first:\n    sys.exit('Address already in use')\n"
    begin += "os.execv(sys.executable, [sys.executable, '-m', 'ipykernel_launcher', *sys.argv[3:]])"
    folder = tmp_path / "kernels" / "python3"
    folder.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    nbformat.write(new_notebook(cells=[new_code_cell("print(6 * 7)")]), tmp_path / "one.ipynb")

    def run(deaths):
        words = [sys.executable, "-c", begin, str(died), str(deaths), "-f", "{connection_file}"]
        kernel = {"argv": words, "display_name": "dies first", "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(kernel))
        died.unlink(missing_ok=True)
        return execute(tmp_path / "one.ipynb", tmp_path)

    (said,) = run(deaths=1).cells[0].outputs
    assert said["text"] == "42\n"
    assert died.read_text() == "xx"
    with pytest.raises(RuntimeError, match="Kernel died before replying"):
        run(deaths=2)
