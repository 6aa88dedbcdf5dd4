"""Every file of a run directory and of a saved policy, as something that it should not be: no reader executes, hangs,
changes what the command did not name, or ends in a traceback."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx.numpy_helper import from_array

from ddrl import evaluate, export
from ddrl.acting.policy_file import SavedPolicy, load_policy, load_trusted_policy, save_policy
from ddrl.core.errors import DdrlError
from ddrl.core.files import last_lines
from ddrl.notebook import compare, panel_html
from ddrl.run.checkpoint import _checksum
from ddrl.run.cli import parse
from ddrl.run.preparation import Preparation
from ddrl.run.serial import SerialRun
from ddrl.run.task import Reason
from ddrl.telemetry import Run
from ddrl.telemetry import summary as runs
from ddrl.telemetry.directory import find_film, read_live_file
from ddrl.telemetry.summary import describe, list_facts
from tests.run.test_resume import go_on, start, stop

MAX_SECONDS = 120.0  # of one command: what hangs takes longer; a resume took ten where others had the cores
MORE_MEMORY = 400 << 10  # [KiB]
DEEP = b"[" * 200_000
PRIVATE = "private words\n"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run that holds every kind of file."""
    folder = tmp_path_factory.mktemp("hostile") / "run"
    run = start(folder)
    go_on(run, 1100)
    stop(run)
    for name in ("output", "cells", "versions", "tensorboard"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "output" / "rank-0.txt").write_text("what an environment prints\n")
    (folder / "agent.gif").write_bytes(b"GIF89a")
    (folder / "live.json").write_text(json.dumps({"pid": 1, "host": "elsewhere", "stream": "tcp://127.0.0.1:1"}))
    (folder / "days.json").write_text("{}")
    (folder / "keys").chmod(0o700)
    return folder


# -- what a file may be in place of itself -----------------------------------------------------------------------------


def fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def link_to_private(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "private")


def link_to_folder(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "folder")


def link_to_itself(path: Path, outside: Path) -> None:
    path.symlink_to(path.name)


def link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "made")


def link_to_zeros(path: Path, outside: Path) -> None:
    path.symlink_to("/dev/zero")


def folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "inside").write_text(PRIVATE)


def huge(path: Path, outside: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def holding(data: bytes) -> Callable[[Path, Path], None]:
    def make(path: Path, outside: Path) -> None:
        path.write_bytes(data)

    return make


SHAPES: dict[str, Callable[[Path, Path], None]] = {
    "fifo": fifo,
    "link to a private file": link_to_private,
    "link to a folder": link_to_folder,
    "link to itself": link_to_itself,
    "link to nothing": link_to_nothing,
    "link to a device": link_to_zeros,
    "folder": folder,
    "huge": huge,
    "empty": holding(b""),
    "deep": holding(DEEP),
    "a list": holding(b"[1]"),
    "a number": holding(b"1e999"),
    "a long number": holding(b"9" * 5000),
    "no text": holding(b"\xff\xfe\x00"),
    "a surrogate": holding(b'{"\\ud800": "\\ud800"}'),
}


def values_of_another_type(document: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each place of a JSON document, with values that do not belong there."""
    if place:
        for value in (None, "../../outside/private", -1, 1e300, [], {}, True):
            if type(value) is not type(document):
                yield place, value
        if isinstance(document, (int, float)):
            yield from ((place, value) for value in (-1e300, 1e300, 2**70, 0))
        if isinstance(document, str):
            yield from ((place, value) for value in ("../../outside/private", "", "\x00", "x" * 100_000))
    if isinstance(document, dict):
        for name, value in document.items():
            yield from values_of_another_type(value, (*place, name))
    elif isinstance(document, list) and document:
        yield from values_of_another_type(document[0], (*place, 0))


def with_value(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    changed = json.loads(json.dumps(document))
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return changed


# -- what reads a run directory ----------------------------------------------------------------------------------------


def read_telemetry(run: Path) -> None:
    with Run(run) as opened:
        _ = opened.status, opened.config, opened.summary
        opened.series(points=10)
        opened.events()
        opened.evaluations()
        opened.processes()


def resume_it(run: Path) -> None:
    preparation = Preparation(parse(["--serial", "--resume", str(run)]), f"hostile{os.getpid()}")
    try:
        resumed = SerialRun(preparation)
    except BaseException:
        preparation.directory.release()
        raise
    resumed.task.end(Reason.INTERRUPTED)
    resumed.finish()


def output(run: Path) -> None:
    """What the notebook's panel shows of the log beside a run that has failed."""
    with contextlib.suppress(OSError):
        last_lines(run.with_suffix(".log"), 8)


READERS: dict[str, Callable[[Path], object]] = {
    "telemetry": read_telemetry,
    "facts": describe,
    "list": lambda run: list_facts(run.parent),
    "runs": lambda run: runs.main([str(run)]),
    "runs --json": lambda run: runs.main([str(run), "--json"]),
    "panel": lambda run: panel_html(Run(run)),
    "output": output,
    "compare": lambda run: str(compare([run])),
    "live": read_live_file,
    "film": find_film,
    "policy": load_trusted_policy,
    "evaluate": lambda run: evaluate.main([str(run), "--episodes", "1"]),
    "export": lambda run: export.main([str(run), "--onnx", str(run.parent / "exported.onnx")]),
}
WRITERS: dict[str, Callable[[Path], object]] = {"resume": resume_it}
OF_POLICIES = ("policy", "evaluate", "export")


class Hang(BaseException):
    """A command has taken longer than it may."""


@contextlib.contextmanager
def deadline(seconds: float) -> Generator[None]:
    def raise_hang(number: int, frame: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGUSR1, raise_hang)
    timer = threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def state_of(place: Path) -> dict[str, Any]:
    """What is below a folder: kind, mode, and content."""
    found: dict[str, Any] = {}
    for path in sorted(place.rglob("*")):
        status = path.lstat()
        content: Any = os.readlink(path) if path.is_symlink() else ""
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes() if status.st_size < 1 << 30 else status.st_size
        found[str(path.relative_to(place))] = (status.st_mode, content)
    return found


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what is the user's own beside the run directory that he was given."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "outside" / "folder").mkdir(parents=True)
    (tmp_path / "outside" / "private").write_text(PRIVATE)
    (tmp_path / "outside" / "folder" / "private").write_text(PRIVATE)
    (tmp_path / "runs").mkdir()
    return tmp_path


def attempt(run: Path, what: str, use: Callable[[Path], object]) -> None:
    """Let a command meet the run; what it says is one line of bounded length, and quotes nothing private."""
    said = io.StringIO()
    words = ""
    try:
        with deadline(MAX_SECONDS), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            use(run)
    except DdrlError as error:
        words = str(error)
        assert "\n" not in words, (what, words)
        assert len(words) < 2000, (what, words)
    except Hang:
        pytest.fail(f"{what} takes longer than {MAX_SECONDS:g} s")
    except Exception as error:
        raise AssertionError(f"{what} ended in {type(error).__name__}: {str(error)[:300]}") from error
    assert "Traceback" not in said.getvalue(), (what, said.getvalue())
    assert PRIVATE.strip() not in words + said.getvalue(), what


def meet(place: Path, run: Path, readers: tuple[str, ...] = tuple(READERS), *, resume: bool = True) -> None:
    """Let every command meet the run, readers first: they change nothing; nobody changes what is outside of it."""
    outside = state_of(place / "outside")
    before = state_of(run)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for what in readers:
        attempt(run, what, READERS[what])
    assert state_of(run) == before, "a reader has changed the run"
    if resume:
        for what, use in WRITERS.items():
            attempt(run, what, use)
    assert state_of(place / "outside") == outside
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MORE_MEMORY


def files_of(run: Path) -> list[str]:
    """Every file and folder of a run, checkpoints by the newest."""
    newest = max((run / "checkpoints").iterdir()).name
    names = [str(path.relative_to(run)) for path in sorted(run.rglob("*"))]
    return [name for name in names if not name.startswith("checkpoints/") or newest in name]


def replace(path: Path, shape: str, outside: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    SHAPES[shape](path, outside)


@pytest.mark.parametrize("shape", ["any", *(pytest.param(name, marks=pytest.mark.long) for name in SHAPES)])
def test_no_file_of_a_run_directory_is_more_than_it_should_be(shape: str, template: Path, place: Path) -> None:
    for number, name in enumerate(files_of(template)):
        run = place / "runs" / "gift"
        shutil.copytree(template, run)
        given = list(SHAPES)[number % len(SHAPES)] if shape == "any" else shape
        replace(run / name, given, place / "outside")
        try:
            meet(place, run)
        except BaseException as error:
            error.add_note(f"{name} as {given}")
            raise
        shutil.rmtree(run)


def test_no_file_of_a_run_directory_is_written_through_a_hard_link(template: Path, place: Path) -> None:
    run = place / "runs" / "gift"
    shutil.copytree(template, run)
    (run / "lock").touch(0o644)
    (run / "lock").chmod(0o644)
    for number, path in enumerate(path for path in sorted(run.rglob("*")) if path.is_file()):
        (place / "outside" / str(number)).hardlink_to(path)
    meet(place, run)
    for path in run.rglob("*"):  # whole as it is, it was gone on with
        assert ".aside-" not in path.name


def documents_of(run: Path) -> dict[str, tuple[str, ...]]:
    """The JSON files of a run, and who reads each."""
    newest = max((run / "checkpoints").iterdir()).name
    status = ("telemetry", "facts", "list", "runs", "panel", "compare", "live")
    return {
        "policy.json": OF_POLICIES,
        "summary.json": (*status, "runs --json"),
        "status.json": status,
        "live.json": status,
        "run.json": ("telemetry",),
        f"checkpoints/{newest}/state.json": (),
    }


def sealed(name: str, document: Any) -> bytes:
    """The document as its giver would write it: with checksums that are right."""
    if name.endswith("state.json"):
        kept = {key: value for key, value in document.items() if key not in ("format", "checksum")}
        document = {**document, "checksum": _checksum(kept)}
    elif name == "policy.json":
        document = {**document, "checksum": ""}
    return json.dumps(document).encode()


@pytest.mark.parametrize("every", [41, pytest.param(1, marks=pytest.mark.long)])
def test_no_value_of_a_document_is_more_than_it_should_be(every: int, template: Path, place: Path) -> None:
    run = place / "runs" / "gift"
    for name, readers in documents_of(template).items():
        shutil.copytree(template, run)
        document = json.loads((run / name).read_text())
        for where, value in list(values_of_another_type(document))[::every]:
            (run / name).write_bytes(sealed(name, with_value(document, where, value)))
            try:
                meet(place, run, readers, resume=name.endswith(("run.json", "state.json")))
            except BaseException as error:
                error.add_note(f"{name}: {where} = {value!r:.100}")
                raise
        shutil.rmtree(run)


# -- graphs that are whole and wrong -----------------------------------------------------------------------------------


def graph_of(saved: SavedPolicy, *nodes: Any, **constants: Any) -> bytes:
    """A graph from `observation` to `q`, as the policy's manifest says."""
    observed = saved.model.spec.observation.shape
    actions = saved.model.outputs["q"].shape
    made = helper.make_graph(
        list(nodes),
        "hostile",
        [helper.make_tensor_value_info("observation", TensorProto.FLOAT, ["n", *observed])],
        [helper.make_tensor_value_info("q", TensorProto.FLOAT, ["n", *actions])],
        [from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


def endless(saved: SavedPolicy) -> bytes:
    body = helper.make_graph(
        [helper.make_node("Identity", ["on"], ["still"]), helper.make_node("Add", ["x", "x"], ["y"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, None),
        ],
    )
    loop = helper.make_node("Loop", ["count", "go", "observation"], ["all"], body=body)
    part = helper.make_node("Slice", ["all", "from", "to", "axis"], ["q"])
    many = np.int64(2**62)
    return graph_of(saved, loop, part, count=many, go=np.True_, to=[2], axis=[1], **{"from": [0]})


def enormous(saved: SavedPolicy) -> bytes:
    made = helper.make_node("ConstantOfShape", ["shape"], ["q"])
    return graph_of(saved, made, shape=np.array([1, 2**40], np.int64))


def of_another_shape(saved: SavedPolicy) -> bytes:
    return graph_of(saved, helper.make_node("Identity", ["observation"], ["q"]))


def not_numbers(saved: SavedPolicy) -> bytes:
    cut = helper.make_node("Slice", ["observation", "from", "to", "axis"], ["cut"])
    made = helper.make_node("Mul", ["cut", "nan"], ["q"])
    return graph_of(saved, cut, made, to=[2], axis=[1], nan=np.float32(np.nan), **{"from": [0]})


def from_a_file(saved: SavedPolicy) -> bytes:
    graph = onnx.load_from_string(not_numbers(saved))
    [tensor] = [one for one in graph.graph.initializer if one.name == "nan"]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../../outside/private"), ("offset", "0"), ("length", "4")):
        entry = tensor.external_data.add()
        entry.key = key
        entry.value = value
    return graph.SerializeToString()


GRAPHS: dict[str, Callable[[SavedPolicy], bytes]] = {
    "empty": lambda saved: b"",
    "no graph": lambda saved: b"\x08" * 1000,
    "cut": lambda saved: saved.model.onnx[:-100],
    "endless": endless,
    "enormous": enormous,
    "of another shape": of_another_shape,
    "not numbers": not_numbers,
    "from a file": from_a_file,
}


@pytest.mark.parametrize("graph", GRAPHS)
def test_no_graph_is_computed_without_end(
    graph: str, template: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place / "runs" / "gift"
    shutil.copytree(template, run)
    saved = load_policy(run)
    changed = msgspec.structs.replace(saved.model, onnx=GRAPHS[graph](saved))
    save_policy(run, changed, saved.vector, env=saved.env, evaluation=saved.evaluation, run_id=saved.run_id)
    monkeypatch.chdir(run)
    meet(place, run, OF_POLICIES, resume=False)


@pytest.mark.parametrize("shape", ["fifo", "link to a device", "huge", "folder"])
def test_a_log_beside_the_run_is_no_more_than_a_file(shape: str, template: Path, place: Path) -> None:
    run = place / "runs" / "gift"
    shutil.copytree(template, run)
    SHAPES[shape](run.with_suffix(".log"), place / "outside")
    meet(place, run, ("output", "panel"), resume=False)
