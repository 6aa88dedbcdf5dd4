"""Versions of a run's policy: RUN/versions/VERSION holds each policy that was published or served, as `policy_file`
saves it, and RUN/versions/choice.json what is served.

A version is the hash of graph and parameters that `ServedPolicy` has; nothing replaces it. Without a pin the newest
policy of RUN is served, or one that was chosen after it; a pin serves its version until it is taken back, whatever
appears in RUN. Written by servers and by `ddrl.retrain`."""

from __future__ import annotations

import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from ddrl.acting.policy_file import SavedPolicy, load_policy, save_policy
from ddrl.admix.mixer import version_of
from ddrl.core.errors import CheckpointError, MessageError, RunDirError
from ddrl.core.files import read_json, write_atomically
from ddrl.core.trust import check_trust, foreign_code

FOLDER = "versions"
CHOICE = "choice.json"
KEPT = 20


class Choice(msgspec.Struct, frozen=True):
    """What is served in place of the policy of RUN."""

    version: str = ""  # "": the policy of RUN
    pinned: bool = False
    over: str = ""  # the version that RUN had: where it has another one, that is newer than this choice


class VersionInfo(msgspec.Struct, frozen=True):
    """A version, as it is listed."""

    version: str
    saved: float  # [s] Unix time
    evaluation: dict[str, Any]
    served: bool = False
    pinned: bool = False


class _Manifest(msgspec.Struct, frozen=True):
    saved: float
    evaluation: dict[str, Any]


class VersionChange(msgspec.Struct, forbid_unknown_fields=True):
    """Which version to serve; "": the newest policy of RUN, and no pin."""

    version: str
    pin: bool = True


class Versions:
    """See the module."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._folder = run / FOLDER

    def keep(self, saved: SavedPolicy) -> str:
        """Keep a policy; its version. The oldest beyond KEPT go, but for the one that is chosen."""
        version = version_of(saved.model, saved.vector)
        place = self._folder / version
        try:
            if not place.exists():
                fresh = self._folder / f".{version}"
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir(parents=True)
                save_policy(
                    fresh, saved.model, saved.vector, env=saved.env, evaluation=saved.evaluation, run_id=saved.run_id
                )
                fresh.rename(place)
            chosen = self.choice().version
            for old in [name for name in self._kept() if name not in (chosen, version)][: -(KEPT - 1)]:
                shutil.rmtree(self._folder / old)
        except OSError as error:
            raise RunDirError(f"cannot keep the version {version} in {self._folder}: {error}") from None
        return version

    def load(self, version: str) -> SavedPolicy:
        """A kept policy; MessageError where it is gone."""
        if version not in (kept := self._kept()):
            raise MessageError(f"there is no version {version[:40]!r} (any more): kept are {', '.join(kept) or 'none'}")
        return self._trusted(self._folder / version)

    def newest(self) -> SavedPolicy:
        """What is to be served: the pinned version; one that was chosen since RUN has its policy; the policy of RUN."""
        choice = self.choice()
        own = None if choice.pinned else self._trusted(self._run)
        if choice.version and (own is None or version_of(own.model, own.vector) == choice.over):
            return self.load(choice.version)
        assert own is not None
        return own

    def choose(self, version: str, *, pin: bool) -> None:
        """Serve a version from now on; "": the policy of RUN. MessageError where it is gone."""
        if version:
            self.load(version)
        own = load_policy(self._run)
        self.restore(Choice(version, pin and bool(version), version_of(own.model, own.vector)))

    def restore(self, choice: Choice) -> None:
        """Choose as before."""
        try:
            self._folder.mkdir(exist_ok=True)
            write_atomically(self._folder / CHOICE, msgspec.json.encode(choice))
        except OSError as error:
            raise RunDirError(f"cannot choose the version {choice.version} in {self._folder}: {error}") from None

    def choice(self) -> Choice:
        """What was chosen last; CheckpointError for a damaged file."""
        path = self._folder / CHOICE
        if not path.exists():
            return Choice()
        return read_json(path, Choice, CheckpointError, f"{path} cannot be read: remove it, or choose a version")

    def listed(self, served: str = "") -> list[VersionInfo]:
        """All versions, oldest first."""
        choice = self.choice()
        found: list[VersionInfo] = []
        for name in self._kept():
            path = self._folder / name / "policy.json"
            kept = read_json(path, _Manifest, CheckpointError, f"{path} cannot be read: remove its folder")
            pinned = choice.pinned and choice.version == name
            found.append(VersionInfo(name, kept.saved, kept.evaluation, name == served, pinned))
        return found

    def _trusted(self, place: Path) -> SavedPolicy:
        """A policy, where the user trusts for the run what it names."""
        saved = load_policy(place)
        named = {"env": asdict(saved.env), "rollout": {"chooser": saved.model.chooser}}
        check_trust(self._run, foreign_code(named, self._run), trust=False)
        return saved

    def _kept(self) -> list[str]:
        found = [path.parent.name for path in self._folder.glob("*/policy.json")]
        return sorted((name for name in found if not name.startswith(".")), key=self._time)

    def _time(self, version: str) -> float:
        return (self._folder / version / "policy.json").stat().st_mtime
