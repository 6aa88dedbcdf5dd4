"""TorchRL's weight sync over shared memory: `PYTHON_OF_THE_PEER torchrl_weights.py NBYTES READERS MODELS`; one JSON
line of seconds.

SharedMemWeightSyncScheme(sync=True): the sender copies into memory that all workers share, and each worker's background
thread loads its own module's parameters from it and acknowledges. Workers are forked, so torch is imported once."""

import json
import multiprocessing
import sys
import time
from pathlib import Path

import torch
from tensordict import TensorDict
from torchrl.weight_update import SharedMemWeightSyncScheme


def kib(pid: int, field: str) -> int:
    return sum(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith(field)
    )


def work(scheme, index, nbytes, ready, stop):
    torch.set_num_threads(1)
    model = torch.nn.Linear(nbytes // 4000, 1000, bias=False)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    ready.release()
    scheme.connect(worker_idx=index)
    ready.release()
    stop.wait()


def main() -> None:
    nbytes, readers, models = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    source = torch.nn.Linear(nbytes // 4000, 1000, bias=False)
    scheme = SharedMemWeightSyncScheme(strategy="tensordict", sync=True)
    scheme.init_on_sender(
        model_id="policy", weights=TensorDict.from_module(source), devices=[torch.device("cpu")] * readers, ctx=context
    )
    ready = context.Semaphore(0)
    stop = context.Event()
    workers = [
        context.Process(target=work, args=(scheme, index, nbytes, ready, stop), daemon=True) for index in range(readers)
    ]
    for worker in workers:
        worker.start()
    for _ in workers:
        ready.acquire()
    scheme.connect()
    for _ in workers:
        ready.acquire()
    fresh = TensorDict.from_module(source).data.clone()
    copy = torch.empty_like(source.weight.data)
    seconds = []
    memcpy = []
    for version in range(models + 2):
        fresh["weight"].fill_(float(version))
        begun = time.perf_counter()
        copy.copy_(fresh["weight"])
        copied = time.perf_counter()
        scheme.send(weights=fresh)
        ended = time.perf_counter()
        if version >= 2:
            memcpy.append(copied - begun)
            seconds.append(ended - copied)
    pss = [kib(worker.pid, "Pss:") for worker in workers]
    private = [kib(worker.pid, "Private") for worker in workers]
    print(
        json.dumps(
            {"last_reader": seconds, "publish": seconds, "memcpy": memcpy, "pss_kib": pss, "private_kib": private}
        ),
        flush=True,
    )
    stop.set()
    for worker in workers:
        worker.terminate()


if __name__ == "__main__":
    main()
