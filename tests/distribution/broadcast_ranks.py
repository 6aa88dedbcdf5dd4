"""Programs that tests run under mpirun: `python broadcast_ranks.py NAME ...`, and further ones after `,`, one after
another. For each rank 0 prints one JSON line of findings, one a rank."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mpi4py
import numpy as np

if sys.argv[1] == "level":
    mpi4py.rc.thread_level = sys.argv[2]
from mpi4py import MPI

from ddrl.core.errors import DdrlError
from ddrl.distribution import broadcast, join, subscribe
from tests.sources import check_sources
from tests.waiting import PATIENCE, wait_until

check_sources()
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size


def tensors(version=0):
    """Of several types and shapes, a scalar among them; each version has other bits."""
    bits = np.random.default_rng(version)
    return {
        "weight": bits.normal(size=(130, 77)).astype(np.float32),
        "steps": np.array(version, np.int64),
        "mask": bits.integers(0, 2, 33).astype(bool),
    }


def same(some, version):
    return all(np.array_equal(some[name], array) for name, array in tensors(version).items())


def report(finding):
    everyone = WORLD.gather(finding)
    if RANK == 0:
        print(json.dumps(everyone), flush=True)


def segments(name):
    return sorted(path.name for path in Path("/dev/shm").glob(f"ddrl-{name.partition('-h')[0]}-*"))


def versions():
    """Rank `root` publishes versions; every other rank loads each that it sees, and the last."""
    root, relays, scheme, count = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5])
    seen, wrong = [], 0
    own = tensors()
    settings = {"tree": {"fanout": 1}, "chunk_bytes": 4096 if scheme == "chain" else 0}
    with join(WORLD, own if root == RANK else None, root=root, relays=relays, scheme=scheme, **settings) as feed:
        if root == RANK:
            for version in range(count):
                feed.publish(tensors(version), version)
        else:
            version = -1
            while (version := feed.load(own, version)) is not None:
                seen.append(version)
                wrong += not same(own, version)
        left = segments(feed.name)
    report({"seen": seen, "wrong": wrong, "left": left})


def pinned():
    """The last rank pins the first version while many more come, which the others load; then it reads the newest."""
    changed = 0
    with join(WORLD, tensors(), relays=2, versions_in_flight=1, pins=int(sys.argv[2])) as feed:
        if RANK == 0:
            feed.publish(tensors(0), 0)
            WORLD.Barrier()
            for version in range(1, 30):
                feed.publish(tensors(version), version)
        elif RANK == SIZE - 1:
            with feed.pin() as pin:
                WORLD.Barrier()
                feed.wait(20)
                changed = not same(pin.arrays, 0) or pin.version or pin.arrays["mask"].flags.writeable
        else:
            feed.wait()
            WORLD.Barrier()
        feed.wait(28)
        with feed.pin() as pin:
            last = pin.version if same(pin.arrays, pin.version) else -1
    report({"changed": bool(changed), "last": last})


def crowded():
    """Readers of the root's host pin each another version, until no slot is left: the next one waits for a pin to end,
    and where none does, publishing ends with an error; one rank."""
    published, pins = [], []
    with join(WORLD, tensors(), versions_in_flight=1, pins=0, readers=9, limit=0.5) as feed:
        for place in range(9):
            published.append(refusal(lambda version=place: feed.publish(tensors(version), version)))
            if published[-1] != "accepted":
                break
            pins.append(subscribe(feed.name, place).pin())
            held = pins[-1].__enter__()
            assert held.version == place
            pins[-1].arrays = held.arrays
        whole = [bool(same(pin.arrays, version)) for version, pin in enumerate(pins)]
        pins[1].__exit__(None, None, None)
        again = refusal(lambda: feed.publish(tensors(99), 99))
        feed.limit = 600.0
        broadcast.LOOK_PERIOD = 600.0  # what waits is woken
        threading.Timer(0.2, pins[2].__exit__, (None, None, None)).start()
        woken = refusal(lambda: feed.publish(tensors(100), 100))
        broadcast.LOOK_PERIOD = 0.5
    report({"published": published, "whole": whole, "again": again, "woken": woken})


def crowded_elsewhere():
    """Readers of another host pin one version each: the next one waits there for a pin to end, which fails nothing."""
    pins = []
    with join(WORLD, tensors(), relays=2, versions_in_flight=1, pins=0, readers=9) as feed:
        for version in range(7):
            if RANK == 0:
                feed.publish(tensors(version), version)
            if RANK == SIZE - 1 and version < 6:
                feed.wait(version - 1)
                pins.append(subscribe(feed.name, version).pin())
                pins[-1].held = pins[-1].__enter__()
            WORLD.Barrier()
        waited = refusal(lambda: feed.wait(5, limit=0.5))
        whole = [bool(same(pin.held.arrays, version)) for version, pin in enumerate(pins)]
        for pin in pins[:1]:
            pin.__exit__(None, None, None)
        newest = feed.wait(5)
    report([waited, whole, newest])


def late():
    """Every version is published before anyone reads; then all ranks, and a process of each host that MPI does not
    know, get the newest at once."""
    finding = {}
    with join(WORLD, tensors(), relays=2, readers=2) as feed:
        if RANK == 0:
            for version in range(5):
                feed.publish(tensors(version), version)
        feed.wait(3)
        WORLD.Barrier()
        own = tensors(99)
        finding["version"] = feed.load(own, limit=0.0)
        finding["same"] = bool(same(own, 4))
        words = [sys.executable, __file__, "outside", feed.name]
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMIX", "PRTE"))}
        if RANK != 1:
            done = subprocess.run([*words, str(RANK % 2)], capture_output=True, text=True, env=outside)
            finding["outside"] = done.stdout.split() or done.stderr
        WORLD.Barrier()
    finding["left"] = segments(feed.name)
    report(finding)


def outside():
    """A process that is no rank."""
    own = tensors(99)
    with subscribe(sys.argv[2], int(sys.argv[3])) as feed:
        version = feed.load(own, limit=0.0)
        with feed.pin() as pin:
            print(version, same(own, version), pin.version)


def level():
    """MPI lets fewer threads call it than relays need."""
    report(refusal(lambda: join(WORLD, tensors())))


def refusal(call):
    """The words of its error."""
    try:
        call()
    except DdrlError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusals():
    """What cannot be joined, published, read or subscribed to; one rank."""
    found = {
        "nothing": refusal(lambda: join(WORLD)),
        "objects": refusal(lambda: join(WORLD, {"o": np.array([None])})),
        "scheme": refusal(lambda: join(WORLD, tensors(), scheme="nonsense")),
        "setting": refusal(lambda: join(WORLD, tensors(), schema="tree")),
        "closed loop": refusal(lambda: join(WORLD, tensors(), closed_loop=True)),
        "name": refusal(lambda: subscribe("../../etc")),
        "gone": refusal(lambda: subscribe("0123abcd-h0")),
    }
    feed = join(WORLD, tensors(), readers=1)
    found |= {
        "timeout": refusal(lambda: feed.wait(limit=0.01)),
        "size": refusal(lambda: feed.publish({**tensors(), "mask": np.zeros(34, bool)}, 0)),
        "dtype": refusal(lambda: feed.publish({**tensors(), "weight": tensors()["weight"].astype(float)}, 0)),
        "missing": refusal(lambda: feed.publish({"weight": tensors()["weight"]}, 0)),
        "further": refusal(lambda: feed.publish({**tensors(), "bias": np.zeros(1)}, 0)),
        "list": refusal(lambda: feed.publish(list(tensors().values()), 0)),
        "negative": refusal(lambda: feed.publish(tensors(), -1)),
    }
    feed.publish(tensors(5), 5)
    with feed.pin():
        found["nested"] = refusal(lambda: feed.pin().__enter__())
    found |= {
        "same version": refusal(lambda: feed.publish(tensors(), 5)),
        "older": refusal(lambda: feed.publish(tensors(), 4)),
        "load": refusal(lambda: feed.load({"weight": np.zeros(3)})),
        "place": refusal(lambda: subscribe(feed.name, 1)),
        "taken": refusal(lambda: [subscribe(feed.name), subprocess_of(feed.name)]),
    }
    feed.close()
    feed.close()
    found |= {
        "closed publish": refusal(lambda: feed.publish(tensors(), 6)),
        "closed wait": refusal(lambda: feed.wait()),
        "closed pin": refusal(lambda: feed.pin().__enter__()),
    }
    report(found)


def subprocess_of(name):
    """A second process at a place that is taken."""
    words = [sys.executable, __file__, "outside", name, "0"]
    done = subprocess.run(words, capture_output=True, text=True)
    raise DdrlError(done.stderr.strip().splitlines()[-1])


def elsewhere():
    """Rank 1 publishes, which is not its part; the root has a setting that cannot be, and the others hear of it."""
    refused = refusal(lambda: join(WORLD, tensors() if RANK == 0 else None, relays=2, shards=7))
    with join(WORLD, tensors() if RANK == 0 else None, relays=2) as feed:
        published = refusal(lambda: feed.publish(tensors(), 0)) if RANK else ""
    report([refused, published])


def failing():
    """A rank fails in the middle, as `how` says: raises, ends without a word, or is killed."""
    victim, how, readers = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    feed = join(WORLD, tensors() if RANK == 0 else None, relays=2, readers=readers, limit=PATIENCE)
    print("joined", feed.name, flush=True)
    if how == "forgotten":
        if victim == RANK:
            sys.exit(3)
        go_on(feed, victim, how)
    else:
        with feed:
            go_on(feed, victim, how)


def go_on(feed, victim, how):
    version = 0
    while True:
        if RANK == 0:
            feed.publish(tensors(version), version)
            time.sleep(0.01)
        else:
            feed.wait(version - 1)
        version += 1
        if victim == RANK and version == 5:
            if how == "raises":
                raise RuntimeError("injected here")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)


def unclosed():
    """The last rank, which relays, closes; the root does not come to it within that rank's limit."""
    feed = join(WORLD, tensors(), relays=2, limit=PATIENCE)
    if RANK == SIZE - 1:
        feed.limit = 0.5
    else:
        wait_until(lambda: failed(feed), "this rank hears nothing")
    report(refusal(feed.close))


def failed(feed):
    return refusal(lambda: feed.wait(limit=0.0)).startswith("JobFailed")


if __name__ == "__main__":
    for name, *arguments in map(str.split, " ".join(sys.argv[1:]).split(" , ")):
        sys.argv[1:] = [name, *arguments]
        globals()[name]()
