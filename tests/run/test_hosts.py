"""The keeper of a host as its parent sees it: one that is killed is started again, but not for ever."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ddrl.core.errors import JobFailed
from ddrl.run import hosts
from ddrl.run.hosts import HostKeeper
from ddrl.run.topology import KeepHost, Made


def test_only_deaths_in_a_row_count_against_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that worked for long enough before it was killed begins a new row."""
    program = tmp_path / "keeper"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    keeper = HostKeeper("absent", 1, silence_limit=60.0)
    try:
        keeper.send(KeepHost(b"", []))
        for work, started in ((1e9, True), (1e9, True), (0.0, True), (1e9, True), (1e9, False)):
            with pytest.raises(JobFailed, match=r"the keeper of host 1 .* was killed by SIGKILL"):
                keeper.receive(Made)
            monkeypatch.setattr(hosts, "MIN_WORK", work)  # at 0 s the keeper that died counts as one that had worked
            assert keeper.start_again(limit=2) == started
    finally:
        keeper.end()
