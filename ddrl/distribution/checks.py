"""What can be refused of the distribution's settings before anything starts. Pure; called on rank 0 of every run."""

from __future__ import annotations

from ddrl.core import plugins
from ddrl.core.config import ClusterConfig, Config
from ddrl.core.errors import ConfigError, PlanError
from ddrl.core.rows import ALIGNMENT
from ddrl.core.settings import plugin_settings
from ddrl.distribution.plans.planner import usual_network
from ddrl.distribution.plans.scheme import PACKAGE, Situation, load_scheme
from ddrl.distribution.transport import codec as codecs


def check_cluster(config: Config, hosts: int, nbytes: int | None = None) -> list[str]:
    """Raise ConfigError where models cannot travel to `hosts` hosts beside the trainer's with these settings, and
    MissingExtraError where a package is missing; the settings that will have no effect, a line each.

    `nbytes` of a model, None where it is not known yet. O(messages of a plan)."""
    cluster = config.cluster
    scheme = load_scheme(cluster.scheme)
    codec = codecs.load_codec(cluster.codec)
    settings = plugin_settings(config, "cluster", scheme)
    plugin_settings(config, "cluster", codec)
    codec.check()
    for name, value, meant in (
        ("shards", cluster.shards, scheme.takes_shards),
        ("chunk_bytes", cluster.chunk_bytes, scheme.takes_chunks),
    ):
        if value and not meant:
            raise ConfigError(
                f"cluster.{name} ({value}) has no meaning for cluster.scheme = {cluster.scheme}: leave one of them out"
            )
    _check_tables(config)
    if not hosts:
        return _without_effect(cluster)
    size = max(1, hosts) * ALIGNMENT if nbytes is None else nbytes
    situation = Situation(
        usual_network(hosts), size, cluster.versions_in_flight, cluster.shards, min(cluster.chunk_bytes, size)
    )
    try:
        scheme.check(settings, situation)
    except PlanError as error:
        raise ConfigError(f"cluster.scheme = {cluster.scheme} on {hosts} hosts: {error}") from None
    return []


def _check_tables(config: Config) -> None:
    """Tables of built-in plug-ins that are not in use now can come into use while the run goes on."""
    for package, setting in ((PACKAGE, "cluster.scheme"), (codecs.PACKAGE, codecs.SETTING)):
        for name in plugins.names(package):
            if f"cluster.{name}" in config.tables:
                plugin_settings(config, "cluster", plugins.load(setting, package, name))


def _without_effect(cluster: ClusterConfig) -> list[str]:
    """On one host nothing travels."""
    usual = ClusterConfig()
    return [
        f"cluster.{name} = {getattr(cluster, name)} has no effect: this run has one host, so no model travels"
        for name in ("scheme", "shards", "chunk_bytes", "codec", "closed_loop")
        if getattr(cluster, name) != getattr(usual, name)
    ]
