"""Plans: who sends which piece of a model to whom, what that costs, and which one to use. Pure; no MPI."""
