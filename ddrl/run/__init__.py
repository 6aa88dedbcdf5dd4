"""Wires the stages into a run: one process, local processes, or ranks under mpirun. The only package that imports
several stages."""
