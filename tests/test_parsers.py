"""Whatever reads files or bodies from outside takes them or refuses them in one clear line, within bounded memory.

The files of a run are in tests/run/test_damage.py, its sockets in tests/telemetry/test_fuzz.py: here is the rest."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from ddrl.admix import journal as counters
from ddrl.admix import open_log
from ddrl.admix.account import FORMAT, Account, Rule, read_account, write_account
from ddrl.admix.account import NAME as ACCOUNT
from ddrl.admix.mixer import Control, policy_of
from ddrl.balance.ddqn import SHIPPED, ValueNetwork
from ddrl.core.config import LearnerConfig
from ddrl.core.errors import DdrlError, MessageError
from ddrl.core.files import decode
from ddrl.core.settings import config_from_toml
from ddrl.learner.export import read_state
from ddrl.pool.records import read_pool
from ddrl.replay import ExperienceReplay
from ddrl.run.cli import tasks
from docs.examples.ipinyou import COLUMNS, read_impressions
from tests.admix.material import request_of, small_mixer
from tests.learner.learner_cases import learner_of
from tests.mutated import mutate
from tests.pool.recorded import write_pool
from tests.replay.filled import fill, make_replay

MORE_MEMORY = 200 << 10  # [KiB]
MOST_WORDS = 1500


@dataclass
class Parser:
    """Sound data, who reads them, how many changes are tried, and the least share that is refused."""

    data: bytes
    read: Callable[[bytes], object]
    refused: float = 0.3
    quick: int = 1000


def of_file(path: Path, read: Callable[[], object], **more: float) -> Parser:
    """A file that is damaged in its place."""

    def read_damaged(data: bytes) -> object:
        path.write_bytes(data)
        return read()

    return Parser(path.read_bytes(), read_damaged, **more)  # type: ignore[arg-type]


def display_request(folder: Path) -> Parser:
    mixer = small_mixer()
    return Parser(msgspec.json.encode(request_of(mixer.book, bids=3, time=0.5)), mixer.decide)


def play_control(folder: Path) -> Parser:
    body = b'{"ad": [2, 3], "theta": [0.5, 0.25], "rate": [1.0, 0.5]}'
    return Parser(body, lambda data: decode(data, Control, MessageError, "the body"))


def policy_body(folder: Path) -> Parser:
    from safetensors.numpy import save

    policy = small_mixer().policy
    return Parser(save(policy.model.layout.views(policy.vector)), lambda data: policy_of(data, policy), 0.2)


def serving_counters(folder: Path) -> Parser:
    mixer, path = small_mixer(), folder / "serving.json"
    mixer.choose(request_of(mixer.book))
    path.write_bytes(counters.encode(mixer))
    return of_file(path, lambda: counters.restore(path, mixer))


def log_record(folder: Path) -> Parser:
    from tests.admix.test_logs import tiny

    return of_file(tiny(folder) / "contracts.json", lambda: open_log(folder))


def log_table(folder: Path) -> Parser:
    from tests.admix.test_logs import tiny

    path = next(tiny(folder).glob("*.parquet"))
    return of_file(path, lambda: list(open_log(folder)), quick=300)


def impressions(folder: Path) -> Parser:
    values = dict.fromkeys(COLUMNS, "1") | {"timestamp": "20130606000104008", "region": "216"}
    path = folder / "imp.txt"
    path.write_text("".join("\t".join((values | {"bid_id": f"b{row}"}).values()) + "\n" for row in range(3)))
    return of_file(path, lambda: list(read_impressions([path])), refused=0.2)


def account(folder: Path) -> Parser:
    rule = Rule("policy", [1.0], [0.5, 1.0])
    whole = Account(FORMAT, 1.0, {"mean": 1.0}, 1, 10, 0.1, [0.5, 1.0], 1.0, 2.0, 0.0, [rule], [])
    write_account(folder, whole)
    return of_file(folder / ACCOUNT, lambda: read_account(folder))


def pool_plan(folder: Path) -> Parser:
    write_pool(folder)
    return of_file(folder / "pool" / "plan.json", lambda: read_pool(folder))


def pool_leases(folder: Path) -> Parser:
    write_pool(folder, rounds=2)
    return of_file(folder / "pool" / "leases.jsonl", lambda: read_pool(folder), refused=0.2)


def pool_summary(folder: Path) -> Parser:
    write_pool(folder, rounds=2)
    return of_file(folder / "summary.json", lambda: read_pool(folder))


def sizer_network(folder: Path) -> Parser:
    path = folder / "ddqn.safetensors"
    path.write_bytes(SHIPPED.read_bytes())
    return of_file(path, lambda: ValueNetwork.load(path), refused=0.0, quick=300)


def learner_state(folder: Path) -> Parser:
    path = folder / "learner.safetensors"
    learner_of(LearnerConfig(hidden=[4])).save(path)
    return of_file(path, lambda: read_state(path, algorithm="dqn"), refused=0.9)


def replay_snapshot(folder: Path) -> Parser:
    path = folder / "replay"
    fill(make_replay(40, n_step=3), [20, 30]).save(path)

    def read() -> ExperienceReplay:
        replay = make_replay(40, n_step=3)
        replay.load(path)
        replay.check()
        return replay

    return of_file(path, read, refused=0.9)


def task_file(folder: Path) -> Parser:
    return Parser(tasks()["cartpole"].read_bytes(), lambda data: config_from_toml(data.decode("latin1"), "a.toml"))


PARSERS = (
    display_request, play_control, policy_body, serving_counters, log_record, log_table, impressions, account,
    pool_plan, pool_leases, pool_summary, sizer_network, learner_state, replay_snapshot,
    task_file,
)  # fmt: skip


def attack(parser: Parser, count: int, seed: str) -> None:
    """Read `count` damaged versions."""
    draw, refused = random.Random(seed), 0
    parser.read(parser.data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(count):
        said = ""
        try:
            parser.read(mutate(parser.data, draw))
        except DdrlError as error:
            said = str(error)
            refused += 1
        assert "\n" not in said
        assert len(said) < MOST_WORDS
    assert refused >= parser.refused * count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MORE_MEMORY


@pytest.mark.parametrize("make", PARSERS, ids=lambda make: make.__name__)
def test_damaged_data_are_read_or_refused(make: Callable[[Path], Parser], tmp_path: Path) -> None:
    parser = make(tmp_path)
    attack(parser, parser.quick, make.__name__)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("make", PARSERS, ids=lambda make: make.__name__)
def test_so_are_very_many(make: Callable[[Path], Parser], tmp_path: Path) -> None:
    attack(make(tmp_path), 100_000, make.__name__ + " long")
