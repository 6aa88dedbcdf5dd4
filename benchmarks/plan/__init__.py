"""Predictions beside measurements: `python -m benchmarks.plan`."""
