"""Snapshots of a replay: bytes, or files written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import msgspec

from ddrl._kernel import ReplayCore
from ddrl.core.errors import CheckpointError
from ddrl.core.files import replacement

Progress = Callable[[int, int], object]


class Snapshots:
    """What `ExperienceReplay` does with snapshots. A snapshot names the configuration and the selectors it needs."""

    _core: ReplayCore
    _configuration: dict[str, Any]
    _selectors: list[dict[str, Any]]

    def new_pick_selector(self, selector: Any, **options: Any) -> int:
        """Make a way of drawing picks."""
        raise NotImplementedError

    def serialize(self, progress: Progress | None = None) -> bytes:
        """Everything as bytes: records, structure, the selectors with their priorities and random states. Recording may
        go on meanwhile."""
        return cast(bytes, self._core.serialize(self._describe(self._selectors), progress))

    def unserialize(self, data: bytes, progress: Progress | None = None) -> None:
        """Become the replay that `serialize` wrote; the same draws follow.

        A replay without selectors gets the snapshot's. Raises CheckpointError, with nothing changed, for input that is
        truncated, corrupt, foreign, or of another configuration. `progress` is called with bytes done and in all."""
        self._restore(
            data[: 1 << 16], "the snapshot", lambda configuration: self._core.unserialize(data, configuration, progress)
        )

    def save(self, path: str | Path, progress: Progress | None = None, *, increment: bool = False) -> None:
        """A snapshot in a file, whole or not at all (a temporary file is renamed).

        With `increment` it holds what changed since the last save (or load) alone, at the cost of the new records, and
        is loaded after it: load(first, *increments). Raises CheckpointError where it cannot be written, or there is
        nothing to build on."""
        try:
            with replacement(Path(path)) as temporary:
                self._core.save(str(temporary), self._describe(self._selectors), increment, progress)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"{path}: {error}") from None

    def load(self, path: str | Path, *increments: str | Path, progress: Progress | None = None) -> None:
        """Become the replay that `save` wrote into a file, and the increments after it in their order; otherwise as
        `unserialize`."""
        try:
            with Path(path).open("rb") as file:
                head = file.read(1 << 16)
        except OSError as error:
            raise CheckpointError(f"cannot read the snapshot {path}: {error.strerror or error}") from None
        self._restore(
            head,
            str(path),
            lambda configuration: self._core.load([str(each) for each in (path, *increments)], configuration, progress),
        )

    def _restore(self, head: bytes, source: str, read: Callable[[str], None]) -> None:
        before = len(self._selectors)
        try:
            selectors: list[dict[str, Any]] = []
            if not self._selectors:
                length = int.from_bytes(head[8:12], "little")
                described = (
                    msgspec.json.decode(head[12 : 12 + length], type=dict[str, Any]) if head[:7] == b"DDRLRPL" else {}
                )
                selectors = described.get("selectors", [])
            for selector in selectors:
                if "foreign" in selector:
                    raise ValueError(f"make its selector {selector['selector']} first: it is not one of the kernel's")
                self.new_pick_selector(**selector)
            read(self._describe(self._selectors))
        except (RuntimeError, ValueError, TypeError, msgspec.DecodeError) as error:
            self._core.keep_selectors(before)
            del self._selectors[before:]
            raise CheckpointError(f"{source} cannot be loaded: {error}") from None

    def _describe(self, selectors: list[dict[str, Any]]) -> str:
        return msgspec.json.encode({**self._configuration, "selectors": selectors}).decode()
