"""What a torch device must do, on the fake one. Run by test_fakegpu.py."""

import gc
import random
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.core.config import Config, LearnerConfig
from ddrl.core.specs import ArraySpec, EnvSpec
from ddrl.learner import Learner
from tests.testing import fakegpu

fakegpu.install(devices=2)


@pytest.fixture(autouse=True)
def fresh():
    gc.collect()
    for index in range(2):
        fakegpu.reset(index)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2))


def train(device: str, foreach: bool | None) -> tuple[list[torch.Tensor], list[float]]:
    """20 steps of Adam; parameters and losses."""
    model = network().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=foreach)
    generator = torch.Generator().manual_seed(1)
    given, wanted = (torch.randn(64, size, generator=generator).to(device) for size in (8, 2))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.smooth_l1_loss(model(given), wanted)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return [parameter.detach().cpu() for parameter in model.parameters()], losses


@pytest.mark.parametrize("foreach", [False, True])
def test_20_adam_steps_equal_the_processors_bit_for_bit(foreach):
    expected, expected_losses = train("cpu", foreach)
    parameters, losses = train("fake", foreach)
    assert losses == expected_losses
    assert losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, expected, strict=True))


def test_a_convolution_and_its_gradients_equal_the_processors():
    torch.manual_seed(0)
    layer, images = nn.Conv2d(2, 3, 3, stride=2), torch.randn(4, 2, 9, 9)
    layer(images).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    layer.to("fake")(images.to("fake")).square().sum().backward()
    assert all(torch.equal(p.grad.cpu(), grad) for p, grad in zip(layer.parameters(), expected, strict=True))


def test_a_module_moves_there_and_back():
    model = network()
    before = [parameter.clone() for parameter in model.parameters()]
    model.to("fake:1")
    assert {parameter.device for parameter in model.parameters()} == {torch.device("fake", 1)}
    assert fakegpu.live_bytes(1) == sum(4 * parameter.numel() for parameter in before)
    model.to("cpu")
    gc.collect()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
    assert fakegpu.live_bytes(1) == 0


def test_operands_on_different_devices_are_refused():
    here = torch.ones(3, device="fake")
    for there in (torch.ones(3), torch.ones(3, device="fake:1")):
        with pytest.raises(RuntimeError, match="same device"):
            here + there
        with pytest.raises(RuntimeError, match="same device"):
            torch.mm(here.view(1, 3), there.view(3, 1))
    assert (here + torch.tensor(2.0)).tolist() == [3.0, 3.0, 3.0]  # a number may come from anywhere
    with pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        here.numpy()
    with pytest.raises(RuntimeError, match="fake:7 does not exist"):
        torch.ones(3, device="fake:7")


def test_copies_are_counted_by_direction_with_their_bytes():
    host = torch.randn(5, 4)
    there = host.to("fake")
    counted = fakegpu.counters()
    assert (counted.copies_in, counted.bytes_in, counted.blocking_copies) == (1, 80, 1)
    again = torch.empty(5, 4, device="fake")
    again.copy_(host, non_blocking=True)
    assert (counted.copies_in, counted.bytes_in, counted.blocking_copies) == (2, 160, 1)
    assert torch.equal(there[1:3].cpu(), host[1:3])
    assert (counted.copies_out, counted.bytes_out, counted.blocking_copies) == (1, 32, 2)
    other = there.to("fake:1")
    assert other.device.index == 1
    assert (fakegpu.counters(1).copies_within, fakegpu.counters(1).bytes_within) == (1, 80)
    assert torch.equal(other.cpu(), host)


def test_a_learners_switch_copies_its_state_once_each_way():
    """Networks, target and both moments; on and off again."""
    spec = EnvSpec("any", ArraySpec((4,), "float32"), 2)
    learner = Learner.of(Config(learner=LearnerConfig(hidden=(512, 512))), spec)
    before = learner.state()
    nbytes = sum(vector.nbytes for part in learner.parts.values() for vector in part.vectors().values())
    assert nbytes > 4_000_000
    counted = fakegpu.counters()
    learner.to("fake")
    assert nbytes <= counted.bytes_in <= nbytes + 64  # and the optimizer's few numbers
    assert counted.bytes_out == 0
    learner.to("cpu")
    assert counted.bytes_out == nbytes
    assert counted.copies_out == 4
    after = learner.state()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_launches_and_synchronizations_are_counted():
    there = torch.ones(4, device="fake")
    fakegpu.reset()
    counted = fakegpu.counters()
    total = (there * 2).sum()
    assert (counted.launches, counted.synchronizations) == (2, 0)
    there.view(2, 2).t()[0]  # views compute nothing
    assert counted.launches == 2
    assert total.item() == 8.0
    assert counted.synchronizations == 1
    there.nonzero()
    assert counted.synchronizations == 2
    torch.fake.synchronize("fake:1")
    assert (counted.synchronizations, fakegpu.counters(1).synchronizations) == (2, 1)


def test_live_bytes_follow_the_tensors_and_the_peak_stays():
    first = torch.zeros(1000, device="fake")
    second = torch.zeros(500, device="fake")
    view = first[10:20]
    assert fakegpu.live_bytes() == 6000
    del first, second
    assert fakegpu.live_bytes() == 4000  # the view holds all of its memory
    del view
    assert fakegpu.live_bytes() == 0
    assert fakegpu.peak_bytes() == 6000
    fakegpu.reset()
    assert fakegpu.peak_bytes() == 0


def test_a_device_runs_out_of_memory_and_goes_on_when_there_is_some_again():
    fakegpu.limit_memory(1000)
    first = torch.zeros(200, device="fake")
    with pytest.raises(torch.OutOfMemoryError, match=r"fake:0 is out of memory: tried to allocate 400 bytes with 800"):
        torch.zeros(100, device="fake")
    del first
    assert torch.zeros(100, device="fake").sum().item() == 0
    assert torch.zeros(1000, device="fake:1").numel() == 1000  # the limit was the other one's


def test_a_failure_can_be_injected_into_the_next_allocation():
    model = network()
    fakegpu.fail_allocations(1)
    with pytest.raises(torch.OutOfMemoryError):
        model.to("fake")
    model.to("fake")
    assert next(model.parameters()).device.type == "fake"


def test_views_share_memory_as_on_any_device():
    flat = torch.zeros(6, device="fake")
    parameter = nn.Parameter(flat[1:4])
    parameter.data.add_(1)
    flat.view(2, 3).t()[2].mul_(5)
    assert flat.tolist() == [0, 1, 5, 1, 0, 0]
    matrix = torch.arange(6, device="fake").view(2, 3)
    matrix.t_()
    assert matrix.shape == (3, 2)
    assert matrix.tolist() == [[0, 3], [1, 4], [2, 5]]
    parts = flat.split(3)
    parts[1].fill_(7)
    assert flat.tolist() == [0, 1, 5, 7, 7, 7]


def test_outputs_take_the_shape_of_their_results():
    one, out = torch.ones(3, device="fake"), torch.empty(0, device="fake")
    torch.add(one, one, out=out)
    assert out.tolist() == [2, 2, 2]
    torch.add(one, one, out=one)  # an output that is an input too
    assert one.tolist() == [2, 2, 2]
    held = torch.arange(4.0, device="fake")
    held.resize_(6)
    assert held[:4].tolist() == [0, 1, 2, 3]
    held.resize_(2)
    assert held.tolist() == [0, 1]


def test_random_operations_equal_the_processors():
    """Whatever the operations and their order: a chain of them gives the same bits on both."""
    operations = [
        lambda x: x.relu(),
        lambda x: x.t(),
        lambda x: x @ x.t(),
        lambda x: x[:, :3] * 2,
        lambda x: x.softmax(1),
        lambda x: x.clone().add_(1),
        lambda x: torch.cat([x, -x]),
        lambda x: x - x.mean(0, keepdim=True),
        lambda x: x.masked_fill(x > 0.5, 0.25),
        lambda x: x.sort(1).values,
        lambda x: x.reshape(-1, x.shape[0]),
        lambda x: x.sum(1, keepdim=True).expand(x.shape[0], 4),
    ]
    generator = random.Random(0)
    for _ in range(60):
        chain = [generator.choice(operations) for _ in range(6)]
        host = torch.randn(4, 4)
        there = host.to("fake")
        for operation in chain:
            host, there = operation(host), operation(there)
            assert there.shape == host.shape
            assert there.stride() == host.stride()
        assert torch.equal(there.cpu(), host)


def test_streams_and_the_accelerator_exist():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("fake")
    stream = torch.Stream("fake")
    with stream:
        total = torch.ones(3, device="fake").sum()
    stream.synchronize()
    assert stream.query()
    assert total.item() == 3.0


def test_what_torchs_python_backend_cannot_do_is_refused_and_not_done_wrongly():
    """The module's docstring lists these; were one to work some day, the list must shrink."""
    with pytest.raises(NotImplementedError):
        torch.ones(3).pin_memory()
    with pytest.raises(NotImplementedError):
        torch.Generator("fake")
    with pytest.raises(RuntimeError, match="doesn't support"):
        torch.accelerator.synchronize()
    with pytest.raises(NotImplementedError, match="fake cannot"):
        torch.view_as_real(torch.ones(3, dtype=torch.complex64, device="fake"))
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        torch.ones(3, device="fake:1", requires_grad=True).sum().backward()


def test_the_number_of_devices_can_change_and_has_limits():
    fakegpu.install(devices=2)
    assert torch.fake.device_count() == 2
    with pytest.raises(ValueError, match="1 to 127"):
        fakegpu.install(devices=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(3)
    assert torch.fake.current_device() == 0
