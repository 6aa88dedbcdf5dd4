"""On a GPU, what is promised to be reproducible asks torch for kernels that add in one order, before anything else."""

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddrl.run import serial
from ddrl.run import trainer as driver
from ddrl.run.process import fix_order_of_sums

NAME = "CUBLAS_WORKSPACE_CONFIG"


class AskedFor(Exception):
    """Ends what is started, right there."""


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(NAME, "")
    monkeypatch.delenv(NAME)
    yield
    torch.set_deterministic_debug_mode("default")
    torch.utils.deterministic.fill_uninitialized_memory = True


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("there", [True, False])
def test_torch_is_asked_only_where_there_is_a_gpu(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    fix_order_of_sums()
    assert torch.are_deterministic_algorithms_enabled() == there
    assert torch.is_deterministic_algorithms_warn_only_enabled() == there
    assert torch.utils.deterministic.fill_uninitialized_memory != there  # it costs time, and nothing reads such memory
    assert (os.environ.get(NAME) == ":4096:8") == there


def test_serial_runs_and_rounds_ask_before_they_begin_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask() -> None:
        raise AskedFor

    for module in (serial, driver):
        monkeypatch.setattr(module, "fix_order_of_sums", ask)
        monkeypatch.setattr(module, "spare_collector", lambda: None)
    config: Any = SimpleNamespace(learner=SimpleNamespace(threads=torch.get_num_threads()))
    with pytest.raises(AskedFor):
        serial.run_serial(SimpleNamespace(config=config))  # type: ignore[arg-type]

    class Started(Exception):
        pass

    def start() -> None:
        raise Started

    for rounds, ends in ((object(), AskedFor), (None, Started)):
        training = SimpleNamespace(rounds=rounds)
        task: Any = SimpleNamespace(config=config, training=training, start=start, abandon=lambda error: None)
        with pytest.raises(ends):
            driver.drive(task, interrupts=None)  # type: ignore[arg-type]
