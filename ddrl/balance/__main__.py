"""A dry run: the sizes that a set of nodes would get, and whether equal ones would do.

python -m ddrl.balance --total 256 --nodes 100 100 50 25
python -m ddrl.balance --total 256 --nodes 100 50 --overhead 0.01 0.02 --memory 8e9 2e9 --model-bytes 1e9 --sample-
bytes 4e7"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from ddrl.balance.sizes import Cluster, balanced_sizes, memory_limit, model_speed, proportional_sizes
from ddrl.core.errors import ConfigError
from ddrl.core.forks import checked_output, keep_streams

WORTHWHILE = 0.05  # shorter iterations below which equal sizes are advised


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 with the reason where no sizes exist."""
    parser = argparse.ArgumentParser(prog="python -m ddrl.balance", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--total", type=int, required=True, metavar="B", help="samples of a batch")
    parser.add_argument("--nodes", type=float, nargs="+", required=True, metavar="V", help="samples/s of each node")
    parser.add_argument(
        "--parameters", type=float, metavar="P", help="of the network: --nodes are operations/s, and a sample takes 6 P"
    )
    parser.add_argument(
        "--overhead", type=float, nargs="+", metavar="A", help="s an iteration of each node (default 0)"
    )
    parser.add_argument(
        "--max-size", type=int, nargs="+", metavar="M", help="largest micro-batch of each node [samples]"
    )
    parser.add_argument(
        "--memory", type=float, nargs="+", metavar="BYTES", help="in place of --max-size, with the next two"
    )
    parser.add_argument("--model-bytes", type=float, default=0.0, help="what the model takes on each node")
    parser.add_argument("--sample-bytes", type=float, help="what each sample takes")
    options = parser.parse_args(arguments)
    try:
        print(dry_run(options))
    except ConfigError as error:
        print(f"ddrl.balance: {error}", file=sys.stderr)
        return 1
    return 0


def dry_run(options: argparse.Namespace) -> str:
    """The table as text. ConfigError for nodes that cannot share the batch."""
    nodes = len(options.nodes)
    for name in ("overhead", "max_size", "memory"):
        values = getattr(options, name)
        if values is not None and len(values) != nodes:
            raise ConfigError(f"--{name.replace('_', '-')} has {len(values)} values for {nodes} nodes")
    limit = options.max_size
    if options.memory is not None:
        if options.sample_bytes is None:
            raise ConfigError("--memory needs --sample-bytes")
        if limit is not None:
            raise ConfigError("--memory and --max-size say the same thing: give one")
        limit = memory_limit(options.memory, options.model_bytes, options.sample_bytes)
    speed = options.nodes if options.parameters is None else model_speed(options.nodes, 6.0 * options.parameters)
    cluster = Cluster.of(options.total, speed, limit)
    overhead = np.array(options.overhead or np.zeros(nodes))
    sizes = balanced_sizes(cluster.total, overhead, cluster.speed, cluster.min_size, cluster.max_size)
    equal = proportional_sizes(cluster.total, np.ones(nodes), cluster.min_size, cluster.max_size)
    seconds = overhead + sizes / cluster.speed
    equal_seconds = overhead + equal / cluster.speed
    lines = ["node  samples/s  largest  size  s        equal  s"]
    for node in range(nodes):
        lines.append(
            f"{node:<4}  {cluster.speed[node]:<9.4g}  {cluster.max_size[node]:<7}  {sizes[node]:<4}  "
            f"{seconds[node]:<7.4g}  {equal[node]:<5}  {equal_seconds[node]:.4g}"
        )
    gain = 1.0 - seconds.max() / equal_seconds.max()
    lines.append(f"iteration: {seconds.max():.4g} s, with equal sizes {equal_seconds.max():.4g} s ({gain:.0%} shorter)")
    if gain < WORTHWHILE:
        lines.append("Equal sizes are fine here: balancing would gain less than jitter costs.")
    return "\n".join(lines)


if __name__ == "__main__":
    keep_streams(patience=None)
    sys.exit(checked_output(main()))
