"""Memory on the host for copies to and from a device.

On CUDA it is page-locked, so copies run beside the host's work until somebody waits for them (torch keeps such memory
for the next who asks). On other devices it is ordinary memory, and a copy has ended when the call returns."""

from __future__ import annotations

from typing import Any

import torch


def host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on the host, for copies to and from `device`; its contents are arbitrary."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def mark(device: torch.device) -> Any:
    """An event behind all copies begun so far; None where copies have ended when they return."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for(device: torch.device) -> None:
    """Return when all copies begun so far have ended."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def move(vectors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Copies of `vectors` (uint8 [n] each) on `device`: they run behind each other, and one wait ends them all. What
    comes to the host is page-locked there, so that the way back to the device is as fast.

    Raises torch.OutOfMemoryError with nothing changed."""
    fresh = [
        host_memory(len(vector), vector.device) if device.type == "cpu" else torch.empty_like(vector, device=device)
        for vector in vectors
    ]
    for to, of in zip(fresh, vectors, strict=True):
        to.copy_(of, non_blocking=True)
    for place in {device, *(vector.device for vector in vectors)}:
        wait_for(place)
    return fresh
