"""RUN/tensorboard: run-level series as TensorBoard event files (`telemetry.tensorboard = true`); a sink of the
recorder.

Written without TensorBoard or TensorFlow: an event file is a sequence of records (length, masked CRC-32C of the length,
a protocol buffer, its masked CRC-32C), and the protocol buffers needed here are three short messages
(tensorflow/core/util/event.proto, summary.proto). The step of every point is env_steps."""

from __future__ import annotations

import math
import socket
import struct
from pathlib import Path

from ddrl.core.errors import RunDirError
from ddrl.telemetry.record import Evaluation, Event, Record

_POLYNOMIAL = 0x82F63B78  # Castagnoli, reflected


def _table() -> list[int]:
    entries: list[int] = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (_POLYNOMIAL if value & 1 else 0)
        entries.append(value)
    return entries


_CRC = _table()


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli)."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ (value >> 8)
    return value ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    value = crc32c(data)
    return struct.pack("<I", (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    out = bytearray()
    value &= (1 << 64) - 1
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _bytes_field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def frame(data: bytes) -> bytes:
    """One record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def scalars_event(time: float, step: int, values: dict[str, float]) -> bytes:
    """An Event with a Summary of simple values, as a protocol buffer."""
    points = (_bytes_field(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, value) for tag, value in values.items())
    summary = b"".join(_bytes_field(1, value) for value in points)
    return struct.pack("<Bd", 1 << 3 | 1, time) + b"\x10" + _varint(step) + _bytes_field(5, summary)


class TensorBoardFiles:
    """Writes one event file; TensorBoard finds it with `tensorboard --logdir runs`."""

    def __init__(self, run_dir: Path, began: float) -> None:
        folder = run_dir / "tensorboard"
        try:
            folder.mkdir(exist_ok=True)
            self._file = (folder / f"events.out.tfevents.{int(began)}.{socket.gethostname()}").open("ab")
        except OSError as error:
            raise RunDirError(
                f"cannot write {folder} ({error.strerror}): choose another run.dir or set telemetry.tensorboard = false"
            ) from None
        self._file.write(frame(struct.pack("<Bd", 1 << 3 | 1, began) + _bytes_field(3, b"brain.Event:2")))
        self._step = 0

    def record(self, record: Record) -> None:
        """Write every series that was reported."""
        steps = record.series["env_steps"]
        self._step = self._step if math.isnan(steps) else int(steps)
        values = {f"run/{name}": value for name, value in record.series.items() if math.isfinite(value)}
        self._file.write(frame(scalars_event(record.time, self._step, values)))
        self._file.flush()

    def event(self, event: Event) -> None:
        """Events have no place among scalars."""

    def evaluation(self, evaluation: Evaluation) -> None:
        """Write the mean return."""
        self._file.write(
            frame(
                scalars_event(evaluation.time, int(evaluation.env_steps), {"evaluation/return_mean": evaluation.mean})
            )
        )
        self._file.flush()

    def close(self) -> None:
        """Finish the file."""
        self._file.close()
