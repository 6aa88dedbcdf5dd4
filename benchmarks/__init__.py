"""Benchmarks: every one is `python -m benchmarks.NAME [--short] [--json FILE]` and saves benchmarks/results/NAME.json
by default."""
