"""Lets short jobs run between the layers of a pass. A pass takes minutes where a microbatch does, and a round must not wait for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from peerd.models.module import StageModule
from peerd.stage.executor import Executor, executor_here

_MARK = "_breathes"


def let_breathe(module: StageModule) -> None:
    """Have each layer of the module stop for short jobs once it has been computed, forward and backward. It changes no value."""
    if getattr(module, _MARK, False):
        return
    setattr(module, _MARK, True)
    for parent in module.modules():
        if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            for layer in parent.children():
                layer.register_forward_hook(_after)


def _after(_layer: nn.Module, _inputs: Any, output: Any) -> None:
    executor = executor_here()
    if executor is None:
        return
    computed = output if isinstance(output, Tensor) else next((each for each in output if isinstance(each, Tensor)), None)
    if computed is None:
        return
    device = computed.device.type
    _breathe(executor, device)
    if computed.requires_grad:
        computed.register_hook(lambda _gradient: _breathe(executor, device))  # type: ignore[no-untyped-call]


def _breathe(executor: Executor, device: str) -> None:
    """The jobs run as they would between two passes: no graph is built, in full precision."""
    if executor.has_ledger_job:
        with torch.no_grad(), torch.autocast(device, enabled=False):
            executor.breathe()
