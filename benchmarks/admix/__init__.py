"""Ad mixing on generated days: `python -m benchmarks.admix`."""
