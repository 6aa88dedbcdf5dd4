"""A torch trainer on rank 0, and ranks that act with its newest network, without ddrl.run:

mpirun -n 4 python docs/examples/broadcast.py
"""

import argparse

import torch
from mpi4py import MPI
from torch import nn

from ddrl.distribution import join

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()
comm = MPI.COMM_WORLD
torch.set_num_threads(1)
torch.manual_seed(comm.rank)
network = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
weights = network.state_dict()  # tensors that share the network's memory: what is loaded into them is acted with
with join(comm, weights) as feed:
    if comm.rank == 0:
        optimizer = torch.optim.Adam(network.parameters(), 1e-3)
        for step in range(options.steps):
            states = torch.randn(256, 4)
            best = (states.sum(1) > 0).long()
            loss = nn.functional.cross_entropy(network(states), best)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 9:
                feed.publish(weights, version=step // 10)
    else:
        version = feed.load(weights)  # waits for the first one
        while version is not None:  # None: the trainer has closed
            with torch.no_grad():
                states = torch.randn(1000, 4)
                right = (network(states).argmax(1) == (states.sum(1) > 0)).float().mean().item()
            last = version
            version = feed.load(weights, newer_than=last)
        print(f"rank {comm.rank} acted with version {last} last, {right:.0%} right", flush=True)
