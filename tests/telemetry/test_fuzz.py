"""Whatever arrives can at most be refused: messages and files with bytes changed, cut off, doubled or made up."""

import random
import sqlite3

import pytest

from ddrl.core.errors import DdrlError, MessageError, RunDirError
from ddrl.telemetry import Evaluation, Event, Record, Run
from ddrl.telemetry.control import decode_item, encode_item, read_request
from tests.mutated import mutate, mutated_parts
from tests.telemetry.fake_cluster import FakeCluster
from tests.telemetry.feeding import record_run

QUICK, LONG = 2_000, 100_000
often = pytest.mark.parametrize("count", [QUICK, pytest.param(LONG, marks=pytest.mark.long)])


@often
def test_control_messages(count):
    draw = random.Random(1)
    taken, words = 0, []
    for _ in range(count):
        try:
            request = read_request(mutated_parts(draw))
        except MessageError as error:
            words.append(str(error))
        else:
            taken += 1
            assert len(request.command) + sum(map(len, request.arguments)) < 300
            request.command.encode()  # words that can be written down
    assert taken > 0
    assert len(words) > count / 2
    assert max(map(len, words)) < 500


@often
def test_live_messages(count):
    draw = random.Random(2)
    cluster = FakeCluster(4, 1)
    cluster.advance(1.0)
    items = (
        Record(1, 1.0, 1.0, {"loss": float("nan")}, cluster.table()),
        Event(1.0, 2.0, "note", "text", {"a": [1]}),
        Evaluation(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7),
    )
    sound = [encode_item(item) for item in items]
    refused = 0
    for _ in range(count):
        try:
            decode_item(mutate(draw.choice(sound), draw))
        except MessageError:
            refused += 1
    assert refused > count / 4


@pytest.mark.parametrize("count", [60, pytest.param(5_000, marks=pytest.mark.long)])
def test_telemetry_files(tmp_path, count):
    record_run(tmp_path, records=30)
    file = tmp_path / "telemetry.sqlite"
    sound = file.read_bytes()
    draw = random.Random(3)
    refused = 0
    for _ in range(count):
        data = bytearray(sound)
        for _ in range(draw.randint(1, 200)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data)
        try:
            with Run(tmp_path) as run:
                run.series(points=50)
                run.processes(points=10)
                run.latest()
                run.evaluations()
                run.events()
                run.snapshot("replay")
        except DdrlError:
            refused += 1
    assert refused > 0


@pytest.mark.parametrize(
    ("statement", "read"),
    [
        ("UPDATE events SET time = 'a'", Run.events),
        ("UPDATE events SET wall_seconds = x'00ff'", Run.events),
        ("UPDATE events SET fields = '[1]'", Run.events),
        ("UPDATE events SET fields = x'ff'", Run.events),
        ("UPDATE events SET fields = '" + "[" * 100_000 + "'", Run.events),
        ("UPDATE evaluations SET time = 'a'", Run.evaluations),
        ("UPDATE evaluations SET mean = x'ff'", Run.evaluations),
        ("UPDATE snapshots SET time = 'a'", lambda run: run.snapshot("values")),
        ("UPDATE snapshots SET fields = '[1]'", lambda run: run.snapshot("values")),
    ],
)
def test_values_of_another_type_are_damage(tmp_path, statement, read):
    record_run(tmp_path, records=3)
    with sqlite3.connect(tmp_path / "telemetry.sqlite") as db:
        db.execute("INSERT INTO events VALUES (1000, 1.0, 1.0, 'note', 'text', '{}')")
        db.execute("INSERT INTO evaluations VALUES (1000, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1, 1.0)")
        db.execute("INSERT INTO snapshots VALUES ('values', 1.0, '{}')")
        db.execute(statement)
    db.close()
    with Run(tmp_path) as run, pytest.raises(RunDirError, match=r"telemetry\.sqlite cannot be read"):
        read(run)
