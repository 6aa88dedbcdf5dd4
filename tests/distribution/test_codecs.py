"""Codecs chunk by chunk, versions as differences from others, and coded models under mpirun."""

import contextlib
import itertools
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddrl.channels.mailbox import checksum
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError, MessageError, MissingExtraError
from ddrl.core.rows import ParameterLayout
from ddrl.distribution import codecs, models
from ddrl.distribution.chunks import Bases, CodedAssembly, Coding, Encoder, Headers, SentVersions
from ddrl.distribution.models import ModelSender
from ddrl.distribution.plan import cut_chunks
from ddrl.distribution.schemes import Choice

pytest.importorskip("zstandard", reason="needs the extra [codecs]")
LAYOUT = ParameterLayout.of(
    {"weight": ((40, 33), "float32"), "count": ((5,), "int64"), "bias": ((7,), "float32"), "flag": ((3,), "uint8")}
)


def make_codec(name, layout):
    return codecs.make_codec(Config(cluster=ClusterConfig(codec=name)), layout)


def vector_of(seed, scale=1.0):
    vector = np.zeros(LAYOUT.nbytes, np.uint8)
    random = np.random.default_rng(seed)
    for name, view in LAYOUT.views(vector).items():
        view[...] = (
            random.standard_normal(view.shape) * scale
            if name in ("weight", "bias")
            else random.integers(0, 200, view.shape)
        )
    return vector


def round_trip(codec, model, base, bounds):
    out = np.full(len(model), 0xA5, np.uint8)
    for start, stop in itertools.pairwise(bounds):
        wire = np.full(codec.wire_bytes(start, stop), 0xA5, np.uint8)
        used = codec.encode(wire, model, base, start, stop)
        assert used == len(wire) or not codec.fixed
        codec.decode(out, wire[:used], base, start, stop)
    return out


def cuts(nbytes, chunk):
    return [0, *cut_chunks(0, nbytes, chunk)]


def bf16(values):
    """Rounded to nearest even, by the definition."""
    bits = values.view(np.uint32).astype(np.uint64)
    up = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32)
    return np.where(np.isnan(values), np.float32("nan"), up.view(np.float32))


def test_bf16_is_the_nearest_even_bfloat16_of_every_float():
    random = np.random.default_rng(0)
    values = random.integers(0, 1 << 32, 40 * 33, dtype=np.uint32).view(
        np.float32
    )  # every exponent, NaNs and infinities too
    values[:6] = (0.0, -0.0, np.inf, -np.inf, np.nan, 3.3895313892515355e38)
    values[6:8] = np.array([0x3F808000, 0x3F818000], np.uint32).view(np.float32)  # ties: one goes down, one up
    model = vector_of(1)
    LAYOUT.views(model)["weight"][...] = values.reshape(40, 33)
    out = LAYOUT.views(round_trip(make_codec("bf16", LAYOUT), model, None, [0, LAYOUT.nbytes]))
    np.testing.assert_array_equal(out["weight"].ravel(), bf16(values))
    for name in ("count", "flag"):
        np.testing.assert_array_equal(out[name], LAYOUT.views(model)[name])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_int8_is_off_by_half_a_step_at_most_and_leaves_other_types_alone(scale):
    model = vector_of(2, scale)
    out = LAYOUT.views(round_trip(make_codec("int8", LAYOUT), model, None, [0, LAYOUT.nbytes]))
    given = LAYOUT.views(model)
    for name in ("weight", "bias"):
        for start in range(0, given[name].size, 256):
            block, back = given[name].ravel()[start : start + 256], out[name].ravel()[start : start + 256]
            assert np.abs(back - block).max() <= np.abs(block).max() / 254 * 1.0001
    np.testing.assert_array_equal(out["count"], given["count"])
    np.testing.assert_array_equal(out["flag"], given["flag"])


def test_int8_blocks_do_not_reach_from_one_tensor_into_another():
    model = vector_of(3)
    LAYOUT.views(model)["weight"][...] = 1e6
    bias = LAYOUT.views(round_trip(make_codec("int8", LAYOUT), model, None, [0, LAYOUT.nbytes]))["bias"]
    assert np.abs(bias - LAYOUT.views(model)["bias"]).max() < 0.02


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("chunk", [64, 192, 1024, 2112])
def test_what_is_acted_on_does_not_depend_on_how_the_model_was_cut(name, chunk):
    model, codec = vector_of(11), make_codec(name, LAYOUT)
    np.testing.assert_array_equal(
        round_trip(codec, model, None, cuts(len(model), chunk)), round_trip(codec, model, None, [0, len(model)])
    )


def test_int8_shows_a_network_that_has_diverged():
    model = vector_of(4)
    LAYOUT.views(model)["weight"][3, 3] = np.inf
    out = LAYOUT.views(round_trip(make_codec("int8", LAYOUT), model, None, [0, LAYOUT.nbytes]))["weight"].ravel()
    assert np.isnan(out[:256]).all()
    assert np.isfinite(out[256:]).all()


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_lossy_codecs_take_half_and_little_more_than_a_quarter(name):
    layout = ParameterLayout.of({"weight": ((1 << 20,), "float32")})
    assert (
        make_codec(name, layout).wire_bytes(0, layout.nbytes)
        == {"bf16": layout.nbytes // 2, "int8": layout.nbytes // 4 * 65 // 64}[name]
    )


@given(st.integers(0, 700), st.sampled_from([64, 128, 4096]), st.integers(0, 4), st.booleans())
@settings(max_examples=60)
def test_xor_zstd_gives_back_every_byte(nbytes, chunk, changed, against):
    random = np.random.default_rng(nbytes)
    base = random.integers(0, 256, nbytes, dtype=np.uint8)
    model = base ^ (random.random(nbytes) < changed / 4) * random.integers(0, 256, nbytes, dtype=np.uint8)
    np.testing.assert_array_equal(
        round_trip(make_codec("xor_zstd", None), model, base if against else None, cuts(nbytes, chunk)), model
    )


def test_versions_that_differ_little_become_short():
    base = vector_of(5)
    model = base.copy()
    LAYOUT.views(model)["weight"][:] *= np.float32(1 + 1e-6)
    codec = make_codec("xor_zstd", None)
    out = np.zeros(codec.wire_bytes(0, len(base)), np.uint8)
    assert codec.encode(out, model, base, 0, len(base)) < 0.5 * len(base)
    assert codec.encode(out, base, base, 0, len(base)) < 100


@given(st.integers(0, 2000), st.integers(0, 7), st.integers(-20, 20))
@settings(max_examples=100)
def test_what_is_no_coded_chunk_is_refused_or_decoded_and_nothing_worse(byte, bit, longer):
    codec, model = make_codec("xor_zstd", None), np.repeat(np.arange(64, dtype=np.uint8), 32)
    wire = np.zeros(codec.wire_bytes(0, len(model)) + 32, np.uint8)
    used = codec.encode(wire, model, None, 0, len(model))
    wire[byte % used] ^= 1 << bit
    with contextlib.suppress(MessageError):
        codec.decode(np.zeros_like(model), wire[: max(0, used + longer)], None, 0, len(model))


def test_settings_name_the_codecs_and_the_missing_package(monkeypatch):
    assert Config().cluster.codec == "none"
    with pytest.raises(ConfigError, match=r"cluster.codec \('gzip'\): known are bf16, int8, none, xor_zstd"):
        Config(cluster=ClusterConfig(codec="gzip"))
    with pytest.raises(ConfigError, match="needs the manifest"):
        make_codec("bf16", None)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(
        MissingExtraError, match=r"cluster.codec = xor_zstd needs the package 'zstandard'.*ddrl\[codecs\]"
    ):
        make_codec("xor_zstd", None)


# -- versions


class Kept:
    """A version in memory, with the count of who keeps it."""

    def __init__(self, data):
        self.data, self.version, self.checksum, self.kept = data, 7, checksum(data), 1

    def share(self):
        self.kept += 1
        return self

    def release(self):
        self.kept -= 1


def coded(name, model, base, chunk=256, back=0, epoch=3, sequence=9):
    """Coding, coded form and headers of a version, and where its chunks stand."""
    coding = Coding(make_codec(name, LAYOUT), np.array(cuts(len(model), chunk)), most_bases=3)
    wire, headers = coding.take(), Headers(len(coding.bounds) - 1)
    headers.fill(
        epoch=epoch,
        sequence=sequence,
        version=7,
        model_checksum=checksum(model),
        time_ns=1,
        values=np.zeros(8),
        back=back,
    )
    encoder = Encoder(coding, wire, headers, model, None if base is None else base.data)
    encoder.code(0, len(headers))
    return coding, wire, headers, encoder


@pytest.mark.parametrize("name", ["bf16", "int8", "xor_zstd"])
def test_chunks_in_any_order_and_twice_give_the_model(name):
    model, base = vector_of(6), Kept(vector_of(6, 1.0001))
    coding, wire, headers, encoder = coded(
        name, model, base if name == "xor_zstd" else None, back=2 if name == "xor_zstd" else 0
    )
    if coding.bases is not None:
        coding.bases.keep(7, base.data, lambda: None)
    out = np.full(len(model), 0xA5, np.uint8)
    assembly = CodedAssembly(coding, wire, out, headers, 3, 9)
    assembly.lengths[:] = encoder.lengths
    order = np.random.default_rng(0).permutation(2 * len(headers)) % len(headers)
    for index in order.tolist():
        assembly.arrived(index)
    assert assembly.complete
    assert assembly.model_checksum() == checksum(out)
    assert assembly.problem == ""
    if name == "xor_zstd":
        np.testing.assert_array_equal(out, model)
    else:
        np.testing.assert_array_equal(out, round_trip(coding.codec, model, None, coding.bounds))


@pytest.mark.parametrize("name", ["bf16", "int8", "xor_zstd"])
def test_a_flipped_byte_of_coded_form_or_header_is_never_decoded(name):
    model = vector_of(7)
    coding, wire, headers, encoder = coded(name, model, None)
    random = np.random.default_rng(1)
    for _ in range(40):
        spoiled, heads = wire.copy(), Headers(len(headers))
        heads.memory[:] = headers.memory
        index = int(random.integers(len(headers)))
        if random.random() < 0.5:
            spoiled[coding.edges[index] + int(random.integers(encoder.lengths[index]))] ^= 1 << int(random.integers(8))
        else:
            start, nbytes = Headers.span(index, 1)
            heads.memory[start + int(random.integers(nbytes))] ^= 1 << int(random.integers(8))
        out = np.full(len(model), 0xA5, np.uint8)
        assembly = CodedAssembly(coding, spoiled, out, heads, 3, 9)
        assembly.lengths[:] = encoder.lengths
        assembly.arrived(index)
        assert assembly.problem
        assert (out == 0xA5).all()


def test_a_version_told_against_one_that_is_not_held_is_refused():
    model, base = vector_of(8), Kept(vector_of(9))
    coding, wire, headers, encoder = coded("xor_zstd", model, base, back=1)
    coding.bases.keep(7, base.data, lambda: None)  # not the one that it names
    assembly = CodedAssembly(coding, wire, np.zeros_like(model), headers, 3, 9)
    assembly.lengths[:] = encoder.lengths
    assembly.arrived(0)
    assert "a difference from one that this host does not have" in assembly.problem


def test_a_wrong_base_does_not_pass_for_the_trainers_model():
    model, base = vector_of(8), Kept(vector_of(9))
    coding, wire, headers, encoder = coded("xor_zstd", model, base, back=1)
    coding.bases.keep(8, vector_of(10), lambda: None)
    assembly = CodedAssembly(coding, wire, np.zeros_like(model), headers, 3, 9)
    assembly.lengths[:] = encoder.lengths
    for index in range(len(headers)):
        assembly.arrived(index)
    assembly.model_checksum()
    assert "decoded to another model" in assembly.problem


def test_a_receiver_keeps_its_newest_versions_and_lets_older_ones_go():
    bases, gone = Bases(3), []
    for sequence in (0, 1, 3, 2):  # 2 is late
        bases.keep(sequence, np.zeros(1, np.uint8), lambda sequence=sequence: gone.append(sequence))
    assert gone == [0]
    assert bases.find(0) is None
    assert bases.find(1) is not None
    bases.keep(4, np.zeros(1, np.uint8), lambda: gone.append(4))
    assert gone == [0, 1]
    bases.clear()
    assert sorted(gone) == list(range(5))


def test_the_root_tells_a_version_against_the_newest_confirmed_one_and_whole_ones_after_a_refusal():
    sent, versions = SentVersions(), [Kept(np.zeros(1, np.uint8)) for _ in range(6)]
    for sequence in range(3):
        assert sent.base(sequence) is None
        sent.sent(sequence, versions[sequence])
    sent.confirmed(1)
    assert sent.base(3) == (1, versions[1])
    assert [version.kept for version in versions[:3]] == [1, 2, 2]
    sent.confirmed(0)  # late
    assert sent.base(3) == (1, versions[1])
    sent.refused(3)
    sent.sent(3, versions[3])
    sent.confirmed(2)  # left before the refusal was known
    assert sent.base(4) is None
    sent.confirmed(3)
    assert sent.base(4) == (3, versions[3])
    assert [version.kept for version in versions] == [1, 1, 1, 2, 1, 1]


@pytest.mark.parametrize(("given_size", "cut"), [(0, 4_000), (1_000, 1_000)])
def test_pieces_that_auto_has_chosen_for_the_wire_are_cut_larger_in_the_model(given_size, cut, monkeypatch):
    """Of a model that travels as a quarter of its bytes; what the user has set is in bytes of the model."""
    made = []
    root = SimpleNamespace(
        links=None,
        mailbox=SimpleNamespace(nbytes=1_000_000),
        codec=SimpleNamespace(wire_bytes=lambda first, last: 250_000),
        hosts=4,
        _config=Config(cluster=ClusterConfig(chunk_bytes=given_size)),
        plan_with=made.append,
    )
    asked = []
    choice = Choice("chain", {"chunk_bytes": 1_000})
    monkeypatch.setattr(models, "choose", lambda config, hosts, nbytes, network: asked.append(nbytes) or choice)
    ModelSender._plan(root)
    assert asked == [250_000]
    assert made == [Choice("chain", {"chunk_bytes": cut})]
