"""Code of a notebook's cells becomes files that a run's processes import, or is refused by name."""

from __future__ import annotations

import enum
import functools
import importlib.util
import os
import py_compile
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ddrl
from ddrl import cells
from ddrl.core import plugins
from ddrl.core.errors import ConfigError, DdrlError, RunDirError
from tests.run.preloaded import forked
from tests.sources import ROOT, environment
from tests.waiting import PATIENCE


class Notebook:
    """Cells that were executed, in a namespace that is `__main__`'s while code is written."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sources: str) -> None:
        self.sources: list[str] = []
        main = ModuleType("__main__")
        self.namespace = vars(main)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(cells, "executed_sources", lambda: self.sources)
        self.run(*sources)

    def run(self, *sources: str) -> None:
        for source in map(textwrap.dedent, sources):
            self.sources.append(source)
            exec(compile(source, "<cell>", "exec", dont_inherit=True), self.namespace)

    def __getitem__(self, name: str) -> Any:
        return self.namespace[name]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    before = set(os.environ)
    yield lambda *sources: Notebook(monkeypatch, *sources)
    for name in set(os.environ) - before:
        del os.environ[name]


def written(notebook: Notebook, folder: Path, name: str, setting: str = "env.id") -> Any:
    """What another process would import: the object, after its file was written."""
    names = cells.write_cells({setting: notebook[name]}, folder)
    module, _, attribute = names[setting].partition(":")
    return getattr(plugins.import_code(module), attribute)


def test_a_class_comes_with_all_it_uses_and_with_nothing_else(notebook, tmp_path):
    book = notebook(
        """
        from __future__ import annotations
        import math
        import os.path, json
        import numpy as np
        from collections import deque as queue
        from functools import wraps
        """,
        """
        SCALE = 3
        UNUSED = object()
        TABLE = np.arange(6.0).reshape(2, 3)
        LIMITS = {"low": (-1.0,), "high": [float("inf"), 2], "names": {"a"}, 4: None}
        HALF = np.float32(0.5)
        """,
        """
        def unused():
            return UNUSED

        def doubled(f):
            @wraps(f)
            def wrapper(*arguments):
                return 2 * f(*arguments)
            return wrapper

        @doubled
        def half(x):
            return x * HALF / 2
        """,
        """
        class Base:
            limit: queue = queue([1], maxlen=SCALE)

            def root(self, x):
                return math.sqrt(x)
        """,
        """
        class Env(Base):
            names = [key for key in LIMITS]

            class Inner:
                def place(self):
                    return os.path.join("a", "b")

            @doubled
            def value(self, x):
                def inside():
                    return half(x) + self.root(TABLE[1, 2] - 1) + super(Env, self).root(4)
                return inside()

            @staticmethod
            def table():
                return TABLE

            @property
            def high(self):
                return max(LIMITS["high"])
        """,
    )
    made = written(book, tmp_path / "run", "Env")()
    assert made.value(2.0) == book["Env"]().value(2.0) == 2 * (1.0 + 2.0 + 2.0)
    np.testing.assert_array_equal(made.table(), book["TABLE"])
    assert (made.high, made.limit.maxlen, made.Inner().place()) == (float("inf"), 3, "a/b")
    assert made.names == ["low", "high", "names", 4]
    text = (tmp_path / "run" / "cells" / "env.py").read_text()
    assert "unused" not in text
    assert "UNUSED" not in text
    assert "json" not in text
    assert text.index("class Base") < text.index("class Env")
    assert sorted(path.name for path in (tmp_path / "run" / "cells").iterdir() if path.is_file()) == [
        "env.TABLE.npy",
        "env.py",
    ]


def test_the_present_value_and_the_latest_definition_count(notebook, tmp_path):
    book = notebook("N = 1\ndef make():\n    return N\n", "N = 2\n", "def make():\n    return N + 10\n", "N = 3\n")
    book.sources.append("def make(:\n")  # a cell that never ran
    assert written(book, tmp_path / "run", "make")() == 13


def test_an_alias_and_a_function_of_a_module_keep_their_names(notebook, tmp_path):
    book = notebook(
        "import numpy as np\nfrom math import sqrt as root\nrng = np.random.default_rng\n",
        "def add(a, b=root(4)):\n    return a + b\n",
        "plus = add\ndef make():\n    return plus(1), rng(0).random()\n",
    )
    assert written(book, tmp_path / "run", "make")() == (3.0, np.random.default_rng(0).random())


def test_imports_are_those_of_the_living_modules(notebook, tmp_path):
    book = notebook(
        "import math as m\nfrom math import sqrt as root\nimport xml.dom.minidom\nimport xml.sax\n",
        "if True:\n    import cmath as m\n    from cmath import sqrt as root\n",
        "def make():\n    return root(-1), m.sqrt(-4), xml\n",
    )
    assert written(book, tmp_path / "run", "make")()[:2] == (1j, 2j)
    lines = (tmp_path / "run" / "cells" / "env.py").read_text().splitlines()
    assert {"import xml.dom.minidom", "import xml.sax"} < set(lines), "both bind xml"


def test_code_that_draws_in_a_run_needs_no_torch(notebook, tmp_path):
    pytest.importorskip("torch", reason="needs the extra [train]")
    book = notebook(
        "import torch\n",
        "HIDDEN = torch.tensor(8)\n",
        "class Net(torch.nn.Linear):\n    def __init__(self, spec):\n        super().__init__(HIDDEN, 2)\n",
        "class Env:\n    size = 3\n",
    )
    roles = {"learner.network": book["Net"], "env.id": book["Env"]}
    names = cells.write_cells(roles, tmp_path / "run")
    assert [name.partition(".")[2] for name in names.values()] == ["network:Net", "env:Env"]
    assert "torch" not in (tmp_path / "run" / "cells" / "env.py").read_text()
    assert "HIDDEN = 8" in (tmp_path / "run" / "cells" / "network.py").read_text()


def test_decorated_functions_names_of_types_and_cells_under_a_magic_are_followed(notebook, tmp_path):
    book = notebook(
        """
        import functools
        from typing import Callable, Literal, NewType, Optional, TypeAlias, TypeVar, Union
        """,
        """
        T = TypeVar("T")
        Number = Union[int, float]
        Pair: TypeAlias = tuple[Number, Number]
        Either = int | Literal["a"]
        Meters = NewType("Meters", float)

        def first(pair: Pair, either: Either = 1, call: Optional[Callable[[T], T]] = None) -> Number:
            return pair[0]
        """,
        """
        def plainly(f):  # without functools.wraps
            def wrapper(n):
                return wrapper(n - 1) if n > 10 else f(n)
            return wrapper

        @functools.lru_cache(maxsize=None)
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

        @plainly
        def more(n):
            return n + fibonacci(n)
        """,
        """
        class Doubled:
            def __init__(self, f):
                functools.update_wrapper(self, f)
                self.f = f

            def __call__(self):
                return 2 * self.f()

        @Doubled
        def nothing():
            return len(NUMBERS[PART]) - 2

        NUMBERS = range(10)
        PART = slice(0, 2)

        class Env:
            @functools.cached_property
            def size(self):
                return more(12) + nothing()

            @functools.lru_cache
            def value(self, x):
                return first((x, 1)) + Meters(self.size)
        """,
    )
    cell = "def f():\n    return Env().value(2)\n"
    book.run(cell)
    book.sources[-1] = f"get_ipython().run_cell_magic('time', '', {cell!r})\n"  # as IPython keeps it
    assert written(book, tmp_path / "run", "f")() == book["f"]() == 2 + 10 + 55


def test_values_are_written_by_what_makes_them_of_other_names(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(enum.Enum.__new__, "mark", "of a library", raising=False)  # torch leaves such, once it exports
    book = notebook(
        """
        import enum
        import http
        import math
        from collections import namedtuple
        from dataclasses import dataclass
        from functools import partial
        from typing import NamedTuple

        import numpy as np
        """,
        """
        class Way(enum.Enum):
            UP = enum.auto()
            DOWN = enum.auto()

            def back(self):
                return Way.UP if self is Way.DOWN else Way.DOWN

        class Pull(float, enum.Enum):
            MOON = 1.62

        class Flag(enum.IntFlag):
            A = 1
            B = 2

        class Point(NamedTuple):
            x: int
            y: float = 2.0

        Pair = namedtuple("Pair", "left right")

        @dataclass(frozen=True)
        class Config:
            way: Way
            size: int = 3
            area: int = 0

            def __post_init__(self):
                object.__setattr__(self, "area", self.size**2)
        """,
        """
        def power(base, x, plus=0):
            return x**base + plus

        def floor(x):
            return "no library's"

        START = Way.DOWN
        BOTH = Flag.A | Flag.B
        FOUND = http.HTTPStatus.NOT_FOUND
        CONFIG = Config(Way.UP, 5)
        PLACES = [Point(1), Point(3, 4.0), Pair("a", (START,))]
        ACTS = {Way.UP: math.floor, Way.DOWN: partial(power, 3, plus=1)}
        clip = partial(np.clip, a_min=0, a_max=Pull.MOON)

        class Env:
            def __init__(self, most):
                self.most = most

            def told(self, way=Way.UP, seen={Way.DOWN}):
                with open("/dev/null") as file:
                    nothing = file.read()
                assert START in seen and way is START.back() and FOUND is http.HTTPStatus(404)
                acted = floor(1.5), ACTS[Way.UP](1.5), ACTS[START](2), float(clip(self.most))
                return CONFIG.area, int(BOTH), PLACES[1].y, PLACES[2], acted, nothing
        """,
        "env = partial(Env, 9.0)\n",
    )
    book.namespace["open"] = functools.wraps(open)(functools.partial(open))  # as IPython does
    told = written(book, tmp_path / "run", "env")().told()
    assert repr(told) == repr(book["env"]().told())
    assert told[:2] == (25, 3)
    assert told[4] == ("no library's", 1, 9, 1.62)


def test_of_branches_the_one_that_was_executed_is_written(notebook, tmp_path):
    book = notebook(
        "FAST = False\ndef older():\n    return 1\n",
        """
        if FAST:
            def f(x):
                return x + 1

            def older():
                return 2
        else:
            def f(x, text='''a
        b'''):
                return x, text

        try:
            from nowhere import jit
        except ImportError:
            def jit(of):
                return of

        for k in range(3):
            @jit
            def last(k=k):
                return k
        """,
        """
        with open("/dev/null"):
            if FAST:
                class Env:
                    def told(self):
                        return 0
            else:
                class Env:
                    class Inner:
                        def told(self):
                            return [f(each) for each in (older(), last())]

                    def told(self):
                        return self.Inner().told()
        """,
        "FAST = True\n",
    )
    assert written(book, tmp_path / "run", "Env")().told() == book["Env"]().told() == [(1, "a\nb"), (2, "a\nb")]


REFUSED = {
    "branches that are alike": (
        "A = 1\nif A:\n    def f(a=1): return a\nelse:\n    def f(a=2): return a\n",
        "f, which is no definition of a cell as it is now .*under an `if`.*at a cell's left margin",
    ),
    "a member of a class that was defined anew": (
        "import enum\nclass Way(enum.Enum): UP = 1\nSTART = Way.UP\nclass Way(enum.Enum): UP = 1\n"
        "def f(): return Way, START\n",
        "f uses Way, which is no definition of a cell as it is now",
    ),
    "a partial of a function that was defined anew": (
        "from functools import partial\ndef g(a): return a\nh = partial(g, 1)\n"
        "def g(a): return -a\ndef f(): return h()\n",
        "f uses g, which is no definition of a cell as it is now",
    ),
    "a partial of a lambda": (
        "from functools import partial\nh = partial(lambda a: a, 1)\ndef f(): return h()\n",
        "f uses <lambda>, which is no definition",
    ),
    "a partial with an attribute": (
        "from functools import partial\ndef g(a): return a\nh = partial(g, 1)\nh.k = 1\ndef f(): return h.k\n",
        "h is not what its cell says",
    ),
    "a dataclass that keeps what its fields do not say": (
        "from dataclasses import dataclass\n@dataclass\nclass C: a: int = 1\nc = C()\nc.b = object()\n"
        "def f(): return c.b\n",
        "c is not what its cell says",
    ),
    "a dataclass of an object": (
        "from dataclasses import dataclass\n@dataclass\nclass C: a: object\nc = C(object())\ndef f(): return c\n",
        "f uses c, a C that was made in a cell",
    ),
    "a dataclass that makes a field by itself": (
        "from dataclasses import dataclass, field\n@dataclass\nclass C: a: int = field(init=False, default=1)\n"
        "c = C()\ndef f(): return c\n",
        "f uses c, a C that was made in a cell",
    ),
    "a value of a member that has changed": (
        "import enum\nN = 1\nclass Way(enum.Enum): UP = N\nN = 2\ndef f(): return Way.UP\n",
        "Way.* is not what its cell says",
    ),
    "a class as an attribute that was defined anew": (
        "class H: x = 1\nclass f: h = H\nclass H: x = 2\n",
        "f.h.x is not what its cell says",
    ),
    "a default that has changed beside one that is a function": (
        "N = 1\ndef g(): pass\ndef f(a=g, *, n=N): return n\nN = 2\n",
        "f is not what its cell says",
    ),
    "an array as an attribute that has changed": (
        "import numpy as np\nN = 3\nclass f: table = np.arange(N)\nN = 4\n",
        "f.table is not what its cell says",
    ),
    "an instance as an attribute that has changed": (
        "N = 3\nclass C:\n    def __init__(self, n): self.n = n\nclass f: c = C(N)\nN = 4\n",
        "f.c is not what its cell says",
    ),
    "names of a named tuple that have changed": (
        "from collections import namedtuple\nN = 'a b'\nP = namedtuple('P', N)\nN = 'b a'\ndef f(): return P(1, 2)\n",
        "P.* is not what its cell says",
    ),
    "an instance": ("class A: pass\na = A()\ndef f():\n    return a\n", "f uses a, a A that was made in a cell"),
    "a computed object": ("import io\na = io.StringIO()\ndef f():\n    return a\n", "f uses a, a StringIO"),
    "an array of objects": (
        "import numpy as np\na = np.array([object()])\ndef f():\n    return a\n",
        "uses a, a ndarray",
    ),
    "a lambda": ("g = lambda: 1\ndef f():\n    return g()\n", "f uses g, which is no definition of a cell"),
    "a closure": (
        "def outer(n):\n    def inner():\n        return n\n    return inner\ng = outer(3)\ndef f():\n    return g()\n",
        "f uses g, which is no definition of a cell",
    ),
    "a base defined anew": (
        "class A: pass\nclass f(A): pass\nclass A: pass\n",
        "f has a base A that was defined anew: run the cell of f again",
    ),
    "a patched method": (
        "class f:\n    def step(self): return 1\ndef other(self): return 2\nf.step = other\n",
        "f.step is not what its cell says",
    ),
    "a patched method of a base": (
        "class A:\n    def step(self): return 1\nclass f(A): pass\nA.step = lambda self: 2\n",
        "A.step is not what its cell says .*: run the cell of A again, with everything inside it",
    ),
    "an attribute of a value that has changed": (
        "N = {'a', 'b'}\nclass f:\n    names = N\nN = {'c'}\n",
        "f.names is not what its cell says .*what it is made from has changed",
    ),
    "a definition that another has replaced": (
        "class g: pass\nf = g\nclass g: pass\n",
        "env.id uses g, which is no definition of a cell as it is now .*: write it with def or class at a cell's",
    ),
    "what was registered elsewhere": (
        "from functools import singledispatch\n@singledispatch\ndef g(x): return 1\n"
        "@g.register\ndef _(x: int): return 2\ndef f(): return g(3)\n",
        "g is not what its cell says",
    ),
    "an attribute of a function": ("def f(): return f.k\nf.k = 2\n", "f is not what its cell says"),
    "a cached function that was replaced": (
        "from functools import lru_cache\n@lru_cache\ndef g(): return 1\ng = lru_cache(lambda: 2)\n"
        "def f(): return g()\n",
        "g is not what its cell says",
    ),
    "a cached property that was replaced": (
        "from functools import cached_property\nclass f:\n    @cached_property\n    def size(self): return 1\n"
        "f.size = cached_property(lambda self: 2)\n",
        "f.size is not what its cell says",
    ),
    "what a decorator's object has counted": (
        "import functools\nclass counted:\n    def __init__(self, of):\n        functools.update_wrapper(self, of)\n"
        "        self.of, self.calls = of, 0\n    def __call__(self):\n        self.calls += 1\n"
        "        return self.of()\n@counted\ndef g(): return 1\ng()\ndef f(): return g()\n",
        "g is not what its cell says",
    ),
    "a namespace": (
        "from types import SimpleNamespace\ng = SimpleNamespace(a=1)\ng.a = 2\ndef f(): return g.a\n",
        "f uses g, a SimpleNamespace",
    ),
    "what a decorator without functools.wraps has counted": (
        "def counted(of):\n    calls = {'n': 0}\n    def wrapper():\n        calls['n'] += 1\n        return of()\n"
        "    return wrapper\n@counted\ndef g(): return 1\ng()\ndef f(): return g()\n",
        "g is not what its cell says",
    ),
    "what a decorator left": ("def g(of): pass\n@g\ndef f(): pass\n", "env.id is a NoneType: give the class"),
}


@pytest.mark.parametrize(("source", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_written_is_refused_by_name(notebook, tmp_path, source, message):
    book = notebook(source)
    with pytest.raises(ConfigError, match=message) as refused:
        cells.write_cells({"env.id": book["f"]}, tmp_path / "run")
    assert "\n" not in str(refused.value)


LIVING = """
class f:
    limit = 1
    acts = [abs, {"a": max}, {min}]
    @property
    def size(self): return 1
    @staticmethod
    def table(): return 1
    class Inner:
        def place(self, a=1): return a
"""


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ("f.limit = 2", "f.limit"),
        ("f.acts[0] = len", "f.acts"),
        ("f.acts[1]['a'] = len", "f.acts"),
        ("f.acts[2] = {len}", "f.acts"),
        ("f.size = property(lambda self: 2)", "f.size"),
        ("f.size = f.size.setter(lambda self, value: None)", "f.size"),
        ("f.table = staticmethod(lambda: 2)", "f.table"),
        ("f.Inner.place = lambda self, a=1: 2", "f.Inner.place"),
        ("f.Inner.place.__defaults__ = (2,)", "f.Inner.place"),
        ("f.more = lambda self: 2", "f.more"),
    ],
)
def test_whatever_a_class_is_made_of_is_compared(change, seen):
    exec(LIVING, before := {"__name__": "__main__"})
    exec(f"{LIVING}\n{change}", after := {"__name__": "__main__"})
    here, there = (cells.code_texts({"f": space["f"]}) for space in (before, after))
    assert here | {seen: ""} == there | {seen: ""}
    assert here.get(seen) != there[seen]


def test_a_cell_that_was_changed_but_not_run_is_refused(notebook, tmp_path):
    book = notebook("def f():\n    return 1\n")
    book.sources.append("def f():\n    return 2\n")
    with pytest.raises(ConfigError, match="f is not what its cell says"):
        cells.write_cells({"env.id": book["f"]}, tmp_path / "run")


def test_a_file_that_fails_by_itself_is_named_with_its_error(notebook, tmp_path):
    book = notebook("import os\nos.environ['ONLY_HERE'] = '1'\ndef f(a=os.environ['ONLY_HERE']):\n    return a\n")
    os.environ.pop("ONLY_HERE")
    with pytest.raises(ConfigError, match="env:f cannot be imported by itself: KeyError: 'ONLY_HERE'"):
        cells.write_cells({"env.id": book["f"]}, tmp_path / "run")


ENDLESS_ELSEWHERE = """
import threading
class Env:
    threading.Event().wait(0 if __name__ == "__main__" else None)
"""


def test_what_takes_for_ever_elsewhere_is_refused_and_nothing_is_left_of_the_run(notebook, tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "CHECK_SECONDS", 2.0)
    with pytest.raises(
        ConfigError, match=r"env:Env cannot be imported by itself within 2 s: do what takes long inside"
    ):
        ddrl.start(env=notebook(ENDLESS_ELSEWHERE)["Env"], root=tmp_path / "runs")
    assert not list(tmp_path.glob("runs/*"))


def test_a_class_inside_a_function_of_a_module_is_refused(tmp_path):
    class Local:
        pass

    with pytest.raises(ConfigError, match=r"Local of tests.* cannot be imported by that name: define it at the top"):
        ddrl.start(env=Local, root=tmp_path)


@pytest.fixture
def trusted(notebook, tmp_path, monkeypatch) -> dict[str, str]:
    """The names of a run's cells, which the user has consented to."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)  # as on anybody's machine
    names = cells.write_cells({"env.id": notebook("def f():\n    return 1\n")["f"]}, tmp_path / "run")
    plugins.remember_trust(tmp_path / "run", names)
    plugins.check_trust(tmp_path / "run", names, trust=False)
    return names


def test_consent_covers_the_content_of_the_files(trusted, tmp_path):
    with (tmp_path / "run" / "cells" / "env.py").open("a") as file:
        file.write("import os\n")
    with pytest.raises(RunDirError, match="look at that code, then say --trust once"):
        plugins.check_trust(tmp_path / "run", trusted, trust=False)


def test_compiled_files_beside_the_source_are_neither_run_nor_in_the_way_of_consent(trusted, tmp_path):
    source = tmp_path / "run" / "cells" / "env.py"
    hostile = tmp_path / "hostile.py"
    hostile.write_text("def f():\n    return 2\n".ljust(source.stat().st_size, "\n"))
    os.utime(hostile, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
    compiled = Path(importlib.util.cache_from_source(str(source)))
    compiled.parent.mkdir(exist_ok=True)
    py_compile.compile(str(hostile), cfile=str(compiled))  # by size and time it is of the source
    plugins.check_trust(tmp_path / "run", trusted, trust=False)
    (name,) = trusted.values()
    assert plugins.import_code(name.partition(":")[0]).f() == 1


def test_a_fifo_among_the_files_hangs_nobody(trusted, tmp_path):
    os.mkfifo(tmp_path / "run" / "cells" / "more.py")
    with pytest.raises(RunDirError, match=r"more.py cannot be read: it is not a file"):
        plugins.check_trust(tmp_path / "run", trusted, trust=False)


def test_a_name_leads_to_no_file_outside_of_the_cells(trusted, tmp_path):
    (tmp_path / "run" / "evil.py").write_text("raise AssertionError('it was run')\n")
    package = trusted["env.id"].partition(".")[0]
    for role in ("../evil", "a.b", ""):
        with pytest.raises((ModuleNotFoundError, ValueError)):
            plugins.import_code(f"{package}.{role}")


def test_roles_of_one_name_have_files_of_their_own(notebook, tmp_path):
    book = notebook("def f():\n    return 1\n", "def g():\n    return 2\n")
    names = cells.write_cells({"learner.network": book["f"], "other.network": book["g"]}, tmp_path / "run")
    made = [plugins.import_code(name.partition(":")[0]) for name in names.values()]
    assert (made[0].f(), made[1].g()) == (1, 2)


def test_the_cells_of_a_real_notebook_are_found(tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra [test]")
    nbformat = pytest.importorskip("nbformat", reason="needs the extra [notebook]")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    sources = [
        "%env CELLS_TEST=1\nimport numpy as np\nN = 2",
        "class Env:\n    def size(self):\n        return 1",
        "class Env:\n    def size(self):\n        return N * np.int64(21)",
        "N = 1 / 0",
        "from pathlib import Path\nfrom ddrl.cells import write_cells",
        f"print(write_cells({{'env.id': Env}}, Path({str(tmp_path / 'run')!r})))",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(book, timeout=PATIENCE, kernel_name="python3", allow_errors=True).execute()
    (said,) = book.cells[-1].outputs
    assert ".env:Env" in said.get("text", ""), said
    text = (tmp_path / "run" / "cells" / "env.py").read_text()
    assert "N = 2" in text
    assert "return 1" not in text


SCRIPT = """
import gymnasium
import numpy as np
import torch
import ddrl
from ddrl.acting.choosers import EpsilonGreedy

GOAL = 5


class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, GOAL, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        self.left = 50
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.place = max(0, self.place + (1 if action else -1))
        self.left -= 1
        return np.full(1, self.place, np.float32), float(action), self.place == GOAL, self.left == 0, {}


class Net(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.layer = torch.nn.Linear(spec.observation.size, spec.num_actions)

    def forward(self, observation):
        return self.layer(observation)


class Careful(EpsilonGreedy):
    name = "careful"


gymnasium.register("Here-v0", Corridor)
try:
    ddrl.start(env="Here-v0", root="runs")
except ddrl.core.errors.ConfigError as error:
    print("refused:", error)
small = {"run.max_env_steps": np.int64(400), "learner.lr": torch.tensor(5e-4), "learner.hidden": [np.int32(16)]}
small |= {"run.processes": 1, "evaluation.period": 200, "env.num_envs": 2}
small |= {"replay.selector": Tournament, "rollout.chooser": Careful}
run = ddrl.start(settings=small, env=Corridor, network=Net, root="runs", wait=%f)
print(run.wait(%f), run.path)
"""


def program(name: str) -> str:
    """An example of docs/extending.md."""
    return (ROOT / "docs" / "extending.md").read_text().split(f"```python {name}\n")[1].split("```")[0]


def test_a_scheme_of_a_cell_makes_its_plans_elsewhere(notebook, tmp_path):
    book = notebook(program("hops.py"))
    scheme = written(book, tmp_path / "run", "Hops", "cluster.scheme")
    plan, expected = (kind.plan(4, 1000, hop=2) for kind in (scheme, book["Hops"]))
    assert plan.source.tolist() == expected.source.tolist()


def test_an_interactive_python_that_keeps_no_source_is_refused_in_one_line(tmp_path):
    typed = """import ddrl
class Env: pass

try: ddrl.start(env=Env, root="runs")
except ddrl.core.errors.ConfigError as error: print("refused:", error)

"""
    done = subprocess.run(
        [sys.executable, "-i", "-q"], cwd=tmp_path, input=typed, env=environment(), capture_output=True, text=True
    )
    assert "refused: this Python keeps no source of what is typed into it: write the class into a file" in done.stdout


def test_a_script_trains_what_it_defines_and_others_go_on_and_play_it(tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="needs the extra [train]")
    selector = program("tournament.py")
    (tmp_path / "script.py").write_text(selector + SCRIPT % (PATIENCE, PATIENCE))
    state = environment(XDG_STATE_HOME=str(tmp_path / "state"))
    state.pop("PYTHONDONTWRITEBYTECODE", None)  # as on anybody's machine

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=state, capture_output=True, text=True, timeout=2 * PATIENCE)

    done = call("script.py")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused: env.id = Here-v0 is registered in this process alone: give the class" in done.stdout
    (run,) = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert "ended" in done.stdout, done.stdout
    files = ["chooser.py", "env.py", "network.py", "selector.py"]
    assert sorted(path.name for path in (run / "cells").glob("*.py")) == files
    monkeypatch.setenv("XDG_STATE_HOME", state["XDG_STATE_HOME"])
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    on = forked("--resume", str(run), "--set", "run.max_env_steps=600")
    assert on.returncode == 0, on.stderr[-2000:]
    played = call("-m", "ddrl.evaluate", str(run), "--episodes", "1")
    assert played.returncode == 0, played.stderr[-2000:]


BAD = """
import gymnasium
import numpy as np
import torch


class Fails(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        raise ValueError("no such map: 'desert'")


class Wide(torch.nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.layer = torch.nn.Linear(spec.observation.size, spec.num_actions + 1)

    def forward(self, observation):
        return self.layer(observation)

"""


def test_a_constructor_that_fails_and_a_network_with_the_wrong_output_are_one_line_each(notebook, tmp_path):
    pytest.importorskip("torch", reason="needs the extra [train]")
    book = notebook(BAD)
    said = []
    for given in ({"env": book["Fails"]}, {"network": book["Wide"]}):
        with pytest.raises(DdrlError) as refusal:
            ddrl.start(settings={"run.processes": 1}, root=tmp_path / "runs", wait=PATIENCE, **given)
        said.append(str(refusal.value))
    assert not any("\n" in words for words in said)
    constructor, output = said
    assert "env:Fails: ValueError: no such map: 'desert' (env.py, line 11, in __init__" in constructor
    assert "network:Wide returns [2, 3] float32 for 2 observations: its forward(observation) must give" in output
