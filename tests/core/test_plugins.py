"""Plug-ins are found by name, in a module or a package of their kind, without importing any but the one asked for."""

import sys

import pytest

import ddrl
from ddrl.core import plugins
from ddrl.core.errors import ConfigError

MODULE = """
from typing import ClassVar, Protocol

class Shape(Protocol):
    name: ClassVar[str]

class Round:
    name = "round"

class Flat(Round):
    name: ClassVar[str] = "flat"

class Unnamed(Round):
    area = "name"
"""


@pytest.fixture(params=["module", "package"])
def kind(request, tmp_path, monkeypatch):
    """A kind of two plug-ins, `round` and `flat`."""
    name = f"shapes_{request.param}"
    if request.param == "module":
        (tmp_path / f"{name}.py").write_text(MODULE)
        (tmp_path / name / "__pycache__").mkdir(parents=True)  # of an earlier version, in which it was a package
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        (tmp_path / name / "_shared.py").write_text("class Base:\n    name = 'base'\n")
        for shape in ("round", "flat"):
            (tmp_path / name / f"{shape}.py").write_text(f'class Shape:\n    name = "{shape}"\n')
    monkeypatch.setattr(plugins, "ROOT", tmp_path)
    monkeypatch.setattr(ddrl, "__path__", [*ddrl.__path__, str(tmp_path)])
    yield f"ddrl.{name}"
    for module in [one for one in sys.modules if one.startswith(f"ddrl.{name}")]:
        del sys.modules[module]


def test_names_are_known_before_anything_is_imported(kind):
    assert plugins.names(kind) == ("flat", "round")
    assert kind not in sys.modules
    with pytest.raises(ConfigError, match=r"draw.shape \('rond'\): did you mean 'round'\? Known are flat, round, or"):
        plugins.check_name("draw.shape", kind, "rond")


@pytest.mark.parametrize("name", ["round", "flat"])
def test_a_name_gives_the_class_of_that_name(kind, name):
    found = plugins.load("draw.shape", kind, name)
    assert vars(found)["name"] == name
