"""Settings in and out: a TOML file, `--set section.name=value` overrides, the effective TOML, and the table behind
--help all.

Strict: an unknown name is refused with the nearest known one, a mistyped value with the type wanted. The table of a
plug-in (`[learner.c51]`, `--set learner.c51.atoms=51`) is checked when the plug-in is loaded (`plugin_settings`): no
other process needs to know it. The section of a slice (`[pool]`) is checked where a file or an override names it, or
the run uses it; in the config of an earlier run it is kept as it is.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, cast, get_type_hints

import tomli_w

from ddrl.core import plugins
from ddrl.core.config import CORE_SECTIONS, SWITCHED, Config, check_ranges, convert
from ddrl.core.errors import ConfigError, shortened
from ddrl.core.files import DAMAGE, MAX_DOCUMENT, read_regular, refuse_deep
from ddrl.core.plugins import installed_slices, slice_component


@dataclass(frozen=True)
class SettingInfo:
    """One setting as --help all shows it."""

    name: str
    type: str
    default: Any
    unit: str
    doc: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Removed:
    """A setting of earlier versions: the value in force now, and what to do where another one is wanted."""

    value: Any
    instead: str


REMOVED = {
    "run.keep_checkpoints": Removed(3, "the three newest checkpoints are kept; copy those that are to stay"),
    "cluster.uplink_block_bytes": Removed(1 << 18, "one message holds at most 256 KiB of experience"),
    "cluster.xor_zstd.level": Removed(1, "higher levels of zstd save next to nothing on parameters; leave it out"),
    "channels.lane_full": Removed("wait", "a rollout waits at a full lane; raise channels.lane_rows"),
    "channels.mailbox_slots": Removed(4, "a host holds as many versions as can be in use; leave it out"),
    "areas.guard": Removed("generations", "set replay.source = benchmarks.admix.sources:PlainFlag"),
    "learner.node_replay": Removed("leader", "gradient nodes learn from the trainer's replay; leave it out"),
    "balance.controller.dead_band": Removed(0.05, "derive a class of your own from Controller"),
    "balance.ddqn.least_gain": Removed(0.01, "derive a class of your own from Ddqn"),
    "learner.td3.target_noise_clip": Removed(0.5, "derive a class of your own from TD3"),
    "learner.r2d2.eta": Removed(0.9, "derive a class of your own from R2D2"),
}

# Values that named a plug-in of the library in earlier versions, and the name by which it is found now.
RENAMED_VALUES = {
    ("cluster.scheme", "two_tree"): "benchmarks.distribution.schemes:TwoTree",
    ("cluster.scheme", "binomial"): "benchmarks.distribution.schemes:Binomial",
    ("cluster.scheme", "scatter_ring"): "benchmarks.distribution.schemes:ScatterRing",
    ("replay.source", "pool"): "benchmarks.admix.sources:RandomPool",
}


def present_settings(tree: Mapping[str, Any], source: str, *, reading: bool = False) -> dict[str, Any]:
    """A tree of an earlier version without the settings that were removed since (`REMOVED`).

    Where such a setting has another value than the one in force now, or a value names a plug-in that has left the
    library, ConfigError names the replacement. With `reading` the setting is left out, and the value replaced: the run
    is only read, not resumed."""
    present = dict(tree)
    for name, removed in REMOVED.items():
        table, key = _place(present, name)
        if key not in table:
            continue
        value = table.pop(key)
        if value != removed.value and not reading:
            raise ConfigError(f"{source}: {name} = {value} was removed, {removed.value} is in force: {removed.instead}")
    for (name, value), new in RENAMED_VALUES.items():
        table, key = _place(present, name)
        if table.get(key) != value:
            continue
        if not reading:
            raise ConfigError(f"{source}: {name} = {value} is no name of the library any more: set {name} = {new}")
        table[key] = new
    if "env" in present:
        table, key = _place(present, "env.scale")
        table.setdefault(key, "bytes")  # a run that began before this setting keeps its scales
    return present


def _place(tree: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The table of a tree that may hold the setting `name`, a copy of the given one, and its key there."""
    *tables, key = name.split(".")
    place = tree
    for table in tables:
        inner = place.get(table)
        if not isinstance(inner, Mapping):
            return {}, key
        place[table] = dict(cast("Mapping[str, Any]", inner))
        place = place[table]
    return place, key


def describe_settings(slices: Iterable[str] = ()) -> list[SettingInfo]:
    """Every setting of the core, in the order of `Config`, then those of `slices`, as far as they are installed."""
    described: list[SettingInfo] = []
    for section in dict.fromkeys((*CORE_SECTIONS, *slices)):
        component = _component(section)
        if component is not None:
            described += _describe(section, component)
    return described


def describe_plugin_settings() -> list[SettingInfo]:
    """Every setting of the built-in plug-ins of core and slices, by section; loads them all."""
    described: list[SettingInfo] = []
    for section in (*CORE_SECTIONS, *installed_slices()):
        for setting, kind in _plugin_kinds(section).items():
            for name in plugins.names(kind):
                component = getattr(plugins.load(setting, kind, name), "Settings", None)
                described += _describe(f"{section}.{name}", component) if component is not None else []
    return described


def plugin_settings(config: Config, section: str, plugin: Any) -> Any:
    """The table of a plug-in of a section ("learner") as its checked `Settings`; None where it has none.

    Raises ConfigError for a name, type or value that the plug-in does not take.
    """
    place = f"{section}.{plugin.name}"
    table = config.table(place)
    component = getattr(plugin, "Settings", None)
    known = {} if component is None else get_type_hints(component)
    for name in table:
        if f"{place}.{name}" in REMOVED:
            raise ConfigError(f"the setting '{place}.{name}' was removed: {REMOVED[f'{place}.{name}'].instead}")
        if name not in known:
            raise ConfigError(f"there is no setting '{place}.{name}'{_nearest(name, known)}")
    if component is None:
        return None
    whole = {
        name: int(value) if known[name] is int and isinstance(value, float) and value.is_integer() else value
        for name, value in table.items()
    }
    settings = convert(whole, component, place)
    check_ranges(place, settings)
    return settings


def load_config(path: Path | None = None, overrides: Iterable[str] = ()) -> Config:
    """The effective config: defaults, then the file, then `section.name=value` overrides.

    Raises ConfigError naming the setting and the place it came from.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        tree = present_settings(_read_toml(path), str(path))
        _check_names(tree, str(path))
        _checked(
            _to_config(tree, str(path)), set(tree), str(path)
        )  # blames the file before an override is laid over it
    return _lay_over(tree, overrides, "--set" if path is None else f"{path} and --set", set(tree))


def apply_overrides(config: Config, overrides: Iterable[str]) -> Config:
    """`config` with `section.name=value` overrides laid over it."""
    return _lay_over(config_tree(config), overrides, "--set", set())


def config_from_toml(text: str, source: str, *, reading: bool = False) -> Config:
    """Read a config that `config_to_toml` wrote; `source` names it in errors. Sections of slices are kept as read.

    `reading`: the run is only read, not resumed (`present_settings`)."""
    try:
        given = tomllib.loads(text)
        refuse_deep(given)
        tree = present_settings(given, source, reading=reading)
        _check_names({section: values for section, values in tree.items() if section in CORE_SECTIONS}, source)
        return _to_config(tree, source)
    except ConfigError as error:
        raise ConfigError(shortened(error)) from None
    except DAMAGE as error:
        raise ConfigError(f"{source} is not valid TOML, correct it: {shortened(error)}") from None


def config_to_toml(config: Config) -> str:
    """The effective settings as TOML that `load_config` reads back to an equal config."""
    return tomli_w.dumps(config_tree(config))


def config_tree(config: Config) -> dict[str, Any]:
    """The effective settings as a settings file has them: by section, the tables of plug-ins inside their sections."""
    tree = asdict(config)
    slices = tree.pop("slices")
    for place, table in tree.pop("tables").items():
        section, _, plugin = place.partition(".")
        tree[section][plugin] = table
    return {**tree, **slices}


@cache
def _component(section: str) -> Any:
    return get_type_hints(Config)[section] if section in CORE_SECTIONS else slice_component(section)


def _plugin_kinds(section: str) -> dict[str, str]:
    """The settings of a section that name plug-ins, each with the module or package of its kind."""
    return {
        f"{section}.{item.name}": item.metadata["plugin"]
        for item in fields(_component(section))
        if item.metadata["plugin"]
    }


def _describe(section: str, component: Any) -> Iterable[SettingInfo]:
    hints = get_type_hints(component)
    for item in fields(component):
        default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
        kind = hints[item.name]
        name = str(kind).replace("typing.", "") if hasattr(kind, "__args__") else kind.__name__
        meta = item.metadata
        choices = plugins.names(meta["plugin"]) if meta["plugin"] else meta["choices"]
        yield SettingInfo(f"{section}.{item.name}", name, default, meta["unit"], meta["doc"], choices)


def _to_config(tree: Mapping[str, Any], source: str) -> Config:
    """The config of a tree; what is a table inside a section belongs to a plug-in."""
    own: dict[str, Any] = {"slices": {}, "tables": {}}
    for section, values in tree.items():
        if section not in CORE_SECTIONS:
            own["slices"][section] = values
            continue
        settings = {item.name for item in fields(_component(section))}
        own[section] = {name: value for name, value in values.items() if name in settings}
        own["tables"] |= {f"{section}.{name}": value for name, value in values.items() if name not in settings}
    return convert(own, Config, source)


def _checked(config: Config, named: set[str], source: str) -> Config:
    """`config` with the sections of slices that are `named`, or that the run uses, checked and complete."""
    slices = dict(config.slices)
    wanted = named | {name for name in SWITCHED if config.uses(name)}
    try:
        for name in wanted.difference(CORE_SECTIONS):
            slices[name] = {**slices.get(name, {}), **asdict(config.section(name))}
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return replace(config, slices=slices)


def _lay_over(tree: dict[str, Any], overrides: Iterable[str], source: str, named: set[str]) -> Config:
    for override in overrides:
        name, value = _parse_override(override)
        *tables, key = name.split(".")
        place = tree
        for table in tables:
            place = place.setdefault(table, {})
        place[key] = value
        named.add(tables[0])
    return _checked(_to_config(tree, source), named, source)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_regular(path, MAX_DOCUMENT).decode())
    except OSError as error:
        raise ConfigError(
            f"cannot read the settings file {path} ({error.strerror or error}): name one that can be read"
        ) from None
    except DAMAGE as error:
        raise ConfigError(f"{path} is not valid TOML, correct it: {shortened(error)}") from None


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
    except ValueError:  # no TOML, or a number of more digits than Python reads
        value = text  # an unquoted string: --set env.id=CartPole-v1
    if isinstance(value, float) and value.is_integer() and _is_integer_setting(name):
        value = int(value)  # --set run.max_env_steps=2e6
    return name, value


@cache
def _names(section: str) -> tuple[str, ...]:
    """Every setting of the core and of `section`."""
    sections = dict.fromkeys((*CORE_SECTIONS, section))
    return tuple(f"{name}.{item.name}" for name in sections for item in fields(_component(name)))


def _is_integer_setting(name: str) -> bool:
    return any(info.name == name and info.type == "int" for info in describe_settings([name.partition(".")[0]]))


def _check_names(tree: Mapping[str, Any], source: str) -> None:
    for section, values in tree.items():
        component = _component(section)
        if component is None and section in SWITCHED:
            Config().section(section)  # raises: the slice is not installed
        if component is None:
            sections = (*CORE_SECTIONS, *installed_slices())
            raise ConfigError(
                f"{source}: there is no section '{section}' (nor a package ddrl.{section} with settings)"
                f"{_nearest(section, sections)}"
            )
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{source}: '{section}' is a section of settings, not a value: write [{section}] or {section}.name = "
                "..."
            )
        known = _names(section)
        for key, value in cast(Mapping[str, Any], values).items():
            name = f"{section}.{key}"
            if name in REMOVED:
                raise ConfigError(f"{source}: the setting '{name}' was removed: {REMOVED[name].instead}")
            if name not in known and not (isinstance(value, Mapping) and _may_be_table(section, key, tree)):
                raise ConfigError(f"{source}: there is no setting '{name}'{_nearest(name, known)}")


def _may_be_table(section: str, key: str, tree: Mapping[str, Any]) -> bool:
    """Whether `[section.key]` can be the table of a plug-in: a built-in one, or perhaps one from outside."""
    kinds = _plugin_kinds(section)
    from_outside = any(":" in str(tree[section].get(setting.partition(".")[2], ":")) for setting in kinds)
    return from_outside or any(key in plugins.names(kind) for kind in kinds.values())


def _nearest(name: str, known: Iterable[str]) -> str:
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else "; --help all lists the settings"
