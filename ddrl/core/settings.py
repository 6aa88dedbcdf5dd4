"""Settings in and out: a TOML file, `--set section.name=value` overrides, the effective TOML, and the table behind
--help.

Strict: an unknown name is refused with the nearest known one, a mistyped value with the type wanted.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast, get_type_hints

import msgspec
import tomli_w

from ddrl.core.config import Config
from ddrl.core.errors import ConfigError


@dataclass(frozen=True)
class SettingInfo:
    """One setting as --help shows it."""

    name: str
    type: str
    default: Any
    unit: str
    doc: str


def describe_settings() -> list[SettingInfo]:
    """Every setting, in the order of `Config`."""
    described: list[SettingInfo] = []
    for section, component in get_type_hints(Config).items():
        hints = get_type_hints(component)
        for item in fields(component):
            default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
            kind = hints[item.name]
            name = str(kind).replace("typing.", "") if hasattr(kind, "__args__") else kind.__name__
            described.append(
                SettingInfo(f"{section}.{item.name}", name, default, item.metadata["unit"], item.metadata["doc"])
            )
    return described


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The effective config: defaults, then the file, then `section.name=value` overrides.

    Raises ConfigError naming the setting and the place it came from.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_toml(path)
        _check_names(tree, str(path))
        _convert(tree, str(path))  # blames the file before an override is laid over it
    for override in overrides:
        name, value = _parse_override(override)
        section, _, key = name.partition(".")
        tree.setdefault(section, {})[key] = value
    return _convert(tree, "--set" if path is None else f"{path} and --set")


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """`config` with `section.name=value` overrides laid over it."""
    tree = asdict(config)
    for override in overrides:
        name, value = _parse_override(override)
        section, _, key = name.partition(".")
        tree[section][key] = value
    return _convert(tree, "--set")


def config_from_toml(text: str, source: str) -> Config:
    """Read a config that `config_to_toml` wrote; `source` names it in errors."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not valid TOML: {error}") from None
    _check_names(tree, source)
    return _convert(tree, source)


def config_to_toml(config: Config) -> str:
    """The effective settings as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(asdict(config))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the settings file {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def _parse_override(override: str) -> tuple[str, Any]:
    name, equals, text = override.partition("=")
    name = name.strip()
    if not equals or "." not in name:
        raise ConfigError(f"--set {override}: write it as section.name=value, e.g. --set learner.lr=0.001")
    _check_names({name.partition(".")[0]: {name.partition(".")[2]: None}}, f"--set {override}")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # an unquoted string: --set env.id=CartPole-v1
    if isinstance(value, float) and value.is_integer() and _is_integer_setting(name):
        value = int(value)  # --set run.max_env_steps=2e6
    return name, value


def _is_integer_setting(name: str) -> bool:
    return any(info.name == name and info.type == "int" for info in describe_settings())


def _check_names(tree: Mapping[str, Any], source: str) -> None:
    known = [info.name for info in describe_settings()]
    sections = {name.partition(".")[0] for name in known}
    for section, values in tree.items():
        if section not in sections:
            raise ConfigError(f"{source}: there is no section '{section}'{_nearest(section, sections)}")
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: '{section}' is a section of settings, not a value: write [{section}] or {section}.name = "
                "..."
            )
        for key in cast(Mapping[str, Any], values):
            name = f"{section}.{key}"
            if name not in known:
                raise ConfigError(f"{source}: there is no setting '{name}'{_nearest(name, known)}")


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else "; --help lists all settings"


def _convert(tree: Mapping[str, Any], source: str) -> Config:
    try:
        return msgspec.convert(tree, Config, strict=True)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{source}: {error.__cause__}") from None
        what, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(f"{source}: {name or 'settings'}: {what}") from None
