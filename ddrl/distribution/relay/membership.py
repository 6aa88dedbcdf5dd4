"""A relay among all relays: it joins, and it leaves with the others, in order or because one of them has failed.

Used as a context: an error raised inside is sent to every other relay, all of them withdraw what they have posted in
MPI, and the error goes on upwards. On the others `RelayFailed` is raised wherever they are, with the text of the first
one, so that a failure at any time, while links are measured and plans are made included, ends all of them within
seconds and leaves no memory to MPI that is freed."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ddrl.core.errors import DdrlError, JobFailed
from ddrl.distribution.relay.control import MAX_TEXT, Failed, Message
from ddrl.distribution.relay.post import Post
from ddrl.distribution.transport.requests import Exchange, Part, withdraw

if TYPE_CHECKING:
    from mpi4py import MPI

TAG_DOWN = 1
TAG_UP = 2
TAG_TABLE = 3
TAG_BLOCK = 4
TAG_EXCHANGE = 5
POLL_PERIOD = 0.01  # s, between polls of the post while others are waited for


class RelayFailed(JobFailed):
    """Another relay has failed; the text is its own."""


def describe_relay(error: BaseException) -> str:
    """The text of an error that other relays get, unless the relay is given another function."""
    return str(error) if isinstance(error, DdrlError) else f"{type(error).__name__}: {error}"


class Membership:
    """Rank 0 of `comm` is the root. Making one is collective. `data` and `control` are communicators of its own."""

    def __init__(self, comm: MPI.Comm, describe: Callable[[BaseException], str] = describe_relay) -> None:
        self.rank = comm.rank
        self.hosts = comm.size - 1
        self.data = comm.Dup()
        self.control = comm.Dup()
        self._describe = describe
        self._left = False
        self._next_poll = 0.0
        self._unread: list[tuple[int, Message]] = []
        self._parts: list[Part] = []
        root = self.rank == 0
        self.post = Post(
            self.control,
            TAG_UP if root else TAG_DOWN,
            range(1, comm.size) if root else [0],
            out_tag=TAG_DOWN if root else TAG_UP,
        )
        self.keep(self.post)
        self.exchange = Exchange(self.control, self, TAG_EXCHANGE)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._give_up(error)
            return
        try:
            self.leave()
        except BaseException as late:
            self._give_up(late)
            raise

    # -- whose requests stand (`transport.requests.Guard`)

    def keep(self, part: Part) -> None:
        """`part` posts requests from now on."""
        self._parts.append(part)

    def drop(self, part: Part) -> None:
        """All of its requests have ended."""
        self._parts.remove(part)

    def poll(self) -> None:
        """Raise RelayFailed where another relay has failed."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_PERIOD
            self._read()

    def messages(self) -> list[tuple[int, Message]]:
        """Messages since the last call, (rank, message). RelayFailed where another relay has failed."""
        self._read()
        unread = self._unread
        self._unread = []
        return unread

    def _read(self) -> None:
        for rank, message in self.post.receive():
            if isinstance(message, Failed):
                raise RelayFailed(message.text)
            self._unread.append((rank, message))

    # -- the end

    def leave(self) -> None:
        """In order, once every model and row has ended everywhere: wait for all others, then free what is ours."""
        if self._left:
            return
        self.exchange.barrier()
        self._left = True
        self.post.close()
        self.data.Free()
        self.control.Free()

    def _give_up(self, error: BaseException) -> None:
        self.abandon(str(error) if isinstance(error, RelayFailed) else self._describe(error))

    def abandon(self, text: str) -> None:
        """Send the text of a failure, this relay's or another's, to the others, and withdraw together."""
        if self._left:
            return
        self._left = True
        self.post.send_all(Failed(text[-MAX_TEXT:]))
        if withdraw([self.data, self.control], self._parts):
            self.data.Free()
            self.control.Free()
