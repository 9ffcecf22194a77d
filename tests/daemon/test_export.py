"""Which tensors of each stage make up one step's parameters, when stages are caught at two steps."""

from __future__ import annotations

import pytest
import torch

from peerd.daemon.export import assemble
from peerd.stage.snapshots import Downloaded
from peerd.table.record import Lineage

STEP = 3


def part(stage: int, step: int, delayed: bool) -> Downloaded:
    """Parameters are the number of updates that led to them."""
    held = {"parameters": step - delayed, "previous": step - 1 - delayed, "optimizer": step} | ({"ahead": step} if delayed else {})
    return Downloaded(step, Lineage(), {f"{kind}/{stage}": torch.tensor(float(updates)) for kind, updates in held.items()}, ())


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("last", [STEP, STEP + 1])
def test_an_export_holds_the_parameters_that_all_updates_before_its_step_led_to(last: int, delayed: bool) -> None:
    parameters, optimizer = assemble([part(0, STEP, delayed), part(1, last, delayed)], STEP)
    assert {name: float(value) for name, value in parameters.items()} == {"0": STEP, "1": STEP}
    assert (optimizer is None) == (last != STEP)
