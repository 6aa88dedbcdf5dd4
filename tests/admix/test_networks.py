"""Networks over a queue: permuting its ads permutes their scores; what the mask leaves out counts for nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ddrl.admix.networks import QueueActor, QueueCritics
from ddrl.core.config import Config, LearnerConfig
from ddrl.core.errors import ConfigError
from ddrl.core.specs import ArraySpec, Declaration, EnvSpec
from ddrl.learner.actor_critic import make_actor, make_critics
from ddrl.learner.algorithm import Acting, Loss
from ddrl.learner.algorithms.d4pg import D4PG, D4PGSettings
from ddrl.learner.algorithms.td3 import TD3
from ddrl.learner.export import export_model

QUEUE = 5

ONE = LearnerConfig(hidden=[16])
TWO = LearnerConfig(hidden=[16, 16])


def spec(rewards: tuple[int, ...] = (), prior: bool = True) -> EnvSpec:
    arrays = {
        "queue_mask": ArraySpec((QUEUE,), "bool"),
        "ad": ArraySpec((QUEUE, 3), "float32", axes=("queue", "")),
        "ad_id": ArraySpec((QUEUE,), "int32", axes=("queue",)),
        "overall": ArraySpec((2,), "float32"),
    }
    if prior:
        arrays["prior"] = ArraySpec((QUEUE,), "float32", axes=("queue",))
    bounds = (0.0,) * QUEUE, (8.0,) * QUEUE
    return EnvSpec(
        "x", ArraySpec.record(arrays), 0, ArraySpec((QUEUE,), "float32"), reward_shape=rewards,
        action_low=bounds[0], action_high=bounds[1],
    )  # fmt: skip


def observation(count: int = 6) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    mask = torch.rand(count, QUEUE) < 0.7
    mask[:, 0] = True
    return {
        "queue_mask": mask,
        "ad": torch.randn(count, QUEUE, 3) * 4 * mask.unsqueeze(2),
        "ad_id": torch.arange(QUEUE, dtype=torch.int32).expand(count, QUEUE),
        "overall": torch.randn(count, 2),
        "prior": torch.rand(count, QUEUE) * 8 * mask,
    }


def permuted(given: dict[str, torch.Tensor], order: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: array if name == "overall" else array[:, order] for name, array in given.items()}


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module


def test_permuting_the_queue_permutes_the_actions_and_leaves_the_value() -> None:
    given, order = observation(), torch.tensor([3, 0, 4, 1, 2])
    actor = shaken(make_actor(TWO, spec()))
    assert isinstance(actor, QueueActor)
    action = actor(given)
    torch.testing.assert_close(actor(permuted(given, order)), action[:, order])
    assert ((action >= 0) & (action <= 8)).all()
    critics = make_critics(TWO, spec(), count=2, outputs=7)
    assert isinstance(critics, QueueCritics)
    value = critics(given, action)
    assert value.shape == (6, 2, 7)
    torch.testing.assert_close(critics(permuted(given, order), action[:, order]), value)
    by_place = make_critics(TWO, spec((QUEUE,)), outputs=7)
    each = by_place(given, action)
    assert each.shape == (6, QUEUE, 7)
    torch.testing.assert_close(by_place(permuted(given, order), action[:, order]), each[:, order])


def test_ads_outside_the_mask_change_nothing_for_the_others() -> None:
    given, actor = observation(), shaken(make_actor(TWO, spec()))
    mask = given["queue_mask"]
    other = {**given, "ad": torch.where(mask.unsqueeze(2), given["ad"], torch.full_like(given["ad"], 99.0))}
    torch.testing.assert_close(actor(other)[mask], actor(given)[mask])


def test_an_actor_begins_as_its_prior_or_in_the_middle() -> None:
    given = observation()
    actor = make_actor(ONE, spec())
    given["prior"][0, 0], given["prior"][1, 0] = 8.0, 0.0
    torch.testing.assert_close(actor(given), given["prior"])
    torch.testing.assert_close(make_actor(ONE, spec(prior=False))(given), torch.full((6, QUEUE), 4.0))
    noise = torch.full((6, QUEUE), 9.0)
    assert (actor(given, noise) == 8.0).all()


@pytest.mark.parametrize("bound", [0.0, 8.0])
def test_an_action_at_a_bound_can_leave_it(bound: float) -> None:
    given = observation() | {"prior": torch.full((6, QUEUE), bound)}
    actor = make_actor(ONE, spec())
    with torch.no_grad():
        actor.head.bias.fill_(1.0 if bound else -1.0)  # beyond the bound
    action = actor(given)
    torch.testing.assert_close(action, torch.full((6, QUEUE), bound))
    (slope,) = torch.autograd.grad(action.sum(), actor.head.bias)
    assert slope > 0


def test_the_value_depends_on_the_action_of_each_place_and_its_gradient_reaches_the_actor() -> None:
    given = observation()
    actor, critics = (
        make_actor(TWO, spec()),
        make_critics(TWO, spec()),
    )
    action = actor(given)
    gradient = torch.autograd.grad(critics(given, action).sum(), action)[0]
    assert (gradient[given["queue_mask"]] != 0).all()
    assert (gradient[~given["queue_mask"]] == 0).all()


def test_the_value_of_a_place_with_a_reward_of_its_own_is_climbed_by_its_own_action_alone() -> None:
    """Though it depends on the other actions."""
    given = observation() | {"queue_mask": torch.ones(6, QUEUE, dtype=torch.bool)}
    critics = make_critics(TWO, spec((QUEUE,)), outputs=1)
    action = torch.full((6, QUEUE), 4.0, requires_grad=True)
    gradient = torch.autograd.grad(critics(given, action)[:, 2].sum(), action)[0]
    assert (gradient[:, 2] != 0).all()
    assert (gradient[:, [0, 1, 3, 4]] == 0).all()
    moved = action.detach().clone()
    moved[:, 0] = 8.0
    assert (critics(given, moved)[:, 2] != critics(given, action)[:, 2]).all()


def test_the_anchor_costs_the_square_of_the_departure_from_the_prior() -> None:
    config, given = Config(learner=LearnerConfig(algorithm="d4pg", hidden=[8])), observation()
    free, held = (D4PG(config, spec((QUEUE,)), D4PGSettings(actor_anchor=anchor)) for anchor in (0.0, 2.0))
    action = given["prior"] + 0.8  # a tenth of the range
    outputs, batch = {"z": torch.zeros(6, QUEUE, 51), "action": action}, SimpleNamespace(s_tm1=given)
    further = held.loss(outputs, batch, "actor").scalar() - free.loss(outputs, batch, "actor").scalar()
    assert float(further) == pytest.approx(2.0 * QUEUE * 0.1**2, rel=1e-4)
    with pytest.raises(ConfigError, match="the prior, an array"):
        D4PG(config, spec(prior=False), D4PGSettings(actor_anchor=2.0))


def test_it_acts_in_onnx_as_in_torch() -> None:
    actor = shaken(make_actor(TWO, spec()))
    model = export_model(Acting("actor", actor, ("mean",)), actor, spec(), Declaration("d4pg", "gaussian"))
    assert model.outputs["mean"].shape == (QUEUE,)


@pytest.mark.parametrize("critic", ["categorical", "quantile", "scalar"])
def test_the_loss_of_several_rewards_is_the_mean_of_their_own(critic: str) -> None:
    """And the actor climbs the sum of their means."""
    atoms, count = (1 if critic == "scalar" else 11), 4
    config = Config(learner=LearnerConfig(algorithm="d4pg", hidden=[8]))
    algorithm = D4PG(config, spec((QUEUE,)), D4PGSettings(critic=critic, atoms=11, v_min=-3.0, v_max=3.0))
    torch.manual_seed(0)
    z_tm1, z_t = torch.randn(count, QUEUE, atoms), torch.randn(count, QUEUE, atoms)
    reward, discount, weight = torch.randn(count, QUEUE), torch.rand(count), torch.rand(count)

    def loss(place: slice) -> Loss:
        batch = SimpleNamespace(r_t=reward[:, place], discount_t=discount, weight=weight)
        return algorithm.loss({"z_tm1": z_tm1[:, place], "z_t": z_t[:, place]}, batch, "critic")

    together, alone = loss(slice(None)), [loss(slice(place, place + 1)) for place in range(QUEUE)]
    torch.testing.assert_close(together.scalar(), torch.stack([one.scalar() for one in alone]).mean())
    torch.testing.assert_close(together.priority, torch.stack([one.priority for one in alone]).mean(0))
    climbs = [
        algorithm.loss({"z": z_tm1[:, place]}, None, "actor").scalar()
        for place in [slice(None), *(slice(place, place + 1) for place in range(QUEUE))]
    ]
    torch.testing.assert_close(climbs[0], torch.stack(climbs[1:]).sum())


def test_td3_refuses_rewards_of_several_numbers() -> None:
    with pytest.raises(ConfigError, match="needs one number: use d4pg"):
        TD3.describe(Config(), spec((QUEUE,)))
