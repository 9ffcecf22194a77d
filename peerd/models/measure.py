"""Measures a module's costs on tensors without memory. This works for any architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from peerd.models.kernels import keep_kernels_in_cache
from peerd.models.weights import give_memory

Microbatch = Callable[[], tuple[Tensor, Tensor | None]]
"""Makes a microbatch's inputs and labels; called in a mode in which tensors have no memory."""
LOWERED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""What passes of mixed precision compute in, by `train.precision`."""


def saved_bytes(module: nn.Module, microbatch: Microbatch, precision: str = "float32") -> int:
    """Bytes that autograd keeps of one forward pass in a run's `train.precision` for the backward pass.

    Leaves the module with fake tensors as parameters.
    """
    saved: dict[int, int] = {}
    kept: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        kept.append(tensor)  # keeps the address from being reused by another storage
        return tensor

    with _fake(module):
        own = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
            torch.autocast("cpu", LOWERED.get(precision), enabled=precision in LOWERED),
        ):
            module(*microbatch())
    return sum(size for storage, size in saved.items() if storage not in own)


def product_flops(module: nn.Module, microbatch: Microbatch) -> int:
    """Floating-point operations of one forward pass, matrix products and convolutions only. It leaves fake tensors, too."""
    keep_kernels_in_cache()
    from torch.utils.flop_counter import FlopCounterMode

    with _fake(module), torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*microbatch())
    return int(counter.get_total_flops())


@contextmanager
def _fake(module: nn.Module) -> Iterator[None]:
    keep_kernels_in_cache()
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        give_memory(module, torch.device("cpu"))
        yield
