"""Every refusal of environments, settings, networks, runs, resumes and pools says what is wrong, where, the value and
what to do, in one line of less than 300 letters. The syntax trees of the sources say which there are; rows make them:
tests that hold the words of each, and commands and constructors below. UNMADE may only become shorter."""

from __future__ import annotations

import ast
import errno
import importlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Of
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torch import nn

import ddrl
from ddrl.acting.policy_file import save_policy
from ddrl.channels import segment_name
from ddrl.core import errors
from ddrl.core.config import Config, EnvConfig, LearnerConfig
from ddrl.core.errors import MAX_LINE, DdrlError
from ddrl.core.files import refuse_odd_files
from ddrl.core.forks import forbid_torch
from ddrl.core.plugins import cells_digest, check_trust, own_secret, slice_module
from ddrl.core.roles import assign_roles
from ddrl.core.rows import Column, RowSchema, schema_of
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, ColumnRole
from ddrl.envs import make_vector_env
from ddrl.envs.atari import AtariGame
from ddrl.learner import Learner, describe, import_torch
from ddrl.learner.actor_critic import make_actor
from ddrl.learner.algorithm import algorithm_class
from ddrl.learner.algorithms.pqn import PQN
from ddrl.learner.algorithms.td3 import TD3
from ddrl.learner.engine import Engine
from ddrl.learner.export import _outputs, _parameters_as_inputs, _refuse_hidden_state, write_state
from ddrl.learner.own_networks import require_tensors
from ddrl.learner.part import named_tensors
from ddrl.pool.__main__ import main as pool_command
from ddrl.pool.devices import make_group, parse_devices
from ddrl.pool.leases import LeaseHolder, LeaseMaster, _encoded
from ddrl.pool.mode import Pool, _policy_tables, add_task, setup_of
from ddrl.pool.policies import DeviceQueue, Fifo
from ddrl.pool.ranks import TaskRelays, assign_relays
from ddrl.pool.records import PoolSetup, PoolTask, _lines
from ddrl.pool.simulator import Simulator
from ddrl.pool.task import command_of
from ddrl.run import checkpoint
from ddrl.run.__main__ import main as run_command
from ddrl.run.checkpoint import BestPolicy, newest_checkpoint
from ddrl.run.cli import parse
from ddrl.run.directory import RunDirectory, RunLock, planned_path
from ddrl.run.local import local_ranks
from ddrl.run.preparation import Preparation, probe_in_fork
from ddrl.run.ranks import Lead
from ddrl.run.serial import RANKS, run_serial
from ddrl.run.task import PlanWatch, Steering
from ddrl.run.topology import HostChannels
from tests.acting.networks import make_mlp, random_vector
from tests.envs.test_making import Twins
from tests.learner import published_networks, test_published_networks, test_strange_networks
from tests.learner.continuous_cases import BOX
from tests.learner.continuous_cases import learner_of as continuous_learner_of
from tests.learner.learner_cases import VECTOR, learner_of
from tests.run.launch import TINY, settings
from tests.run.test_checkpoint import write

ROOT = Path(ddrl.__file__).parent
PACKAGES = ("envs", "core", "learner", "run", "pool")
KINDS = {"ConfigError", "EnvError", "NetworkError", "CheckpointError", "RunDirError", "PoolError", "MissingExtraError"}
pytestmark = pytest.mark.filterwarnings("ignore")  # of what networks use

# Words by which a message says what to do, beside imperatives: what a setting may be, and what stands in its place.
REMEDIES = re.compile(
    r"\b(must|needs?|may|acquire|compute|at least|at most|did you mean|there is no setting|is wanted|known are|"
    r"which is not installed|set|use|give|make|name|choose|leave|remove|delete|start|resume|lower|raise|install|add|"
    r"write|rename|wrap|wait|"
    r"stop|call|returns?|define|let|put|free|end|take|convert|register|normalize|change|mount|say|copy|move|keep|look|try|"
    r"begin|correct|is a section of settings|expected|go on|derive|one of|lacks)\b",
    re.IGNORECASE,
)


def refusals() -> dict[tuple[str, int], str]:
    """By file and line: file and first words of each refusal."""
    found: dict[tuple[str, int], str] = {}
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in KINDS:
                place = f"{path.relative_to(ROOT)}: {_words(node.args[0])}"
                found |= {(str(path), line): place for line in range(node.lineno, (node.end_lineno or 0) + 1)}
    return found


def _words(message: ast.expr) -> str:
    """The longest text in a message that no value is put into, or its expression."""
    texts = [each.value for each in ast.walk(message) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return (max(texts, key=len) if texts else ast.unparse(message))[:40].strip()


# Tests whose cases are rows.
TESTS = {
    "envs.test_contract": (
        "test_the_same_rule_holds_wherever_an_array_is",
        "test_a_reward_that_is_no_number_is_named_with_its_value",
        "test_what_an_environment_lacks_is_said_in_one_line",
        "test_a_vector_that_takes_a_step_where_it_should_reset_is_found_out",
        "test_what_a_factory_returns_is_known_by_name",
        "test_a_simulator_that_may_exist_once_in_a_process_is_made_once",
    ),
    "envs.test_making": (
        "test_what_cannot_be_made_is_refused_in_one_line_that_says_why",
        "test_a_missing_package_names_the_extra_that_brings_it",
        "test_a_vector_of_the_users_own_is_used_as_it_is_and_checked",
        "test_a_step_that_breaks_the_contract_is_refused_at_once",
        "test_ids_are_looked_up_after_a_package_has_registered_them",
        "test_an_id_of_the_old_package_gym_is_named_as_such",
        "test_an_id_as_people_type_it_is_refused_with_the_one_that_is_meant",
    ),
    "envs.test_partial": ("test_entries_that_are_not_there_are_refused", "test_only_vectors_have_parts"),
    "envs.test_named": (
        "test_sequences_without_a_maximum_or_longer_than_it_are_refused",
        "test_columns_that_break_the_spec_are_refused",
    ),
    "envs.test_instances": (
        "test_what_is_no_number_is_refused_by_its_name",
        "test_figures_are_columns_of_the_run_and_names_must_differ",
        "test_figures_of_vectors_are_refused_and_single_environments_are_taken_instead",
    ),
    "envs.test_atari": ("test_a_game_whose_own_frameskip_is_not_one_is_refused",),
    "run.test_strange_environments": ("test_a_reset_without_a_seed_is_refused_by_what_to_define",),
    "run.test_action_masks": (
        "test_masks_that_are_not_read_or_wrong_are_named",
        "test_pqn_says_that_it_reads_no_masks",
    ),
    "core.test_settings": (
        "test_a_bad_override_names_what_and_where",
        "test_a_bad_file_is_named",
        "test_the_table_of_a_plug_in_is_checked_by_name_type_and_range",
        "test_the_section_of_a_slice_is_checked_where_it_is_named",
        "test_what_switches_a_slice_on_has_its_section_checked",
        "test_the_config_of_an_earlier_run_is_read_without_the_slices_it_names",
        "test_a_run_whose_removed_setting_mattered_is_read_but_not_resumed",
        "test_a_removed_setting_cannot_be_set",
        "test_reading_a_run_imports_no_source_from_outside",
    ),
    "core.test_roles": (
        "test_every_host_has_one_relay_and_the_world_one_trainer",
        "test_a_group_never_spans_machines",
        "test_too_few_ranks_are_refused_in_words",
        "test_other_numbers_of_ranks_are_refused_where_relays_start_the_collectors",
    ),
    "core.test_layouts": ("test_a_vector_of_another_network_is_refused",),
    "core.test_transitions": ("test_stacked_frames_are_refused",),
    "core.test_one_reader_and_writer": ("test_nothing_is_written_through_a_link_and_no_secret_changes_its_mode",),
    "telemetry.test_figures_of_an_algorithm": ("test_a_figure_whose_name_is_taken_or_no_name_is_refused",),
    "learner.test_d4pg": ("test_its_settings_are_checked",),
    "learner.test_c51": (
        "test_its_settings_are_a_table_of_their_own",
        "test_dueling_by_the_values_of_logits_is_refused",
    ),
    "learner.test_pqn": ("test_what_it_cannot_learn_from_is_refused",),
    "learner.test_td3": ("test_environments_that_it_cannot_act_in_are_refused",),
    "learner.test_quantiles": ("test_what_does_not_fit_is_refused",),
    "learner.test_normalize": ("test_it_is_refused_where_means_would_not_be_kept",),
    "learner.test_networks": (
        "test_a_network_that_cannot_serve_is_refused_in_one_line",
        "test_a_screen_too_small_for_the_convolutions_is_refused",
        "test_continuous_actions_are_refused",
    ),
    "learner.test_noisy": ("test_noisy_layers_in_a_network_of_the_user_s_own_are_refused",),
    "learner.test_dqn": (
        "test_divergence_is_loud_also_between_two_looks_at_the_statistics",
        "test_devices_that_are_not_there_are_refused",
        "test_a_family_of_policies_that_the_chooser_cannot_have_is_refused",
    ),
    "learner.test_checks": ("test_a_mistake_is_named_by_file_class_and_method_before_training",),
    "learner.test_snapshot": ("test_a_state_of_another_network_is_refused",),
    "learner.test_flat": (
        "test_a_vector_of_another_network_is_refused",
        "test_networks_that_cannot_be_flattened_are_refused",
    ),
    "learner.test_named_observations": ("test_an_array_and_a_parameter_of_one_name_are_refused",),
    "learner.test_noise": ("test_outputs_that_are_not_all_named_are_refused",),
    "learner.test_own_parts": (
        "test_what_does_not_fit_is_refused_in_one_line",
        "test_an_algorithm_that_reads_none_refuses_one",
    ),
    "run.test_checkpoint": (
        "test_one_changed_byte_in_a_file_is_refused_by_the_files_name",
        "test_a_missing_file_is_refused_by_its_name",
        "test_a_changed_count_is_refused",
    ),
    "run.test_published": (
        "test_an_algorithm_that_is_named_is_not_replaced",
        "test_noisy_layers_beside_pictures_are_refused",
    ),
    "run.test_room": ("test_what_a_run_surely_fills_is_refused_with_the_setting_to_lower",),
    "run.test_states": ("test_states_that_cannot_be_saved_or_are_of_others_are_refused_by_name",),
    "run.test_lock": ("test_a_lock_is_held_by_one_and_free_after_its_release",),
    "run.test_task": ("test_checkpoints_by_the_clock_are_refused_where_every_bit_follows_from_the_seed",),
    "run.test_launching": ("test_ranks_with_another_version_are_refused_with_the_place",),
    "pool.test_devices": (
        "test_what_is_no_device_is_refused_in_one_line",
        "test_devices_that_do_not_exist_are_refused",
        "test_a_torch_device_is_no_slot_and_a_share_needs_its_quota",
        "test_a_group_that_cannot_be_made_is_refused_with_what_to_do",
    ),
    "pool.test_simulator": (
        "test_traces_of_other_shapes_or_negative_seconds_are_refused",
        "test_a_task_without_time_to_collect_is_refused",
    ),
    "pool.test_queue": ("test_a_second_request_and_a_foreign_release_are_refused",),
    "pool.test_records": ("test_directories_that_are_no_pools_are_refused_in_words",),
    "pool.test_mode": (
        "test_a_pool_that_cannot_start_says_so_in_one_line_and_makes_nothing",
        "test_two_tasks_of_one_directory_or_with_different_devices_are_refused",
    ),
}


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Each test of TESTS with the values of each of its cases."""
    for module, names in TESTS.items():
        for name in names:
            function = getattr(importlib.import_module(f"tests.{module}"), name)
            marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
            for chosen in itertools.product(*(mark.args[1] for mark in marks)):
                values: dict[str, Any] = {}
                for mark, case in zip(marks, chosen, strict=True):
                    case = getattr(case, "values", case)
                    given = mark.args[0]
                    keys = given.replace(" ", "").split(",") if isinstance(given, str) else list(given)
                    values |= dict(zip(keys, case if len(keys) > 1 or type(case) is tuple else [case], strict=True))
                yield function, values


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Of each refusal that is raised: file and first words, and its message."""
    known = refusals()
    seen: list[tuple[str, str]] = []

    def noted(self: DdrlError, *words: Any) -> None:
        Exception.__init__(self, *words)
        frame: Any = sys._getframe(1)
        if frame.f_code.co_filename == errors.__file__:  # of a class with a constructor of its own
            frame = frame.f_back
        place = known.get((frame.f_code.co_filename, frame.f_lineno))
        if place is not None:
            seen.append((place, str(self)))

    monkeypatch.setattr(DdrlError, "__init__", noted)
    return seen


# -- rows of their own: commands, environments, networks, runs and pools ----------------------------------------------


def prepare(*assignments: str, arguments: tuple[str, ...] = ("--serial",)) -> None:
    """All that a command checks before there is a run."""
    Preparation(parse([*arguments, *TINY, *settings("run.dir=/nonexistent/run", *assignments)]), "refused").topology(
        RANKS
    )


COMMANDS = (
    ["replay.source=nope"],
    ["replay.capacity=3", "replay.min_size=3", "replay.n_step=5"],
    ["rollout.epsilon_start=0.1", "rollout.epsilon_end=0.9"],
    ["replay.samples_per_insert=0.01", "replay.samples_tolerance=1"],
    ["rollout.max_policy_lag=0.5"],
    ["rollout.refresh=write"],
    ["replay.source=areas", "rollout.max_policy_lag=3"],
    ["learner=3"],
    ["replay.source=tests.core.test_refusals:prepare"],
    ["pool.collectors=cold"],
    ["learner.algorithm=tests.core.test_refusals:OnlyAName"],
    ["learner.init=/nonexistent"],
    ["env.num_envs=0"],
    ["learner.algorithm=tests.core.test_refusals:OnlyMethods"],
)
IN_ROUNDS = (["learner.nodes=1"], ["replay.source=areas"], ["replay.samples_per_insert=0"])


class OnlyAName:
    name = "only_a_name"


class OnlyMethods(OnlyAName):
    describe = modules = prepare = evaluations = loss = acting = inspect = print


class Odd(gymnasium.Env[Any, Any]):
    """Is like no other one that was made."""

    made = 0

    def __init__(self, fault: str = "") -> None:
        Odd.made += 1
        self.fault = fault
        self.observation_space = spaces.Box(-1, 1, (Odd.made if fault == "spaces" else 2,), np.float32)
        self.action_space = spaces.Box(0, 9, (2,), np.int64) if fault == "action" else spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {"action_mask": np.ones(2, np.int8)} if self.fault == "masks" else {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {}


ONE = Odd()


def the_same() -> Odd:
    return ONE


def numbered(env_index: int) -> Odd:
    made = Odd()
    made.observation_space = spaces.Box(-1, 1, (env_index % 2 + 1,), np.float32)
    return made


def leaving() -> None:
    os._exit(0)


class Flagged(gymnasium.vector.SyncVectorEnv):
    def step(self, actions: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(actions)
        return observation, reward, terminated.astype(np.float32), truncated, info


def several(num_envs: int, fault: str = "") -> Any:
    return (gymnasium.vector.SyncVectorEnv if fault else Flagged)([lambda: Odd(fault)] * num_envs)


def vector(num_envs: int, fault: str) -> Any:
    made = Twins(num_envs)
    step = made.step

    def broken(action: Any) -> Any:
        given = step(action)
        return given._replace(terminated=np.zeros(num_envs)) if fault == "flags" else None

    made.step = broken  # type: ignore[method-assign]
    return made


def play(factory: str, **settings: Any) -> None:
    """Make two environments and take a step, without a reset of Acrobot."""
    env: Any = make_vector_env(EnvConfig(id=factory, num_envs=2, **settings))
    if "Acrobot" not in factory:
        env.reset(0)
    env.step(np.zeros(2, np.int64))


ENVIRONMENTS: tuple[dict[str, Any], ...] = (
    {"factory": "Acrobot-v1"},
    {"factory": f"{__name__}:Odd", "kwargs": {"fault": "spaces"}},
    {"factory": f"{__name__}:Odd", "kwargs": {"fault": "action"}},
    {"factory": f"{__name__}:the_same"},
    {"factory": f"{__name__}:vector", "kwargs": {"fault": "flags"}},
    {"factory": f"{__name__}:vector", "kwargs": {"fault": "nothing"}},
    {"factory": f"{__name__}:several"},
    {"factory": f"{__name__}:several", "kwargs": {"fault": "masks"}},
    {"factory": f"{__name__}:numbered", "workers": 2},
)
NETWORKS = (
    "MatrixExponential", "Scripted", "LoopsOverRows", "ToNumpy", "PythonList", "ExtraState", "HoldsALock",
    "HiddenState", "ChangesItsBuffer", "RecurrentOverRows", "WithoutGradient", "ChangesWhatIsNeeded",
    "BoundedEmbeddings", "NoForward", "WithoutValues", "Autocast", "InAClosure", "OfWidths", "DrawsWhileActing",
    "ForbidsByInfinity",
)  # fmt: skip


def parts() -> Iterator[Callable[[], Any]]:
    """Rows, parameters and algorithms by their constructors."""
    state = ColumnRole.STATE
    floats = ArraySpec((2,), "float32")
    for columns in (
        [Column("a"), Column("a")],
        [Column(f"c{place}") for place in range(300)],
        [Column("a", (0,))],
        [Column("reward", (), "float64", ColumnRole.REWARD)],
        [Column("a", role=state), Column("a_next")],
    ):
        yield partial(RowSchema, tuple(columns))
    yield partial(schema_of, floats, floats, [Column("padding")])
    several = replace(VECTOR, reward_shape=(3,))
    record = replace(VECTOR, observation=ArraySpec.record({"a": floats}))
    yield partial(PQN.describe, Config(learner=LearnerConfig(network="mlp")), several)
    yield partial(PQN.describe, Config(learner=LearnerConfig(network="mlp")), record)
    yield partial(TD3.describe, Config(), replace(BOX, reward_shape=(3,)))
    yield partial(algorithm_class, Config(learner=LearnerConfig(algorithm=f"{__name__}:OnlyAName")))
    yield partial(require_tensors, ArraySpec((0,), "float32"))
    buffers = nn.Linear(2, 2)
    buffers.register_buffer("low", torch.zeros(2, dtype=torch.bfloat16))
    yield partial(named_tensors, buffers)
    yield partial(assign_roles, [1, 0, 0, 0], evaluator=True)
    yield partial(_encoded, "\udc80")
    family = load_config(None, ["learner.dueling=policy", "rollout.by_rollout=[{exploration=0.5}]"])
    yield partial(describe, family, VECTOR)
    yield partial(add_task, SETUP, Path("/nonexistent/none.toml"))
    yield partial(make_vector_env, EnvConfig(), 0)
    yield partial(AtariGame, Of(_frameskip=1, get_action_meanings=lambda: ["FIRE"]), EnvConfig())
    yield partial(Config(slices={"pool": {"nope": 1}}).section, "pool")
    yield partial(slice_module, "absent.mode", "--tasks")
    yield partial(local_ranks, Config(), 1)
    yield partial(make_actor, LearnerConfig(normalize=True), Of(networks="admix.networks", env_id="admix"))
    yield partial(continuous_learner_of, "d4pg", table={"actor_anchor": 1.0})
    yield partial(Lead, ["--serial"])


class Counts(nn.Module):
    """Gives one number for all observations, and another one at each call."""

    calls = 0

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return observation.mean() + self.calls


def networks() -> Iterator[Callable[[], Any]]:
    """Modules and devices that a learner cannot use."""
    what = "the network Counts"
    yield partial(_refuse_hidden_state, Counts(), (), VECTOR, what)
    yield partial(_outputs, Counts(), ("q",), (), VECTOR, what)
    yield partial(_parameters_as_inputs, b"", nn.Linear(1, 1), nn.Linear(1, 1), Of(entries=()), (), {}, what)
    evaluation = Of(name="next_q", part="q", target=True)
    yield partial(Engine._module, Of(_parts={"q": Of(target_module=None)}), evaluation)  # type: ignore[arg-type]
    learner = learner_of(LearnerConfig(hidden=[8]))
    yield without("torch", import_torch)
    learner.algorithm.parts = ("value", "policy")
    yield partial(Learner, learner.algorithm, Config(), VECTOR)
    yield partial(patched, "ddrl.learner.learner.move", out_of_memory, partial(learner.to, "cpu"))
    learner._loader = Of(load=out_of_memory)  # type: ignore[assignment]
    yield partial(learner.gradient, None, "q")


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def patched(name: str, value: Any, call: Callable[[], Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, value)
        call()


def without(package: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """The call where a package is not installed."""

    def row() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            call()

    return row


def preparations() -> Iterator[Callable[[], Any]]:
    """Runs and environments that are prepared, and settings that are changed while one trains."""
    yield from (partial(prepare, "pool.collectors=cold", *given, arguments=()) for given in IN_ROUNDS)
    sink = partial(prepare, "telemetry.tensorboard=true")
    yield partial(patched, "ddrl.run.preparation.find_spec", lambda name: None, sink)
    areas = parse([*TINY, *settings("replay.source=areas", "run.dir=/nonexistent/run")])
    yield lambda: Preparation(areas, "refused").topology(tuple(assign_roles([0, 0, 0, 1, 1], evaluator=True)))
    for given in (["env.id=tests.run.environments:endless", "run.start_limit=0.3"], [f"env.id={__name__}:leaving"]):
        yield partial(probe_in_fork, load_config(None, given))
    yield partial(PlanWatch.ask, Of(_hosts=0), "tree")  # type: ignore[arg-type]
    steering = Of(_training=Of(config=Config(), live=None), _run=Path("/nonexistent"))
    yield partial(Steering._set, steering, "cluster.scheme", "mine:Scheme")  # type: ignore[arg-type]
    for in_rounds in (True, False):
        channels = Of(topology=Of(ranks=RANKS, hosts=1, in_rounds=in_rounds))
        yield partial(HostChannels.ask_rollouts, channels, 3)  # type: ignore[arg-type]


def leases(folder: Path) -> Iterator[Callable[[], Any]]:
    """Devices that are asked for and given back where they cannot be."""
    name = segment_name(f"test{os.getpid()}", 0, "leases")
    master = LeaseMaster(name, Fifo(), 1, slots=1)
    master.add("a")
    yield from (partial(master.check_room, task, 1.0) for task in "ab")
    yield partial(master.table.find, "z")
    holder = LeaseHolder(name, "a")
    yield partial(LeaseHolder, name, "a")
    yield holder.release
    holder._key = (0, 0)
    yield partial(holder.acquire, 1)
    holder._key = None
    holder._last = (1, 0)
    yield partial(holder.acquire, 1)
    holder._number = 9
    yield partial(patched, "ddrl.pool.leases.is_alive", lambda *owner: False, partial(holder._wait, 9.0))
    master.close()
    share = parse_devices("cpu:0@0.5")[0]
    yield partial(patched, "ddrl.pool.devices.CpuController.find", lambda: None, partial(make_group, share, "x"))
    resumed = parse(["--resume", str(folder)])
    yield partial(patched, "ddrl.pool.mode.is_listening", lambda path: True, partial(setup_of, resumed))
    yield partial(_policy_tables, {each: Config(slices={"pool": {"fair": {"x": each}}}) for each in "ab"})
    yield partial(Pool._add, Of(_ending=True), "b.toml")  # type: ignore[arg-type]
    yield partial(Pool._child, Of(_running={}), "z")  # type: ignore[arg-type]
    yield partial(assign_relays, ["host"] * 2, 2, 0)
    for relays, free in ((3, ["place 1/1"]), (0, [])):
        places = Of(_check=lambda *given: None, _relays=relays, _free=free, hosts=1)
        yield partial(TaskRelays.check_room, places, "a", Config())  # type: ignore[arg-type]
    yield partial(TaskRelays._check, Of(hosts=1), "a", Config())  # type: ignore[arg-type]
    yield partial(_lines, folder, PoolTask)


def trusted_files(folder: Path) -> Iterator[Callable[[], Any]]:
    """Files that are no settings, or not to be trusted, read or written."""
    file = folder / "section.toml"
    file.write_text("learner = 3")
    yield partial(load_config, file)
    for name in ("mine:make", "tests.run.environments:walk"):
        yield partial(check_trust, folder, {"env.id": name}, trust=False)
    yield partial(own_secret, Path("/proc/ddrl"), "key", lambda: b"secret")
    yield partial(RunLock, Path("/proc/self"))
    (folder / "cells").mkdir()
    os.mkfifo(folder / "cells" / "a.py")
    yield partial(cells_digest, folder)
    made = RunDirectory.create(Config(), "one", folder / "run")
    made.release()
    (made.path / "run.json").unlink()
    opening = partial(RunDirectory.open, made.path, claim=True)
    yield partial(patched, "ddrl.run.directory.write_json", full_disk, opening)
    model = make_mlp(VECTOR)
    for layout in (make_mlp(VECTOR, (9,)).layout, model.layout):
        save_policy(folder, model, random_vector(model.layout, 0), run_id="another")
        kept = Of(_path=folder, _model=Of(layout=layout), _run_id="one", _disk=Of(notify=print))
        yield partial(BestPolicy._read, kept)  # type: ignore[arg-type]


SETUP = PoolSetup("/nonexistent", "cpu:0", "fifo", ())


def learner_files(folder: Path) -> Iterator[Callable[[], Any]]:
    """Damaged and foreign states of a learner."""
    learner = learner_of(LearnerConfig(hidden=[8]))
    path = folder / "state"
    learner.save(path)
    whole = path.read_bytes()
    arrays = load_file(path)
    with safe_open(path, "np") as file:
        header = file.metadata()
    yield partial(learner.load, path) if path.write_bytes(whole[:-9]) else None
    yield partial(learner.load, path) if path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1])) else None
    save_file(arrays, path, {"format": "pt"})
    yield partial(learner.load, path)
    save_file(arrays, path, {name: text.replace("dqn", "iqn") for name, text in header.items()})
    yield partial(learner.load, path)
    write_state(path, arrays | {"further": np.zeros(1)}, {"algorithm": "dqn"})
    yield partial(learner.load, path)
    yield partial(learner.load, folder / "absent")
    yield partial(learner.save, folder / "absent" / "state")


def run_files(folder: Path) -> Iterator[Callable[[], Any]]:
    """Runs whose files are damaged, foreign or in use."""
    run = folder / "run"
    made = RunDirectory.create(Config(), "one", run)
    claim = partial(RunDirectory.open, run, claim=True)
    yield claim
    made.release()
    for other in (run, Path("/proc/ddrl")):
        yield partial(RunDirectory.create, Config(), "two", other)
    yield partial(RunDirectory.open, folder / "absent")
    yield partial(RunDirectory.open, folder)
    (folder / "gone").mkdir()
    with chdir(folder / "gone"):
        (folder / "gone").rmdir()
        yield partial(planned_path, Config(), "1")
    text = made.config.read_bytes()
    for damaged in (b"\xff", text[:-20], text.replace(b"# run one", b"# run two")):
        made.config.write_bytes(damaged)
        yield claim
    made.config.unlink()
    made.config.mkdir()
    yield partial(made.rewrite_config, Config())
    yield partial(newest_checkpoint, folder / "none")
    yield partial(refuse_odd_files, [folder])
    for change in ("format", "digests", "steps", "renamed"):
        (folder / change).mkdir()
        path = write(folder / change)
        document = json.loads((path / "state.json").read_text())
        if change == "digests":
            document["digests"] = {"../x": "0"}
        if change == "steps":
            document["training"]["env_steps"] = -1
        known = {name: value for name, value in document.items() if name not in ("format", "checksum")}
        document |= {
            "checksum": checkpoint._checksum(known),
            "format": 99 if change == "format" else document["format"],
        }
        (path / "state.json").write_text(json.dumps(document))
        if change == "renamed":
            path.rename(path.with_name("000000000099"))
        yield partial(newest_checkpoint, folder / change)
    (folder / "file").write_text("")
    yield partial(write, folder / "file")
    yield partial(write, folder / "gone")
    yield partial(lock_without_proc, folder)


def lock_without_proc(folder: Path) -> None:
    """A run's lock where the kernel's own files are not mounted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.path.exists", lambda path: not str(path).startswith("/proc"))
        RunLock(folder)


def resumes(folder: Path) -> Iterator[Callable[[], Any]]:
    """A run that is resumed, or whose weights are asked for, with other settings."""
    run = folder / "run"
    run_serial(Preparation(parse(["--serial", *TINY, *settings("run.max_env_steps=300", f"run.dir={run}")]), "one"))
    again = ("--serial", "--resume", str(run))
    yield lambda: Preparation(parse([*again, *settings("env.id=Acrobot-v1")]), "two")
    for other in ("learner.algorithm=c51", "learner.hidden=[9]"):
        yield partial(prepare, f"learner.init={run}", other)
    [state] = run.glob("checkpoints/*/state.json")
    document = json.loads(state.read_text()) | {"run_id": "another"}
    known = {name: value for name, value in document.items() if name not in ("format", "checksum")}
    state.write_text(json.dumps(document | {"checksum": checkpoint._checksum(known)}))
    yield lambda: Preparation(parse([*again]), "two")


def pool_files(folder: Path) -> Iterator[Callable[[], Any]]:
    """Pools that are asked for what they cannot do."""
    file = folder / "a.toml"
    pool = folder / "pool"
    file.write_text("")
    setup = PoolSetup(str(pool), "cpu:0", "fifo", (PoolTask("a", str(file), str(pool / "a")),))
    yield partial(DeviceQueue, Fifo(), 0)
    yield partial(Simulator, [], 1, Fifo(), None)
    setup.write()
    yield partial(run_command, ["--tasks", str(file), *settings(f"run.dir={pool}", "pool.devices=cpu:0")])
    yield partial(run_command, ["--resume", str(pool), *settings("run.dir=/elsewhere")])
    yield partial(pool_command, [str(pool), "--reweight", "a", "much"])
    yield partial(pool_command, [str(pool)])
    file.write_text('[pool]\ndevices = "cpu:1"\n')
    yield partial(add_task, setup, file)
    setup.end_of("a").write_text(json.dumps({"ok": True, "reason": "target", "figures": {}}))
    yield partial(run_command, ["--resume", str(pool)])
    (pool / "a").mkdir()
    (pool / "a" / "config.toml").write_text("")
    yield partial(command_of, setup, setup.tasks[0])
    yield partial(replace(setup, directory="/proc/ddrl").write)


def rows(folder: Callable[[str], Path]) -> Iterator[Callable[[], Any]]:
    """What is refused, one by one."""
    yield from (partial(prepare, *given) for given in COMMANDS)
    yield from (partial(parse, given) for given in (["no_such_task"], ["cartpole", "--resume", "x"]))
    yield from (partial(play, **given) for given in ENVIRONMENTS)
    yield from (partial(acting, name) for name in NETWORKS)
    yield lambda: test_strange_networks.learner_of("ByZeros").acting_model()
    yield forbid_torch
    yield from itertools.chain(parts(), networks(), preparations())
    for made in (learner_files, run_files, resumes, pool_files, leases, trusted_files):
        yield from filter(None, made(folder(made.__name__)))


def acting(name: str) -> Any:
    """The acting network of a module of `published_networks`."""
    return test_published_networks.checked(name, published_networks.VECTOR).acting_model()


# Refusals that no row makes: of a disk that fills while a run trains (`run.test_full_disk`).
UNMADE = {"run/task.py: ), but not all of it is saved:"}


def test_each_refusal_is_made_and_is_one_short_line_that_says_what_to_do(
    made: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> None:
    for function, values in cases():
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        with pytest.MonkeyPatch.context() as patch:
            for name in set(names) - set(values):
                fixtures = {"tmp_path": partial(tmp_path_factory.mktemp, "t"), "monkeypatch": lambda patch=patch: patch}
                values[name] = fixtures[name]() if name in fixtures else request.getfixturevalue(name)
            function(**values)
    accepted: list[Callable[[], Any]] = []
    for row in rows(tmp_path_factory.mktemp):
        before = len(made)
        with suppress(DdrlError):
            row()
        if len(made) == before:
            accepted.append(row)
    assert not accepted, "nothing refuses these rows"
    place_of_tests = str(tmp_path_factory.getbasetemp())
    for place, text in made:
        short = text.replace(place_of_tests, "/tmp")
        assert len(short) <= MAX_LINE, f"{place}: {short}"
        assert "\n" not in short, f"{place}: {short}"
        assert REMEDIES.search(short), f"{place}: no remedy in {short!r}"
    missing = set(refusals().values()) - {place for place, _ in made}
    assert missing - UNMADE == set(), "refusals without a row"
    assert UNMADE - missing == set(), "refusals that have a row, or are no longer there"
