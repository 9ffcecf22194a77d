"""Dropout's masks depend on run, step, microbatch, module and index alone; otherwise they look random."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peerd.models.dropout import Dropout, dropout_of, keep_mask
from peerd.models.stages import build_stage
from tests.tiny_run import tiny_manifest

CPU = torch.device("cpu")
SHAPE = torch.Size((64, 1024))


def mask(name: str, probability: float = 0.3) -> Tensor:
    return keep_mask(SHAPE, name, probability, CPU)


def test_the_mask_of_a_name_is_the_same_on_every_machine() -> None:
    """Frozen: after a change, peers of different versions would disagree."""
    assert keep_mask(torch.Size((16,)), "7/0/0/embedding_dropout/1", 0.5, CPU).int().tolist() == [
        1,
        0,
        1,
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        0,
        0,
        0,
        1,
        1,
    ]


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_left_out_as_asked(probability: float) -> None:
    """Within five standard deviations."""
    left_out = 1 - float(mask("7/0/0/a/1", probability).double().mean())
    assert left_out == pytest.approx(probability, abs=5 * (probability * (1 - probability) / SHAPE.numel()) ** 0.5)


@pytest.mark.parametrize("other", ["8/0/0/a/1", "7/1/0/a/1", "7/0/1/a/1", "7/0/0/b/1", "7/0/0/a/2"])
def test_seed_step_microbatch_module_and_application_make_masks_that_have_nothing_to_do_with_each_other(other: str) -> None:
    together = torch.corrcoef(torch.stack([mask("7/0/0/a/1").flatten(), mask(other).flatten()]).double())
    assert abs(float(together[0, 1])) < 5 / SHAPE.numel() ** 0.5


@pytest.mark.parametrize("distance", [1, 2, 16, 1024])
def test_neighbours_have_nothing_to_do_with_each_other(distance: int) -> None:
    flat = mask("7/3/2/a/1").flatten().double()
    together = torch.corrcoef(torch.stack([flat[:-distance], flat[distance:]]))
    assert abs(float(together[0, 1])) < 5 / SHAPE.numel() ** 0.5


def test_the_mean_is_kept_and_a_repetition_draws_the_same() -> None:
    dropout = Dropout(0.25)
    dropout.begin("7/0/0/a")
    first, second = dropout(torch.ones(SHAPE)), dropout(torch.ones(SHAPE))
    dropout.begin("7/0/0/a")
    assert torch.equal(dropout(torch.ones(SHAPE)), first)
    assert not torch.equal(first, second), "a module applied twice draws twice"
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert float(first.mean()) == pytest.approx(1, abs=0.02)
    dropout.end()
    assert torch.equal(dropout(torch.ones(SHAPE)), torch.ones(SHAPE))


@pytest.mark.parametrize("num_stages", [1, 2, 5])
def test_the_split_does_not_change_what_is_left_out(num_stages: int) -> None:
    manifest = tiny_manifest(num_stages, dropout=0.5)
    stages = [build_stage(manifest, stage, "cpu") for stage in range(num_stages)]
    whole = build_stage(tiny_manifest(1, dropout=0.5), 0, "cpu")
    tokens = torch.arange(32).view(2, 16)

    def run(modules: list[torch.nn.Module], index: int) -> Tensor:
        hidden = tokens
        for module in modules:
            with dropout_of(module, manifest, 3, index):
                hidden = module(hidden)
        return hidden

    with torch.no_grad():
        assert torch.equal(run([*stages], 0), run([whole], 0))
        assert not torch.equal(run([whole], 0), run([whole], 1))
        assert torch.equal(whole(tokens), build_stage(tiny_manifest(1), 0, "cpu")(tokens)), "without training nothing is left out"
