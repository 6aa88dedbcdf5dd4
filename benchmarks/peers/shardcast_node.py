"""A node of shardcast on one host, under an interpreter that has shardcast, with a /tmp of its own (shardcast keeps
files there under fixed names, and one beside its sources: so they are copied):
`python shardcast_node.py origin|middle|leaf|late UPSTREAM POLL SHARD_BYTES DOWNLOADS`.

It prints "up", then a line for each version: of the origin the time at which it began to publish, of others that at
which they had the whole of it, verified [s, CLOCK_MONOTONIC]. The origin publishes as many bytes as a line on its input
says, another node ends with its input. A late node times one download, from nothing [s]."""

import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

role, upstream = sys.argv[1:3]
poll = float(sys.argv[3])
shard_bytes = int(sys.argv[4])
PORT = 8000
folder = Path(tempfile.mkdtemp())
shutil.copytree(Path(importlib.util.find_spec("shardcast").origin).parent, folder / "sources" / "shardcast")
sys.path.insert(0, str(folder / "sources"))
os.environ |= {"SHARDCAST_LOG_LEVEL": "ERROR", "SHARDCAST_RETRY_ATTEMPTS": "100000"}
os.environ |= {"SHARDCAST_FAST_RETRY_ATTEMPTS": "100000", "SHARDCAST_MAX_DISTRIBUTION_FOLDERS": "2"}
os.environ["SHARDCAST_MAX_CONCURRENT_DOWNLOADS"] = sys.argv[5]

from shardcast import ClientNode, MiddleNode, OriginServer, client  # noqa: E402
from shardcast.utils import parse_distribution_file  # noqa: E402

logging.disable(logging.CRITICAL)
client.SHARDCAST_FAST_RETRY_INTERVAL = poll  # its variable takes whole seconds alone, 2 of them by default
data = folder / "data"
data.mkdir()
(data / "data1.bin").write_bytes(b"x" * 1000)  # what a node asks its upstream for first


def say(what):
    print(what, flush=True)


def origin():
    server = OriginServer(str(data), PORT, 2)
    say("up")
    for line in sys.stdin:
        path = folder / "model"
        path.write_bytes(os.urandom(int(line)))
        begun = time.monotonic()
        server.broadcast(str(path), shard_bytes)
        say(begun)


def middle():
    """Its files are the shards: it serves them, and here they are put together and verified as a client does."""
    import blake3

    node = MiddleNode([upstream], str(data), PORT, poll)
    say("up")
    seen = set()
    while True:
        for version in sorted(node.processed_versions - seen):
            seen.add(version)
            whole = b"".join(path.read_bytes() for path in sorted((data / version).glob("shard_*.bin")))
            wanted = parse_distribution_file(str(data / "distribution.txt"))[version].partition("|")[0]
            assert blake3.blake3(whole).hexdigest() == wanted
            say(time.monotonic())
        time.sleep(1e-3)


def leaf():
    node = ClientNode([upstream], str(folder / "downloads"))
    say("up")
    seen = set()
    while True:
        for version in sorted(set(node.list_available_versions()) - seen):
            seen.add(version)
            assert node.download_version(version) is not None
            say(time.monotonic())
            shutil.rmtree(folder / "downloads")
        time.sleep(poll)


def late():
    say("up")
    sys.stdin.readline()
    begun = time.monotonic()
    node = ClientNode([upstream], str(folder / "downloads"))
    newest = max(node.list_available_versions(), key=lambda version: int(version[1:]))
    assert node.download_version(newest) is not None
    say(time.monotonic() - begun)


if role != "origin" and role != "late":
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
{"origin": origin, "middle": middle, "leaf": leaf, "late": late}[role]()
