"""docs/replay.md says what is there."""

from __future__ import annotations

import re
from pathlib import Path

from ddrl._kernel import ReplayCore
from ddrl.core import plugins
from ddrl.replay import ExperienceReplay, evictions, selectors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "replay.md").read_text()


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(example, names)
    replay = names["replay"]
    assert isinstance(replay, ExperienceReplay)
    assert len(replay) == 200
    replay.check()


def test_every_method_selector_and_eviction_is_named() -> None:
    methods = {name for name in vars(ExperienceReplay) if not name.startswith("_")}
    plain = {"num_episodes", "num_picks"}  # their names say it all
    missing = {name for name in methods - plain if not re.search(rf"\b{name}\b", PAGE)}
    assert not missing
    for kind in plugins.names(selectors.PACKAGE):
        assert f"`{kind}`" in PAGE
        assert isinstance(ReplayCore.selector_defaults(kind), dict)
    for eviction in plugins.names(evictions.PACKAGE):
        assert f'"{eviction}"' in PAGE


def test_the_selector_shown_is_the_one_that_is_tested() -> None:
    interface = (ROOT / "ddrl" / "kernel" / "replay" / "selectors.hpp").read_text()
    tested = (ROOT / "tests" / "kernel" / "test_replay_new_strategies.cpp").read_text()
    (shown,) = re.findall(r"```cpp\n(.*?)```", PAGE, re.DOTALL)
    assert "class RoundRobin final : public PickSelector" in shown
    for source in (interface, tested):
        for method in re.findall(r"^    (?:void|bool|std::size_t) (\w+)\(", shown, re.MULTILINE):
            assert f"{method}(" in source, method
