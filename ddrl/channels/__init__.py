"""Shared memory inside a host: the only places where stages touch.

    segment   named memory with a header; leaves nothing behind in /dev/shm
    lane      rows, one producer -> one consumer
    area      blocks of samples, one explorer -> the trainer, which draws from them
    messages  byte strings, one process -> another (message_lane)
    mailbox   versions of a vector, one writer -> many readers in place
    counters  plain float64 stores, each process its own row -> telemetry
    board     a host's command, stages of start-up, doorbells
    blob      bytes written once

Written and read by every stage; this package imports ddrl.core and the kernel, no stage, and nothing that speaks to a
network."""

from ddrl._kernel import Doorbell
from ddrl.channels.area import SampleArea
from ddrl.channels.area_writer import AreaWriter
from ddrl.channels.board import Blob, Board, Command
from ddrl.channels.counters import CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet
from ddrl.channels.mailbox import Mailbox, MailboxReader, MailboxSlot, Pin, checksum
from ddrl.channels.message_lane import MessageLane
from ddrl.channels.segment import Segment, segment_name, sweep_dead, unlink_run
from ddrl.channels.step_writer import StepWriter

__all__ = [
    "AreaWriter",
    "Blob",
    "Board",
    "Command",
    "CounterRow",
    "Counters",
    "Doorbell",
    "Lane",
    "LaneSet",
    "Mailbox",
    "MailboxReader",
    "MailboxSlot",
    "MessageLane",
    "Pin",
    "SampleArea",
    "Segment",
    "StepWriter",
    "checksum",
    "segment_name",
    "sweep_dead",
    "unlink_run",
]
