"""Whole runs that learn, and single updates."""
