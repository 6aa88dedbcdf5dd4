"""Notices the end of processes as an event: one thread sleeps on their pidfds (Linux 5.3) and calls back."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable

from ddrl.channels.segment import is_alive


class DeathWatch:
    """Calls `on_death(pid, started)` once for each watched process that ends, however it ends; a zombie has ended.

    The call comes from the watch's thread, or from `watch` itself where the process has ended already. pid and start
    time name a process for good: a pid used again by another process is not mistaken for it."""

    def __init__(self, on_death: Callable[[int, int], None]) -> None:
        self._on_death = on_death
        self._lock = threading.Lock()
        self._processes: dict[int, tuple[int, int]] = {}  # by pidfd
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="death-watch", daemon=True)
        self._thread.start()

    def watch(self, pid: int, started: int) -> None:
        """Watch a process."""
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_death(pid, started)
            return
        if not is_alive(pid, started):  # asked after the pidfd was there: it cannot become another process any more
            os.close(descriptor)
            self._on_death(pid, started)
            return
        with self._lock:
            self._processes[descriptor] = (pid, started)
            self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, pid: int, started: int) -> None:
        """Watch a process no more; its end may have been noticed already."""
        with self._lock:
            for descriptor in [known for known, process in self._processes.items() if process == (pid, started)]:
                self._drop(descriptor)

    def close(self) -> None:
        """End the thread."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        with self._lock:
            for descriptor in list(self._processes):
                self._drop(descriptor)
        self._epoll.close()
        os.close(self._stop)

    def _drop(self, descriptor: int) -> tuple[int, int]:
        self._epoll.unregister(descriptor)
        os.close(descriptor)
        return self._processes.pop(descriptor)

    def _run(self) -> None:
        while True:
            for descriptor, _ in self._epoll.poll():
                if descriptor == self._stop:
                    return
                with self._lock:
                    ended = self._drop(descriptor) if descriptor in self._processes else None
                if ended is not None:
                    self._on_death(*ended)
