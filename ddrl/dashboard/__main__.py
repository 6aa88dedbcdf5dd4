"""`python -m ddrl.dashboard [FOLDER]`: serve the dashboard on this machine, from any folder."""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddrl.core.errors import MissingExtraError

HERE = Path(__file__).parent


def flags(options: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Options of a config.toml as flags of `streamlit run`."""
    for name, value in options.items():
        if isinstance(value, dict):
            yield from flags(value, f"{prefix}{name}.")
        else:
            yield f"--{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m ddrl.dashboard",
        description="Show runs in a browser. Further options go to `streamlit run`, e.g. --server.port 8502.",
    )
    parser.add_argument("folder", nargs="?", default="runs", help="holds runs, or is one (default: %(default)s)")
    options, further = parser.parse_known_args()
    try:
        from streamlit.web import cli
    except ImportError:
        raise SystemExit(str(MissingExtraError("streamlit", "dashboard", "ddrl.dashboard"))) from None
    own = flags(tomllib.loads((HERE / "config.toml").read_text()))
    sys.argv = ["streamlit", "run", str(HERE / "app.py"), *own, *further, "--", options.folder]
    cli.main()


if __name__ == "__main__":
    main()
