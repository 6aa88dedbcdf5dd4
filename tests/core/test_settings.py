"""Settings: strict, with the nearest name, and back from what was printed."""

import math
import re
from dataclasses import dataclass

import pytest

from ddrl.core.config import Config, setting
from ddrl.core.errors import ConfigError
from ddrl.core.settings import (
    apply_overrides,
    config_from_toml,
    config_to_toml,
    describe_settings,
    load_config,
    plugin_settings,
)


def test_printed_settings_read_back_to_an_equal_config():
    config = load_config(
        None, ["learner.lr=0.0005", "env.id=LunarLander-v3", "run.target_return=200", "env.kwargs={gravity = -5.0}"]
    )
    assert config_from_toml(config_to_toml(config), "printed") == config
    assert config_from_toml(config_to_toml(Config()), "printed") == Config()


def test_every_default_is_printed():
    text = config_to_toml(load_config(None, ["env.id=X"]))
    for info in describe_settings():
        assert info.name.partition(".")[2] in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("learner.lrr=1", "did you mean 'learner.lr'"),
        ("lerner.lr=1", "did you mean 'learner'"),
        ("learner.lr=fast", "learner.lr"),
        ("learner.lr=-1", "above 0"),
        ("replay.selector=best", "known are prioritized, rank_based, recency, uniform, or package.module:Class"),
        ("replay.min_size=2000000", "exceeds replay.capacity"),
        ("run.max_env_steps=1.5", "run.max_env_steps"),
        ("learner.hidden=[]", "learner.hidden"),
        (f"run.max_env_steps=1{5000 * '0'}", "run.max_env_steps: Expected `int`"),  # Python refuses to read it
        (f"rollout.epsilon_decay_steps=1{400 * '0'}", "epsilon_decay_steps must be at most 9223372036854775807"),
        ("rollout.epsilon_spread=inf", "rollout.epsilon_spread (inf) must be at most"),
        ("rollout.epsilon_end=0.9 ", None),
        ("lr", "section.name=value"),
    ],
)
def test_a_bad_override_names_what_and_where(override, words):
    if words is None:
        assert load_config(None, [override]).rollout.epsilon_end == 0.9
        return
    with pytest.raises(ConfigError, match="--set") as caught:
        load_config(None, [override])
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("last", "first", "words"),
    [
        ("replay.min_size=100", "replay.min_size=101", "replay.min_size (101) exceeds replay.capacity (100)"),
        ("replay.n_step=99", "replay.n_step=100", "replay.n_step (100) must be below replay.capacity (100)"),
        ("replay.samples_tolerance=8", "replay.samples_tolerance=7.9", "must cover one batch"),
        ("rollout.epsilon_end=0.5", "rollout.epsilon_end=0.51", "must not exceed rollout.epsilon_start (0.5)"),
        ("rollout.max_policy_lag=1", "rollout.max_policy_lag=0.9", "must be at least 1 where at_max_lag = wait"),
        ("learner.hidden=[1]", "learner.hidden=[0]", "must list one or more widths of at least 1"),
    ],
)
def test_settings_that_bound_each_other_are_refused_from_the_first_value_on_that_cannot_be(last, first, words):
    """`last` is the last value that may be, `first` the next one."""
    near = ["replay.capacity=100", "replay.min_size=50", "learner.batch_size=32", "replay.samples_per_insert=4"]
    near += ["replay.samples_tolerance=8", "rollout.epsilon_start=0.5", "rollout.epsilon_end=0.1"]
    near += ["rollout.at_max_lag=wait"]
    load_config(None, [*near, last])
    with pytest.raises(ConfigError, match=re.escape(words)):
        load_config(None, [*near, first])


def test_whole_numbers_may_be_written_in_scientific_form():
    assert load_config(None, ["run.max_env_steps=2e6"]).run.max_env_steps == 2_000_000


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "task.toml"
    path.write_text("[learner]\nbatch_sise = 3\n")
    with pytest.raises(ConfigError, match=r"task\.toml.*learner\.batch_size"):
        load_config(path)
    path.write_text("[learner\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(path)
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "absent.toml")


def test_never_is_infinity():
    assert load_config().run.max_seconds == math.inf


@dataclass(frozen=True)
class CountingSettings:
    number: int = setting(7, "things", "How many.", ge=1)


class R2D2:
    name = "r2d2"


class Counting:
    name = "counting"
    Settings = CountingSettings


def test_more_records_than_the_kernel_can_number_are_refused():
    with pytest.raises(ConfigError, match="at most 1073741824"):
        load_config(None, ["replay.capacity=1000000000000000000"])


def test_the_table_of_a_plug_in_is_checked_by_name_type_and_range():
    def of(**table):
        return plugin_settings(Config(tables={"learner.counting": table}), "learner", Counting)

    assert of() == CountingSettings(7)
    assert of(number=9.0) == CountingSettings(9)
    with pytest.raises(ConfigError, match=r"there is no setting 'learner\.counting\.numbr'.*number"):
        of(numbr=9)
    with pytest.raises(ConfigError, match=r"learner\.counting: number"):
        of(number="nine")
    with pytest.raises(ConfigError, match="at least 1"):
        of(number=0)


def test_the_section_of_a_slice_is_checked_where_it_is_named():
    config = load_config(None, ["pool.devices=cpu:0", "pool.fair.patience=2.5"])
    assert config.section("pool").devices == "cpu:0"
    assert config.slices["pool"]["collect_steps"] == config.section("pool").collect_steps, "the whole section is saved"
    assert config.table("pool.fair") == {"patience": 2.5}
    for override, words in {
        "pool.polcy=fifo": r"did you mean 'pool\.policy'",
        "pool.policy=3": r"pool\.policy: Expected",
        "pool.weight=0": r"pool\.weight \(0.*above 0",
        "pol.policy=fifo": "did you mean 'pool'",
    }.items():
        with pytest.raises(ConfigError, match=f"--set.*{words}"):
            load_config(None, [override])


def test_what_switches_a_slice_on_has_its_section_checked():
    assert load_config(None, ["learner.nodes=3"]).slices["balance"]["first"] == 0
    with pytest.raises(ConfigError, match=r"learner\.batch_size \(2\) is below learner\.nodes \(3\)"):
        load_config(None, ["learner.nodes=3", "learner.batch_size=2"])
    assert not Config().uses("balance")
    assert load_config(None, ["pool.collectors=cold"]).uses("pool")


def test_the_config_of_an_earlier_run_is_read_without_the_slices_it_names():
    text = '[absent]\nsize = 3\n[absent.kind]\nrate = 0.5\n[pool]\ndevices = 7\ngone = "yes"\n'
    config = config_from_toml(text, "an earlier run")
    assert config.slices["absent"] == {"size": 3, "kind": {"rate": 0.5}}
    assert config_from_toml(config_to_toml(config), "printed") == config
    assert apply_overrides(config, ["learner.lr=0.5"]).slices == config.slices
    with pytest.raises(ConfigError, match=r"section \[absent\] needs ddrl\.absent, which this installation lacks"):
        config.section("absent")
    with pytest.raises(ConfigError, match=r"there is no section 'absent' \(nor a package ddrl\.absent"):
        load_config(None, ["absent.size=3"])


def test_removed_settings_of_an_earlier_run_are_dropped_where_nothing_changes():
    text = "[run]\nseed = 3\nkeep_checkpoints = 3\n[learner.r2d2]\neta = 0.9\nunits = 8\n"
    config = config_from_toml(text, "an earlier run")
    assert config.run.seed == 3
    assert config.tables == {"learner.r2d2": {"units": 8}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nkeep_checkpoints = 9\n", r"run.keep_checkpoints = 9 was removed, 3 is in force: .* copy those"),
        ("[learner.r2d2]\neta = 0.5\n", r"learner.r2d2.eta = 0.5 was removed, 0.9 is in force: derive a class"),
        ("[areas]\nguard = 'flag'\n", "areas.guard = flag was removed, generations is in force: set replay.source = "),
        ("[replay]\nsource = 'pool'\n", "set replay.source = benchmarks.admix.sources:RandomPool"),
        ("[cluster]\nscheme = 'two_tree'\n", "set cluster.scheme = benchmarks.distribution.schemes:TwoTree"),
    ],
)
def test_a_run_whose_removed_setting_mattered_is_read_but_not_resumed(text, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        config_from_toml(text, "an earlier run")
    assert config_from_toml(text, "an earlier run", reading=True).run == Config().run
    (tmp_path / "task.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "task.toml")


def test_a_removed_setting_cannot_be_set():
    with pytest.raises(ConfigError, match=r"--set run\.keep_checkpoints=3: the setting 'run\.keep_checkpoints' was"):
        load_config(None, ["run.keep_checkpoints=3"])
    with pytest.raises(ConfigError, match=r"'learner\.r2d2\.eta' was removed: derive"):
        plugin_settings(load_config(None, ["learner.r2d2.eta=0.9"]), "learner", R2D2)


def test_reading_a_run_imports_no_source_from_outside():
    text = "[replay]\nsource = 'no.such.module:Source'\n[rollout]\nrefresh = 'write'\nmax_policy_lag = 3.0\n"
    config = config_from_toml(text, "an unknown run")
    with pytest.raises(ConfigError, match=r"there is no module no"):
        config.check_source()


@pytest.mark.parametrize("setting", ["learner.threads", "learner.nodes", "run.processes", "cluster.relays"])
def test_more_threads_or_processes_than_any_machine_has_are_refused(setting):
    with pytest.raises(ConfigError, match=r"at most"):
        apply_overrides(Config(), [f"{setting}=100000000"])
