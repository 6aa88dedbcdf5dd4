"""The package as a newcomer meets it: its version, its names, its command line, what it imports, and what it must never
contain."""

import ast
import importlib.metadata
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ddrl
from ddrl.core.config import Config
from ddrl.core.settings import config_from_toml, describe_plugin_settings, describe_settings, load_config
from ddrl.run.cli import tasks
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for path in (ROOT / "ddrl").rglob("*.py"))


def python(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=PATIENCE, **options)


def test_the_version_is_the_same_everywhere():
    assert ddrl.__version__ == importlib.metadata.version("ddrl")
    assert ddrl.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_public_names_are_these_and_all_of_them_exist():
    assert ddrl.__all__ == ["Run", "__version__", "attach", "compare", "play", "policy", "start", "watch"]
    assert set(ddrl.__all__) <= set(dir(ddrl))
    for name in ddrl.__all__:
        assert getattr(ddrl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = ddrl.nonsense


def test_help_lists_every_setting_with_type_default_and_unit():
    done = python("-m", "ddrl.run", "--help", "all")
    assert done.returncode == 0, done.stderr
    lines = {
        line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ") and "." in line.split()[0]
    }
    task = load_config(tasks()["cartpole"])
    for info in describe_settings():
        line = lines[info.name]
        section, _, name = info.name.partition(".")
        value = getattr(getattr(task, section), name)
        assert info.type in line
        assert str(value) in line or value == ""
        assert all(choice in line for choice in info.choices)
        assert f"[{info.unit}]" in line or not info.unit
        assert info.doc in line
    own = 0  # values of the task that are not the defaults
    for info in describe_plugin_settings():
        table, _, name = info.name.rpartition(".")
        value = task.table(table).get(name, info.default)
        own += value != info.default
        assert lines[info.name].split(maxsplit=2)[2].startswith(f"{value} " if value != "" else '"" ')
    assert own


def test_the_predictions_of_earlier_versions_say_where_they_went():
    done = python("-m", "ddrl.plan", "runs/NAME", "--tasks", "3..8")
    assert done.returncode == 2
    assert not done.stdout
    assert "ddrl.pool.simulator" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_is_one_screen_with_the_main_settings():
    done = python("-m", "ddrl.run", "--help", "pong")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 75
    shown = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ") and "." in line.split()[0]]
    assert len(set(shown) & {info.name for info in describe_settings()}) == 21  # the options' texts name some too
    assert "ALE/Pong-v5's task" in done.stdout
    assert "--help all" in done.stdout


def test_printed_settings_can_be_fed_back(tmp_path):
    first = python(
        "-m", "ddrl.run", "pong", "--print-config", "--set", "learner.lr=0.0007", "--set", "env.kwargs={a = 1}"
    )
    assert first.returncode == 0, first.stderr
    task = tmp_path / "task.toml"
    task.write_text(first.stdout)
    again = python("-m", "ddrl.run", str(task), "--print-config")
    assert again.stdout == first.stdout
    assert load_config(task).learner.lr == 0.0007
    assert config_from_toml(first.stdout, "printed") != Config()


def _is_installed(folder: Path) -> bool:
    command = [sys.executable, "-P", "-c", "import ddrl"]
    return subprocess.run(command, cwd=folder, env={"PATH": os.environ["PATH"]}, capture_output=True).returncode == 0


def test_the_installed_package_runs_outside_the_repository(tmp_path):
    if not _is_installed(tmp_path):
        pytest.skip("ddrl is not installed in this environment: pip install .")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = python("-P", "-m", "ddrl.run", "--print-config", cwd=tmp_path, env=alone)
    assert done.returncode == 0, done.stderr
    assert config_from_toml(done.stdout, "printed") == load_config(ROOT / "ddrl" / "tasks" / "cartpole.toml")
    done = python("-P", "-c", "import ddrl._kernel, ddrl.channels, ddrl.replay, ddrl.rollout", cwd=tmp_path, env=alone)
    assert done.returncode == 0, done.stderr


def test_nothing_is_left_in_the_users_home(tmp_path):
    """ONNX Runtime's usage figures are off, in a process that reads a policy."""
    ours = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    done = python("-c", "import ddrl.acting, ddrl.evaluate", env=ours | {"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.iterdir())


def modules() -> list[str]:
    names = [module.name for module in pkgutil.walk_packages([str(ROOT / "ddrl")], "ddrl.")]
    return [
        name
        for name in names
        if not name.startswith(("ddrl.learner", "ddrl.admix.networks", "ddrl.balance.exchange"))
        and not name.endswith("__main__")
        and name != "ddrl._kernel"
    ]


def test_no_module_but_the_learner_imports_torch():
    done = python(
        "-c",
        f"import importlib, sys\nfor name in {modules()!r}:\n    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n",
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr


def test_a_relay_imports_nothing_that_only_acts_or_trains():
    """One a host beside hundreds of processes: 24 MB each."""
    heavy = ("torch", "onnx", "onnxruntime", "gymnasium", "mpi4py")
    done = python(
        "-c", f"import sys, ddrl.run.relay; sys.exit(str([one for one in {heavy} if one in sys.modules]))", cwd=ROOT
    )
    assert done.stderr.strip() == "[]"


BLOCK = """
import sys, importlib.abc
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
blocked = {blocked!r}
def find_spec(name, package=None):
    return None if name.partition(".")[0] in blocked else found(name, package)
importlib.util.find_spec = find_spec
from ddrl.run.__main__ import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(
    ("blocked", "environment", "arguments", "extra"),
    [
        (["torch"], {}, ["--serial"], "train"),
        (["onnx"], {}, ["--serial"], "train"),
        (["mpi4py"], {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, [], "mpi"),
        (["ale_py"], {}, ["pong", "--serial"], "atari"),
        (["Box2D"], {}, ["lunarlander", "--serial"], "box2d"),
    ],
)
def test_a_missing_extra_is_said_in_one_line(blocked, environment, arguments, extra, tmp_path):
    arguments = [*arguments, "--set", f"run.dir={tmp_path / 'run'}"]
    done = python(
        "-c", BLOCK.format(blocked=set(blocked), arguments=arguments), cwd=ROOT, env={**os.environ, **environment}
    )
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("ddrl: ")]
    assert said == done.stderr.splitlines()[-1:], done.stderr  # below the banner
    assert f"pip install 'ddrl[{extra}]'" in done.stderr


def test_the_first_command_installs_whatever_readme_shows():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"[\w]+", extras["all"][0])) - {"ddrl"}
    implied = {extra for name in named for line in extras[name] for extra in re.findall(r"^ddrl\[(\w+)\]", line)}
    assert named | implied == extras.keys() - {"all", "test", "reference"}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {name.name.partition(".")[0] for name in node.names} & {
                "pickle",
                "dill",
                "cloudpickle",
                "shelve",
                "marshal",
            }
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").partition(".")[0] not in {"pickle", "dill", "cloudpickle", "shelve", "marshal"}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            assert node.attr not in {"load", "save"}, f"line {node.lineno}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant), f"line {node.value.lineno}"
            assert node.value.value is False, f"line {node.value.lineno}"
