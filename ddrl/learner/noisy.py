"""Noisy layers: parameters with a learned scale of noise, which explores in place of epsilon (Fortunato et al. 2018).

Noise is an input of the network, so that rollouts draw it without torch and an update is a function of its inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import linear


class NoisyLinear(nn.Linear):
    """y = (W + S * f(e_out) f(e_in)^T) x + b + s * f(e_out), f(x) = sign(x) sqrt|x| (factorized noise, eq. 10 and 11);
    without noise y = W x + b.

    Factorized noise needs no matrix of its own for each row: y = W x + b + f(e_out) * (S (f(e_in) * x) + s)."""

    def __init__(self, width_in: int, width_out: int, sigma: float) -> None:
        super().__init__(width_in, width_out)  # W and b are drawn as in the paper's section 3.2
        scale = sigma / width_in**0.5
        self.weight_sigma = nn.Parameter(torch.full((width_out, width_in), scale))
        self.bias_sigma = nn.Parameter(torch.full((width_out,), scale))
        self.noise: torch.Tensor | None = None  # [B or 1, width_in + width_out], set for one forward pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[B, width_out] from [B, width_in]."""
        mean = super().forward(input)
        if self.noise is None:
            return mean
        noise = self.noise.sign() * self.noise.abs().sqrt()
        of_input, of_output = noise.split([self.in_features, self.out_features], dim=1)
        return mean + of_output * linear(input * of_input, self.weight_sigma, self.bias_sigma)


class NoisyNetwork(nn.Module):
    """A network whose linear layers are noisy: (observation [B, ...], noise [B or 1, self.noise]) -> what it gives;
    without noise it computes with the means."""

    def __init__(self, network: nn.Module, sigma: float) -> None:
        super().__init__()
        self.network = network
        for parent in list(network.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear and "bias" in dict(child.named_parameters()):
                    setattr(parent, name, NoisyLinear(child.in_features, child.out_features, sigma))
        self.layers = [layer for layer in network.modules() if isinstance(layer, NoisyLinear)]
        self.noise = sum(layer.in_features + layer.out_features for layer in self.layers)  # numbers of one draw

    def forward(self, observation: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
        """See the class."""
        if noise is None:
            return self.network(observation)
        pieces = noise.split([layer.in_features + layer.out_features for layer in self.layers], dim=1)
        for layer, piece in zip(self.layers, pieces, strict=True):
            layer.noise = piece
        try:
            return self.network(observation)
        finally:
            for layer in self.layers:
                layer.noise = None
