"""A scheme and a codec from outside the library, each with a setting of its own; test_plugins.py uses them."""

from dataclasses import dataclass

import numpy as np

from ddrl.core.config import setting
from ddrl.distribution.schemes import Scheme, whole_models


class Hops(Scheme):
    """Whole models in hops over `hop` hosts: the root serves every `hop`-th host, which serves those behind it."""

    name = "hops"

    @dataclass(frozen=True)
    class Settings:
        hop: int = setting(2, "hosts", "Hosts of one hop.", ge=1)

    @classmethod
    def parameters(cls, settings, situation):
        return {"hop": settings.hop}

    @staticmethod
    def plan(hosts, nbytes, *, hop):
        edges = [(0 if (host - 1) % hop == 0 else host - 1, host) for host in range(1, hosts + 1)]
        return whole_models("hops", hosts, nbytes, edges)


class Masked:
    """Every byte XOR a mask: as long as the model, and lossless."""

    name = "masked"
    lossless = fixed = True
    uses_base = False

    @dataclass(frozen=True)
    class Settings:
        mask: int = setting(0, "", "XORed with every byte.", ge=0, le=255)

    @classmethod
    def check(cls):
        pass

    @classmethod
    def make(cls, layout, settings):
        return cls(settings.mask)

    def __init__(self, mask):
        self.mask = np.uint8(mask)

    def wire_bytes(self, start, stop):
        return stop - start

    def encode(self, out, model, base, start, stop):
        np.bitwise_xor(model[start:stop], self.mask, out=out[: stop - start])
        return stop - start

    def decode(self, model, wire, base, start, stop):
        np.bitwise_xor(wire, self.mask, out=model[start:stop])
