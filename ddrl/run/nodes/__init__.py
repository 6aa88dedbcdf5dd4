"""Data-parallel learning: the trainer leads, gradient nodes compute parts of its batches; they speak MPI."""
