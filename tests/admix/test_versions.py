"""Versions of a policy: what a server takes into service by itself, and what it asks for first."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ddrl.acting.policy_file import SavedPolicy, load_policy, load_trusted_policy, save_policy
from ddrl.admix.journal import CHOICE, FOLDER, Choice
from ddrl.admix.mixer import version_of
from ddrl.admix.serving import App, open_mixer
from ddrl.admix.settings import ServeConfig
from ddrl.core.errors import RunDirError
from tests.admix.material import afresh, env_config, request_of, save_run
from tests.admix.test_app import ask


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    """A server of RUN, beside whose folder lies code that leaves a file where it is imported."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "memory"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    run = tmp_path / "run"
    save_run(run, env_config(mode="all"), value=1.0)
    return App(open_mixer(run), ServeConfig(), run, run / "state")


def newer(run: Path, *, names: str = "") -> SavedPolicy:
    """The policy of RUN with other parameters; its environment, or its chooser, is code."""
    saved = load_policy(run)
    vector = saved.vector.copy()
    saved.model.layout.views(vector)["weights"][...] += np.float32(1)
    env = replace(saved.env, id="stranger:Market") if names == "environment" else saved.env
    model = msgspec.structs.replace(saved.model, chooser="stranger:Choice") if names == "chooser" else saved.model
    return msgspec.structs.replace(saved, model=model, vector=vector, env=env)


def put(place: Path, saved: SavedPolicy) -> None:
    place.mkdir(parents=True, exist_ok=True)
    save_policy(place, saved.model, saved.vector, env=saved.env, evaluation=saved.evaluation, run_id=saved.run_id)


@pytest.mark.parametrize("names", ["environment", "chooser"])
@pytest.mark.parametrize("place", ["RUN", "a version"])
def test_a_newer_policy_that_names_code_is_not_loaded_and_the_one_before_goes_on_serving(
    place: str, names: str, app: App, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    before = app.mixer.policy.version
    request = request_of(app.mixer.book)
    decided = app.mixer.answer(request)
    saved = newer(run, names=names)
    version = version_of(saved.model, saved.vector)
    if place == "RUN":
        put(run, saved)
    else:
        put(run / FOLDER / version, saved)
        (run / FOLDER / CHOICE).write_bytes(msgspec.json.encode(Choice(version, pinned=True)))
    for _ in range(2):  # it is refused each time that it is looked at
        with pytest.raises(RunDirError, match=r"stranger:.*--trust"):
            asyncio.run(app._reload())
    if place == "RUN":  # nor where it is asked for
        status, _, answer = ask(app, b"", path="/v1/policy")
        assert status >= 400
        assert "stranger:" in answer["error"]
    assert app.mixer.policy.version == before
    status, _, answer = ask(app, msgspec.json.encode(afresh(request)))
    assert (status, answer["version"], answer["ad"]) == (200, before, decided.ad)
    assert "stranger" not in sys.modules
    assert not (tmp_path / "ran").exists()


def test_a_version_that_names_code_is_not_chosen(app: App, tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = app.mixer.policy.version
    saved = newer(run, names="environment")
    version = version_of(saved.model, saved.vector)
    put(run / FOLDER / version, saved)
    status, _, answer = ask(app, msgspec.json.encode({"version": version}), path="/v1/versions")
    assert status >= 400
    assert "stranger:Market" in answer["error"]
    assert app.mixer.policy.version == before
    asyncio.run(app._reload())  # nor later, by the choice that was refused
    assert app.mixer.policy.version == before


def test_a_newer_policy_is_taken_into_service_and_one_that_names_code_after_a_word_of_the_user(
    app: App, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    saved = newer(run)
    put(run, saved)
    asyncio.run(app._reload())
    assert app.mixer.policy.version == version_of(saved.model, saved.vector)
    named = newer(run, names="environment")
    put(run, named)
    with pytest.raises(RunDirError, match="--trust"):
        asyncio.run(app._reload())
    load_trusted_policy(run, trust=True)
    asyncio.run(app._reload())
    assert app.mixer.policy.version == version_of(named.model, named.vector)
