"""Networks as people publish or write them: each learns and acts with the numbers that the module itself gives in a
plain loop of torch, or is refused at the start in one line that says what to do."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ddrl.acting.policy import ActingPolicy
from ddrl.core.config import Config, LearnerConfig, RunConfig
from ddrl.core.errors import NetworkError
from ddrl.core.rows import row_schema
from ddrl.core.specs import EnvSpec
from ddrl.learner import Learner, describe
from ddrl.learner.checks import checked_learner
from ddrl.learner.export import random_inputs
from ddrl.replay.sources import small_source
from tests.learner import published_networks
from tests.learner.learner_cases import Transitions

pytestmark = pytest.mark.filterwarnings("ignore")  # of what the networks use
UPDATES = 3
LR = 1e-2
EPSILON = 1e-2  # of Adam: gradients that are zero but for rounding move nothing
NETWORKS = published_networks.__name__


def checked(name: str, spec: EnvSpec, algorithm: str = "dqn", **tables: Any) -> Learner:
    """The learner that a run would begin with, after all that is checked before the training."""
    table = LearnerConfig(
        algorithm=algorithm,
        network=f"{NETWORKS}:{name}",
        device="cpu",
        loss="mse",
        max_grad_norm=1e6,
        lr=LR,
        adam_epsilon=EPSILON,
    )
    config = Config(run=RunConfig(seed=1), learner=table, tables={f"learner.{algorithm}": tables})
    declaration = describe(config, spec)
    source = small_source(config, row_schema(spec, declaration.columns), declaration.experience)
    return checked_learner(config, spec, source, lambda line: None)


def observations(spec: EnvSpec, count: int, seed: int) -> Any:
    """[count, ...]; of a record a dict of arrays, as replay gives them."""
    arrays = random_inputs(spec, (), count, np.random.default_rng(seed))
    return dict(zip(spec.observation.arrays, arrays, strict=True)) if spec.observation.fields else arrays[0]


def tensors(observed: Any) -> Any:
    """The same as a network is given them, in memory of their own."""
    if isinstance(observed, dict):
        return {name: torch.from_numpy(array.copy()) for name, array in observed.items()}
    return torch.from_numpy(observed.copy())


def batch_of(spec: EnvSpec, seed: int, size: int = 16) -> Transitions:
    """Transitions without meaning."""
    generator = np.random.default_rng(seed)
    return Transitions(
        observations(spec, size, seed),
        generator.integers(0, spec.num_actions, size),
        generator.standard_normal(size).astype(np.float32),
        generator.choice([0.0, 0.97], size).astype(np.float32),
        observations(spec, size, seed + 100),
        generator.random(size).astype(np.float32),
    )


def bare(name: str, spec: EnvSpec) -> nn.Module:
    """The module after as many updates of double Q-learning, written as anybody would."""
    torch.manual_seed(1)
    module: nn.Module = getattr(published_networks, name)(spec)
    module = getattr(module, "_orig_mod", module)
    module._compiled_call_impl = None
    with torch.no_grad():
        module.eval()(tensors(observations(spec, 2, 0)))
    target = copy.deepcopy(module)
    adam = torch.optim.Adam(module.parameters(), lr=LR, eps=EPSILON)
    for update in range(UPDATES):
        batch = batch_of(spec, update)
        r_t, discount_t, weight = (torch.from_numpy(each) for each in (batch.r_t, batch.discount_t, batch.weight))
        with torch.no_grad():
            q_t = target(tensors(batch.s_t))
            best = module.eval()(tensors(batch.s_t)).argmax(1, keepdim=True)
            goal = r_t + discount_t * q_t.gather(1, best).squeeze(1)
        q = module.train()(tensors(batch.s_tm1)).gather(1, torch.from_numpy(batch.a_tm1).unsqueeze(1)).squeeze(1)
        loss = (weight * 0.5 * (goal - q).square()).mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
    return module.eval()


REFUSED = {
    "Orthogonal": "cannot be exported to ONNX.*householder_product",
    "Scripted": "holds TorchScript .*leave out torch.jit.script",
    "scripted_whole": "holds TorchScript .*leave out torch.jit.script",
    "ByLength": r"\(line \d+ of published_networks.py\) cannot act on other numbers.*x.shape\[0\] in place of len",
    "LoopsOverRows": r"\(line \d+ of published_networks.py\) cannot act on other numbers.*no loop over rows",
    "ToNumpy": r"\(line \d+ of published_networks.py\) does not use the observation",
    "MatrixExponential": "cannot be exported to ONNX.*matrix_exp",
    "Double": r"first.weight of the network is float64.*\.float\(\)",
    "Half": "body.weight of the network is bfloat16",
    "Complex": "body.weight of the network is complex64",
    "GivesDouble": r"returns \[2, 3\] float64.*must give \[2, 3\] float32",
    "GivesLogitsOfTwo": r"returns \[2, 2\].*must give \[2, 3\]",
    "ReturnsDict": r"returns a dict.*must give \[2, 3\]",
    "ThreeArguments": "'state' and 'mask'.*must give",
    "PythonList": "keeps a Linear in the plain attribute 'layers'.*nn.ModuleList",
    "PlainTensor": "keeps a Tensor in the plain attribute 'scale'.*nn.Parameter",
    "ExtraState": "_extra_state, which is no tensor.*register_buffer",
    "HoldsALock": "cannot be copied.*keep files",
    "DrawsWhileActing": "nor draw random numbers in evaluation mode",
    "HiddenState": "must keep no state in attributes",
    "ChangesItsBuffer": "changes shape or dtype of its buffer",
    "RecurrentOverRows": r"for an observation alone than beside others.*batch_first=True",
    "CenteredByBatch": "for an observation alone than beside others",
    "NoStatistics": r"fails on observations \[1, 4\]",
    "ScaledByLargest": r"\(line \d+ of published_networks.py\) .*no value may decide in Python",
    "ScriptedBranch": "no value may decide in Python",
    "Squeezed": r"returns \[3\] float32 for 1 observations",
    "TwoRowsOnly": r"observations \[1, 4\].*first axis holds any number of observations",
    "WithoutGradient": "would not learn.*leave out torch.no_grad",
    "FrozenWhole": "would not learn",
    "AuxiliaryInTraining": "in training mode, returns a tuple",
    "ChangesWhatIsNeeded": "cannot be differentiated.*in place",
    "BoundedEmbeddings": "changes table.weight in evaluation mode.*max_norm",
    "BufferInEvaluation": "changes memory in evaluation mode.*r2d2",
    "NestedLists": "plain attribute 'towers'",
    "InAClosure": "must be its own",
    "WithoutValues": "no values in body.weight",
    "Autocast": "no torch.autocast",
    "OfTheEnvironment": "spec has observation.shape, num_actions",
    "OfWidths": "spec has observation.shape, num_actions",
    "StateBeside": r"returns a tuple.*must give \[2, 3\]",
    "NoForward": "define forward",
    "ForbidsByInfinity": r"gives NaN or infinite numbers .*env.action_mask",
}
WORKING = [
    name
    for name, made in vars(published_networks).items()
    if getattr(made, "__module__", "") == NETWORKS and name not in {"Net", "Sign", *REFUSED} and name[0] != "_"
] + [published_networks.MADE_LATE]
FAST = {  # a network of each kind; the others are long
    "BatchNormMLP", "RMSNormMLP", "NewSpectralNorm", "OldWeightNorm", "DropoutMLP", "NoisyInside", "PaddedAttention",
    "TransformerEncoder", "GRUInside", "ImpalaCNN", "Embeddings", "FiLM", "Lazy", "Shared", "AssignedStatistics",
    "Hooked", "KeywordsOnly", "DividesItsInput", "PicturesBeside", "Mixer", "RoutedMixture", "CompiledForward",
    "Replicated",
}  # fmt: skip
CASES = [pytest.param(each, marks=[pytest.mark.long] * (each not in FAST)) for each in WORKING]


@pytest.mark.parametrize("name", CASES)
def test_it_learns_and_acts_with_the_numbers_of_the_bare_module(name: str) -> None:
    spec = getattr(getattr(published_networks, name), "seen", published_networks.VECTOR)
    learner = checked(name, spec)
    model = learner.acting_model()
    for update in range(UPDATES):
        learner.update(batch_of(spec, update))
    seen = observations(spec, 7, 999)
    module = bare(name, spec)
    with torch.no_grad():
        expected = module(tensors(seen))
    acted: Any = seen
    if isinstance(seen, dict):
        acted = np.zeros(7, spec.observation.numpy)
        for entry, array in seen.items():
            acted[entry] = array
    given = ActingPolicy(model).act(acted, learner.parameters.numpy())["q"]
    np.testing.assert_allclose(given, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_a_training_in_one_line_with_the_remedy(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NetworkError, match=REFUSED[name]) as refusal:
        checked(name, published_networks.VECTOR).acting_model()
    text = str(refusal.value)
    assert "\n" not in text
    assert len(text) < 300
    assert capfd.readouterr() == ("", "")
