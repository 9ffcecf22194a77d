"""A backward pass from a gradient that another stage has sent."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from peerd.stage.passes import gradients_of

SCRIPT = """
import sys, torch
from peerd.stage.passes import gradients_of
weight = torch.ones(2, 2, requires_grad=True)
gradients_of(weight * 2, [weight], torch.ones(2, 2))
print(*sorted({"sympy", "torch.fx.experimental.symbolic_shapes"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradients_are_torchs_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    weight, inputs = (torch.randn(4, 4, dtype=dtype, requires_grad=True) for _ in range(2))
    gradient = torch.randn(4, 4)
    gradient[0, 0], gradient[1, 1] = torch.inf, torch.nan
    found = gradients_of(torch.tanh(inputs @ weight), [inputs, weight], gradient)
    expected = torch.autograd.grad(torch.tanh(inputs @ weight), [inputs, weight], gradient)
    assert all(torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7)) for mine, theirs in zip(found, expected, strict=True))


def test_a_gradient_of_another_shape_is_refused() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with pytest.raises(ValueError, match=r"shape \[1\] for an output of shape \[2, 2\]"):
        gradients_of(weight * 2, [weight], torch.ones(1))


def test_torchs_shape_solver_is_not_imported() -> None:
    """It takes 36 MB."""
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert not found.stdout.strip()
