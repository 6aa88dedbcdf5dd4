"""Torch's devices: by the name that a setting gives, and their random states."""

from __future__ import annotations

import torch

from ddrl.core.errors import ConfigError


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
