"""A pool's tasks: the plan checked before the start, the process of each task, and the devices lent to it."""
