"""The experts of a layer as grouped products: the processor does not ask a GPU how many tokens each of them gets.

The library's own way for training takes one expert after another, and waits for the device at each: 309 times a microbatch of four layers
with 16 experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "peerd_grouped"


def experts_together() -> str:
    """The name of this way in the library's registry. Models without experts, or whose experts are not in one tensor, ignore it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _together)
    return NAME


def _together(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return what the chosen experts give, weighted. `hidden`: [tokens, width]; `chosen` and `weights`: [tokens, experts of each]."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        experts = _InPrecision(experts, torch.get_autocast_dtype(kind))
    found: Tensor = grouped_mm_experts_forward(experts, hidden, chosen, weights)
    return found


class _InPrecision:
    """Experts whose parameters are of a precision, as autocast would make them: it does not know grouped products."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._experts, name)
        return found.to(self._dtype) if isinstance(found, nn.Parameter) else found
