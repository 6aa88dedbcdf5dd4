"""The trainer's process: `python -m ddrl.run.trainer [spare TRAINER] RUN_ID LINK ERRORS PARENT`, started by the keeper.

It imports torch while the keeper prepares the run, then attaches the host's channels and drives the task to its end. A
spare does the same beside the process TRAINER, and waits for its death; until then the channels are not its own.
LINK: descriptor of its end of the link to the keeper; ERRORS: where it writes its stacks when it is asked; PARENT: the
keeper's process id. A keeper that ends is an interrupt: the trainer saves, removes the channels, and ends; before it
has anything to save it ends at once."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddrl.channels.segment import unlink_run
from ddrl.core.errors import DdrlError, JobFailed
from ddrl.core.forks import die_with, end_process, is_orphan, keep_streams
from ddrl.run.process import (
    SAVE_SECONDS,
    Interrupts,
    fix_order_of_sums,
    flush_denormals,
    load_torch,
    name_process,
    offered_to_oom_killer,
    set_torch_threads,
    signals_handled,
    spare_collector,
)

if TYPE_CHECKING:
    from ddrl.run.checkpoint import Records, TaskRecords
    from ddrl.run.task import Task
    from ddrl.run.topology import JobMessage, Link

WAIT = 0.05  # [s] longest sleep of an idle task; a bell ends it earlier
IMPORTED = ("ddrl.learner.checks", "onnx", "onnxruntime", "ddrl.run.members", "ddrl.run.task")  # beside torch


def drive(
    task: Task, interrupts: Interrupts, save_elsewhere: Callable[[Task], bool] = lambda task: False
) -> dict[str, Any]:
    """Turn by turn to the end; the summary. After an error the task is abandoned and the error raised.

    `save_elsewhere` is asked after SIGTERM, between two draws: whether it has saved already."""
    from ddrl.run.members import Evaluator
    from ddrl.run.task import Outcome, Reason

    evaluators: list[Evaluator] = []

    def last_evaluator() -> Evaluator:
        evaluators.append(Evaluator(task.config, task.model, task.states))
        return evaluators[-1]

    try:
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
        return task.finish(
            last_evaluator,
            stop=lambda: interrupts.requested,
            settle=not interrupts.terminated,
            saved=saved,
        )
    except BaseException as error:
        task.abandon(error)
        raise
    finally:
        for evaluator in evaluators:
            evaluator.close()


def await_records(link: Link, leave: Callable[[], None]) -> Sequence[JobMessage]:
    """Import what training needs; what the keeper has sent, once there are channels or a trainer has died. There is
    nothing to save yet: SIGTERM, also the kernel's at the end of the keeper, ends this process at once."""

    def end(number: int, frame: FrameType | None) -> None:
        leave()
        os._exit(130)

    with signals_handled(end, [signal.SIGTERM]):
        load_torch()
        for name in IMPORTED:  # while ranks still start
            importlib.import_module(name)
        return link.receive(wait=True)


def _leave(run_id: str, parent: int, *, trainer: int | None = None) -> None:
    """Remove what a keeper that has died had made: nobody else does. trainer: of a spare the pidfd of the trainer
    beside it: it still saves, and may be killed before it removes anything, so its end is awaited, at most as long as
    saving may take."""
    if is_orphan(parent) and (trainer is None or select.select([trainer], [], [], SAVE_SECONDS)[0]):
        unlink_run(run_id)


def train(run_id: str, link: Link, messages: Sequence[JobMessage], interrupts: Interrupts) -> dict[str, Any]:
    """Attach the run's channels and train to the end; the summary. messages: what the keeper has sent."""
    from ddrl.run.checkpoint import Records
    from ddrl.run.task import Duty, assemble
    from ddrl.run.topology import HostChannels

    if not messages:
        raise JobFailed("")  # the keeper has ended
    records = messages[0]
    assert isinstance(records, Records)
    channels = HostChannels.attach(run_id, 0, 0.0)
    name_process(f"ddrl {channels.topology.trainer.rank} trainer")
    channels.attach_drained()
    lock = link.take_descriptor() if records.has_lock else None
    collectors = link.take_descriptor() if records.has_collectors else None
    set_torch_threads(channels.topology.config.learner.threads)
    task = assemble(channels.topology, channels, open_records(records, lock))
    _record_notes(task, messages[1:])
    task.duties.append(Duty(0.0, lambda now: _record_notes(task, link.receive())))
    try:
        with nullcontext() if collectors is None else closing(start_rounds(task, collectors)):
            return drive(task, interrupts)
    finally:
        channels.close()


def open_records(records: Records, lock: int | None) -> TaskRecords:
    """The run's directory, and the checkpoint that the keeper has named, or in place of a trainer that has died the
    newest one; `lock`: descriptor of the run's lock."""
    from ddrl.run.checkpoint import Checkpoint, TaskRecords, take_over
    from ddrl.run.directory import RunDirectory, RunLock

    directory = RunDirectory(
        Path(records.directory), None if lock is None else RunLock.adopt(lock, Path(records.directory))
    )
    if records.same_job:
        return take_over(directory)
    resume = None if records.resume is None else Checkpoint(Path(records.resume[0]), records.resume[1])
    return TaskRecords(directory, resume)


def _record_notes(task: Task, messages: Sequence[JobMessage]) -> None:
    from ddrl.run.topology import Note

    for message in messages:
        if isinstance(message, Note):
            task.recorder.record_event("alarm", message.text, rank=message.rank)


def start_rounds(task: Task, collectors: int) -> Any:
    """Let the task go in rounds: its collectors, which the caller closes. `collectors`: descriptor of the socket that
    orders those of this host."""
    from ddrl.core.plugins import slice_module

    return slice_module("pool.rounds", "pool.collectors").go_in_rounds(task, collectors)


def main() -> int:
    """Run the trainer that the command line names; the process's exit status."""
    from ddrl.run.keeper import report_stacks

    run_id, descriptor, errors, parent = sys.argv[-4:]
    leave = partial(_leave, run_id, int(parent))
    is_spare = sys.argv[1] == "spare"
    if is_spare:
        name_process("ddrl spare")
        with suppress(ProcessLookupError):  # it has died already, and this process takes its place
            leave = partial(leave, trainer=os.pidfd_open(int(sys.argv[2])))
    report_stacks(int(errors))
    try:
        with Interrupts() as interrupts:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, interrupts.signals)
            die_with(int(parent), signal.SIGTERM)

            from ddrl.run.topology import JOB, Link, Result, describe

            link = Link.of(int(descriptor), JOB)
            try:
                try:
                    with offered_to_oom_killer() if is_spare else nullcontext():
                        messages = await_records(link, leave)
                    if messages:  # else the job has ended without a need of a spare
                        leave = partial(_leave, run_id, int(parent))
                    result = Result(train(run_id, link, messages, interrupts))
                except KeyboardInterrupt:
                    raise
                except DdrlError as error:
                    result = Result(None, str(error))
                except BaseException as error:
                    result = Result(None, describe(error, "the trainer"))
                signal.pthread_sigmask(signal.SIG_BLOCK, interrupts.signals)  # it has ended: nothing to interrupt
            except KeyboardInterrupt:
                return 130
            link.send(result)
    finally:
        leave()
    return 0 if result.document is not None else 1


if __name__ == "__main__":
    keep_streams()
    end_process(main())
