"""Local steps: a peer's own updates, what it gives to the average, and what the run's optimizer makes of that."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.optim.sgd import SGD

from peerd.config.manifest import Manifest
from peerd.stage.local_steps import LocalSteps
from peerd.stage.optimizer import Optimizer, optimizer_parts
from tests.tiny_run import replace_train, tiny_manifest

PLAIN = tiny_manifest(1, microbatches_per_step=8, local_batch=2, learning_rate=0.01)
LOCAL = replace_train(PLAIN, outer_learning_rate=0.7, outer_momentum=0.9)
SHAPES = {"weight": (6, 5), "bias": (6,)}


def parameters() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value) for name, value in values(99).items()}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sum_of(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum((each[name] for each in gradients[1:]), gradients[0][name].clone()) for name in SHAPES}


def run(steps: LocalSteps, seeds: list[int], step: int = 0) -> None:
    """Microbatches one after another, each full batch sealed, and what is left at the end."""
    for seed in seeds:
        steps.add(values(seed))
        if steps.is_full:
            steps.seal(step)
    steps.seal(step)


def test_each_full_batch_is_an_update_of_its_mean_gradient_and_the_last_one_may_be_smaller() -> None:
    mine, plain = parameters(), parameters()
    steps, optimizer = LocalSteps(LOCAL, mine), Optimizer(replace_train(LOCAL, local_batch=0), plain)
    run(steps, [0, 1, 2, 3, 4], step=3)
    for batch in ([0, 1], [2, 3], [4]):
        optimizer.update(3, {name: total / len(batch) for name, total in sum_of([values(seed) for seed in batch]).items()})
    assert steps.num_sealed == 5
    assert steps.num_open == 0
    assert all(torch.equal(mine[name], plain[name]) for name in mine)


def test_what_a_peer_gives_is_its_change_times_the_microbatches_behind_it() -> None:
    mine = parameters()
    steps, begun = LocalSteps(LOCAL, mine), {name: value.detach().clone() for name, value in mine.items()}
    run(steps, [0, 1, 2])
    given = steps.contribution()
    assert all(torch.allclose(given[name], 3 * (begun[name] - mine[name].detach()), atol=1e-6) for name in mine)
    assert {value.dtype for value in given.values()} == {torch.float32}
    assert {value.dtype for value in LocalSteps(replace_train(LOCAL, accumulate="float64"), mine).contribution().values()} == {
        torch.float64
    }


def test_an_open_batch_can_be_dropped_and_leaves_nothing_behind() -> None:
    mine, other = parameters(), parameters()
    steps, straight = LocalSteps(LOCAL, mine), LocalSteps(LOCAL, other)
    steps.add(values(7))
    steps.drop()
    run(steps, [0, 1, 2])
    run(straight, [0, 1, 2])
    assert steps.num_sealed == 3
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_an_empty_batch_is_no_update() -> None:
    steps = LocalSteps(LOCAL, parameters())
    steps.seal(0)
    assert steps.num_sealed == 0
    assert not any(bool(value.any()) for value in steps.contribution().values())
    assert all(float(value) == 0 for name, value in steps.inner.tensors().items() if name.endswith(".step"))


def test_a_step_begins_with_the_average_and_with_the_moments_of_before() -> None:
    mine = parameters()
    steps = LocalSteps(LOCAL, mine)
    run(steps, [0, 1])
    moments = {name: value.clone() for name, value in steps.inner.tensors().items()}
    steps.add(values(5))
    steps.begin(average := values(50))
    assert (steps.num_open, steps.num_sealed) == (0, 0)
    assert all(torch.equal(mine[name].detach(), average[name]) for name in mine)
    assert all(torch.equal(value, moments[name]) for name, value in steps.inner.tensors().items())
    assert not any(bool(value.any()) for value in steps.contribution().values())


# The update of a step


def by_torch(manifest: Manifest, gradients: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    train, mine = manifest.train, parameters()
    optimizer = SGD(mine.values(), lr=train.outer_learning_rate, momentum=train.outer_momentum, nesterov=train.outer_momentum > 0)
    for each in gradients:
        for name, parameter in mine.items():
            parameter.grad = each[name].clone()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in mine.items()}


@pytest.mark.parametrize(("rate", "momentum", "bits"), [(0.7, 0.9, 32), (1.0, 0.0, 32), (0.5, 0.3, 32), (0.5, 0.0, 8)])
def test_the_update_of_a_step_is_torchs(rate: float, momentum: float, bits: int) -> None:
    """SGD with Nesterov momentum, without weight decay, at a rate of its own."""
    manifest = replace_train(
        LOCAL, outer_learning_rate=rate, outer_momentum=momentum, optimizer_bits=bits, weight_decay=0.5, warmup_steps=100
    )
    mine, gradients = parameters(), [values(seed) for seed in range(4)]
    optimizer = Optimizer(manifest, mine)
    for step, each in enumerate(gradients):
        optimizer.update(step, each)
    expected = by_torch(manifest, [*gradients])
    assert all(torch.allclose(mine[name], expected[name], rtol=1e-6, atol=1e-6) for name in mine)


def test_eight_bits_of_momentum_are_near_torchs() -> None:
    manifest = replace_train(LOCAL, optimizer_bits=8)
    large = {"weight": nn.Parameter(torch.zeros(64, 512))}
    optimizer, gradient = Optimizer(manifest, large), torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    velocity, expected = torch.zeros(64, 512), torch.zeros(64, 512)
    for step in range(5):
        optimizer.update(step, {"weight": gradient})
        velocity = 0.9 * velocity + gradient
        expected -= 0.7 * (gradient + 0.9 * velocity)
    assert float((large["weight"].detach() - expected).norm() / expected.norm()) < 0.02


def test_averaging_alone_keeps_no_state_and_is_what_a_run_does_that_says_nothing() -> None:
    assert (PLAIN.train.outer_learning_rate, PLAIN.train.outer_momentum) == (1.0, 0.0)
    assert optimizer_parts(PLAIN.train) == {"step"}
    assert optimizer_parts(LOCAL.train) == {"outer_momentum", "step"}


def test_plain_averaging_of_one_peer_is_what_it_has_done() -> None:
    """With a rate of 1 and no momentum, and nobody else, the step ends with this peer's parameters."""
    manifest = replace_train(LOCAL, outer_learning_rate=1.0, outer_momentum=0.0, microbatches_per_step=4)
    mine, average = parameters(), parameters()
    steps, optimizer = LocalSteps(manifest, mine), Optimizer(manifest, average)
    run(steps, [0, 1, 2, 3])
    optimizer.update(0, {name: total / 4 for name, total in steps.contribution().items()})
    assert all(torch.allclose(average[name], mine[name], atol=1e-6) for name in mine)
