"""No codec: models travel as they are, straight out of and into mailbox slots."""

from __future__ import annotations

from typing import Any

from ddrl.core.rows import ParameterLayout


class Plain:
    """Makes no coder: the executor sends the model itself."""

    name = "none"
    lossless = fixed = True
    uses_base = False

    @classmethod
    def check(cls) -> None:
        """Needs nothing."""

    @classmethod
    def make(cls, layout: ParameterLayout | None, settings: Any) -> None:
        """See Codec."""
