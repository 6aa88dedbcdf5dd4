"""From `env.*` settings to a vector of environments: Gymnasium ids, Atari games, and environments of the user.

`env.id` is a registered id (CartPole-v1), a module that registers one (package.module:Env-v0, as Gymnasium writes it),
or a factory of the user (package.module:factory) called as factory(**env.kwargs), with num_envs=... too where it takes
that, which returns a gymnasium.Env, a Gymnasium vector, or a VectorEnv of `ddrl.core.specs`. A factory that takes
env_index is given a number that no other environment of the run has: for ports, licences and files of its own."""

from __future__ import annotations

import copy
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from typing import Any, cast

import gymnasium
import msgspec
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as Registered
from gymnasium.wrappers import TransformObservation

from ddrl.acting.choosers import chooser_class
from ddrl.core.config import EnvConfig
from ddrl.core.errors import MAX_WORDS, CheckpointError, DdrlError, EnvError, MissingExtraError, first_line, user_error
from ddrl.core.plugins import code_name, import_code
from ddrl.core.specs import Array, EnvSpec, VectorEnv
from ddrl.envs.spaces import doubts, has_attribute, has_picture, is_box, shown
from ddrl.envs.vectors import LoopVectorEnv, NativeVectorEnv, OwnVectorEnv, speaks_our_protocol

PROBE_STEPS = 30  # that an environment takes before there is a run
PROBE_SECONDS = 0.1  # after which it takes no further one
ENV_INDEX = "env_index"  # argument of a factory: which environment of the run it makes
_ATARI_ENTRY_POINT = "ale_py.env:AtariEnv"
_ID = re.compile(r"/|-v\d+$")  # in a name that is an id rather than a factory
_ATARI_ID = re.compile(r"ALE/|.+NoFrameskip-v[04]$")
# Packages of environments whose import opens, starts and asks for nothing.
_PRELOADED = ("gymnasium.envs.classic_control.", "gymnasium.envs.toy_text.")
STATISTICS = ("obs_rms", "return_rms")  # attributes of wrappers: a running mean and variance
MOMENTS = ("mean", "var", "count")
_ARRAY = "__array__"
_TUPLE = "__tuple__"
_INTEGER = "__integer__"
MAX_WORD = 2**63  # integers of msgpack are smaller
_MAX_DEPTH = 100  # of wrappers around each other


def preload(config: EnvConfig) -> None:
    """Import the environment's module where it is one of Gymnasium's simplest: processes that are forked from this one
    share its memory, 1 MB of each. The code of others is imported only in the process that runs it."""
    registered = gymnasium.registry.get(config.id)
    if registered is not None:
        for point in (registered.entry_point, registered.vector_entry_point):
            if isinstance(point, str) and point.startswith(_PRELOADED):
                importlib.import_module(point.partition(":")[0])


def make_vector_env(config: EnvConfig, num_envs: int | None = None, first_index: int = 0) -> VectorEnv:
    """`num_envs` (default: config.num_envs) environments that step together. `first_index`: the env_index of the first.

    EnvError: unknown id, spaces that are not supported, arguments that the environment does not take.
    MissingExtraError: the id's package is not installed. An exception inside the environment passes through with its
    traceback."""
    count = config.num_envs if num_envs is None else num_envs
    if count < 1:
        raise EnvError(f"env.num_envs ({count}) must be at least 1")
    workers = min(config.workers, count)
    if workers > 1:
        from ddrl.envs.workers import WorkersVectorEnv  # whose multiprocessing takes time to import

        vector: VectorEnv = WorkersVectorEnv(
            config.id, workers, count, lambda part, first: _part(config, count, part, first, first_index)
        )
    else:
        vector = _make_vector(config, count, first_index)
    if config.figures and not hasattr(vector, "figures"):
        vector.close()
        raise EnvError(
            f"env.figures = {config.figures}: info is read of single environments, not of {config.id}, which steps as "
            "a vector: set env.figures = [], or let a factory return one environment"
        )
    vector.spec = vector.spec.scaled(config.scale)
    return vector


def _part(config: EnvConfig, count: int, part: int, first: int, first_index: int) -> VectorEnv:
    """`part` of `count` environments, from number `first` on."""
    vector = _make_vector(config, part, first_index + first)
    if isinstance(vector, LoopVectorEnv):
        vector.place = (first, count)
    return vector


def _make_vector(config: EnvConfig, count: int, first_index: int) -> VectorEnv:
    found = find_env(config.id)
    if not isinstance(found, Registered):
        return _from_factory(config, found, count, first_index)
    if found.entry_point == _ATARI_ENTRY_POINT and config.kwargs.get("obs_type", "rgb") != "ram":
        return _atari(config, found, count)
    native = None if config.figures or config.workers > 1 else _native(config, found, count)
    if native is not None:
        return native
    return _loop(config, count, lambda _: _make(config, found))


def _loop(config: EnvConfig, count: int, make: Callable[[int], Any]) -> LoopVectorEnv:
    environments: list[Any] = []
    for place in range(count):
        try:
            environments.append(make(place))
        except DdrlError:
            raise
        except Exception as error:
            if not place:
                raise
            raise EnvError(
                user_error(
                    error,
                    f"env.id = {config.id}: number {place + 1} of {count} environments in one process: ",
                    "; where one process may have one: env.num_envs = 1, not --serial",
                )
            ) from error
    return LoopVectorEnv(
        config.id,
        environments,
        config.reward_clip,
        named=config.observation == "named" or (config.observation == "auto" and has_picture(environments[0])),
        max_lengths=config.max_lengths,
        action_mask=config.action_mask,
        figures=config.figures,
    )


def probe_spec(config: EnvConfig) -> EnvSpec:
    """What one environment gives and takes, after some steps at random, which make the checks of a run: makes one and
    closes it. Raises as make_vector_env does, and what the environment raises."""
    env = make_vector_env(config, 1)
    try:
        spec = env.spec
        chooser = chooser_class("epsilon_greedy" if spec.discrete else "gaussian")(spec, 1, 0, {})
        seen = [env.reset(0)]
        end = time.perf_counter() + PROBE_SECONDS
        while len(seen) <= PROBE_STEPS and (len(seen) == 1 or time.perf_counter() < end):
            seen.append(env.step(chooser.random(seen[-1])[0]).observation)
        notes = (*spec.notes, *doubts(spec, np.concatenate(seen)))
        return replace(spec, notes=notes, state_nbytes=len(read_states(env)))
    finally:
        env.close()


def find_env(env_id: str) -> Registered | Callable[..., Any]:
    """The registered spec of an id, or the user's factory."""
    code = code_name(env_id)
    if code is None:
        return _find_registered(env_id, env_id)
    module_name, name = code
    if module_name == "gymnasium" and not hasattr(gymnasium, name):  # its own ids need no module
        return _find_registered(env_id, name)
    if module_name == "gym" and name in gymnasium.registry:
        raise EnvError(f"env.id = {env_id}: gymnasium has taken the place of gym: did you mean '{name}'?")
    module = _import_module(env_id, module_name)
    members = cast(dict[str, Any], vars(module))
    register = members.get("register_envs")
    if (
        name not in gymnasium.registry
        and name not in members
        and callable(register)
        and register.__module__
        in (
            module_name,
            getattr(module, "__package__", ""),
        )
    ):
        register()  # some packages leave it to the user
    if name not in gymnasium.registry and name not in members:
        _call_entry_points(module_name)
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    factory = getattr(module, name, None)
    if factory is None:
        old = getattr(getattr(sys.modules.get("gym"), "envs", None), "registry", {})
        if name in getattr(old, "env_specs", old):
            raise EnvError(
                f"env.id = {env_id}: {name} is registered with the old package gym, not with gymnasium: name a factory "
                "of your own that wraps it, for example with shimmy's GymV26CompatibilityV0"
            )
        known = _registered_by(module_name)
        if not _ID.search(name):
            known += [key for key, value in members.items() if callable(value)]
        hint = meant(env_id, known) or "its import registers no such id: name one, or a factory"
        raise EnvError(f"env.id = {env_id}: the module {module_name} has no '{name}'; {hint}")
    if not callable(factory):
        raise EnvError(
            f"env.id = {env_id}: {name} is a {type(factory).__name__}, not what makes an environment: name a "
            "function or class"
        )
    return factory


def _call_entry_points(module_name: str) -> None:
    """Register what a module's package has told its installer to have registered, which Gymnasium 1 does not read."""
    package = module_name.partition(".")[0]
    for point in metadata.entry_points(group="gymnasium.envs"):
        if point.module.partition(".")[0] == package:
            point.load()()


def every_id() -> list[str]:
    """The ids of all environments that are installed and have told Gymnasium or their installer so, as `env.id` takes
    them; of Atari games those whose preprocessing is ddrl's (ALE/...)."""
    ids = [
        name for name, spec in _all_ids().items() if name.startswith("ALE/") or spec.entry_point != _ATARI_ENTRY_POINT
    ]
    for point in metadata.entry_points(group="gymnasium.envs"):
        package = point.module.partition(".")[0]
        before = set(gymnasium.registry)
        with suppress(Exception):  # a package that cannot be imported has no environments
            point.load()()
        ids += [f"{package}:{name}" for name in gymnasium.registry if name not in before]
    return ids


def _registered_by(module_name: str) -> list[str]:
    """The ids whose environments are in a module's package."""
    package = module_name.partition(".")[0]
    return [known for known, spec in gymnasium.registry.items() if str(spec.entry_point).startswith(f"{package}.")]


def _all_ids() -> dict[str, Registered]:
    """What Gymnasium knows, with the Atari games where they are installed."""
    with suppress(ModuleNotFoundError):
        importlib.import_module("ale_py")  # registers them
    return gymnasium.registry


def _find_registered(env_id: str, name: str) -> Registered:
    if name in gymnasium.registry or name in _all_ids():
        return gymnasium.registry[name]
    if _ATARI_ID.match(name) and importlib.util.find_spec("ale_py") is None:
        raise MissingExtraError("ale-py", "atari", f"env.id = {env_id}")
    hint = meant(name, gymnasium.registry) or "gymnasium.pprint_registry() lists all ids"
    raise EnvError(
        f"env.id = {env_id}: Gymnasium has no such environment; {hint} (of a package that registers it at import: "
        "write package:Id; of your own: package.module:factory)"
    )


# By what pip installs: how ids of packages begin that people know by their ids, and what goes before such an id: the
# module that registers it at import, and a namespace that people leave out.
_PACKAGES = {
    "minigrid": ("MiniGrid-|BabyAI-", "minigrid:"),
    "gymnasium-robotics": (
        "Fetch|HandManipulate|HandReach|AntMaze|PointMaze|AdroitHand|FrankaKitchen",
        "gymnasium_robotics:",
    ),
    "highway-env": (
        "(highway|merge|roundabout|parking|intersection|racetrack|exit|u-turn|two-way|lane-keeping)-",
        "highway_env:",
    ),
    "flappy-bird-gymnasium": ("FlappyBird", "flappy_bird_gymnasium:"),
    "minatar": ("MinAtar/", "minatar:"),
    "miniworld": ("MiniWorld-", "miniworld:"),
    "panda-gym": ("Panda(Reach|Push|Slide|PickAndPlace|Stack|Flip)", "panda_gym:"),
    "metaworld": ("Meta-World/", "metaworld:"),
    "vizdoom": ("Vizdoom", "vizdoom.gymnasium_wrapper:"),
    "PyFlyt": ("PyFlyt/", "PyFlyt.gym_envs:"),
    "'shimmy[dm-control]'": ("dm_control/", "shimmy:"),
    "procgen-gym": ("(procgen_gym/)?procgen-", "procgen_gym:procgen_gym/"),  # procgen itself speaks the old gym
}
_VERSION = re.compile(r"[-_ ]?v(\d+)$", re.IGNORECASE)
_FILE = re.compile(r"(?:(.*)/)?(\w+)\.py:(\w+)")


def meant(typed: str, known: Iterable[str]) -> str:
    """What to type instead of an id that is not `known`, or module:id: "did you mean 'CartPole-v1'?", what to install
    for it, or "" where nothing is near.

    Case, signs and version decide nothing: of one name the newest version is meant."""
    file = _FILE.fullmatch(typed)
    if file is not None:
        folder, module, attribute = file.groups()
        return f"did you mean '{module}:{attribute}'{f', started in {folder}' if folder else ''}?"
    parts = {each: _parts(each) for each in known}
    bare = typed.rpartition(":")[2]
    space, name, _ = _parts(bare)
    names = {other for namespace, other, _ in parts.values() if not space or namespace == space}
    if name not in names:
        for package, (begins, before) in _PACKAGES.items():
            family = re.compile(begins, re.IGNORECASE)
            if not family.match(bare) or any(map(family.match, gymnasium.registry)):
                continue
            module, _, namespace = before.partition(":")
            wanted = f"{before}{bare.removeprefix(namespace)}"
            if wanted == typed:
                return f"pip install {package}"
            is_there = importlib.util.find_spec(module.partition(".")[0]) is not None
            return f"did you mean '{wanted}'{'' if is_there else f' (pip install {package})'}?"
        module, _, attribute = bare.rpartition(".")
        if module.isidentifier() and attribute.isidentifier() and importlib.util.find_spec(module):
            return f"did you mean '{module}:{attribute}'?"
        if space and not names:  # a prefix that nothing registers, of an id that another does
            names = {name} & {other for _, other, _ in parts.values()}
            space = ""
        name = next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.7)), "")
    fitting = [
        each for each, (namespace, other, _) in parts.items() if other == name and (not space or namespace == space)
    ]
    if not name or not fitting:
        return ""
    return f"did you mean '{max(fitting, key=lambda each: (parts[each][0] in ('', 'ale'), parts[each][2]))}'?"


def _parts(env_id: str) -> tuple[str, str, int]:
    """Namespace and letters of an id in lower case, and its version (-1: none)."""
    namespace, _, name = env_id.strip().lower().rpartition("/")
    version = _VERSION.search(name)
    letters = re.sub(r"[\W_]", "", name[: version.start()] if version else name)
    return namespace, letters, int(version[1]) if version else -1


def _import_module(env_id: str, module_name: str) -> Any:
    try:
        return import_code(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the user's module imports
        hint = meant(env_id, _all_ids())
        raise EnvError(
            f"env.id = {env_id}: there is no module '{error.name}'; "
            f"{hint or 'start where it can be imported, or install it'}"
        ) from None


def _make(config: EnvConfig, registered: Registered, **overrides: Any) -> gymnasium.Env[Any, Any]:
    """One environment by Gymnasium, without its checking wrappers: ddrl checks what it gets itself."""
    lean = copy.deepcopy(registered)
    lean.order_enforce = False
    lean.disable_env_checker = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of the packages behind an environment, e.g. Box2D's bindings
            return gymnasium.make(lean, **{**config.kwargs, **overrides})
    except gymnasium.error.DependencyNotInstalled as error:
        if "box2d" in str(error).lower():
            raise MissingExtraError("box2d", "box2d", f"env.id = {config.id}") from None
        raise EnvError(f"env.id = {config.id}: {error}") from None
    except ModuleNotFoundError as error:
        raise EnvError(
            f"env.id = {config.id} needs the package '{error.name}', which is not installed: install it"
        ) from error
    except ImportError as error:
        newest = meant(registered.id, gymnasium.registry)
        if registered.id in newest:
            raise
        raise EnvError(f"env.id = {config.id}: {first_line(error)[:MAX_WORDS]}; {newest}") from error
    except TypeError as error:
        if "argument" not in str(error):
            raise
        words = str(error).partition(" was raised from")[0]
        remedy = "give it there, or let a factory give it" if " missing " in words else "leave it out, or correct it"
        raise EnvError(f"env.kwargs = {config.kwargs}: {words} ({config.id}): {remedy}") from error


def _native(config: EnvConfig, registered: Registered, count: int) -> NativeVectorEnv | None:
    """The environment's own vector form, where it has one that ddrl can use and that takes these arguments."""
    if (
        registered.vector_entry_point is None
        or registered.additional_wrappers
        or registered.entry_point == _ATARI_ENTRY_POINT
    ):
        return None
    try:
        vector = gymnasium.make_vec(copy.deepcopy(registered), count, "vector_entry_point", **config.kwargs)
    except (TypeError, ImportError, gymnasium.error.DependencyNotInstalled):
        return None  # the loop names the trouble, or takes the argument
    if speaks_our_protocol(vector):
        trusted = type(vector).__module__.startswith("gymnasium.")  # packages register vectors of their own
        return NativeVectorEnv(config.id, vector, config.reward_clip, trusted=trusted)
    vector.close()
    return None


def _atari(config: EnvConfig, registered: Registered, count: int) -> VectorEnv:
    try:
        from ddrl.envs.atari import AtariGame, AtariVectorEnv
    except ModuleNotFoundError:
        raise MissingExtraError("opencv-python-headless", "atari", f"env.id = {config.id}") from None
    if config.kwargs.get("frameskip", 1) != 1:
        raise EnvError(
            f"env.kwargs.frameskip = {config.kwargs['frameskip']}: the game must run at frameskip 1; set "
            "env.frame_skip instead"
        )
    kwargs = dict(config.kwargs)
    limit = kwargs.pop("max_episode_steps", registered.max_episode_steps) or 0
    if kwargs.get("continuous") or kwargs.get("sound_obs"):
        raise EnvError(
            f"env.kwargs = {kwargs}: continuous actions and sound are not supported for Atari games; remove them"
        )
    games = [
        AtariGame(_make(replace(config, kwargs=kwargs), registered, frameskip=1).unwrapped, config)
        for _ in range(count)
    ]
    return AtariVectorEnv(games, config, limit)


def _refusal(made: Any) -> str:
    """Why what a factory returned is no environment for ddrl, and what to return."""
    name = f"{type(made).__module__}.{type(made).__name__}".removeprefix("builtins.")
    if _is_vector(made) or _is_many(made):
        mode = cast(dict[str, Any], getattr(made, "metadata", None) or {}).get("autoreset_mode")
        space = getattr(made, "single_observation_space", None)
        lacks: list[str] = []
        if mode is not gymnasium.vector.AutoresetMode.NEXT_STEP:
            lacks.append(f"autoreset mode NEXT_STEP (metadata says {mode})")
        if not is_box(space):
            lacks.append(f"a Box of observations (single_observation_space is {shown(space)})")
        return (
            f"{name} needs {' and '.join(lacks) or 'to be a gymnasium.vector.VectorEnv'}: return one environment, or a "
            "VectorEnv of ddrl.core.specs"
        )
    if any(kind.__module__.split(".")[0] == "gym" for kind in type(made).__mro__):
        return (
            f"{name} is an environment of the old package gym: wrap it, for example with shimmy's GymV21CompatibilityV0"
        )
    if isinstance(made, type):
        return f"the factory returned the class {made.__name__}: return one of its objects, {made.__name__}(...)"
    for attribute, what in _OTHER_INTERFACES.items():
        if has_attribute(made, attribute):
            return f"the factory returned a {name}, {what}"
    return (
        f"the factory returned a {name}; it must return a gymnasium.Env, a Gymnasium vector, or a VectorEnv "
        "(ddrl.core.specs)"
    )


# By an attribute that tells it: an interface that is not Gymnasium's, and what to do.
_OTHER_INTERFACES = {
    "possible_agents": "which has several agents (PettingZoo): return a gymnasium.Env in which one of them acts and "
    "the others are a part of the environment",
    "action_spec": "of dm_env's interface: wrap it, for example with shimmy's DmControlCompatibilityV0",
    "step": "which is no gymnasium.Env: derive it from that, with reset -> (observation, info) and the 5 values of "
    "step; shimmy wraps environments of the old gym",
}


def _is_vector(made: object) -> bool:
    return isinstance(made, gymnasium.vector.VectorEnv)


def _is_many(made: object) -> bool:
    """Whether it says how many environments it is: a proxy may have an attribute of any name."""
    return isinstance(getattr(made, "num_envs", None), int | np.integer)


def _from_factory(config: EnvConfig, factory: Callable[..., Any], count: int, first_index: int) -> VectorEnv:
    kwargs = dict(config.kwargs)
    indexed = False
    try:
        signature: inspect.Signature | None = inspect.signature(factory)
    except ValueError:  # some built-in types say nothing about their arguments
        signature = None
    if signature is not None:
        if "num_envs" in signature.parameters:
            kwargs.setdefault("num_envs", count)
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        indexed = ENV_INDEX in signature.parameters or inspect.Parameter.VAR_KEYWORD in kinds
        try:
            signature.bind(**({ENV_INDEX: 0, **kwargs} if ENV_INDEX in signature.parameters else kwargs))
        except TypeError as error:
            raise EnvError(
                f"env.kwargs = {config.kwargs}: {error}; give what {config.id} takes: {str(signature)[:80]}"
            ) from None

    def make(place: int) -> Any:
        if not indexed or ENV_INDEX in kwargs:
            return factory(**kwargs)
        try:
            return factory(**kwargs, env_index=first_index + place)
        except Exception as error:
            if ENV_INDEX not in str(error):
                raise
        return factory(**kwargs)  # it hands its keywords on to something that does not take this one

    made: Any = make(0)
    if isinstance(cast(object, made), gymnasium.Env) and not _is_many(made):
        return _loop(config, count, lambda place: make(place) if place else made)
    if isinstance(getattr(made, "spec", None), EnvSpec) and _is_many(made):
        vector: VectorEnv = OwnVectorEnv(made, config.id)
    elif _is_vector(made) and speaks_our_protocol(made):
        vector = NativeVectorEnv(config.id, made, config.reward_clip)
    else:
        raise EnvError(f"env.id = {config.id}: {_refusal(made)}")
    if vector.num_envs != count:
        raise EnvError(
            f"env.id = {config.id}: the factory made {vector.num_envs} environments where {count} are wanted; "
            "let it take the argument num_envs"
        )
    return vector


def partly_observed(id: str, keep: Sequence[int], **kwargs: Any) -> gymnasium.Env[Array, Any]:
    """The registered environment `id` with the entries `keep` of its observation alone (a vector).

    CartPole-v1 without velocities: env.kwargs = {id = "CartPole-v1", keep = [0, 2]}. EnvError where it does not fit."""
    env: gymnasium.Env[Any, Any] = gymnasium.make(id, **kwargs)
    kept = np.array(keep, np.int64)
    box = cast(Any, env).observation_space  # the bounds of a Box have no types
    if type(box) is not spaces.Box or len(box.shape) != 1:
        raise EnvError(f"env.kwargs: {id} observes {shown(box)}: name an environment that observes a vector")
    if not (len(kept) and ((kept >= 0) & (kept < box.shape[0])).all()):
        raise EnvError(
            f"env.kwargs: keep = {list(keep)} must name entries 0 to {box.shape[0] - 1} of {id}'s observation"
        )
    part = spaces.Box(box.low[kept], box.high[kept], dtype=np.float32)
    return TransformObservation(env, lambda observation: np.asarray(observation)[kept], part)


# ---- what environments keep ----
# From one episode to the next: statistics of Gymnasium's normalizing wrappers, and what an optional `state()` of an
# environment or wrapper returns and its `load_state(state)` takes. Checkpoints and saved policies hold it as bytes, so
# that a resumed run continues with it and an evaluation plays with it. A state is made of numbers, strings, lists,
# tuples, dicts and arrays of numbers.


def _layers(env: Any) -> list[Any]:
    """Those among an environment and its wrappers that keep a state, the outermost first."""
    found: list[Any] = []
    for _ in range(_MAX_DEPTH):
        if _speaks(env) or any(_has_moments(env, name) for name in STATISTICS):
            found.append(env)
        env = cast(dict[str, Any], getattr(env, "__dict__", {})).get("env")
        if env is None:
            break
    return found


def _speaks(layer: Any) -> bool:
    """Whether its class has both methods; an attribute `state` of an instance is something else."""
    return all(callable(getattr(cast(object, type(layer)), name, None)) for name in ("state", "load_state"))


def _has_moments(layer: Any, name: str) -> bool:
    return has_attribute(layer, name) and all(hasattr(getattr(layer, name), moment) for moment in MOMENTS)


def _read(layer: Any) -> Any:
    if _speaks(layer):
        return layer.state()
    return {
        name: {moment: getattr(getattr(layer, name), moment) for moment in MOMENTS}
        for name in STATISTICS
        if _has_moments(layer, name)
    }


def _load(layer: Any, state: Any, frozen: bool) -> None:
    if _speaks(layer):
        layer.load_state(state)
        return
    for name, moments in state.items():
        for moment in MOMENTS:
            setattr(getattr(layer, name), moment, moments[moment])
    if frozen and hasattr(layer, "update_running_mean"):
        layer.update_running_mean = False


def read_states(vector: Any) -> bytes:
    """The states of all environments of a vector, by environment and layer; b"" where none has any. EnvError for a
    state that cannot be saved."""
    if hasattr(vector, "read_states"):  # its environments are in other processes
        return vector.read_states()
    states = [[_read(layer) for layer in _layers(env)] for env in getattr(vector, "holders", ())]
    if not any(states):
        return b""
    try:
        return msgspec.msgpack.encode([_encode(state) for state in states])
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvError(
            f"env.id = {vector.spec.env_id}: state() of the environment cannot be saved ({error}): return numbers, "
            "strings, lists, tuples, dicts and arrays of numbers"
        ) from None


def load_states(vector: Any, data: bytes, *, frozen: bool = False) -> None:
    """Continue with states that `read_states` gave; where it held fewer environments, several begin alike. `frozen`:
    the statistics of Gymnasium's wrappers stay as they are. CheckpointError where they are of other environments."""
    holders = getattr(vector, "holders", ())
    try:
        if data and hasattr(vector, "load_states"):
            vector.load_states(data, frozen)
        if not data or not holders:
            return
        states = _decode(msgspec.msgpack.decode(data))
        for place, env in enumerate(holders):
            for layer, state in zip(_layers(env), states[place % len(states)], strict=True):
                _load(layer, state, frozen)
    except (msgspec.DecodeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"env.id = {vector.spec.env_id}: the saved state does not fit its environments ({error}): use the "
            "wrappers and load_state() of the run that saved it, or begin a new run"
        ) from error


def _encode(value: Any) -> Any:
    """In msgpack's types, so that `_decode` gives the same types back: a state of random.getstate(), or of a numpy
    generator, is tuples and whole numbers of any size."""
    if isinstance(value, list):
        return [_encode(each) for each in cast(list[Any], value)]
    if type(value) is tuple:
        return {_TUPLE: [_encode(each) for each in cast(tuple[Any, ...], value)]}
    if isinstance(value, dict):
        return {key: _encode(each) for key, each in cast(dict[Any, Any], value).items()}
    if type(value) is int:
        return value if abs(value) < MAX_WORD else {_INTEGER: str(value)}
    if value is None or type(value) in (str, bytes, bool, float):  # numpy's float64 is a float too
        return value
    array: np.ndarray[Any, Any] = np.asarray(value)
    if array.dtype.kind not in "biuf" or not hasattr(value, "__array__"):
        raise TypeError(f"it holds a {type(value).__name__}")
    return {_ARRAY: array.dtype.str, "shape": array.shape, "data": array.tobytes()}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    known = cast(dict[Any, Any], value)
    if _TUPLE in known:
        return tuple(_decode(known[_TUPLE]))
    if _INTEGER in known:
        return int(known[_INTEGER])
    if _ARRAY not in known:
        return {key: _decode(each) for key, each in known.items()}
    dtype = np.dtype(str(known[_ARRAY]))
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of {dtype}")
    return np.frombuffer(known["data"], dtype).reshape(known["shape"]).copy()[()]
