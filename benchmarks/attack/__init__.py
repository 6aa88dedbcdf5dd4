"""Attacks on whole runs: signals, starts and stops, messages that are none."""
