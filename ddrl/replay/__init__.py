"""Experience replay: episodes kept in a C++ store, drawn by pluggable selectors, and the rate at which they may be
drawn."""

from ddrl.replay.batches import Sequences, Transitions, Windows
from ddrl.replay.experience import ExperienceReplay
from ddrl.replay.rate_limiter import RateLimiter

__all__ = ["ExperienceReplay", "RateLimiter", "Sequences", "Transitions", "Windows"]
