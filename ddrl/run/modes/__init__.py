"""How a run is started: in one process, as local processes, or as ranks of mpirun. Each mode drives the same task."""
