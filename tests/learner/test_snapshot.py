"""Saving and going on: bit for bit, or refused."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from ddrl.core.config import LearnerConfig
from ddrl.core.errors import CheckpointError
from ddrl.learner import Learner, export
from tests.learner.learner_cases import VECTOR, learner_of, random_batch
from tests.learner.learner_user_networks import Normalized

CONFIG = LearnerConfig(hidden=[16], target_period=3, lr_end_fraction=0.1)


def dropout_learner(seed: int) -> Learner:
    torch.manual_seed(seed)
    return learner_of(CONFIG, module=Normalized(VECTOR))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Learner, Path]:
    learner = dropout_learner(0)
    for turn in range(5):
        learner.update(random_batch(VECTOR, 8, turn))
    learner.anneal(0.4)
    learner.save(tmp_path / "learner.safetensors")
    return learner, tmp_path / "learner.safetensors"


def learner_state(path: Path) -> dict[str, np.ndarray]:
    return export.read_state(path, algorithm="dqn")


def go_on(learner: Learner) -> list[bytes]:
    """Four more updates, which draw from torch's generator (dropout) and copy the target network once."""
    results = [learner.update(random_batch(VECTOR, 8, 100 + turn)).priority.tobytes() for turn in range(4)]
    return [*results, *(array.tobytes() for _, array in sorted(learner.state().items()))]


def test_a_loaded_learner_goes_on_bit_for_bit(saved: tuple[Learner, Path]) -> None:
    learner, path = saved
    expected = go_on(learner)
    other = dropout_learner(9)
    other.load(path)
    other.check()
    assert other.updates == 5
    assert go_on(other) == expected


def test_one_that_begins_from_it_has_its_networks_and_target_copies_and_nothing_else(
    saved: tuple[Learner, Path],
) -> None:
    learner, path = saved
    other = dropout_learner(9)
    before = other.state()
    other.begin_from(path)
    theirs = learner.state()
    found = other.state()
    assert any((theirs[name] != before[name]).any() for name in theirs if name.startswith("value.target."))
    for name, array in found.items():
        taken = name.startswith(("value.online.", "value.target."))
        np.testing.assert_array_equal(array, theirs[name] if taken else before[name], err_msg=name)


def test_the_generator_is_part_of_the_state(saved: tuple[Learner, Path]) -> None:
    learner, path = saved
    expected = go_on(learner)
    other = dropout_learner(9)
    state = learner_state(path)
    other.load_state(state)
    torch.rand(1)  # somebody else's draw changes nothing
    assert go_on(other) == expected
    third = dropout_learner(9)
    third.load_state(state | {"torch_rng": dropout_learner(3).state()["torch_rng"]})
    assert go_on(third) != expected


def test_an_update_that_draws_leaves_the_process_s_generator_as_it_was(saved: tuple[Learner, Path]) -> None:
    learner, _ = saved
    own, outer = learner.state()["torch_rng"], torch.get_rng_state()
    learner.update(random_batch(VECTOR, 8, 0))
    assert torch.equal(torch.get_rng_state(), outer)
    assert not np.array_equal(learner.state()["torch_rng"], own)


def test_the_state_is_a_copy_and_plain_arrays(saved: tuple[Learner, Path]) -> None:
    learner, _ = saved
    state = learner.state()
    before = {name: array.copy() for name, array in state.items()}
    learner.update(random_batch(VECTOR, 8, 0))
    assert all(np.array_equal(state[name], before[name]) for name in before)
    assert {
        "value.online.layers.0.weight",
        "value.target.layers.0.weight",
        "value.first_moment.layers.0.weight",
        "value.updates",
        "torch_rng",
    } <= set(state)


def test_saving_twice_gives_the_same_bytes_and_leaves_one_file(saved: tuple[Learner, Path]) -> None:
    learner, path = saved
    again = path.with_name("again.safetensors")
    other = dropout_learner(9)
    other.load(path)
    other.save(again)
    assert sorted(file.name for file in path.parent.iterdir()) == ["again.safetensors", "learner.safetensors"]
    learner.load(again)
    assert again.read_bytes() == path.read_bytes()


def test_truncated_altered_and_foreign_files_are_refused_and_change_nothing(
    saved: tuple[Learner, Path], tmp_path: Path
) -> None:
    _, path = saved
    data = path.read_bytes()
    (header_size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + header_size])
    flipped = bytearray(data)
    flipped[8 + header_size + header["value.online.layers.0.weight"]["data_offsets"][0] + 5] ^= 1
    bad = tmp_path / "bad"
    cases = {
        "cannot be read as safetensors": data[: len(data) // 2],
        "cannot be read as": b"",
        "corrupt": bytes(flipped),
        "was not written by ddrl": b"PK\x03\x04" + data,
    }
    learner = dropout_learner(9)
    before = learner.parameters.numpy()
    for words, content in cases.items():
        bad.write_bytes(content)
        with pytest.raises(CheckpointError, match=words) as caught:
            learner.load(bad)
        assert str(bad) in str(caught.value)
        assert "\n" not in str(caught.value)
    for header in ({"format": "pt"}, *({"ddrl": text} for text in ("[" * 100_000, "1" * 5000, "[]", "{"))):
        save_file({"weight": np.zeros(3, np.float32)}, bad, metadata=header)
        with pytest.raises(CheckpointError, match="ddrl's learner did not write"):
            learner.load(bad)
    with pytest.raises(CheckpointError, match="there is no learner's state"):
        learner.load(tmp_path / "absent")
    assert np.array_equal(learner.parameters.numpy(), before)
    assert learner.updates == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            LearnerConfig(hidden=[8]),
            r"value.online.trunk.0.weight is float32 \[16, 4\] there and float32 \[8, 4\] here",
        ),
        (LearnerConfig(hidden=[16, 16]), "it lacks value.online.trunk.2.weight|value.online.head"),
        (LearnerConfig(hidden=[16], dueling="none"), "lacks value.online.head.advantage.weight"),
    ],
)
def test_a_state_of_another_network_is_refused(config: LearnerConfig, words: str, tmp_path: Path) -> None:
    learner, other = (learner_of(chosen, seed=0) for chosen in (CONFIG, config))
    learner.update(random_batch(VECTOR, 8, 0))
    learner.save(tmp_path / "state")
    before = other.parameters.numpy()
    with pytest.raises(CheckpointError, match=rf"another network \(.*({words})"):
        other.load(tmp_path / "state")
    assert np.array_equal(other.parameters.numpy(), before)
    assert other.updates == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"a": np.zeros((2, 3), np.float64)}, r"a is float64 \[2, 3\] there and float32 \[2, 3\] here"),
        ({"a": np.zeros((2, 3), np.int32)}, "a is int32"),
        ({"a": np.zeros((3, 2), np.float32)}, r"a is float32 \[3, 2\] there"),
        ({"a": np.zeros(6, np.float32)}, r"a is float32 \[6\] there"),
        ({"c": np.zeros(1)}, "it has c, which this one lacks"),
        ({"a": None}, "it lacks a"),
    ],
)
def test_arrays_of_other_names_shapes_or_types_do_not_fit(changed: dict, words: str) -> None:
    wanted = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(1, np.int64)}
    export.check_fits(wanted, wanted, optional=(), source="state")
    export.check_fits({"a": wanted["a"]}, wanted, optional=("b",), source="state")
    state = {name: array for name, array in (wanted | changed).items() if array is not None}
    with pytest.raises(CheckpointError, match=f"another network .{words}"):
        export.check_fits(state, wanted, optional=(), source="state")


def test_a_directory_that_cannot_be_written_is_named(saved: tuple[Learner, Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot write the learner's state to .*absent"):
        saved[0].save(tmp_path / "absent" / "state")


def test_a_state_of_cuda_survives_the_time_between_two_leases(saved: tuple[Learner, Path]) -> None:
    learner, _ = saved
    cuda = np.arange(16, dtype=np.uint8)
    other = dropout_learner(9)
    other.load_state(learner.state() | {"cuda_rng": cuda})
    other.to("cpu")
    other.update(random_batch(VECTOR, 8, 0))
    assert other.state()["cuda_rng"].tobytes() == cuda.tobytes()
    assert go_on(other)  # the CPU is not set to it
