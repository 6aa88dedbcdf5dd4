"""The recorder, reading, and the dashboard, fed by a cluster that only exists as counters."""
