"""Messages between processes: msgspec structs, whose fields may be arrays, as bytes; and the socket that carries them
inside a host.

A `Wire` is a channel's name and the union of its messages: what carries them encodes and decodes by it, so that bytes
which are no such message are refused in one place. Three carriers have `send(message)` and `receive()`: `SocketEnd`
here, `MessageLane` in shared memory, and `distribution.requests.MpiEnd` over MPI. A failure is a message of the union,
or a carrier that is `closed`.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import msgspec
import numpy as np

from ddrl.core.errors import MessageError
from ddrl.core.rows import ALIGNMENT
from ddrl.core.specs import Array, Bytes

M = TypeVar("M")
N = TypeVar("N")

LENGTH = struct.Struct("<Q")
DESCRIPTOR = np.dtype(np.intc)
MAX_DESCRIPTORS = 2  # beside one message
READ_BYTES = 1 << 16  # of a socket at once


class Wire(Generic[M]):
    """The messages of one channel. `name` is used in errors; `union`: of structs with tags.

    A message as bytes: the length of the encoded struct (uint64), the struct, then its arrays, each from a multiple of
    64 bytes on. In the struct an array is its dtype, its shape and where it begins behind the struct."""

    def __init__(self, name: str, union: Any) -> None:
        self.name = name
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union, dec_hook=self._view)
        self._decoding = threading.local()  # `arrays`: memory behind the struct that this thread decodes

    def encode(self, message: M) -> Bytes:
        """A message as bytes; O(bytes), arrays are copied once."""
        arrays: list[tuple[int, Array]] = []
        end = 0

        def place(value: Any) -> tuple[str, tuple[int, ...], int]:
            nonlocal end
            if not isinstance(value, np.ndarray):
                raise TypeError(f"a message of {self.name} cannot hold a {type(value).__name__}")
            array = cast("Array", value)
            begin = aligned(end)
            end = begin + array.nbytes
            arrays.append((begin, array))
            return array.dtype.str, array.shape, begin

        encoded = msgspec.msgpack.encode(message, enc_hook=place)
        begin = LENGTH.size + len(encoded)
        body = aligned(begin)
        data = np.empty(body + end if arrays else begin, np.uint8)
        data[: LENGTH.size] = np.frombuffer(LENGTH.pack(len(encoded)), np.uint8)
        data[LENGTH.size : begin] = np.frombuffer(encoded, np.uint8)
        for offset, array in arrays:
            out = data[body + offset : body + offset + array.nbytes]
            np.copyto(out.view(array.dtype).reshape(array.shape), array)
        return data

    def decode(self, data: Bytes | bytes) -> M:
        """What `encode` made, with arrays as views of `data`; MessageError for anything else."""
        memory = np.frombuffer(data, np.uint8)
        try:
            begin = LENGTH.size
            end = begin + LENGTH.unpack(memory[:begin].tobytes())[0]
            self._decoding.arrays = memory[aligned(end) :]
            return self._decoder.decode(memory[begin:end].data)
        except (ValueError, TypeError, IndexError, struct.error, msgspec.MsgspecError) as error:
            raise MessageError(
                f"a message of {self.name} of {len(memory)} bytes cannot be read ({error}): all must run the same ddrl"
            ) from None
        finally:
            self._decoding.arrays = None  # so that it is freed with the message

    def _view(self, _: type, value: Any) -> Array:
        """The array that a struct of this message describes."""
        dtype, shape, begin = value
        end = begin + math.prod(shape) * np.dtype(dtype).itemsize
        return self._decoding.arrays[begin:end].view(dtype).reshape(shape)


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class SocketEnd(Generic[M]):
    """One end of a socket inside a host: messages in order, descriptors beside them. Several processes may send on one
    end, where no message is longer than a few KiB."""

    def __init__(self, end: socket.socket, wire: Wire[M]) -> None:
        self.closed = False  # by the other end, and everything that it sent was received
        self._socket = end
        self._wire = wire
        self._rest = b""
        self._descriptors: list[int] = []  # received with messages

    @classmethod
    def pair(cls, wire: Wire[N]) -> tuple[SocketEnd[N], SocketEnd[N]]:
        """Two ends."""
        one, other = socket.socketpair()
        return SocketEnd(one, wire), SocketEnd(other, wire)

    @classmethod
    def of(cls, descriptor: int, wire: Wire[N]) -> SocketEnd[N]:
        """The end with this descriptor, which is closed with it."""
        return SocketEnd(socket.socket(fileno=descriptor), wire)

    def send(self, message: M, descriptors: Sequence[int] = ()) -> bool:
        """Send a message, and descriptors beside it; False where the other end is closed: its process has ended."""
        data = self._wire.encode(message)
        whole = LENGTH.pack(len(data)) + data.tobytes()
        try:
            sent = socket.send_fds(self._socket, [whole], descriptors) if descriptors else 0
            self._socket.sendall(whole[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self, *, wait: bool = False) -> list[M]:
        """Messages since the last call. `wait`: until there is one, or the other end is closed."""
        messages: list[M] = []
        while not self.closed:
            try:
                flags = 0 if wait and not messages else socket.MSG_DONTWAIT
                room = socket.CMSG_LEN(MAX_DESCRIPTORS * DESCRIPTOR.itemsize)
                data, beside, _, _ = self._socket.recvmsg(READ_BYTES, room, flags)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
                beside = []
            self.closed = not data
            for _, _, descriptor in beside:
                self._descriptors += np.frombuffer(descriptor, DESCRIPTOR).tolist()
            self._rest += data
            messages += self._take_whole()
        return messages

    def _take_whole(self) -> list[M]:
        """The messages that are there as a whole."""
        messages: list[M] = []
        begin = 0
        while len(self._rest) >= begin + LENGTH.size:
            first = begin + LENGTH.size
            end = first + LENGTH.unpack_from(self._rest, begin)[0]
            if len(self._rest) < end:
                break
            messages.append(self._wire.decode(self._rest[first:end]))
            begin = end
        self._rest = self._rest[begin:]
        return messages

    def take_descriptor(self) -> int | None:
        """The oldest descriptor that was received."""
        return self._descriptors.pop(0) if self._descriptors else None

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def end(self) -> None:
        """Send no more: the other end reads that it is closed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def is_abandoned(self) -> bool:
        """Whether nobody holds the other end any more, as when its process has ended; one that has only called `end`
        still hears."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    def detach(self) -> int:
        """The descriptor, which the caller closes."""
        return self._socket.detach()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
