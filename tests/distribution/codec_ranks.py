"""Programs that tests run under mpirun with coded models: `python codec_ranks.py NAME CODEC ...`. Rank 0 prints one
JSON line of findings."""

import hashlib
import sys

import numpy as np
from ranks import RANK, SIZE, Host, report, run_all

from ddrl.channels.mailbox import checksum
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.rows import ParameterLayout
from ddrl.distribution.codecs import make_codec

LAYOUT = ParameterLayout.of(
    {
        "hidden": ((700, 90), "float32"),
        "bias": ((90,), "float32"),
        "count": ((3,), "int64"),
        "out": ((90, 7), "float32"),
    }
)


def model(version):
    """Parameters that move a little from version to version, as an optimizer moves them."""
    vector = np.zeros(LAYOUT.nbytes, np.uint8)
    for place, (name, view) in enumerate(LAYOUT.views(vector).items()):
        start, steps = np.random.default_rng(place), np.random.default_rng(100 + place)
        if name == "count":
            view[:] = (version, 1 << 40, -1)
            continue
        view[...] = start.standard_normal(view.shape) * 0.05
        for _ in range(version):
            view += (steps.standard_normal(view.shape) * 1e-5).astype(np.float32)
    return vector


def acted_on(codec, version):
    """What hosts other than the trainer's should hold."""
    vector, coder = model(version), make_codec(Config(cluster=ClusterConfig(codec=codec)), LAYOUT)
    if coder.lossless:
        return vector
    wire, out = np.zeros(coder.wire_bytes(0, LAYOUT.nbytes), np.uint8), np.zeros(LAYOUT.nbytes, np.uint8)
    coder.encode(wire, vector, None, 0, LAYOUT.nbytes)
    coder.decode(out, wire, None, 0, LAYOUT.nbytes)
    return out


def digest(data):
    return hashlib.sha256(data).hexdigest()


class CodedHost(Host):
    """A host whose models have `LAYOUT`; notes the digest of every version that its rollouts would see."""

    def __init__(self, codec, scheme, versions_in_flight):
        config = ClusterConfig(scheme=scheme, chunk_bytes=8192, versions_in_flight=versions_in_flight, codec=codec)
        super().__init__(LAYOUT.nbytes, config, local={"layout": LAYOUT})
        self.seen, self.published = {}, -1

    def publish_next(self):
        self.published += 1
        self.mailbox.publish(model(self.published), self.published)

    def turn(self):
        self.relay.progress()
        pin = self.reader.pin()
        if pin is not None and pin.version not in self.seen:
            assert checksum(pin.data) == pin.checksum
            self.seen[pin.version] = digest(pin.data)

    def findings(self, codec, **more):
        row = self.counters.row(0)
        wanted = {version: digest(acted_on(codec, version) if RANK else model(version)) for version in self.seen}
        return {
            "seen": sorted(self.seen),
            "wrong": [version for version in self.seen if self.seen[version] != wanted[version]],
            "sent": row["model_bytes_sent"].value,
            "received": row["model_bytes_received"].value,
            "sealed": row["versions_sealed"].value,
            "refused": row["checksum_failures"].value,
            "problems": self.problems(),
            "model": LAYOUT.nbytes,
            "wire": self.relay.models.executor._packing._edges[-1],
            "chunks": self.relay.models.executor.plan.chunks,
            **more,
        }


def models():
    """Each version is published once the last has left, so that several travel at once; all hosts say what they saw."""
    codec, scheme, in_flight, versions = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
    host = CodedHost(codec, scheme, in_flight)
    while not host.relay.finished:
        host.turn()
        if RANK == 0:
            if host.published < versions - 1 and host.relay.models.sent_version == host.published:
                host.publish_next()
            elif host.relay.models.sent_version == versions - 1 and host.relay.models.settled:
                host.stop()
    report(**host.findings(codec))


def lost():
    """Host 2 loses what it holds after 5 versions: it refuses the next, everybody gets a whole one, then differences go
    on."""
    host, versions = CodedHost("xor_zstd", "chain", 2), 12
    forgotten, sizes = False, []
    while not host.relay.finished:
        host.turn()
        executor = host.relay.models.executor
        if RANK == 2 and not forgotten and len(host.seen) >= 5 and executor is not None:
            executor._coding.bases.clear()
            forgotten = True
        if RANK == 0 and host.relay.models.settled:
            sizes.append(executor.traffic.bytes_sent)
            if (
                host.published < versions - 1
                and host.relay.models.sent_version == host.published
                and not host.relay.models._refused
            ):
                host.publish_next()
            elif (
                host.published == versions - 1
                and host.relay.models.sent_version == host.published
                and not host.relay.models._refused
            ):
                host.stop()
    report(**host.findings("xor_zstd", steps=np.diff(sorted({0, *sizes})).tolist()))


def flipped():
    """A byte of the coded form flips on the root after its checksum was taken."""
    codec = sys.argv[2]
    host = CodedHost(codec, "chain", 1)
    ill = {"left": 1}
    if RANK == 0:
        host.publish_next()
    while not host.relay.finished:
        executor = host.relay.models.executor
        if RANK == 0 and executor is not None and not hasattr(executor, "spoiled"):
            executor.spoiled, inner = True, executor._packing.datatype

            def datatype(flight, message, inner=inner, executor=executor):
                if ill["left"] and executor._packing.first[message] == 2:
                    ill["left"] = 0
                    flight.data[executor._coding.edges[2] + 100] ^= 1
                return inner(flight, message)

            executor._packing.datatype = datatype
        host.turn()
        if RANK == 0 and host.relay.models.settled and len(host.relay.models.confirms) == 2 * (SIZE - 1):
            host.stop()
    report(**host.findings(codec))


if __name__ == "__main__":
    run_all({"models": models, "lost": lost, "flipped": flipped})
