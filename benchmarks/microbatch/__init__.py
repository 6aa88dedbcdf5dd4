"""Micro-batch sizers on simulated clusters: `python -m benchmarks.microbatch`; `--train` trains the shipped agent."""
