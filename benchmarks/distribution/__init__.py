"""Models on their way between hosts and inside one: `python -m benchmarks.distribution`; `cluster` emulates hosts."""
