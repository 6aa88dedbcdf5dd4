"""An ordinary torch model, trained by unequal processes with balanced micro-batches:

torchrun --standalone --nproc-per-node 2 docs/examples/microbatch_torch.py --slow-rank 1
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn

from ddrl.balance import Balancer
from ddrl.balance.collection import Epochs

parser = argparse.ArgumentParser()
parser.add_argument("--slow-rank", type=int, default=-1, help="a process that computes everything four times")
parser.add_argument("--steps", type=int, default=40)
options = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(0)  # the same model and the same order of samples everywhere
x = torch.randn(4096, 64)
y = x.square().sum(1, keepdim=True) / 64
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
# After the first optimizer: with it torch loads modules that would hold the group beyond its end, with threads that
# abort a process at its exit.
dist.init_process_group("gloo")
rank, nodes = dist.get_rank(), dist.get_world_size()
balancer = Balancer(total=512, nodes=nodes)
epochs = Epochs(len(x), seed=0)  # every sample once an epoch; every process cuts the same permutation by the same sizes
for step in range(options.steps):
    if epochs.ended:
        epochs.next_epoch()
    subsets = epochs.deal(dict(enumerate(balancer.sizes.tolist())))
    sizes = [len(subset) for subset in subsets.values()]
    samples = torch.from_numpy(subsets[rank])
    weight = sizes[rank] / sum(sizes)
    begin = time.perf_counter()
    for _ in range(4 if rank == options.slow_rank else 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[samples]), y[samples]) * weight
        loss.backward()
    seconds = torch.tensor([time.perf_counter() - begin])
    for parameter in model.parameters():  # the sum of b_i / B times each mean gradient: the whole batch's mean gradient
        dist.all_reduce(parameter.grad)
    optimizer.step()
    for node in subsets:
        epochs.done(node)
    times = [torch.empty(1) for _ in range(nodes)]
    dist.all_gather(times, seconds)
    balancer.update(torch.cat(times).numpy())  # the same times everywhere give the same sizes everywhere
    dist.all_reduce(loss)
    checksum = sum(p.detach().double().sum().item() for p in model.parameters())
    print(f"rank {rank} step {step} sizes {sizes} loss {loss.item():.6f} parameters {checksum:.9f}", flush=True)
dist.destroy_process_group()
