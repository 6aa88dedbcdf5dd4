"""Faults put into the code, and which of them the tests notice."""
