"""Serving beside the bare paths: `python -m benchmarks.serve`."""
