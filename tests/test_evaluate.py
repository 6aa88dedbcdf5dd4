"""`python -m ddrl.evaluate`, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ddrl.acting.policy_file import save_policy
from ddrl.core.config import EnvConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.evaluate import _Gif, main
from ddrl.telemetry.directory import find_film
from tests.acting.networks import make_mlp, random_vector
from tests.waiting import PATIENCE

SPEC = EnvSpec("CartPole-v1", ArraySpec((4,), "float32"), 2)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return saved(tmp_path, 500)


def saved(tmp_path: Path, limit: int) -> Path:
    """A run directory with a policy that pushes the cart toward where the pole leans, for at most `limit` steps."""
    model = make_mlp(SPEC, (4,))
    layout = model.layout
    vector = np.zeros(layout.nbytes, np.uint8)
    tensors = layout.views(vector)
    tensors["0.weight"][...] = [[0, 0, 1, 0.5], [0, 0, -1, -0.5], [0, 0, 0, 0], [0, 0, 0, 0]]
    tensors["1.weight"][...] = [[0, 1, 0, 0], [1, 0, 0, 0]]
    save_policy(tmp_path, model, vector, env=EnvConfig(kwargs={"max_episode_steps": limit}), evaluation={"mean": 1.0})
    return tmp_path


def test_help_names_what_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--set env.NAME=VALUE" in capsys.readouterr().out


def test_the_command_plays_and_prints_one_json_object_without_loading_torch(run: Path) -> None:
    code = (
        "import sys; from ddrl.evaluate import main; status = main(sys.argv[1:]); assert 'torch' not in sys.modules "
        "and 'onnx' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, str(run), "--episodes", "12", "--seed", "3", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert (figures["env"], figures["episodes"], figures["seed"], figures["policy"]) == (
        "CartPole-v1",
        12,
        3,
        {"mean": 1.0},
    )
    assert len(figures["returns"]) == 12
    assert figures["mean"] == pytest.approx(np.mean(figures["returns"]))
    assert figures["mean"] > 100
    assert figures["env_steps"] == sum(figures["returns"])


def test_the_module_runs_and_says_it_in_words(run: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddrl.evaluate", str(run), "--episodes", "2"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("CartPole-v1: mean return ")


def test_an_environment_that_ends_the_process_is_named_and_the_status_is_1(run: Path, tmp_path: Path) -> None:
    lines = [
        "import os",
        "from gymnasium.envs.classic_control import CartPoleEnv",
        "class E(CartPoleEnv):",
        "    def __init__(self, max_episode_steps): super().__init__()",
        "    def close(self): os._exit(0)",
    ]
    (tmp_path / "leaves.py").write_text("\n".join(lines))
    command = [sys.executable, "-m", "ddrl.evaluate", str(run), "--episodes", "2", "--set", "env.id=leaves:E"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("ddrl: env.id = leaves:E: its process exited with status 0 before its work was done;")


@pytest.mark.long
def test_a_film_is_whole_where_the_close_of_the_environment_does_not_return(run: Path, tmp_path: Path) -> None:
    lines = [
        "import threading",
        "from gymnasium.envs.classic_control import CartPoleEnv",
        "class E(CartPoleEnv):",
        "    def __init__(self, max_episode_steps, render_mode): super().__init__(render_mode=render_mode)",
        "    def close(self): threading.Event().wait()",
    ]
    (tmp_path / "stays.py").write_text("\n".join(lines))
    film = tmp_path / "film.gif"
    command = [sys.executable, "-m", "ddrl.evaluate", str(run), "--video", str(film), "--set", "env.id=stays:E"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "ddrl: env.id = stays:E: its close does not return, which ends nothing: left after" in done.stderr
    assert f"film: {film}" in done.stdout
    assert film.read_bytes()[:3] == b"GIF"


def test_the_same_seed_gives_the_same_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_mlp(SPEC)
    save_policy(tmp_path, model, random_vector(model.layout, 0))
    returns = []
    for seed in ("5", "5", "6"):
        assert main([str(tmp_path), "--episodes", "20", "--seed", seed, "--json"]) == 0
        returns.append(json.loads(capsys.readouterr().out)["returns"])
    assert returns[0] == returns[1] != returns[2]


def test_it_plays_in_another_environment_of_the_same_observations_and_actions(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run), "--episodes", "3", "--json", "--set", "env.kwargs={max_episode_steps = 7}"]) == 0
    assert json.loads(capsys.readouterr().out)["returns"] == [7.0, 7.0, 7.0]
    assert main([str(run), "--episodes", "3", "--json", "--set", "env.id=CartPole-v0"]) == 0
    assert json.loads(capsys.readouterr().out)["env"] == "CartPole-v0"
    for override, words in (
        ("env.id=Acrobot-v1", "but env.id = Acrobot-v1 makes"),
        ("learner.lr=1", "settings of [env] alone"),
        ("env.nosuch=1", "nosuch"),
    ):
        assert main([str(run), "--set", override]) == 1
        text = capsys.readouterr().err
        assert words in text
        assert text.count("\n") == 1


def test_trouble_is_one_line_and_a_nonzero_status(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "policy.onnx").write_bytes(b"broken")
    for arguments, words in (
        ([str(run)], "corrupt or of another policy"),
        ([str(run / "nowhere")], "there is no run directory"),
    ):
        assert main(arguments) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert words in captured.err


def test_an_environment_that_has_changed_since_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = EnvSpec("CartPole-v1", ArraySpec((5,), "float32"), 2)
    model = make_mlp(other)
    save_policy(tmp_path, model, random_vector(model.layout, 0), env=EnvConfig())
    assert main([str(tmp_path)]) == 1
    assert "trained in CartPole-v1 with observations float32 (5,) and 2 actions" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--episodes", "0"], ["--episodes", "many"], ["--seed", "-1"], []])
def test_impossible_arguments_are_refused(arguments: list[str], run: Path) -> None:
    with pytest.raises(SystemExit) as refusal:
        main([*([str(run)] if arguments else []), *arguments])
    assert refusal.value.code == 2


@pytest.mark.parametrize("name", ["agent.gif", "agent.mp4"])
def test_a_film_shows_every_step_of_the_episodes(tmp_path: Path, name: str) -> None:
    run = saved(tmp_path, 30)
    imageio = pytest.importorskip("imageio.v3", reason="needs the extra [video]")
    ffmpeg = pytest.importorskip("imageio_ffmpeg", reason="needs the extra [video]")
    words = ["--video"] if name == "agent.gif" else ["--video", str(run / name)]
    done = subprocess.run(
        [sys.executable, "-m", "ddrl.evaluate", str(run), "--episodes", "2", "--seed", "5", "--json", *words],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["video"] == str(run / name)
    shown = figures["env_steps"] + 1  # the reset between the two
    if name == "agent.gif":  # which joins frames that are alike
        frames = imageio.imread(run / name)
        assert 1 < len(frames) <= shown
        assert (frames[0] != frames[-1]).any()
    else:
        assert ffmpeg.count_frames_and_secs(str(run / name))[0] == shown
    assert find_film(run) == run / name
    assert sorted(path.suffix for path in run.glob(".*")) == []


def test_the_frames_of_a_film_are_in_order(tmp_path: Path) -> None:
    images = pytest.importorskip("PIL.Image", reason="needs the extra [video]")
    with _Gif(tmp_path / "a.gif", images) as film:
        for level in (10, 120, 250):
            film.append_data(np.full((8, 8, 3), level, np.uint8))
    with images.open(tmp_path / "a.gif") as shown:
        levels = []
        for place in range(shown.n_frames):
            shown.seek(place)
            levels.append(shown.convert("L").getpixel((0, 0)))
    assert levels == [10, 120, 250]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--video", "film.avi"], [".gif or .mp4"]),
        (["--video", "/nowhere/film.gif"], ["cannot write /nowhere/film.gif"]),
        (["--video", "--episodes", "4"], ["more than 20 frames"]),
    ],
)
def test_a_film_that_cannot_be_made_is_one_clear_line(
    run: Path,
    options: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ddrl.evaluate.MOST_FRAMES", 20)
    assert main([str(run), *options]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    for word in words:
        assert word in said
    assert find_film(run) is None
