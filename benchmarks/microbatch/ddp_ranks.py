"""The same updates by torch DistributedDataParallel (gloo, equal split); rank 0 prints seconds an update, with `loss`
among the options those until the loss of the whole batch is as small.

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

from benchmarks.microbatch.work import SPEC, batch_of, config_of, lessons_of
from ddrl.learner import Learner
from ddrl.pool.devices import CpuController, QuotaGroup


def main() -> None:
    rank = int(sys.argv[1])
    options = json.loads(sys.argv[2])
    shares = options["shares"]
    iterations = options["iterations"]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(options["port"])}
    config = config_of(options["rows"], options["hidden"])
    network = Learner.of(config, SPEC).parts["value"].module
    target = Learner.of(config, SPEC).parts["value"].module.requires_grad_(False)
    adam = torch.optim.Adam(network.parameters(), lr=config.learner.lr)
    # After the first optimizer: what torch loads with it would hold the group, and its threads, beyond its end.
    dist.init_process_group("gloo", rank=rank, world_size=len(shares))
    model = DistributedDataParallel(network)
    part = options["rows"] // len(shares)
    wanted = options.get("loss")
    if wanted is None:
        batches = [batch_of(SPEC, part, rank)]
    else:
        mine = slice(rank * part, (rank + 1) * part)
        batches = [type(one)(*(array[mine] for array in one)) for one in lessons_of(SPEC, options["rows"])]
    tensors = [[torch.from_numpy(array) for array in batch] for batch in batches]
    controller = CpuController.find()
    assert controller is not None
    group = QuotaGroup(controller, f"ddrl-ddp-{options['port']}-{rank}", shares[rank])
    group.enter()
    dist.barrier()
    seconds: list[float] = []
    for update in range(1, iterations + 1):
        begin = time.perf_counter()
        s_tm1, a_tm1, r_t, discount_t, s_t, _ = tensors[update % len(tensors)]
        with torch.no_grad():
            goal = r_t + discount_t * target(s_t).amax(1)
        value = model(s_tm1).gather(1, a_tm1.unsqueeze(1)).squeeze(1)
        adam.zero_grad()
        loss = nn.functional.huber_loss(value, goal)
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 10.0)
        adam.step()
        if wanted is not None:
            dist.all_reduce(mean := loss.detach() / len(shares))
        seconds.append(time.perf_counter() - begin)
        if wanted is not None and float(mean) <= wanted:
            break
    dist.barrier()
    if rank == 0:
        print(json.dumps(seconds[3:] if wanted is None else seconds), flush=True)
    dist.destroy_process_group()
    group.leave()
    group.remove()


if __name__ == "__main__":
    main()
