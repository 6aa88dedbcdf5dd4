"""Classes and functions of a notebook's cells, or of a script, as files that every process of a run imports.

A run's processes cannot import what only `__main__` has. So the code of each role (environment, network, algorithm and
the like) is written from the source of the executed cells into one readable file, RUN/cells/ROLE.py, with only what
that role needs: the definition, whatever it uses of other definitions, the imports that bring its names, and constants
by their present values. Nothing is pickled. What cannot be written so (computed objects, closures, methods that were
replaced) is refused by name, and a fresh process imports the files and compares their code with the living one before
a run starts.

    python -m ddrl.cells PACKAGE ROLE:NAME ...      what that fresh process runs: prints the code of these as JSON
"""

from __future__ import annotations
import __future__

import ast
import builtins
import dis
import inspect
import json
import secrets
import subprocess
import symtable
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property, partial, partialmethod
from pathlib import Path
from types import CodeType, FunctionType, GenericAlias, ModuleType, UnionType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ddrl.core.errors import ConfigError
from ddrl.core.files import new_file, write_atomically
from ddrl.core.plugins import CELLS, code_name, import_code, mount_cells

CHECK_SECONDS = 300.0  # [s] for a fresh process to import the files: on a loaded machine torch takes two minutes
INDENTED = "if True:  # as its cell has it\n"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def executed_sources() -> list[str]:
    """The sources of the cells of this notebook in the order of their execution, or that of the script that runs."""
    main = sys.modules["__main__"]
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        return [str(cell) for cell in shell.user_ns.get("In", [])]
    file = getattr(main, "__file__", None)
    if file is None:
        raise ConfigError(
            "this Python keeps no source of what is typed into it: write the class into a file, or use a notebook"
        )
    return [Path(file).read_text()]


def write_cells(roles: Mapping[str, Any], run: Path) -> dict[str, str]:
    """Write the code of each role, by the setting that names it ("env.id"), into RUN/cells; the names of what was
    written, as settings take them.

    ConfigError names what cannot be written, or is not as its cell says."""
    package = f"cells_{secrets.token_hex(4)}"
    folder = run / CELLS
    cells = Cells(vars(sys.modules["__main__"]), executed_sources())
    files = {setting: cells.file_of(setting, value) for setting, value in roles.items()}
    folder.mkdir(parents=True)
    names: dict[str, str] = {}
    living: dict[str, Any] = {}
    for setting, file in files.items():
        role = setting.removesuffix(".id").rpartition(".")[2]
        if (folder / f"{role}.py").exists():  # of another section
            role = setting.replace(".", "_")
        file.write(folder / f"{role}.py")
        names[setting] = f"{package}.{role}:{file.name}"
        living |= {f"{role}:{name}": value for name, value in file.defined.items()}
    mount_cells(run, names.values())
    _check(package, ", ".join(name.partition(".")[2] for name in names.values()), living)
    return names


@dataclass
class CellFile:
    """The text of one role's module."""

    name: str  # of what it is written for
    names: set[str] = field(default_factory=set[str])  # that it has, or is about to have
    imports: dict[str, None] = field(default_factory=dict[str, None])  # lines, in order
    constants: dict[str, str] = field(default_factory=dict[str, str])  # expression by name
    arrays: dict[str, Any] = field(default_factory=dict[str, Any])
    definitions: list[str] = field(default_factory=list[str])
    defined: dict[str, Any] = field(default_factory=dict[str, Any])  # the living objects of the definitions

    def write(self, path: Path) -> None:
        """Write the module, and a file beside it for each array."""
        for name, array in self.arrays.items():
            with new_file(path.with_suffix(f".{name}.npy")) as saved:
                np.save(saved, array, allow_pickle=False)
        lines = [f"{name} = {value}" for name, value in self.constants.items()]
        imports = sorted(self.imports, key=lambda line: not line.startswith("from __future__"))
        doc = f'"""{self.name} of a notebook or script, as it was when the run was started."""'
        parts = [doc, "\n".join(imports), "\n".join(lines), *self.definitions]
        write_atomically(path, ("\n\n".join(part for part in parts if part) + "\n").encode())


class Cells:
    """The source of what was executed, beside the namespace that it made."""

    def __init__(self, namespace: Mapping[str, Any], sources: Sequence[str]) -> None:
        self._namespace = namespace
        # By name, of each statement of a cell: its source, or those of all branches that define the name.
        self._definitions: dict[str, list[list[str]]] = {}
        self._assignments: dict[str, str] = {}  # the newest source by name
        self._imports: dict[str, list[tuple[str, str, str]]] = {}  # by name: (line, module, attribute or "")
        for source in sources:
            self._read(source)

    def _read(self, source: str) -> None:
        try:
            tree = ast.parse(source)
        except SyntaxError:
            return  # of a cell that never ran
        for statement in tree.body:
            match statement:
                case ast.Expr(ast.Call(ast.Attribute(attr="run_cell_magic"), [_, _, ast.Constant(str(cell))])):
                    self._read(cell)  # below %%time and the like
                case _:
                    found: dict[str, list[str]] = {}
                    self._note(statement, source, found)
                    for name, sources in found.items():
                        self._definitions.setdefault(name, []).append(sources)

    def _note(self, statement: ast.AST, source: str, found: dict[str, list[str]]) -> None:
        if isinstance(statement, Definition):
            first = min([statement.lineno, *(decorator.lineno for decorator in statement.decorator_list)])
            lines = source.splitlines()[first - 1 : statement.end_lineno]
            text = (INDENTED if statement.col_offset else "") + "\n".join(lines)
            found.setdefault(statement.name, []).append(text)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and not statement.col_offset:
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            self._assignments[ast.unparse(target)] = ast.unparse(statement)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            for alias in statement.names:
                if isinstance(statement, ast.Import):
                    first = alias.name.partition(".")[0]
                    line = ast.unparse(ast.Import([alias]))
                    place = (line, alias.name if alias.asname else first, "")
                else:
                    first = alias.name
                    line = ast.unparse(ast.ImportFrom(statement.module, [alias], statement.level))
                    place = (line, statement.module or "", alias.name)
                self._imports.setdefault(alias.asname or first, []).append(place)
        elif not isinstance(statement, ast.expr):
            for below in ast.iter_child_nodes(statement):  # of an `if`, a `try` and the like
                self._note(below, source, found)

    def file_of(self, setting: str, value: Any) -> CellFile:
        """The module of a role; ConfigError where part of it cannot be written."""
        if not isinstance(value, type | FunctionType | partial):
            raise ConfigError(
                f"{setting} is a {type(value).__name__}: give the class, or a function that makes one, not what it made"
            )
        name = getattr(cast(Any, value), "__name__", "_given")  # a partial has none
        made = CellFile(name)
        executed = [place for places in self._imports.values() for place in places]
        made.imports |= {line: None for line, module, _ in executed if module == "__future__"}
        self._add(name, value, setting, made)
        return made

    def _add(self, name: str, value: Any, user: str, made: CellFile) -> None:
        """Let the module have `name`, which `user` needs."""
        if name in made.names:
            return
        made.names.add(name)
        if self._import(name, value, made):
            return
        if (isinstance(value, type | FunctionType) or _wrapped(value)) and not _library(value):
            self._define(name, value, user, made)
        elif _is_type_form(value) and name in self._assignments:
            self._write(self._assignments[name], name, made)
        elif (literal := _literal(value)) is not None:
            made.constants[name] = literal
        elif isinstance(value, np.ndarray) and not cast(NDArray[Any], value).dtype.hasobject:
            made.arrays[name] = value
            made.imports |= {"from pathlib import Path as _Path": None, "import numpy as _np": None}
            made.constants[name] = f"_np.load(_Path(__file__).with_suffix('.{name}.npy'), allow_pickle=False)"
        elif (made_of := self._expression(value, user, made)) is not None:
            made.defined[name] = value
            made.definitions.append(f"{name} = {made_of}")
        else:
            kind = type(cast(object, value)).__name__
            raise ConfigError(
                f"{user} uses {name}, a {kind} that was made in a cell and cannot be written into a "
                f"file: make it inside {user}, or import it from a module"
            )

    def _import(self, name: str, value: Any, made: CellFile) -> bool:
        """Whether an import brings the name: one that was executed, or by what the object says of itself."""
        for line, module, attribute in reversed(self._imports.get(name, [])):
            loaded = sys.modules.get(module)
            if loaded is not None and (getattr(loaded, attribute, None) if attribute else loaded) is value:
                # `import a.b` and `import a.c` both bind a.
                lines = [line] if attribute else [each for each, of, _ in self._imports[name] if of == module]
                made.imports |= dict.fromkeys(lines)
                return True
        if isinstance(value, ModuleType):
            made.imports[f"import {value.__name__} as {name}"] = None
            return True
        module = _library(value)
        own = getattr(value, "__qualname__", "")
        if callable(value) and getattr(sys.modules.get(module), own, None) is value:
            made.imports[f"from {module} import {own} as {name}"] = None
            return True
        return False

    def _expression(self, value: Any, user: str, made: CellFile) -> str | None:
        """What makes a value out of names that the module then has; None where that is not known."""
        return _literal(value, lambda one: self._call(one, user, made))

    def _call(self, value: Any, user: str, made: CellFile) -> str | None:
        """Likewise of a definition, an Enum's member, a dataclass, a named tuple or a functools.partial."""
        if hasattr(value, "__qualname__"):
            name = str(value.__name__)
            if library := _library(value):
                name = f"_{library}_{name}".replace(".", "_")  # which no name of a cell hides
                return name if self._import(name, value, made) else None
            # What another has replaced is refused there.
            (self._add if self._namespace.get(name) is value else self._define)(name, value, user, made)
            return name
        kind = cast(Any, type(value))
        named: dict[str, Any] = {}
        if issubclass(kind, Enum):
            given: tuple[Any, ...] = (value.value,)
        elif kind == partial:
            given = (value.func, *value.args)
            named = value.keywords
        elif hasattr(kind, "__dataclass_fields__") and all(one.init for one in fields(kind)):
            given = ()
            named = {one.name: getattr(value, one.name) for one in fields(kind)}
        elif hasattr(kind, "_fields") and hasattr(kind, "_asdict"):
            given = tuple(value)
        else:
            return None
        parts = [self._expression(one, user, made) for one in (kind, *given, *named.values())]
        if None in parts:
            return None
        names = [""] * len(given) + [f"{name}=" for name in named]
        return f"{parts[0]}({', '.join(f'{name}{part}' for name, part in zip(names, parts[1:], strict=True))})"

    def _source(self, name: str, value: Any) -> str | None:
        """The newest source of a definition; under an `if` or `try`, that of the branch whose code lives."""
        living = {text for _, text in _parts(name, value)}
        for sources in reversed(self._definitions.get(name, [])):
            if not sources[0].startswith(INDENTED):
                return sources[0]
            alike = {source for source in sources if living.issuperset(_codes(compile(source, name, "exec")))}
            if alike:
                return alike.pop() if len(alike) == 1 else None
        return self._assignments.get(name) if isinstance(value, type) else None

    def _define(self, name: str, value: Any, user: str, made: CellFile) -> None:
        given = value.__name__  # a decorator's own, where that does not hand names on
        own = given if self._namespace.get(given) is value else name
        source = self._source(own, value)
        if source is None or self._namespace.get(own) is not value:
            raise ConfigError(
                f"{user} uses {name}, which is no definition of a cell as it is now (it was made by a call or under an "
                "`if`, typed where no source is kept, or defined anew since): write it with def or class at a cell's "
                "left margin, and run its cell again"
            )
        if own != name:
            self._add(own, value, user, made)
            made.definitions.append(f"{name} = {own}")
            return
        for base in getattr(value, "__bases__", ()):
            if not _library(base) and self._namespace.get(base.__name__) is not base:
                raise ConfigError(
                    f"{name} has a base {base.__name__} that was defined anew: run the cell of {name} again"
                )
        made.defined[name] = value
        self._write(source, name, made)

    def _write(self, source: str, name: str, made: CellFile) -> None:
        """Let the module have a statement, and what that uses."""
        used = list(_names(symtable.symtable(source, "<cell>", "exec"), True))
        for needed, now in used:
            if now:
                self._need(needed, name, made)
        made.definitions.append(source)
        for needed, _ in used:
            self._need(needed, name, made)

    def _need(self, needed: str, user: str, made: CellFile) -> None:
        builtin = getattr(builtins, needed, self)
        value = self._namespace.get(needed, builtin)
        if needed not in self._definitions and _wrapped(value) is builtin:
            return  # IPython's `open`
        if value is not builtin and not needed.startswith("__"):
            self._add(needed, value, user, made)


def _wrapped(value: Any) -> Any:
    """The function beneath an object of functools.lru_cache and the like."""
    return None if isinstance(value, type) else getattr(value, "__dict__", {}).get("__wrapped__")


def _is_type_form(value: Any) -> bool:
    """Whether it stands for a type, as Union[int, float], list[int] and TypeVar("T") do; it cannot be changed."""
    return isinstance(value, GenericAlias | UnionType) or type(value).__module__ == "typing"


def plain(value: Any) -> Any:
    """numpy's and torch's scalars as Python's, anything else as it is."""
    if isinstance(value, np.generic) or (type(value).__module__ == "torch" and getattr(value, "ndim", 1) == 0):
        return cast(Any, value).item()
    return value


def _literal(value: Any, other: Callable[[Any], str | None] = lambda _: None) -> str | None:
    """The value as an expression; None where it is none of plain numbers, texts, containers of them, and what `other`
    knows."""
    value = plain(value)
    kind = cast(Any, type(value))
    if kind is float:
        return repr(value) if np.isfinite(value) else f"float({str(value)!r})"
    if value is None or kind in (bool, int, complex, str, bytes, range, slice):
        return repr(value)
    if kind not in (tuple, list, set, frozenset, dict):
        return other(value)
    items = [_literal(item, other) for item in value]
    if kind is dict:
        values = [_literal(item, other) for item in value.values()]
        items = [key and item and f"{key}: {item}" for key, item in zip(items, values, strict=True)]
    if None in items:
        return None
    if kind in (set, frozenset):
        items.sort(key=str)  # the same in every process
    inside = ", ".join(map(str, items))
    if kind is list:
        return f"[{inside}]"
    if kind is dict:
        return f"{{{inside}}}"
    return f"({inside},)" if kind is tuple and items else f"{kind.__name__}([{inside}])"


def _names(table: symtable.SymbolTable, now: bool) -> Iterator[tuple[str, bool]]:
    """The global names that a definition uses, and whether already when it is executed (in bases, decorators, defaults,
    annotations, bodies of classes) or later (in bodies of functions)."""
    now = now and table.get_type() != "function"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name(), now
    for child in table.get_children():
        yield from _names(child, now)


# -- the check in a fresh process --------------------------------------------------------------------------------------


def code_texts(definitions: Mapping[str, Any]) -> dict[str, str]:
    """The code and the plain defaults of functions, and of classes' methods, and classes' plain attributes, by name."""
    texts: dict[str, str] = {}
    for name, value in definitions.items():
        for path, text in _parts(name, value):
            texts[path] = f"{texts.get(path, '')} {text}"
    return texts


def _parts(path: str, value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[str, str]]:
    """What a value is made of, by the same words in every process; nothing of what has no words."""
    if any(value is one for one in above):
        return  # of a function that calls itself
    members: list[Any] = []
    literal = _literal(value)
    if literal is not None:
        yield path, literal
    elif isinstance(value, FunctionType):
        yield path, _text(value.__code__)
        members = [value.__defaults__, value.__kwdefaults__]
        members += [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        if _is_of_cell(value.__globals__.get("__name__", "")):  # torch has marks of its own on functions of Enum
            members += _attributes(value)
    elif isinstance(value, type) and not _library(value):
        for name, one in vars(value).items():
            if not name.startswith("__") or hasattr(one, "__get__"):
                yield from _parts(f"{path}.{name}", one, (*above, value))
    elif isinstance(value, tuple | list):
        members = [type(cast(Any, value)), *cast("list[Any]", value)]
    elif type(value) is dict:
        members = [one for item in cast("dict[Any, Any]", value).items() for one in item]
    elif isinstance(value, set | frozenset):
        members = sorted(cast("set[Any]", value), key=lambda one: str(list(_parts(path, one, above))))
    elif isinstance(value, np.ndarray):
        array = cast("NDArray[Any]", value)
        if not array.dtype.hasobject:
            yield path, f"{array.dtype} {array.shape} {zlib.crc32(array.tobytes())}"
    elif isinstance(value, staticmethod | classmethod | property | partial):
        names = ("__func__", "fget", "fset", "fdel", "func", "args", "keywords")
        members = [*(getattr(cast(Any, value), name, None) for name in names), *_attributes(value)]
    elif (
        isinstance(value, Enum | cached_property | partialmethod)
        or hasattr(value, "__dataclass_fields__")
        or not _library(type(cast(Any, value)))
        or _wrapped(value) is not None
    ):
        members = [type(cast(Any, value)), *_attributes(value)]
    elif hasattr(value, "__qualname__"):
        yield path, f"{_library(value)}.{value.__qualname__}"
    for member in members:
        yield from _parts(path, member, (*above, cast(Any, value)))


def _library(value: Any) -> str:
    """The module of a definition; "" where a cell or the script has made it."""
    module = str(getattr(value, "__module__", None))
    return "" if _is_of_cell(module) else module


def _is_of_cell(module: str) -> bool:
    return module == "__main__" or module.startswith("cells_")


def _attributes(value: Any) -> list[Any]:
    """What a function or an object keeps, with names, and with the function beneath it."""
    slots = {name: getattr(value, name, None) for name in getattr(value, "__slots__", ())}
    kept = {**slots, **getattr(value, "__dict__", {})}
    return [one for item in kept.items() if item[0] == "__wrapped__" or item[0][:2] != "__" for one in item]


def _codes(code: CodeType) -> Iterator[str]:
    """What the functions do that a definition makes, not in turn those that they make."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and inner.co_name[0] != "<":
            if inner.co_flags & inspect.CO_OPTIMIZED:
                yield _text(inner)
            else:
                yield from _codes(inner)  # a class


def _is_full(cell: Any) -> bool:
    try:
        return not isinstance(cell.cell_contents, type)  # that of super() names the class itself
    except ValueError:
        return False


def _text(code: CodeType) -> str:
    """What a piece of code does, in any process. The compiler calls `np.sqrt` in another way where it has seen the
    import of np in the same file, so calls are compared by what they call."""
    steps: list[tuple[str, str]] = []
    for step in dis.get_instructions(code):
        if step.opname in ("PUSH_NULL", "NOP"):
            continue
        jumps = step.opcode in (*dis.hasjrel, *dis.hasjabs)
        shown = "" if jumps or isinstance(step.argval, CodeType) else _constant(step.argval)
        steps.append(("LOAD_ATTR" if step.opname == "LOAD_METHOD" else step.opname, shown))
    inner = [_text(each) for each in code.co_consts if isinstance(each, CodeType)]
    flags = code.co_flags & ~__future__.annotations.compiler_flag
    return repr((steps, inner, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount, flags))


def _constant(value: Any) -> str:
    return repr(sorted(map(repr, cast("frozenset[Any]", value)))) if isinstance(value, frozenset) else repr(value)


def _check(package: str, names: str, living: Mapping[str, Any]) -> None:
    """Import the files in a fresh process; ConfigError where that fails or gives other code than lives here.

    `living`: the definitions by role:name; `names`: what the files were written for."""
    command = [sys.executable, "-m", "ddrl.cells", package, *living]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{names} cannot be imported by itself within {CHECK_SECONDS:g} s: do what takes long inside the class"
        ) from None
    if done.returncode:
        said = done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"
        raise ConfigError(f"{names} cannot be imported by itself: {said}")
    here = code_texts(living)
    there = json.loads(done.stdout.splitlines()[-1])
    for place in [*here, *there]:
        if here.get(place) != there.get(place):
            name = place.partition(":")[2]
            raise ConfigError(
                f"{name} is not what its cell says (it was replaced, or what it is made from has changed): "
                f"run the cell of {name.partition('.')[0]} again, with everything inside it"
            )


def main(arguments: Sequence[str]) -> int:
    """See the module."""
    package, *names = arguments
    found: dict[str, Any] = {}
    for name in names:
        code = code_name(f"{package}.{name}")
        assert code is not None, name
        found[name] = getattr(import_code(code.module), code.attribute, None)
    print(json.dumps(code_texts(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
