"""Algorithms: each file holds the class of its name (`core.plugins`), which is all that the library knows of it
(`ddrl.learner.algorithm.Algorithm`). Torch is imported inside functions only."""
