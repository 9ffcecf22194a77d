"""One update, however the parameters are spread over processes; and a state that travels by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.sgd import sgd

from peerd.config.manifest import Manifest, TrainConfig
from peerd.config.schedule import learning_rate_at
from peerd.errors import ManifestError
from peerd.models.stages import build_stage
from peerd.stage.optimizer import Optimizer, check_no_decay, optimizer_parts
from tests.tiny_run import tiny_manifest


def parameters_per_stage(manifest: Manifest) -> list[dict[str, nn.Parameter]]:
    return [dict(build_stage(manifest, stage, "cpu").named_parameters()) for stage in range(manifest.train.num_stages)]


def random_gradients(parameters: dict[str, nn.Parameter], step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Seeded by name, so that they do not depend on who holds the parameter."""
    made = {}
    for name, parameter in parameters.items():
        generator = torch.Generator().manual_seed(step * 1000 + sum(name.encode()))
        made[name] = torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return made


def train(manifest: Manifest, steps: int) -> dict[str, Tensor]:
    """Parameters and optimizer state after updates with random gradients."""
    tensors: dict[str, Tensor] = {}
    for parameters in parameters_per_stage(manifest):
        optimizer = Optimizer(manifest, parameters)
        for step in range(steps):
            optimizer.update(step, random_gradients(parameters, step))
        tensors |= {name: parameter.detach() for name, parameter in parameters.items()} | optimizer.tensors()
    return tensors


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_updates_are_equal_to_the_bit_whatever_the_split(num_stages: int) -> None:
    whole, split = train(tiny_manifest(1), steps=3), train(tiny_manifest(num_stages), steps=3)
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)


def test_the_first_update_is_the_one_of_the_paper() -> None:
    """Algorithm 2 of arXiv 1711.05101 at t = 1, where both bias-corrected moments are the gradient's own."""
    manifest = tiny_manifest(1, learning_rate=0.01, weight_decay=0.1)
    weight, bias = nn.Parameter(torch.full((2, 3), 2.0)), nn.Parameter(torch.full((3,), 2.0))
    optimizer = Optimizer(manifest, {"weight": weight, "bias": bias})
    optimizer.update(0, {"weight": torch.full((2, 3), -0.5), "bias": torch.full((3,), 0.5)})
    assert torch.allclose(weight, torch.tensor(2.0 - 0.01 * 0.1 * 2.0 + 0.01))
    assert torch.allclose(bias, torch.tensor(2.0 - 0.01)), "vectors must not decay"
    state = optimizer.tensors()
    assert torch.allclose(state["weight.exp_avg"], torch.tensor(-0.5 * (1 - manifest.train.beta1)))
    assert torch.allclose(state["bias.exp_avg_sq"], torch.tensor(0.25 * (1 - manifest.train.beta2)))
    assert weight.grad is None


# Other optimizers


@pytest.mark.parametrize(("kind", "bits"), [("lamb", 32), ("muon", 32), ("sgd", 32), ("sgd", 8), ("adamw", 8)])
def test_other_optimizers_do_not_depend_on_the_split_either(kind: str, bits: int) -> None:
    whole, split = (train(tiny_manifest(stages, optimizer=kind, optimizer_bits=bits), steps=3) for stages in (1, 3))
    assert split.keys() == whole.keys()
    assert all(torch.equal(split[name], whole[name]) for name in whole)


def lamb_by_the_paper(weight: Tensor, gradients: list[Tensor], rate: float, decay: float, config: TrainConfig) -> Tensor:
    """Algorithm 2 of arXiv 1904.00962, written down line by line, in double precision."""
    x, m, v = weight.double(), torch.zeros_like(weight).double(), torch.zeros_like(weight).double()
    for t, g in enumerate((gradient.double() for gradient in gradients), start=1):
        m = config.beta1 * m + (1 - config.beta1) * g
        v = config.beta2 * v + (1 - config.beta2) * g * g
        r = (m / (1 - config.beta1**t)) / ((v / (1 - config.beta2**t)).sqrt() + config.epsilon)
        step = r + decay * x
        x = x - rate * (x.norm() / step.norm()) * step
    return x


def test_lamb_is_the_papers() -> None:
    manifest = tiny_manifest(1, optimizer="lamb", learning_rate=0.02, weight_decay=0.1)
    chance = torch.Generator().manual_seed(3)
    parameters = {"weight": nn.Parameter(torch.randn(5, 7, generator=chance)), "norm": nn.Parameter(torch.ones(7))}
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    steps = [{name: torch.randn(value.shape, generator=chance) for name, value in before.items()} for _ in range(5)]
    optimizer = Optimizer(manifest, parameters)
    for step, gradients in enumerate(steps):
        optimizer.update(step, gradients)
    for name, decay in (("weight", 0.1), ("norm", 0.0)):
        expected = lamb_by_the_paper(before[name], [gradients[name] for gradients in steps], 0.02, decay, manifest.train)
        assert torch.allclose(parameters[name].double(), expected, atol=1e-6)


def test_lamb_moves_a_tensor_of_zeros() -> None:
    bias = nn.Parameter(torch.zeros(4))
    Optimizer(tiny_manifest(1, optimizer="lamb", learning_rate=0.5), {"bias": bias}).update(0, {"bias": torch.full((4,), 2.0)})
    assert torch.allclose(bias, torch.tensor(-0.5))


def test_sgd_is_torchs_to_the_bit() -> None:
    manifest = tiny_manifest(1, optimizer="sgd", learning_rate=0.05, momentum=0.8, weight_decay=0.1)
    ours, theirs = parameters_per_stage(manifest)[0], parameters_per_stage(manifest)[0]
    optimizer, buffers = Optimizer(manifest, ours), dict[str, list[Tensor | None]]()
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.8, "dampening": 0.0, "nesterov": False, "maximize": False, "foreach": False}
    for step in range(3):
        gradients = random_gradients(ours, step)
        optimizer.update(step, gradients)
        for name, value in theirs.items():
            state = buffers.setdefault(name, [None])
            with torch.no_grad():
                sgd([value], [gradients[name].clone()], state, weight_decay=0.1 * (value.dim() > 1), **settings)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_sgd_without_momentum_keeps_nothing_and_is_torchs_to_the_bit() -> None:
    manifest = tiny_manifest(1, optimizer="sgd", learning_rate=0.05, momentum=0.0, weight_decay=0.1)
    ours, theirs = parameters_per_stage(manifest)[0], parameters_per_stage(manifest)[0]
    optimizer = Optimizer(manifest, ours)
    settings: dict[str, Any] = {"lr": 0.05, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False, "foreach": False}
    for step in range(2):
        gradients = random_gradients(ours, step)
        optimizer.update(step, gradients)
        for name, value in theirs.items():
            with torch.no_grad():
                sgd([value], [gradients[name].clone()], [None], weight_decay=0.1 * (value.dim() > 1), **settings)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {name.rpartition(".")[2] for name in optimizer.tensors()} == {"step"} == optimizer_parts(manifest.train)


# Weight decay


@pytest.mark.parametrize("kind", ["adamw", "lamb", "muon", "sgd"])
def test_what_no_decay_names_and_vectors_are_left_without_decay(kind: str) -> None:
    """A gradient of zero moves nothing but what decays."""
    manifest = tiny_manifest(1, optimizer=kind, weight_decay=0.5, learning_rate=0.1, no_decay=("embedding.*", "blocks.1.*"))
    parameters = parameters_per_stage(manifest)[0]
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    Optimizer(manifest, parameters).update(0, {name: torch.zeros_like(value) for name, value in before.items()})
    decayed = {name for name in parameters if not torch.equal(parameters[name], before[name])}
    spared = ("embedding.", "blocks.1.")
    assert decayed == {name for name, value in before.items() if value.dim() > 1 and not name.startswith(spared)}


def test_a_pattern_that_names_no_parameter_is_refused() -> None:
    check_no_decay(tiny_manifest(3, no_decay=("embedding.weight", "*norm*")))
    with pytest.raises(ManifestError, match=r"no parameter is called 'embeding\.weight'; names are such as embedding\.weight and"):
        check_no_decay(tiny_manifest(3, no_decay=("embeding.weight",)))


@given(st.integers(0, 50), st.integers(0, 200))
def test_the_rate_rises_to_its_height_and_stays(warmup_steps: int, step: int) -> None:
    train = TrainConfig(warmup_steps=warmup_steps, learning_rate=0.5)
    rate, following = learning_rate_at(train, step), learning_rate_at(train, step + 1)
    assert 0 < rate <= following <= 0.5
    assert (rate == 0.5) == (step + 1 >= warmup_steps)


def test_a_mean_in_double_precision_is_cast_to_the_parameters_type() -> None:
    manifest = tiny_manifest(1)
    exact, rounded = parameters_per_stage(manifest)[0], parameters_per_stage(manifest)[0]
    gradients = random_gradients(exact, 0, torch.float64)
    Optimizer(manifest, exact).update(0, gradients)
    Optimizer(manifest, rounded).update(0, {name: value.float() for name, value in gradients.items()})
    assert all(torch.equal(exact[name], rounded[name]) for name in exact)
    assert {parameter.dtype for parameter in exact.values()} == {torch.float32}


def test_the_state_is_zero_before_the_first_step() -> None:
    manifest = tiny_manifest(2)
    parameters = parameters_per_stage(manifest)[1]
    state = Optimizer(manifest, parameters).tensors()
    assert state.keys() == {f"{name}.{part}" for name in parameters for part in ("exp_avg", "exp_avg_sq", "step")}
    assert not any(value.any() for value in state.values())
    assert state["head.weight.exp_avg"].shape == parameters["head.weight"].shape


@pytest.mark.parametrize(
    ("kind", "bits", "steps_before"),
    [("adamw", 32, 0), ("adamw", 32, 2), ("lamb", 32, 2), ("muon", 32, 2), ("sgd", 32, 2), ("adamw", 8, 2), ("sgd", 8, 2)],
)
def test_a_peer_that_loads_the_state_goes_on_to_the_bit(kind: str, bits: int, steps_before: int) -> None:
    manifest = tiny_manifest(1, warmup_steps=4, optimizer=kind, optimizer_bits=bits)
    donor, joiner = parameters_per_stage(manifest)[0], parameters_per_stage(manifest)[0]
    donors = Optimizer(manifest, donor)
    for step in range(steps_before):
        donors.update(step, random_gradients(donor, step))
    with torch.no_grad():
        for name, parameter in joiner.items():
            parameter.copy_(donor[name])
    joiners = Optimizer(manifest, joiner)
    joiners.load(donors.tensors())
    for optimizer, parameters in ((donors, donor), (joiners, joiner)):
        optimizer.update(steps_before, random_gradients(parameters, steps_before))
    assert all(torch.equal(donor[name], joiner[name]) for name in donor)
    after = joiners.tensors()
    assert all(torch.equal(value, after[name]) for name, value in donors.tensors().items())
    assert float(after["head.weight.step"]) == steps_before + 1


def test_loaded_state_is_a_copy() -> None:
    manifest = tiny_manifest(1)
    parameters = parameters_per_stage(manifest)[0]
    optimizer = Optimizer(manifest, parameters)
    given_tensors = {name: value.clone() for name, value in optimizer.tensors().items()}
    optimizer.load(given_tensors)
    optimizer.update(0, random_gradients(parameters, 0))
    assert not any(value.any() for value in given_tensors.values())


def test_gradients_and_state_that_do_not_fit_are_refused_by_name_and_change_nothing() -> None:
    manifest = tiny_manifest(1)
    parameters = parameters_per_stage(manifest)[0]
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = Optimizer(manifest, parameters)
    gradients, state = random_gradients(parameters, 0), optimizer.tensors()
    with pytest.raises(ValueError, match=r"gradient head\.weight is missing"):
        optimizer.update(0, {name: value for name, value in gradients.items() if name != "head.weight"})
    with pytest.raises(ValueError, match=r"gradient tail\.weight is unknown"):
        optimizer.update(0, gradients | {"tail.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"optimizer tensor head\.weight\.exp_avg has shape \[1\]; it must be \[256, 32\]"):
        optimizer.load(state | {"head.weight.exp_avg": torch.ones(1)})
    assert all(torch.equal(parameters[name], value) for name, value in before.items())
    assert not any(value.any() for value in optimizer.tensors().values())
