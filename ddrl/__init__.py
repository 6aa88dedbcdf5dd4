"""ddrl: distributed deep reinforcement learning, one trainer and hundreds of rollouts.

The package's top imports nothing heavy: a rollout process never loads torch. See docs/architecture.md.
"""

__version__ = "0.1.0"
