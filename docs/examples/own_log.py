"""Your own past as a log of ad mixing: two days of requests in plain arrays become LOG/monday and LOG/tuesday.

python docs/examples/own_log.py LOG
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REGIONS, AGES, WINDOWS = 3, 2, 24
generator = np.random.default_rng(0)


def contract(ad_id, demand, penalty, regions):
    """One contract: what was sold, to whom, and what a missing impression costs; counted at 90 % in the past."""
    return {"ad_id": ad_id, "demand": demand, "penalty": penalty, "cap": 2 * demand, "regions": regions,
            "genders": [0, 1], "ages": [0, 1], "billed_rate": 0.9}  # fmt: skip


CONTRACTS = [contract(1, 300, 0.004, [0, 1, 2]), contract(2, 150, 0.006, [1]), contract(3, 400, 0.003, [0, 2])]


def write(folder: Path, count: int) -> None:
    """One day. In place of these made-up arrays, read yours: each row of track_log is a request with its whole queue,
    each row of joined_exposure is what was shown for it."""
    folder.mkdir(parents=True)
    record = {"version": 1, "windows": WINDOWS, "regions": REGIONS, "ages": AGES, "click_value": 0.1,
              "contracts": CONTRACTS}  # fmt: skip
    (folder / "contracts.json").write_text(json.dumps(record))
    region, age = generator.integers(REGIONS, size=count), generator.integers(AGES, size=count)
    queues = [[one for one in CONTRACTS if place in one["regions"]] for place in region]
    bids = generator.lognormal(0.7, 0.6, (count, 5))
    track = {
        "request_id": pa.array(np.arange(count)),
        "time": pa.array(np.sort(generator.random(count))),
        "region": pa.array(region, pa.int32()),
        "gender": pa.array(generator.integers(2, size=count), pa.int32()),
        "age": pa.array(age, pa.int32()),
        "slot": pa.array(np.ones(count, np.int64)),
        "ad": pa.array([[*(one["ad_id"] for one in queue), *range(9001, 9006)] for queue in queues]),
        "kind": pa.array([[0] * len(queue) + [1] * 5 for queue in queues], pa.list_(pa.int8())),
        "ecpm": pa.array([[0.0] * len(queue) + own.tolist() for queue, own in zip(queues, bids, strict=True)],
                         pa.list_(pa.float32())),
        "ctr": pa.array([[0.02] * (len(queue) + 5) for queue in queues], pa.list_(pa.float32())),
        "filters": pa.array([[0] * (len(queue) + 5) for queue in queues], pa.list_(pa.int32())),
    }  # fmt: skip
    exposure = {  # here the first bid was always shown, and counted
        "request_id": track["request_id"],
        "ad": pa.array(np.full(count, 9001)),
        "kind": pa.array(np.ones(count), pa.int8()),
        "ecpm": pa.array(bids[:, 0], pa.float32()),
        "billed": pa.array(np.ones(count, bool)),
    }
    for name, columns in (("track_log", track), ("joined_exposure", exposure)):
        table = pa.table(columns).replace_schema_metadata({"ddrl.admix": f"{name}/1"})
        pq.write_table(table, folder / f"{name}.parquet")


write(Path(sys.argv[1]) / "monday", 2000)
write(Path(sys.argv[1]) / "tuesday", 2000)
