"""The kernel's Adam beside torch's."""

import numpy as np
import pytest
import torch

from ddrl import _kernel
from ddrl.learner import devices
from ddrl.learner.part import Adam


@pytest.mark.parametrize("size", [1, 64, 1003])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_kernel_steps_as_torch_does(size: int, max_norm: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(size)
    start = torch.randn(size)
    steppers, vectors = [], []
    for by_kernel in (True, False):
        monkeypatch.setattr(devices, "has_kernel", lambda tensor, chosen=by_kernel: chosen)
        vectors.append([start.clone(), torch.zeros(size), torch.zeros(size)])
        steppers.append(Adam(*vectors[-1], epsilon=1e-8, max_grad_norm=max_norm))
    for _ in range(30):
        gradient = torch.randn(size)
        norms = [stepper.step(gradient.clone(), 0.01) for stepper in steppers]
        torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=0)
    assert [stepper.steps for stepper in steppers] == [30, 30]
    for ours, torchs in zip(*vectors, strict=True):
        torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    assert (vectors[0][0] - start).abs().max() > 0.01


def test_a_gradient_that_is_not_a_number_is_seen_in_its_norm_and_in_the_parameters() -> None:
    vectors = [torch.zeros(70) for _ in range(3)]
    stepper = Adam(*vectors, epsilon=1e-8, max_grad_norm=1.0)
    assert stepper.step(torch.full((70,), float("nan")), 0.1).isnan()
    assert vectors[0].isnan().all()


def test_vectors_of_several_lengths_are_refused() -> None:
    arrays = [np.zeros(4, np.float32) for _ in range(4)]
    for place in range(4):
        given = [array[:3] if at == place else array for at, array in enumerate(arrays)]
        with pytest.raises(ValueError, match=r"\[size\]"):
            _kernel.adam_step(*given, 0.1, 0.9, 0.999, 1e-8, 1.0, 1)
    with pytest.raises(ValueError, match="from 1"):
        _kernel.adam_step(*arrays, 0.1, 0.9, 0.999, 1e-8, 1.0, 0)


def test_a_step_heeds_no_default_type_of_torch() -> None:
    """A network of the user's own may set one when it is imported."""
    vectors = [torch.zeros(70) for _ in range(3)]
    gradient = torch.ones(70)
    torch.set_default_dtype(torch.float64)
    try:
        norm = Adam(*vectors, epsilon=1e-8, max_grad_norm=1.0).step(gradient, 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(70**0.5)
