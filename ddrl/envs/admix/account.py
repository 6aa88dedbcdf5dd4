"""The account of a policy: held-out days that it played, beside every baseline and the optimum. RUN/days.json.

Written by `python -m ddrl.evaluate RUN --days N` (`accounting`), read by the dashboard and notebooks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ddrl.core.decoding import read_json
from ddrl.core.errors import RunDirError
from ddrl.core.files import write_atomically

MODULE = "ddrl.envs.admix"  # of environments whose policies have accounts
FORMAT = "ddrl admix days 1"
NAME = "days.json"


class Rule(msgspec.Struct, frozen=True):
    """One policy or baseline on the days."""

    name: str
    scores: list[float]  # [days], normalised
    value: list[float]  # [T], V of the first day so far [currency]: shown so far, less penalties for what is due
    settings: dict[str, Any] = {}  # of a baseline, as tuned


class ContractCourse(msgspec.Struct, frozen=True):
    """One contract on the first day."""

    ad: int
    demand: float  # [impressions]
    penalty: float  # [currency]
    due: list[float]  # [T], impressions
    billed: list[float]  # [T], impressions, under the policy


class Account(msgspec.Struct, frozen=True):
    """See the module."""

    format: str
    written: float  # [s] Unix time
    policy: dict[str, Any]  # its evaluation, as saved with it
    days: int
    requests: int  # of the first day
    delay: float  # [days]
    times: list[float]  # [T], days
    bid_only: float  # V of the first day [currency]
    optimum: float  # V of the first day, certified upper bound [currency]
    gap: float  # largest of all days
    rules: list[Rule]  # the policy first
    contracts: list[ContractCourse]


def write_account(run: Path, account: Account) -> Path:
    """Write RUN/days.json; RunDirError where that cannot be written."""
    try:
        write_atomically(run / NAME, msgspec.json.encode(account))
    except OSError as error:
        raise RunDirError(f"cannot write {run / NAME}: {error.strerror or error}") from None
    return run / NAME


def read_account(run: Path) -> Account | None:
    """The account in `run`; None where there is none. RunDirError for a file of another format."""
    if not (run / NAME).exists():
        return None
    account = read_json(run / NAME, Account, RunDirError, f"{run / NAME} cannot be read: make it again")
    if account.format != FORMAT:
        raise RunDirError(f"{run / NAME} has the format {account.format[:40]!r}, not {FORMAT!r}: make it again")
    return account
