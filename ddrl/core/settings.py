"""Settings in and out: a TOML file, `--set section.name=value` overrides, the effective TOML, and the table behind
--help.

Strict: an unknown name is refused with the nearest known one, a mistyped value with the type wanted. The table of a
plug-in (`[learner.c51]`, `--set learner.c51.atoms=51`) is checked when the plug-in is loaded (`plugin_settings`): no
other process needs to know it.
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

from ddrl.core import plugins
from ddrl.core.config import Config
from ddrl.core.decoding import DAMAGE
from ddrl.core.errors import ConfigError, shortened
from ddrl.core.fields import check_ranges


@dataclass(frozen=True)
class SettingInfo:
    """One setting as --help shows it."""

    name: str
    type: str
    default: Any
    unit: str
    doc: str
    choices: tuple[str, ...] = ()


def describe_settings() -> list[SettingInfo]:
    """Every setting of the library itself, in the order of `Config`."""
    return [info for section, component in _sections().items() for info in _describe(section, component)]


def describe_plugin_settings() -> list[SettingInfo]:
    """Every setting of the built-in plug-ins, by section; loads them all."""
    described: list[SettingInfo] = []
    for section, packages in _plugin_packages().items():
        for setting, package in packages.items():
            for name in plugins.names(package):
                component = getattr(plugins.load(setting, package, name), "Settings", None)
                described += _describe(f"{section}.{name}", component) if component is not None else []
    return described


def plugin_settings(config: Config, section: str, plugin: Any) -> Any:
    """The table of a plug-in of a section ("learner") as its checked `Settings`; None where it has none.

    Raises ConfigError for a name, type or value that the plug-in does not take.
    """
    place = f"{section}.{plugin.name}"
    table = config.tables.get(place, {})
    component = getattr(plugin, "Settings", None)
    known = {} if component is None else get_type_hints(component)
    for name in table:
        if name not in known:
            raise ConfigError(f"there is no setting '{place}.{name}'{_nearest(name, known)}")
    if component is None:
        return None
    whole = {
        name: int(value) if known[name] is int and isinstance(value, float) and value.is_integer() else value
        for name, value in table.items()
    }
    settings = _convert(whole, component, place)
    check_ranges(place, settings)
    return settings


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The effective config: defaults, then the file, then `section.name=value` overrides.

    Raises ConfigError naming the setting and the place it came from.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_toml(path)
        _check_names(tree, str(path))
        _to_config(tree, str(path))  # blames the file before an override is laid over it
    return _lay_over(tree, overrides, "--set" if path is None else f"{path} and --set")


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """`config` with `section.name=value` overrides laid over it."""
    return _lay_over(_to_tree(config), overrides, "--set")


def config_from_toml(text: str, source: str) -> Config:
    """Read a config that `config_to_toml` wrote; `source` names it in errors."""
    try:
        tree = tomllib.loads(text)
        _check_names(tree, source)
        return _to_config(tree, source)
    except ConfigError as error:
        raise ConfigError(shortened(error)) from None
    except DAMAGE as error:
        raise ConfigError(f"{source} is not valid TOML: {shortened(error)}") from None


def config_to_toml(config: Config) -> str:
    """The effective settings as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(_to_tree(config))


def _sections() -> dict[str, Any]:
    return {name: component for name, component in get_type_hints(Config).items() if name != "tables"}


def _plugin_packages() -> dict[str, dict[str, str]]:
    """By section: each setting that names a plug-in, and the package of its plug-ins."""
    packages: dict[str, dict[str, str]] = {}
    for section, component in _sections().items():
        for item in fields(component):
            if item.metadata["plugin"]:
                packages.setdefault(section, {})[f"{section}.{item.name}"] = item.metadata["plugin"]
    return packages


def _describe(section: str, component: Any) -> Iterable[SettingInfo]:
    hints = get_type_hints(component)
    for item in fields(component):
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        kind = hints[item.name]
        name = str(kind).replace("typing.", "") if hasattr(kind, "__args__") else kind.__name__
        meta = item.metadata
        choices = plugins.names(meta["plugin"]) if meta["plugin"] else meta["choices"]
        yield SettingInfo(f"{section}.{item.name}", name, default, meta["unit"], meta["doc"], choices)


def _to_tree(config: Config) -> dict[str, Any]:
    tree = asdict(config)
    for place, table in tree.pop("tables").items():
        section, _, plugin = place.partition(".")
        tree[section][plugin] = table
    return tree


def _to_config(tree: Mapping[str, Any], source: str) -> Config:
    """The config of a tree whose names are known; what is a table inside a section belongs to a plug-in."""
    own: dict[str, Any] = {"tables": {}}
    for section, values in tree.items():
        settings = {item.name for item in fields(_sections()[section])}
        own[section] = {name: value for name, value in values.items() if name in settings}
        own["tables"] |= {f"{section}.{name}": value for name, value in values.items() if name not in settings}
    return _convert(own, Config, source)


def _lay_over(tree: dict[str, Any], overrides: Iterable[str], source: str) -> Config:
    for override in overrides:
        name, value = _parse_override(override)
        *tables, key = name.split(".")
        place = tree
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
    return _to_config(tree, source)


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
    section, *rest = name.split(".")
    tree: Any = None
    for key in reversed(rest):
        tree = {key: tree}
    _check_names({section: tree}, f"--set {override}")
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
        for key, value in cast(Mapping[str, Any], values).items():
            name = f"{section}.{key}"
            if name not in known and not (isinstance(value, Mapping) and _may_be_table(section, key, tree)):
                raise ConfigError(f"{source}: there is no setting '{name}'{_nearest(name, known)}")


def _may_be_table(section: str, key: str, tree: Mapping[str, Any]) -> bool:
    """Whether `[section.key]` can be the table of a plug-in: a built-in one, or perhaps one from outside."""
    packages = _plugin_packages().get(section, {})
    from_outside = any(":" in str(tree[section].get(setting.partition(".")[2], ":")) for setting in packages)
    return from_outside or any(key in plugins.names(package) for package in packages.values())


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else "; --help lists all settings"


def _convert(tree: Mapping[str, Any], component: Any, source: str) -> Any:
    try:
        return msgspec.convert(tree, component, strict=True)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise ConfigError(f"{source}: {error.__cause__}") from None
        what, _, place = str(error).partition(" - at `$.")
        name = place.rstrip("`")
        raise ConfigError(f"{source}: {name or 'settings'}: {what}") from None
