import os
from pathlib import Path
from typing import Any

import pytest

from ddrl.core.errors import ConfigError, RunDirError
from ddrl.core.files import MAX_STATUS, decode, last_lines, read_regular, replacement, write_atomically
from ddrl.core.settings import config_from_toml
from ddrl.telemetry.directory import read_settings


@pytest.mark.parametrize("data", [b"[" * 100 + b"]" * 100, b'{"a":[],"b":' * 100 + b"[]" + b"}" * 100])
def test_values_in_one_another_beyond_a_limit_are_damage(data):
    """Who walks them calls itself, and would fail at some depth."""
    with pytest.raises(RunDirError, match="64 deep"):
        decode(data, Any, RunDirError, "it")
    assert decode(b"[" * 60 + b"]" * 60, Any, RunDirError, "it")
    assert len(decode(b"[" + b"[]," * 1000 + b"[]]", Any, RunDirError, "it")) == 1001


def test_so_are_tables_of_settings_by_every_reader(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[env.kwargs" + ".a" * 2000 + "]\nx = 1\n")
    with pytest.raises(ConfigError, match="64 deep"):
        config_from_toml(file.read_text(), "it")
    with pytest.raises(RunDirError, match="64 deep"):
        read_settings(file)


@pytest.mark.parametrize(("most", "words"), [(3 << 20, "longer than 3 MiB"), (1 << 19, r"longer than 0\.5 MiB")])
def test_a_file_may_be_as_long_as_its_limit_and_a_longer_one_is_refused_with_the_limit_in_mib(tmp_path, most, words):
    path = tmp_path / "a"
    path.write_bytes(b"x" * most)
    assert len(read_regular(path, most)) == most
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(OSError, match=words):
        read_regular(path, most)


def test_a_file_is_replaced_whole_with_the_permissions_asked_for(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    write_atomically(path, b"new", secret=True)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_while_the_replacement_is_written_leaves_the_old_file_alone(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def write_half() -> None:
        with replacement(path) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"old")]


def test_an_interrupt_at_the_end_of_a_write_stays_an_interrupt(tmp_path, monkeypatch):
    def replace_and_interrupt(self, target):
        os.replace(self, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", replace_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "file", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_last_lines_of_a_log_are_those_at_its_end_however_long_it_is(tmp_path):
    log = tmp_path / "log"
    log.write_text("".join(f"line {number}\n" for number in range(5)))
    assert last_lines(log, 2) == ["line 3", "line 4"]
    assert last_lines(log, 9) == [f"line {number}" for number in range(5)]
    with log.open("a") as file:
        file.write("x" * MAX_STATUS + "\nthe end\n")
    assert last_lines(log, 1) == ["the end"]
    assert sum(map(len, last_lines(log, 9))) < MAX_STATUS
