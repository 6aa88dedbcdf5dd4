"""A pool of devices on traces: `python -m benchmarks.pool`."""
