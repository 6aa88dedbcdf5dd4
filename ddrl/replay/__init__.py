"""Experience replay: episodes kept in a C++ store, drawn by pluggable selectors, and the rate at which they may be
drawn."""

from ddrl.replay.batches import Sequences, Transitions, Windows
from ddrl.replay.replay import ExperienceReplay
from ddrl.replay.sources import RateLimiter

__all__ = ["ExperienceReplay", "RateLimiter", "Sequences", "Transitions", "Windows"]
