"""Cutting a model up and putting it together again, whatever way its pieces come."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.channels.mailbox import checksum
from ddrl.core.errors import PlanError
from ddrl.core.layouts import ALIGNMENT
from ddrl.distribution.plans.cuts import cut_by_weight, cut_chunks, cut_evenly
from ddrl.distribution.transport.shards import HEADER, Assembly, describe_shards, write_headers


def model(seed, nbytes):
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def pieces(version, nbytes, bounds, sequence=0):
    """Headers and payloads of one version, as they travel."""
    data = model(version, nbytes)
    headers = np.zeros(len(bounds) - 1, HEADER)
    write_headers(
        headers,
        data,
        np.asarray(bounds, np.int64),
        checksum,
        epoch=3,
        sequence=sequence,
        version=version,
        model_checksum=checksum(data),
        time_ns=1,
        values=np.zeros(8),
    )
    return [(headers[index], data[start:stop]) for index, (start, stop) in enumerate(itertools.pairwise(bounds))]


def assembly(nbytes, bounds, sequence=0):
    return Assembly(
        np.full(nbytes, 0xA5, np.uint8),
        np.zeros(len(bounds) - 1, HEADER),
        np.asarray(bounds, np.int64),
        3,
        sequence,
        checksum,
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


def test_every_shard_says_what_it_is():
    bounds = cut_evenly(1000, 3)
    shards = describe_shards(model(7, 1000), 7, bounds, checksum)
    assert [(shard.version, shard.index, shard.count, shard.offset, shard.length) for shard in shards] == [
        (7, 0, 3, 0, 384),
        (7, 1, 3, 384, 320),
        (7, 2, 3, 704, 296),
    ]
    for shard in shards:
        assert shard.checksum == checksum(model(7, 1000)[shard.offset : shard.offset + shard.length])
    for index, (header, payload) in enumerate(pieces(7, 1000, bounds)):
        assert (header["version"], header["index"], header["count"], header["offset"], header["length"]) == (
            7,
            index,
            3,
            bounds[index],
            len(payload),
        )


@settings(deadline=None)
@given(st.data(), st.integers(0, 20_000), st.integers(1, 30))
def test_any_order_with_duplicates_and_other_versions_between_gives_the_same_bytes(data, nbytes, parts):
    bounds = sorted(set(cut_evenly(nbytes, parts))) if nbytes else [0, 0]
    wanted, other = pieces(1, nbytes, bounds, sequence=5), pieces(2, nbytes, bounds, sequence=6)
    twice = data.draw(st.lists(st.sampled_from(range(len(wanted))), max_size=10))
    stream = [
        *((1, piece) for piece in wanted),
        *((1, wanted[index]) for index in twice),
        *((2, piece) for piece in other),
    ]
    first, second = assembly(nbytes, bounds, sequence=5), assembly(nbytes, bounds, sequence=6)
    for _, (header, payload) in data.draw(st.permutations(stream)):
        first.place(header, payload)
        second.place(header, payload)
    for version, whole in ((1, first), (2, second)):
        assert whole.complete
        assert whole.problem == ""
        assert whole.version == version
        np.testing.assert_array_equal(whole.data, model(version, nbytes))


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 9), st.data())
def test_any_flipped_bit_of_payload_or_header_is_noticed(nbytes, parts, data):
    bounds = sorted(set(cut_evenly(nbytes, parts)))
    whole = assembly(nbytes, bounds)
    spoiled = data.draw(st.integers(0, len(bounds) - 2))
    for index, (header, payload) in enumerate(pieces(4, nbytes, bounds)):
        start, stop = bounds[index], bounds[index + 1]
        whole.headers[index], whole.data[start:stop] = header, payload
        if index == spoiled:  # as memory or the wire may spoil what stands in place
            memory = data.draw(
                st.sampled_from([whole.data[start:stop], whole.headers[index : index + 1].view(np.uint8)])
            )
            memory[data.draw(st.integers(0, len(memory) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        whole.arrived(index)
    assert whole.complete
    assert whole.problem


def test_a_chunk_of_another_version_in_place_is_a_problem_not_a_model():
    bounds = cut_evenly(1000, 2)
    whole = assembly(1000, bounds)
    for index, version in ((0, 1), (1, 2)):
        header, payload = pieces(version, 1000, bounds)[index]
        whole.headers[index], whole.data[bounds[index] : bounds[index + 1]] = header, payload
        whole.arrived(index)
    assert "chunk 1 of version 2" in whole.problem
    assert "not to version 1" in whole.problem
