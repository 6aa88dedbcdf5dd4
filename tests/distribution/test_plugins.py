"""A scheme and a codec from outside the library: one file, one setting each."""

from pathlib import Path

import pytest

from ddrl.core.settings import load_config
from ddrl.distribution.schemes import check_cluster, choose, make_plan
from tests.distribution.test_relays import run

HOPS, MASKED = "tests.distribution.outside:Hops", "tests.distribution.outside:Masked"


def test_a_scheme_from_outside_is_named_by_a_setting_and_has_its_own_table():
    config = load_config(overrides=[f"cluster.scheme={HOPS}", "cluster.hops.hop=3"])
    assert check_cluster(config, 6) == []
    choice = choose(config, 6, 1000)
    plan = make_plan(choice.scheme, 6, 1000, **choice.parameters)
    assert plan.scheme == "hops"
    assert plan.source.tolist() == [0, 1, 2, 0, 4, 5]


def test_relays_carry_models_by_a_scheme_and_a_codec_from_outside():
    pytest.importorskip("mpi4py", reason="needs the extra [mpi]")
    everyone = run(4, 2, 0x5A, program="plugin_ranks.py")
    for host in everyone:
        assert host["scheme"] == "hops"
        assert host["source"] == [0, 1, 0]
        assert host["whole"] is True
        assert host["problems"] == []
    for host in everyone[1:]:
        assert host["travelled"] == host["first_byte"] ^ 0x5A


def test_nothing_but_its_own_file_names_a_scheme_or_a_codec():
    """Tables, telemetry and the run would have to be told of a new one otherwise."""
    from ddrl.core import plugins
    from ddrl.distribution.codecs import PACKAGE as CODECS
    from ddrl.distribution.schemes import PACKAGE as SCHEMES

    root = Path(__file__).parents[2] / "ddrl"
    allowed = {"auto": "config.py", "none": "config.py"}
    for package in (SCHEMES, CODECS):
        for name in plugins.names(package):
            if name in ("direct", "stripes", *allowed):
                continue
            users = [
                path.relative_to(root)
                for folder in ("core", "distribution", "run", "telemetry")
                for path in (root / folder).rglob("*.py")
                if path.stem not in ("schemes", "codecs") and f'"{name}"' in path.read_text()
            ]
            assert users == [], name
