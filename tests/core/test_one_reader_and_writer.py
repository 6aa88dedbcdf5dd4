"""Files of run directories are opened by `ddrl.core.files` alone: found in the syntax tree of the library."""

from __future__ import annotations

import ast
import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddrl.acting import policy_file
from ddrl.admix.mixer import policy_of
from ddrl.balance.ddqn import ValueNetwork
from ddrl.core import files
from ddrl.core.errors import CheckpointError, RunDirError
from ddrl.core.rows import ParameterLayout
from ddrl.learner import export
from ddrl.run import cli
from tests.admix.material import small_mixer
from tests.sources import ROOT

OPENS = {"open", "fdopen", "read_text", "read_bytes", "write_text", "write_bytes", "symlink_to", "link", "symlink"}
LIBRARIES = {"np.load", "np.save", "np.savez", "sqlite3.connect", "tempfile.mkstemp", "safe_open", "shutil.copy"}
LIBRARIES |= {"safetensors.numpy.load", "safetensors.numpy.load_file", "safetensors.torch.load"}
# Where else files are opened, none of them of a run directory, or by a library with a checked name.
ELSEWHERE = {
    "core/files.py": "the reader and the writer",
    "core/forks.py": "/proc, /dev/null",
    "core/plugins.py": "the library's own files, tasks that ship",
    "run/cli.py": "tasks that ship",
    "dashboard/__main__.py": "its own settings",
    "cells.py": "the script that the user runs; arrays through `new_file`",
    "notebook.py": "the log of a run that this process starts, beside its directory",
    "channels/segment.py": "/dev/shm, /proc",
    "pool/leases.py": "/dev/shm",
    "pool/devices.py": "/sys/fs/cgroup, /proc",
    "pool/collectors.py": "/proc",
    "run/hosts.py": "/proc, the terminal",
    "run/keeper.py": "/proc, /dev/null",
    "run/process.py": "/proc",
    "run/slot.py": "/proc",
    "run/preparation.py": "the file that a launcher names; /proc, /sys/fs/cgroup",
    "telemetry/recorder.py": "/proc",
    "testing/chaos.py": "/proc, /sys/fs/cgroup, runs of its own",
    "distribution/requests.py": "/proc",
    "distribution/links.py": "/proc",
    "run/directory.py": "RUN/lock, which is locked where it is",
    "telemetry/store.py": "the database, after its names were checked",
    "telemetry/reading.py": "the database, to be read alone",
    "replay/sources.py": "arrays through `opened` and `new_file`",
    "replay/trajectories.py": "arrays through `opened` and `new_file`",
}


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            opens = last in OPENS and not (last == "open" and _is_another_open(node))
            if opens or name in LIBRARIES:
                yield node.lineno, name


def _is_another_open(node: ast.Call) -> bool:
    """Methods called `open` of the library's own objects take no mode of a file."""
    named = ast.unparse(node.func)
    if named in ("open", "os.open", "io.open"):
        return False
    modes = [
        argument for argument in node.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return not any(set(mode.value) <= set("rwxab+t") for mode in modes) and named.partition(".")[0] != "Path"


def test_no_other_module_opens_files() -> None:
    found = {
        f"{path.relative_to(ROOT / 'ddrl')}:{line} {name}"
        for path in (ROOT / "ddrl").rglob("*.py")
        if str(path.relative_to(ROOT / "ddrl")) not in ELSEWHERE
        for line, name in calls(ast.parse(path.read_text()))
    }
    assert not found, "read and write these by ddrl.core.files"


def test_the_list_of_other_modules_is_true() -> None:
    for name in ELSEWHERE:
        assert list(calls(ast.parse((ROOT / "ddrl" / name).read_text()))), f"{name} opens nothing any more"


@pytest.fixture(params=["fifo", "device", "folder", "socket"])
def no_file(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "file"
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "device":
        return Path("/dev/zero")
    elif request.param == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(tmp_path)
        with socket.socket(socket.AF_UNIX) as made:
            made.bind("file")
    return path


def test_what_is_no_file_is_neither_read_nor_written(no_file: Path) -> None:
    kind = no_file.lstat().st_mode
    for use in (
        lambda: files.read_regular(no_file, 100),
        lambda: files.digest_of_file(no_file),
        lambda: files.write_atomically(no_file, b"x"),
        lambda: files.open_to_append(no_file),
    ):
        with pytest.raises(OSError, match=r"not a file|No such device|directory"):
            use()
    assert no_file.lstat().st_mode == kind


def test_nothing_is_written_through_a_link_and_no_secret_changes_its_mode(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("mine")
    private.chmod(0o644)
    link = tmp_path / "server.secret"
    link.symlink_to(private)
    with pytest.raises(OSError, match="symbolic links"):
        files.open_to_append(link)
    files.write_atomically(link, b"new", secret=True)
    assert not link.is_symlink()
    assert link.stat().st_mode & 0o777 == 0o600
    assert private.read_text() == "mine"
    assert private.stat().st_mode & 0o777 == 0o644
    (tmp_path / "keys").symlink_to(tmp_path)
    with pytest.raises(RunDirError, match="keys is not a folder"):
        files.refuse_links([tmp_path / "keys"])


def test_a_file_of_two_names_is_copied_before_it_is_written(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_text("mine\n")
    private.chmod(0o640)
    log = tmp_path / "log"
    log.hardlink_to(private)
    with files.open_to_append(log) as file:
        file.write(b"more\n")
    assert private.read_text() == "mine\n"
    assert log.read_text() == "mine\nmore\n"
    assert log.stat().st_mode == private.stat().st_mode
    assert {path.name for path in tmp_path.iterdir()} == {"private", "log"}
    kept = log.stat().st_ino
    files.unshare(log)
    assert log.stat().st_ino == kept, "a file of one name stays"
    files.unshare(tmp_path / "none")
    with (tmp_path / "sparse").open("wb") as sparse:
        sparse.truncate(1 << 40)
    (tmp_path / "log").unlink()
    log.hardlink_to(tmp_path / "sparse")
    with pytest.raises(OSError, match="far longer than what it holds"):  # a copy would fill the disk
        files.unshare(log)


def test_modes_are_the_umasks(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        files.write_atomically(tmp_path / "a", b"")
        files.open_to_append(tmp_path / "b").close()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_what_is_longer_than_its_kind_may_be_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(OSError, match="longer than"):
        files.read_regular(tmp_path / "sparse", files.MAX_DOCUMENT)


def tensors_of(count: int, dtype: str = "F32") -> bytes:
    """A safetensors file of empty tensors."""
    entry = {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({str(number): entry for number in range(count)}).encode()
    return len(header).to_bytes(8, "little") + header


READERS_OF_TENSORS = {
    "a learner's state": lambda path: export.read_state(path, algorithm="dqn"),
    "a policy": lambda path: policy_file.vector_of(path.read_bytes(), ParameterLayout((), 0), str(path), "policy.json"),
    "parameters that a server is sent": lambda path: policy_of(path.read_bytes(), small_mixer().policy),
    "a sizer's network": ValueNetwork.load,
}


@pytest.mark.parametrize("reader", READERS_OF_TENSORS)
def test_more_names_of_tensors_than_any_network_has_are_refused_undecoded(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(tensors_of(20_000))
    with pytest.raises(CheckpointError, match="more than 1 MiB"):
        READERS_OF_TENSORS[reader](path)


@pytest.mark.parametrize("reader", READERS_OF_TENSORS)
def test_tensors_of_types_that_numpy_lacks_are_refused(reader: str, tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(tensors_of(1, "F8_E4M3"))
    with pytest.raises(CheckpointError, match=r"F8_E4M3|float8"):
        READERS_OF_TENSORS[reader](path)


def test_where_a_user_may_not_look_the_look_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written there, or read, afterwards says so in its own words."""

    def refuse(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    shipped = cli.tasks()
    monkeypatch.setattr(cli, "tasks", lambda: shipped)
    for name in ("exists", "is_file", "is_dir", "is_symlink"):
        monkeypatch.setattr(Path, name, refuse)
    files.refuse_links([Path("keys/clients")])
    files.refuse_odd_files([Path("keys/client.secret")])
    assert cli._task_path("cartpole").name == "cartpole.toml"
