"""Serving an ad-mixing policy: a feature server and a mixer, in Python (`Mixer`) and over HTTP (python -m ddrl.serve).

It acts through `ddrl.acting`, knows no torch, and is given its contracts by `ddrl.run.serving`. docs/serving.md."""

from ddrl.serve.book import Book
from ddrl.serve.messages import Billing, Control, Decision, DisplayRequest
from ddrl.serve.mixer import Mixer
from ddrl.serve.served_policy import ServedPolicy

__all__ = ["Billing", "Book", "Control", "Decision", "DisplayRequest", "Mixer", "ServedPolicy"]
