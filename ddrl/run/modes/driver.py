"""Drives one task to its end in a process of its own: the loop of the local and the MPI mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddrl.run.members import Evaluator
from ddrl.run.process import Interrupts, fix_order_of_sums, flush_denormals, set_torch_threads, spare_collector
from ddrl.run.task import Outcome, Reason, Task

WAIT = 0.05  # [s] longest sleep of an idle task; a bell ends it earlier


def drive(
    task: Task, interrupts: Interrupts, save_elsewhere: Callable[[Task], bool] = lambda task: False
) -> dict[str, Any]:
    """Turn by turn to the end; the summary. After an error the task is abandoned and the error raised.

    `save_elsewhere` is asked after SIGTERM, between two draws: whether it has saved already.
    """
    try:
        set_torch_threads(task.config.learner.threads)
        spare_collector()
        flush_denormals()
        if task.training.rounds is not None:  # what else learns here depends on when experience arrives
            fix_order_of_sums()
        task.start()
        while (outcome := task.turn()) is not Outcome.DONE:
            if interrupts.requested:
                task.end(Reason.INTERRUPTED)
            elif outcome is Outcome.IDLE:
                task.wait(WAIT)
        saved = interrupts.terminated and save_elsewhere(task)
        return task.finish(lambda: Evaluator(task.config, task.model), settle=not saved, saved=saved)
    except BaseException as error:
        task.abandon(error)
        raise
