"""Parameters made ahead: while an update is under way its thread alone has them, and nobody waits who need not."""

from __future__ import annotations

import threading

import pytest
import torch

from peerd.models.stages import StageModule, build_stage
from peerd.stage.delayed import DelayedUpdate
from tests.tiny_run import tiny_manifest


@pytest.fixture
def module() -> StageModule:
    return build_stage(tiny_manifest(5), 1, "cpu")


def shift(module: StageModule, by: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(by)


def norm_weight(module: StageModule) -> float:
    return float(dict(module.named_parameters())["blocks.1.attention_norm.weight"][0].detach())


def test_the_caller_computes_on_while_the_update_is_made(module: StageModule) -> None:
    ahead, go, spare = DelayedUpdate(module), threading.Event(), build_stage(tiny_manifest(5), 1, "cpu")

    def update() -> None:
        assert go.wait(20)
        shift(spare, 1.0)

    computing = ahead.advance(spare, update)
    assert norm_weight(computing) == norm_weight(module) == 1, "the first step's update is not in what the second computes with"
    go.set()
    assert ahead.wait() is spare
    assert norm_weight(spare) == 2
    assert norm_weight(computing) == 1


def test_each_update_starts_from_the_one_before(module: StageModule) -> None:
    ahead, spares = DelayedUpdate(module), [build_stage(tiny_manifest(5), 1, "cpu") for _ in range(2)]
    for number in range(4):
        spare = spares[number % 2]
        assert norm_weight(ahead.advance(spare, lambda spare=spare: shift(spare, 1.0))) == 1 + number  # type: ignore[misc]
    assert norm_weight(ahead.wait()) == 5


def test_what_an_update_raises_reaches_who_waits_for_it(module: StageModule) -> None:
    def broken() -> None:
        raise ValueError("no such gradient")

    ahead = DelayedUpdate(module)
    ahead.advance(build_stage(tiny_manifest(5), 1, "cpu"), broken)
    for _ in range(2):  # such parameters are no better later
        with pytest.raises(ValueError, match="no such gradient"):
            ahead.wait()
