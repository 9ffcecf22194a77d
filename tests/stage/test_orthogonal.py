"""Muon's update is orthogonal, of AdamW's size, for matrices of layers alone, and the same on the way over a state and over local steps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from peerd.config.muon import is_layer_matrix, layer_matrices_in
from peerd.stage.local_steps import LocalSteps
from peerd.stage.optimizer import Optimizer, optimizer_parts
from peerd.stage.orthogonal import orthogonalised
from tests.tiny_run import tiny_manifest


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("shape", [(24, 24), (16, 96), (96, 16), (1, 7), (7, 1)])
def test_all_singular_values_are_about_one_and_the_directions_stay(shape: tuple[int, int]) -> None:
    matrix = drawn(*shape)
    found = orthogonalised(matrix)
    assert found.shape == matrix.shape
    assert found.is_contiguous()
    values = torch.linalg.svdvals(found)
    assert float(values.max()) < 1.25
    assert float(values.median()) > 0.65
    product = matrix.mT @ found if shape[0] > shape[1] else found @ matrix.mT
    assert torch.allclose(product, product.mT, atol=2e-3), "the same singular vectors"


def test_neither_the_scale_nor_a_transposition_changes_it() -> None:
    matrix = drawn(12, 40)
    assert torch.allclose(orthogonalised(matrix * 1e-6), orthogonalised(matrix), atol=1e-4)
    assert torch.equal(orthogonalised(matrix.mT).mT, orthogonalised(matrix))


def test_a_matrix_of_zeros_stays_one() -> None:
    assert not orthogonalised(torch.zeros(3, 5)).any()


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_an_update_is_as_large_as_adamws_whatever_the_shape(shape: tuple[int, int]) -> None:
    weight = nn.Parameter(torch.zeros(shape))
    manifest = tiny_manifest(1, optimizer="muon", learning_rate=0.01)
    Optimizer(manifest, {"blocks.0.weight": weight}).update(0, {"blocks.0.weight": drawn(*shape)})
    size = float(weight.detach().square().mean().sqrt()) / 0.01
    assert 0.14 < size < 0.24


def test_only_matrices_of_layers_have_it() -> None:
    names = {
        "blocks.3.attention.output.weight": (4, 4),
        "model.layers.11.mlp.up_proj.weight": (8, 2),
        "blocks.3.attention_norm.weight": (4,),
        "model.layers.0.experts.gate_up_proj": (2, 4, 4),
        "embedding.weight": (10, 4),
        "head.weight": (10, 4),
    }
    assert [name for name, shape in names.items() if is_layer_matrix(name, shape)] == [*names][:2]
    assert layer_matrices_in(names) == 32
    manifest = tiny_manifest(1, optimizer="muon")
    state = Optimizer(manifest, {name: nn.Parameter(torch.zeros(shape)) for name, shape in names.items()}).tensors()
    muons = {name.rpartition(".")[0] for name in state if name.endswith(".momentum_buffer")}
    adams = {name.rpartition(".")[0] for name in state if name.endswith(".exp_avg_sq")}
    assert (muons, adams) == ({*[*names][:2]}, {*[*names][2:]})
    assert optimizer_parts(manifest.train) == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}


def test_a_peers_own_updates_within_a_step_are_muons() -> None:
    """One local batch of the whole step is the update of a run without local steps."""
    gradient = drawn(6, 10)
    mine, plain = ({"blocks.0.weight": nn.Parameter(torch.zeros(6, 10))} for _ in range(2))
    steps = LocalSteps(tiny_manifest(1, optimizer="muon", local_batch=1, microbatches_per_step=1), mine)
    steps.add({"blocks.0.weight": gradient})
    steps.seal(0)
    Optimizer(tiny_manifest(1, optimizer="muon", microbatches_per_step=1), plain).update(0, {"blocks.0.weight": gradient})
    assert torch.equal(mine["blocks.0.weight"], plain["blocks.0.weight"])
    assert math.isclose(
        float(steps.contribution()["blocks.0.weight"].norm()), float(plain["blocks.0.weight"].detach().norm()), rel_tol=1e-6
    )


def test_the_steps_before_local_ones_are_those_of_a_run_without_local_steps() -> None:
    shapes = {"blocks.0.weight": (6, 10), "embedding.weight": (10, 6)}
    first, plain = ({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()} for _ in range(2))
    beginning = Optimizer(tiny_manifest(1, optimizer="muon", local_batch=1, local_steps_after=2), first)
    synchronous = Optimizer(tiny_manifest(1, optimizer="muon"), plain)
    for step in range(2):
        gradients = {name: drawn(*shape) + step for name, shape in shapes.items()}
        beginning.update(step, gradients)
        synchronous.update(step, gradients)
    assert all(torch.equal(first[name], plain[name]) for name in shapes)
    own = Optimizer(tiny_manifest(1, optimizer="muon", local_batch=1, local_steps_after=2).inner, first)
    own.begin_from(beginning)
    assert all(torch.equal(value, synchronous.tensors()[name]) for name, value in own.tensors().items())
