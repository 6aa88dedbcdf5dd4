from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

from ddrl.channels import segment_name, unlink_run


@pytest.fixture
def name() -> Iterator[Callable[..., str]]:
    """Names of segments of one run that leaves nothing behind: name("lane", 0)."""
    run_id = f"test{uuid.uuid4().hex[:12]}"
    yield lambda kind="lane", index=0: segment_name(run_id, 0, kind, index)
    unlink_run(run_id)


@pytest.fixture
def process() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start Python processes that run a piece of code; whoever still lives at the end is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *(str(argument) for argument in arguments)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
