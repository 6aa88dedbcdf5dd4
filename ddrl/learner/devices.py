"""Torch's devices: by the name that a setting gives, and their random states."""

from __future__ import annotations

from typing import Any

import torch

from ddrl.core.errors import ConfigError

# -- devices -----------------------------------------------------------------------------------------------------------


def resolve_device(name: str) -> torch.device:
    """The device that learner.device names; auto is cuda where there is one. ConfigError where torch lacks it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    other = torch.accelerator.current_accelerator()  # mps, xpu, or the fake one of the tests
    if device.type not in ("cpu", "cuda") and (other is None or device.type != other.type):
        raise ConfigError(f"learner.device = {name} is not a device: choose auto, cpu, cuda or cuda:N")
    count = 1 if device.type == "cpu" else torch.get_device_module(device).device_count()
    if (device.index or 0) >= count:
        raise ConfigError(
            f"learner.device = {name}: torch sees {count} {device.type.upper()} device(s) here: choose auto or cpu, "
            f"or install a torch with {device.type.upper()}"
        )
    return device


def random_states(device: torch.device) -> list[torch.Tensor]:
    """Of the processor, then of `device` where that is CUDA."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_states(states: list[torch.Tensor], device: torch.device) -> None:
    """Go on from `random_states(device)`."""
    torch.set_rng_state(states[0])
    if len(states) > 1 and device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def has_kernel(device: torch.device) -> bool:
    """Whether the C++ kernel's loops can compute in the memory of tensors there."""
    return device.type == "cpu"


# -- transfers ---------------------------------------------------------------------------------------------------------
# Memory on the host for copies to and from a device.
#
# On CUDA it is page-locked, so copies run beside the host's work until somebody waits for them (torch keeps such memory
# for the next who asks). On other devices it is ordinary memory, and a copy has ended when the call returns.


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
