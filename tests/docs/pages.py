"""The snippets of a page: code blocks whose info string names a file, and the commands after them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Section:
    """What stands under one heading: files by name, and commands."""

    title: str
    files: dict[str, str]
    commands: tuple[str, ...]

    def write(self, folder: Path) -> None:
        """Its files into `folder`."""
        for name, text in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)


def sections(page: Path) -> list[Section]:
    """The sections of a Markdown page, what stands before the first heading of the second level being the first."""
    made: list[Section] = []
    for part in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
        blocks = BLOCK.findall(part)
        files = {name: text for _, name, text in blocks if name}
        commands = tuple(text for kind, name, text in blocks if kind == "sh" and not name)
        made.append(Section(part.partition("\n")[0].strip(), files, commands))
    return made
