"""Replay buffers beside the bare copies and other libraries: `python -m benchmarks.replay`."""
