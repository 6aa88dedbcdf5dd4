"""What ddrl needs to be built and run, one requirement a line, from pyproject.toml: `python requirements.py EXTRAS`.

The Dockerfile installs these in a layer of their own, which a change of ddrl's sources leaves as it is."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

BUILD_TOOLS = ("cmake", "ninja")  # which scikit-build-core asks for where a build is isolated


def of_extra(extra: str, extras: dict[str, list[str]]) -> Iterator[str]:
    """Requirements of an extra, and of those that it names."""
    for requirement in extras[extra]:
        named = re.fullmatch(r"ddrl\[(.+)\]", requirement)
        if named is None:
            yield requirement
            continue
        for other in named[1].split(","):
            yield from of_extra(other, extras)


def main(extras: str) -> None:
    """Print them."""
    settings = tomllib.loads(Path("pyproject.toml").read_text())
    project = settings["project"]
    wanted = [*settings["build-system"]["requires"], *BUILD_TOOLS, *project["dependencies"]]
    for extra in filter(None, extras.split(",")):
        wanted += of_extra(extra, project["optional-dependencies"])
    print("\n".join(dict.fromkeys(wanted)))


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else "")
