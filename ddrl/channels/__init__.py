"""Shared memory inside a host: the only places where stages touch.

    segment   named memory with a header; leaves nothing behind in /dev/shm
    lane      rows, one producer -> one consumer; messages over the same (MessageLane)
    wire      messages as bytes; a socket that carries them (SocketEnd)
    area      blocks of samples, one explorer -> the trainer, which draws from them
    mailbox   versions of a vector, one writer -> many readers in place
    board     a host's command, stages of start-up, doorbells; counters, each process its own row -> telemetry;
              blobs, bytes written once

Written and read by every stage; this package imports ddrl.core and the kernel, no stage, and nothing that speaks to a
network."""

from ddrl._kernel import Doorbell
from ddrl.channels.area import AreaWriter, SampleArea
from ddrl.channels.board import Blob, Board, Command, CounterRow, Counters
from ddrl.channels.lane import Lane, LaneSet, MessageLane, StepWriter
from ddrl.channels.mailbox import Mailbox, MailboxReader, MailboxSlot, Pin, checksum
from ddrl.channels.segment import Segment, segment_name, sweep_dead, unlink_run
from ddrl.channels.wire import SocketEnd, Wire

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
    "SocketEnd",
    "StepWriter",
    "Wire",
    "checksum",
    "segment_name",
    "sweep_dead",
    "unlink_run",
]
