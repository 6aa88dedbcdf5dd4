"""Networks: dueling forms, inputs as environments give them, and clear refusals."""

import numpy as np
import pytest
import torch

from ddrl.core.config import Config, LearnerConfig, RolloutConfig
from ddrl.core.errors import ConfigError, NetworkError
from ddrl.core.settings import load_config
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner
from ddrl.learner.algorithm import describe
from ddrl.learner.networks import CNN, MLP, ValueHead, dueling_values, make_network
from tests.learner.learner_cases import IMAGE, VECTOR


def spec_of(shape: tuple[int, ...], dtype: str = "float32", num_actions: int = 3) -> EnvSpec:
    return EnvSpec("Some-v0", ArraySpec(shape, dtype), num_actions)


def policy_of(advantage: torch.Tensor, form: str, epsilon: float) -> torch.Tensor:
    """pi(a | s) of a form."""
    uniform = torch.full_like(advantage, 1 / advantage.shape[1])
    greedy = torch.nn.functional.one_hot(advantage.argmax(1), advantage.shape[1])
    return {
        "mean": uniform,
        "softmax": torch.softmax(advantage, 1),
        "policy": epsilon * uniform + (1 - epsilon) * greedy,
    }[form]


@pytest.mark.parametrize("form", ["mean", "policy", "softmax"])
def test_the_expectation_of_q_under_the_form_s_policy_is_v(form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    advantage = 5 * torch.randn(50, 7, generator=generator, dtype=torch.float64)
    q = dueling_values(value, advantage, form, 0.2)
    pi = policy_of(advantage, form, 0.2)
    torch.testing.assert_close((pi * q).sum(1, keepdim=True), value)
    torch.testing.assert_close(q.argmax(1), advantage.argmax(1))  # and acting greedily is acting by the advantages


def test_the_dueling_forms_differ() -> None:
    value, advantage = torch.zeros(1, 1), torch.tensor([[0.0, 2.0]])
    assert dueling_values(value, advantage, "mean", 0.5)[0, 1] == 1.0
    assert 0 < dueling_values(value, advantage, "softmax", 0.5)[0, 1] < 0.5
    assert dueling_values(value, advantage, "policy", 0.5)[0].tolist() == [-1.5, 0.5]
    assert dueling_values(value, advantage, "policy", 0.0)[0].tolist() == [-2.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.chooser=boltzmann"], "rollout.chooser = boltzmann draws by others"),
        (["rollout.chooser=ez_greedy"], "rollout.chooser = ez_greedy draws by others"),
        (["rollout.epsilon_spread=7"], "gives each rollout others"),
        (["rollout.by_rollout=[{exploration=0.5}, {exploration=2.0}]"], "gives each rollout others"),
        (["masked"], "action masks leave some out"),
        ([], ""),
    ],
)
def test_the_acting_policy_s_dueling_form_is_refused_where_others_act(overrides: list[str], words: str) -> None:
    spec = EnvSpec("X", ArraySpec((4,), "float32"), 3)
    if overrides == ["masked"]:
        overrides = []
        spec = spec.with_mask()
    config = load_config(None, ["learner.dueling=policy", "learner.algorithm=dqn", *overrides])
    if words:
        with pytest.raises(ConfigError, match=words):
            describe(config, spec)
    else:
        assert describe(config, spec).chooser == "epsilon_greedy"


def test_settings_of_a_replay_that_sample_areas_do_not_read_are_named() -> None:
    given = ["replay.selector=uniform", "replay.min_size=50", "replay.eviction=lru", "replay.source=areas"]
    unread = describe(load_config(None, given), EnvSpec("X", ArraySpec((4,), "float32"), 3)).unread
    assert unread == ("replay.min_size", "replay.selector", "replay.eviction")
    assert describe(load_config(None, given[:3]), EnvSpec("X", ArraySpec((4,), "float32"), 3)).unread == ()


def test_the_acting_policy_s_dueling_form_has_its_epsilon() -> None:
    config = Config(learner=LearnerConfig(dueling="policy"), rollout=RolloutConfig(epsilon_end=0.07))
    learner = Learner.of(config, VECTOR)
    assert learner.parts["value"].module.head.epsilon == 0.07
    assert learner.acting_model().outputs.keys() == {"q", "value", "advantage"}


@pytest.mark.parametrize("form", ["mean", "policy", "softmax"])
@pytest.mark.parametrize("stream_width", [0, 8])
def test_a_head_s_q_has_v_as_its_expectation(form: str, stream_width: int) -> None:
    head = ValueHead(5, 4, form, stream_width, epsilon=0.3).double()
    features = torch.randn(20, 5, dtype=torch.float64)
    q = head(features)
    pi = policy_of(q, form, 0.3)  # by q as by A: they differ by a number
    streams = torch.relu(head.hidden(features)) if stream_width else features
    value = head.value(streams[:, :stream_width]) if stream_width else head.value_advantage(streams)[:, :1]
    torch.testing.assert_close((pi * q).sum(1, keepdim=True), value)


@pytest.mark.parametrize("form", ["mean", "policy", "softmax", "none"])
def test_gradients_of_the_heads_agree_with_finite_differences(form: str) -> None:
    head = ValueHead(3, 4, form, stream_width=5).double()
    assert torch.autograd.gradcheck(
        lambda x: torch.tanh(head(x)), torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    )


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4,), MLP),
        ((), MLP),
        ((3, 5), MLP),
        ((10, 10, 4), MLP),
        ((4, 84, 84), CNN),
        ((96, 96, 3), CNN),
        ((84, 84), CNN),
    ],
)
def test_auto_chooses_by_the_observation_s_shape(shape: tuple[int, ...], kind: type) -> None:
    network = make_network(LearnerConfig(), spec_of(shape, "uint8" if kind is CNN else "float32"))
    assert isinstance(network, kind)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8", "bool"])
def test_observations_of_any_dtype_go_in_as_they_are(dtype: str) -> None:
    network = make_network(LearnerConfig(), spec_of((6,), dtype))
    q = network(torch.ones(2, 6, dtype=getattr(torch, dtype)))
    assert q.shape == (2, 3)
    assert q.dtype == torch.float32


@pytest.mark.parametrize("spec", [IMAGE, spec_of((8,), "uint8")])
def test_bytes_are_scaled_inside_to_the_unit_interval(spec: EnvSpec) -> None:
    network = make_network(LearnerConfig(), spec)
    screen = torch.full((1, *spec.observation.shape), 255, dtype=torch.uint8)
    network.trunk.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    seen: list[torch.Tensor] = []
    network(screen)
    torch.testing.assert_close(seen[0], torch.ones_like(seen[0]))


def test_channels_last_and_channels_first_images_give_the_same_values() -> None:
    first = CNN(ArraySpec((3, 44, 52), "uint8"), 2, "mean")
    last = CNN(ArraySpec((44, 52, 3), "uint8"), 2, "mean")
    last.load_state_dict(first.state_dict())
    image = torch.randint(0, 256, (2, 3, 44, 52), dtype=torch.uint8)
    torch.testing.assert_close(last(image.permute(0, 2, 3, 1)), first(image))


def test_the_nature_network_has_the_published_sizes() -> None:
    network = make_network(LearnerConfig(dueling="none"), IMAGE)
    assert (
        sum(parameter.numel() for parameter in network.parameters()) == 1_687_206
    )  # Mnih et al. (2015) with 6 actions


def test_the_small_network_has_the_published_sizes() -> None:
    network = make_network(LearnerConfig(network="small_cnn", dueling="none"), IMAGE)
    assert (
        sum(parameter.numel() for parameter in network.parameters()) == 203_750
    )  # van Hasselt et al. (2019) with 6 actions, one stream


def test_the_same_seed_gives_the_same_network() -> None:
    one, same, other = (make_network(LearnerConfig(), VECTOR, seed=seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


def test_a_user_s_module_is_called_with_the_spec() -> None:
    network = make_network(LearnerConfig(network="tests.learner.learner_user_networks:Plain"), VECTOR)
    assert network(torch.from_numpy(np.zeros((2, 4), np.float32))).shape == (2, 3)


@pytest.mark.parametrize(
    ("network", "words"),
    [
        ("tests.learner.learner_user_networks:WrongWidth", r"WrongWidth returns \[2, 1\].*\[2, 3\] float32"),
        ("tests.learner.learner_user_networks:ReturnsTuple", r"returns a tuple.*\[2, 3\]"),
        ("tests.learner.learner_user_networks:Fails", r"Fails fails on observations \[2, 4\] float32"),
        (
            "tests.learner.learner_user_networks:CannotBeBuilt",
            r"CannotBeBuilt\(spec\) fails: ValueError: needs a pretrained file",
        ),
        ("tests.learner.learner_user_networks:NotAModule", r"must be a torch.nn.Module"),
        ("tests.learner.learner_user_networks:Plane", r"tests.learner.learner_user_networks has no Plane"),
        ("no_such_package:Net", r"cannot import no_such_package.*PYTHONPATH"),
        ("mpl", r"mpl is not a network: choose auto, mlp, nature_cnn, small_cnn"),
        ("nature_cnn", r"nature_cnn needs an image"),
    ],
)
def test_a_network_that_cannot_serve_is_refused_in_one_line(network: str, words: str) -> None:
    with pytest.raises(NetworkError, match=words) as caught:
        make_network(LearnerConfig(network=network), VECTOR)
    assert "\n" not in str(caught.value)


def test_a_screen_too_small_for_the_convolutions_is_refused() -> None:
    with pytest.raises(NetworkError, match="at least 36 x 36"):
        make_network(LearnerConfig(network="nature_cnn"), spec_of((4, 32, 32), "uint8"))
    with pytest.raises(NetworkError, match="at least 25 x 25"):
        make_network(LearnerConfig(network="small_cnn"), spec_of((4, 24, 32), "uint8"))


def test_continuous_actions_are_refused() -> None:
    spec = EnvSpec("Pendulum-v1", ArraySpec((3,), "float32"), 0, ArraySpec((1,), "float32"))
    with pytest.raises(ConfigError, match=r"Pendulum-v1.*continuous.*discrete"):
        make_network(LearnerConfig(), spec)
