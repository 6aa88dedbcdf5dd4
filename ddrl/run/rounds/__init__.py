"""Rounds: the collectors of a training come for each round and go after it; the trainer learns from what they sent."""
