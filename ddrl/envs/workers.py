"""Environments of one vector in processes of their own, which step at once (`env.workers`): for slow ones.

The process that acts forks them, sends each its part of the actions, and takes their steps together; they end with it.
With the same seed the environments play the same episodes as in one process. A message is a letter and bytes: arrays as
they lie in memory, or msgpack."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain, pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import msgspec
import numpy as np

from ddrl.core.errors import DdrlError, EnvError, ForeignError, ProcessEnded, error_of, user_error
from ddrl.core.forks import die_with, ignore_interrupts, seed_generators
from ddrl.core.specs import Array, EnvSpec, EnvStep, VectorEnv
from ddrl.envs.making import load_states, read_states
from ddrl.envs.spaces import environment_seeds

HELLO, RESET, STEP, FIGURES, READ, LOAD, ERROR = b"hrsfgle"
CLOSE_SECONDS = 5.0  # for all environments of a vector to close


class _Hello(msgspec.Struct):
    spec: EnvSpec
    figures: bool  # whether info is read


class _Error(msgspec.Struct):
    kind: str  # of ddrl's errors; "": an exception of the user's code
    text: str


class Worker:
    """One of the processes, with `count` environments."""

    def __init__(
        self, make: Callable[[], VectorEnv], count: int, first: int, total: int, others: Sequence[Worker] = ()
    ) -> None:
        """`first`: the place of its first environment among `total`; `others`: processes that were started before."""
        self.count = count
        self._connection, theirs = Pipe()
        parent = os.getpid()
        seed = int(np.random.randint(1 << 31))  # constructors may draw, and each process draws other numbers
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            for worker in (self, *others):
                worker._connection.close()  # whose other end is to see that it is closed
            _work(theirs, parent, seed, make, (first, total))
        theirs.close()

    def send(self, letter: int, body: bytes = b"") -> None:
        """Ask for something."""
        with suppress(BrokenPipeError, ConnectionResetError):  # `receive` says how it ended
            self._connection.send_bytes(bytes([letter]) + body)

    def receive(self) -> bytes:
        """The answer. Raises what the environments raised, and ProcessEnded where the process has ended."""
        try:
            data = self._connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            _, status = os.waitpid(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            self.pid = 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            raise ProcessEnded(f"a process of environments (env.workers) {how}") from None
        if data[0] != ERROR:
            return data[1:]
        error = msgspec.msgpack.decode(data[1:], type=_Error)
        raise error_of(error.kind, error.text) if error.kind else ForeignError(error.text)

    def hang_up(self) -> None:
        """Let it close its environments and end."""
        self._connection.close()

    def end(self, seconds: float) -> bool:
        """Wait until it has ended, and kill it where that takes too long; whether it ended by itself."""
        if not self.pid:
            return True
        ended = os.pidfd_open(self.pid)
        try:
            waiting = select.poll()
            waiting.register(ended, select.POLLIN)
            in_time = bool(waiting.poll(seconds * 1000.0))
            if not in_time:
                os.kill(self.pid, signal.SIGKILL)
        finally:
            os.close(ended)
        os.waitpid(self.pid, 0)
        self.pid = 0
        return in_time


class WorkersVectorEnv:
    """A `VectorEnv` whose environments are dealt to processes."""

    def __init__(self, env_id: str, workers: int, count: int, make: Callable[[int, int], VectorEnv]) -> None:
        """`make(n, first)`: a vector of n environments, the first of which is number `first`."""
        self.num_envs = count
        self._where = f"env.id = {env_id}"
        counts = [count // workers + (place < count % workers) for place in range(workers)]
        firsts = [0, *accumulate(counts)]
        self._parts = [slice(begin, end) for begin, end in pairwise(firsts)]
        self._workers: list[Worker] = []
        try:
            for number, first in zip(counts, firsts, strict=False):
                part = partial(make, number, first)
                self._workers.append(Worker(part, number, first, count, self._workers))
            hellos = [msgspec.msgpack.decode(worker.receive(), type=_Hello) for worker in self._workers]
        except BaseException:
            self.close()
            raise
        self.spec = hellos[0].spec
        self._reads_info = hellos[0].figures
        if any(hello.spec != self.spec for hello in hellos):
            self.close()
            raise EnvError(f"{self._where}: its environments differ; all of one run must have the same spaces")
        observation = self.spec.observation
        self._arrays: list[tuple[tuple[int, ...], np.dtype[Any]]] = [
            (observation.shape, observation.numpy),
            (self.spec.reward_shape, np.dtype(np.float32)),
            ((), np.dtype(np.bool_)),
            ((), np.dtype(np.bool_)),
            ((), np.dtype(np.float64)),
            *((column.shape, np.dtype(column.dtype)) for column in self.spec.columns),
        ]

    @property
    def figures(self) -> dict[str, float]:
        """By the name of its metric: the mean of an entry of info at the ends of recent episodes."""
        if not self._reads_info:
            raise AttributeError("figures")
        given = [msgspec.msgpack.decode(data, type=dict[str, float]) for data in self._ask(FIGURES)]
        names = dict.fromkeys(chain.from_iterable(given))
        return {name: float(np.mean([each[name] for each in given if name in each])) for name in names}

    def reset(self, seed: int) -> Array:
        """Begin new episodes everywhere. Returns [N, *observation.shape]."""
        return self._joined(self._ask(RESET, seed.to_bytes(8, "little")), self._arrays[:1])[0]

    def step(self, action: Array) -> EnvStep:
        """Take `action` [N, *action.shape] in all processes at once."""
        for worker, part in zip(self._workers, self._parts, strict=True):
            worker.send(STEP, action[part].tobytes())
        arrays = self._joined([worker.receive() for worker in self._workers], self._arrays)
        columns = {column.name: array for column, array in zip(self.spec.columns, arrays[5:], strict=True)}
        observation, reward, terminated, truncated, raw, *_ = arrays
        return EnvStep(observation, reward, terminated, truncated, raw, columns)

    def read_states(self) -> bytes:
        """As `ddrl.envs.making.read_states`."""
        given = [msgspec.msgpack.decode(data) for data in self._ask(READ) if data]
        return msgspec.msgpack.encode([*chain.from_iterable(given)]) if given else b""

    def load_states(self, data: bytes, frozen: bool) -> None:
        """As `ddrl.envs.making.load_states`."""
        states: list[Any] = msgspec.msgpack.decode(data)
        for worker, part in zip(self._workers, self._parts, strict=True):
            own = [states[place % len(states)] for place in range(part.start, part.stop)]
            worker.send(LOAD, bytes([frozen]) + msgspec.msgpack.encode(own))
        for worker in self._workers:
            worker.receive()

    def close(self) -> None:
        """Close all environments, at once. Those that never return end nothing: their processes are killed."""
        for worker in self._workers:
            worker.hang_up()
        end = time.monotonic() + CLOSE_SECONDS
        in_time = [worker.end(max(end - time.monotonic(), 0.0)) for worker in self._workers]
        self._workers = []
        if killed := in_time.count(False):
            words = f"its close does not return, which ends nothing: {killed} of {len(in_time)} processes (env.workers)"
            print(f"ddrl: {self._where}: {words} were killed", file=sys.stderr, flush=True)

    def _ask(self, letter: int, body: bytes = b"") -> list[bytes]:
        for worker in self._workers:
            worker.send(letter, body)
        return [worker.receive() for worker in self._workers]

    def _joined(self, given: Sequence[bytes], arrays: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
        """Arrays of all environments, from the bytes of each process."""
        joined = [np.empty((self.num_envs, *shape), dtype) for shape, dtype in arrays]
        for data, part in zip(given, self._parts, strict=True):
            offset = 0
            for whole, (shape, dtype) in zip(joined, arrays, strict=True):
                count = (part.stop - part.start) * int(np.prod(shape, dtype=np.int64))
                whole[part] = np.frombuffer(data, dtype, count, offset).reshape(-1, *shape)
                offset += count * dtype.itemsize
        return joined


def _work(
    connection: Connection, parent: int, seed: int, make: Callable[[], VectorEnv], place: tuple[int, int]
) -> NoReturn:
    """In the fork: make the environments and serve the other end until it is closed."""
    try:
        die_with(parent)
        ignore_interrupts()
        seed_generators(seed)
        env = make()
        connection.send_bytes(bytes([HELLO]) + msgspec.msgpack.encode(_Hello(env.spec, hasattr(env, "figures"))))
        with suppress(EOFError):
            _serve(connection, env, place)
        env.close()
    except BaseException as error:
        kind = type(error).__name__ if isinstance(error, DdrlError) else ""
        text = str(error) if kind else user_error(error)
        with suppress(OSError):
            connection.send_bytes(bytes([ERROR]) + msgspec.msgpack.encode(_Error(kind, text)))
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)


def _serve(connection: Connection, env: VectorEnv, place: tuple[int, int]) -> None:
    first, total = place
    spec = env.spec
    while True:
        data = connection.recv_bytes()
        letter = data[0]
        answer = b""
        if letter == STEP:
            action = np.frombuffer(data, spec.action.numpy, offset=1).reshape(env.num_envs, *spec.action.shape)
            step = env.step(action)
            arrays = (*step[:5], *(step.columns[column.name] for column in spec.columns))
            answer = b"".join(array.tobytes() for array in arrays)
        elif letter == RESET:
            seed = int.from_bytes(data[1:], "little")
            seed_generators(environment_seeds(seed, total)[first])
            answer = env.reset(seed).tobytes()
        elif letter == FIGURES:
            answer = msgspec.msgpack.encode(getattr(env, "figures", {}))
        elif letter == READ:
            answer = read_states(env)
        elif letter == LOAD:
            load_states(env, data[2:], frozen=bool(data[1]))
        connection.send_bytes(bytes([letter]) + answer)
