"""One update, however the parameters are spread over processes; and a state that travels by name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from peerd.config.manifest import Manifest, TrainConfig
from peerd.models.stages import build_stage
from peerd.stage.optimizer import AdamW, learning_rate_at
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
        optimizer = AdamW(manifest, parameters)
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
    optimizer = AdamW(manifest, {"weight": weight, "bias": bias})
    optimizer.update(0, {"weight": torch.full((2, 3), -0.5), "bias": torch.full((3,), 0.5)})
    assert torch.allclose(weight, torch.tensor(2.0 - 0.01 * 0.1 * 2.0 + 0.01))
    assert torch.allclose(bias, torch.tensor(2.0 - 0.01)), "vectors must not decay"
    state = optimizer.tensors()
    assert torch.allclose(state["weight.exp_avg"], torch.tensor(-0.5 * (1 - manifest.train.beta1)))
    assert torch.allclose(state["bias.exp_avg_sq"], torch.tensor(0.25 * (1 - manifest.train.beta2)))
    assert weight.grad is None


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
    AdamW(manifest, exact).update(0, gradients)
    AdamW(manifest, rounded).update(0, {name: value.float() for name, value in gradients.items()})
    assert all(torch.equal(exact[name], rounded[name]) for name in exact)
    assert {parameter.dtype for parameter in exact.values()} == {torch.float32}


def test_the_state_is_zero_before_the_first_step() -> None:
    manifest = tiny_manifest(2)
    parameters = parameters_per_stage(manifest)[1]
    state = AdamW(manifest, parameters).tensors()
    assert state.keys() == {f"{name}.{part}" for name in parameters for part in ("exp_avg", "exp_avg_sq", "step")}
    assert not any(value.any() for value in state.values())
    assert state["head.weight.exp_avg"].shape == parameters["head.weight"].shape


@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_peer_that_loads_the_state_goes_on_to_the_bit(steps_before: int) -> None:
    manifest = tiny_manifest(1, warmup_steps=4)
    donor, joiner = parameters_per_stage(manifest)[0], parameters_per_stage(manifest)[0]
    donors = AdamW(manifest, donor)
    for step in range(steps_before):
        donors.update(step, random_gradients(donor, step))
    with torch.no_grad():
        for name, parameter in joiner.items():
            parameter.copy_(donor[name])
    joiners = AdamW(manifest, joiner)
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
    optimizer = AdamW(manifest, parameters)
    given_tensors = {name: value.clone() for name, value in optimizer.tensors().items()}
    optimizer.load(given_tensors)
    optimizer.update(0, random_gradients(parameters, 0))
    assert not any(value.any() for value in given_tensors.values())


def test_gradients_and_state_that_do_not_fit_are_refused_by_name_and_change_nothing() -> None:
    manifest = tiny_manifest(1)
    parameters = parameters_per_stage(manifest)[0]
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    optimizer = AdamW(manifest, parameters)
    gradients, state = random_gradients(parameters, 0), optimizer.tensors()
    with pytest.raises(ValueError, match=r"gradient head\.weight is missing"):
        optimizer.update(0, {name: value for name, value in gradients.items() if name != "head.weight"})
    with pytest.raises(ValueError, match=r"gradient tail\.weight is unknown"):
        optimizer.update(0, gradients | {"tail.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"optimizer tensor head\.weight\.exp_avg has shape \[1\]; it must be \[256, 32\]"):
        optimizer.load(state | {"head.weight.exp_avg": torch.ones(1)})
    assert all(torch.equal(parameters[name], value) for name, value in before.items())
    assert not any(value.any() for value in optimizer.tensors().values())
