"""Cutting a model up and putting it together again, whatever way its pieces come."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddrl._kernel import seal_chunks
from ddrl.channels.mailbox import checksum
from ddrl.core.errors import PlanError
from ddrl.core.rows import ALIGNMENT
from ddrl.distribution.chunks import Assembly, Headers
from ddrl.distribution.plan import HEADER_BYTES, MODEL_HEADER_BYTES, cut_by_weight, cut_chunks, cut_evenly


def model(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def pieces(version, nbytes, bounds, sequence=0, epoch=3):
    """Sequence, index, header bytes and payload of each chunk of one version, as they travel."""
    data = model(version, nbytes)
    headers = Headers(len(bounds) - 1)
    headers.fill(
        epoch=epoch,
        sequence=sequence,
        version=version,
        model_checksum=checksum(data),
        time_ns=1,
        values=np.zeros(8),
    )
    seal_chunks(headers.memory, data, np.asarray(bounds, np.int64))
    heads = [headers.memory[place : place + size] for place, size in (Headers.span(i, 1) for i in range(len(headers)))]
    cuts = itertools.pairwise(bounds)
    return [(sequence, index, heads[index], data[start:stop]) for index, (start, stop) in enumerate(cuts)]


def place(whole, bounds, index, header, payload):
    """A chunk lands in place, as MPI puts it there."""
    start, size = Headers.span(index, 1)
    whole.headers.memory[start : start + size] = header
    whole.data[bounds[index] : bounds[index + 1]] = payload


def put(whole, bounds, index, header, payload):
    """A chunk lands in place and is verified."""
    place(whole, bounds, index, header, payload)
    return whole.arrived(index)


def assembly(nbytes, bounds, sequence=0):
    return Assembly(
        np.full(nbytes, 0xA5, np.uint8),
        Headers(len(bounds) - 1),
        np.asarray(bounds, np.int64),
        3,
        sequence,
    )


@given(st.integers(0, 100_000), st.integers(1, 400))
def test_shards_tile_the_model_on_aligned_cuts_and_differ_by_at_most_one_unit(nbytes, parts):
    bounds = cut_evenly(nbytes, parts)
    assert bounds[0] == 0
    assert bounds[-1] == nbytes
    assert len(bounds) == parts + 1
    units = [-(-(stop - start) // ALIGNMENT) for start, stop in itertools.pairwise(bounds)]
    assert max(units) - min(units) <= 1
    assert all(edge % ALIGNMENT == 0 for edge in bounds if edge < nbytes)


@given(st.integers(1, 100_000), st.integers(0, 5000))
def test_chunks_tile_a_shard_and_none_is_longer_than_asked(nbytes, chunk):
    ends = cut_chunks(128, 128 + nbytes, chunk)
    sizes = np.diff([128, *ends])
    assert ends[-1] == 128 + nbytes
    assert (sizes > 0).all()
    assert sizes.max() <= (max(chunk, ALIGNMENT) if chunk else nbytes)


def test_shards_by_weight_follow_the_weights_and_a_weight_of_nothing_gets_nothing():
    assert np.diff(cut_by_weight(64 * 100, [1.0, 0.0, 3.0])).tolist() == [64 * 25, 0, 64 * 75]
    with pytest.raises(PlanError, match="weights"):
        cut_by_weight(64, [0.0, 0.0])


def test_no_shards_and_no_model_less_than_empty():
    with pytest.raises(PlanError, match="cannot be cut into 0 shards"):
        cut_evenly(1000, 0)
    with pytest.raises(PlanError, match="-1 bytes"):
        cut_evenly(-1, 2)


def test_every_chunk_says_what_it_is_and_the_first_one_what_the_model_is():
    bounds, headers = cut_evenly(1000, 3), Headers(3)
    data = model(7, 1000)
    fields = {"epoch": 3, "sequence": 5, "version": 7, "model_checksum": 11, "time_ns": 13, "values": np.arange(8.0)}
    headers.fill(**fields)
    seal_chunks(headers.memory, data, np.asarray(bounds, np.int64))
    assert [row.tolist()[:5] for row in headers.chunks] == [(5, 0, 384, 3, 0), (5, 1, 320, 3, 0), (5, 2, 296, 3, 0)]
    described = headers.model[0]
    assert described.tolist()[1:5] == (3, 7, 11, 13)
    assert described["values"].tolist() == list(range(8))
    spans = [Headers.span(index, 1) for index in range(3)]
    assert spans == [(0, MODEL_HEADER_BYTES + HEADER_BYTES), (120, HEADER_BYTES), (144, HEADER_BYTES)]
    assert Headers.span(0, 3) == (0, len(headers.memory))


@given(st.data(), st.integers(0, 20_000), st.integers(1, 30))
def test_any_order_with_duplicates_and_other_versions_between_gives_the_same_bytes(data, nbytes, parts):
    bounds = sorted(set(cut_evenly(nbytes, parts))) if nbytes else [0, 0]
    wanted, other = pieces(1, nbytes, bounds, sequence=5), pieces(2, nbytes, bounds, sequence=6)
    twice = data.draw(st.lists(st.sampled_from(range(len(wanted))), max_size=10))
    stream = [*wanted, *(wanted[index] for index in twice), *other]
    first, second = assembly(nbytes, bounds, sequence=5), assembly(nbytes, bounds, sequence=6)
    for sequence, *piece in data.draw(st.permutations(stream)):
        put(first if sequence == 5 else second, bounds, *piece)
    for version, whole in ((1, first), (2, second)):
        assert whole.complete
        assert whole.problem == ""
        assert whole.version == version
        np.testing.assert_array_equal(whole.data, model(version, nbytes))


@given(st.integers(1, 5000), st.integers(1, 9), st.data())
def test_any_flipped_bit_of_payload_or_header_is_noticed(nbytes, parts, data):
    bounds = sorted(set(cut_evenly(nbytes, parts)))
    whole = assembly(nbytes, bounds)
    spoiled = data.draw(st.integers(0, len(bounds) - 2))
    for _, index, header, payload in pieces(4, nbytes, bounds):
        if index == spoiled:  # as memory or the wire may spoil it
            header, payload = header.copy(), payload.copy()
            memory = data.draw(st.sampled_from([header, payload]))
            memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        put(whole, bounds, index, header, payload)
    assert whole.complete
    assert whole.problem


@given(st.integers(1, 5000), st.integers(2, 9), st.data())
def test_chunks_verified_together_are_judged_as_one_by_one(nbytes, parts, data):
    bounds = sorted(set(cut_evenly(nbytes, parts)))
    one, together = assembly(nbytes, bounds), assembly(nbytes, bounds)
    spoiled = data.draw(st.sampled_from([None, *range(1, len(bounds) - 1)]))
    for _, index, header, payload in pieces(4, nbytes, bounds):
        if index == spoiled:
            header, payload = header.copy(), payload.copy()
            memory = data.draw(st.sampled_from([header, payload]))
            memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        put(one, bounds, index, header, payload)
        together.headers.memory[:], together.data[:] = one.headers.memory, one.data
    rest = list(range(1, len(bounds) - 1))
    assert not together.all_arrived([0, *rest])  # the first says what the model is
    together.arrived(0)
    assert together.all_arrived(rest) == (spoiled is None) == (one.problem == "")
    assert together.complete == (spoiled is None or not rest)
    if rest:
        assert not together.all_arrived(rest[:1]) or spoiled is not None  # it is there


@pytest.mark.parametrize(
    ("sequence", "epoch", "index"), [(1, 3, 1), (0, 4, 1), (0, 3, 0)], ids=["model", "plan", "chunk"]
)
def test_a_sound_chunk_of_another_model_plan_or_place_is_a_problem_not_a_model(sequence, epoch, index):
    bounds = cut_evenly(1024, 2)
    whole = assembly(1024, bounds)
    assert put(whole, bounds, *pieces(1, 1024, bounds)[0][1:])
    _, _, header, payload = pieces(1, 1024, bounds, sequence, epoch)[index]
    place(whole, bounds, 1, header[-HEADER_BYTES:], payload)
    assert not whole.all_arrived([1])
    assert whole.arrived(1)
    assert whole.complete
    assert whole.problem == "chunk 1 (bytes 512..1024) bears a header of another message"
