"""The same updates by torch DistributedDataParallel (gloo, equal split); rank 0 prints seconds an update.

python -m benchmarks.microbatch.ddp_ranks RANK OPTIONS; started by `real`, one process a node."""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.microbatch.work import SPEC, batch_of, config_of
from ddrl.learner import Learner
from ddrl.pool.slots import CpuController, QuotaGroup


def main() -> None:
    rank, options = int(sys.argv[1]), json.loads(sys.argv[2])
    shares, iterations = options["shares"], options["iterations"]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options["port"])}
    config = config_of(options["rows"], options["hidden"])
    network = Learner.of(config, SPEC).parts["value"].module
    target = Learner.of(config, SPEC).parts["value"].module.requires_grad_(False)
    adam = torch.optim.Adam(network.parameters(), lr=1e-3)
    # After the first optimizer: what torch loads with it would hold the group, and its threads, beyond its end.
    dist.init_process_group("gloo", rank=rank, world_size=len(shares))
    model = DistributedDataParallel(network)
    batch = batch_of(SPEC, options["rows"] // len(shares), rank)
    s_tm1, a_tm1, r_t, _, s_t, _ = (torch.from_numpy(array) for array in batch)
    controller = CpuController.find()
    assert controller is not None
    group = QuotaGroup(controller, f"ddrl-ddp-{options['port']}-{rank}", shares[rank])
    group.enter()
    dist.barrier()
    seconds: list[float] = []
    for _ in range(iterations):
        begin = time.perf_counter()
        with torch.no_grad():
            goal = r_t + target(s_t).amax(1)
        value = model(s_tm1).gather(1, a_tm1.unsqueeze(1)).squeeze(1)
        adam.zero_grad()
        nn.functional.huber_loss(value, goal).backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        adam.step()
        seconds.append(time.perf_counter() - begin)
    dist.barrier()
    if rank == 0:
        print(json.dumps(seconds[3:]), flush=True)
    dist.destroy_process_group()
    group.leave()
    group.remove()


if __name__ == "__main__":
    main()
