"""First weights of a transformers model by the architecture's own rules, the same for every split and on every machine.

The library's initializer runs module by module on what a stage holds. Its draws are replaced: each parameter has its own
generator, seeded by the run's seed and the parameter's name, and normal numbers are sums of integers, which have the same bits
on every processor (torch's use a vectorised logarithm and cosine).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from peerd.models.weights import generator_of, seeded

CHUNK = 1 << 18
"""Numbers drawn at once; this keeps the scratch memory of a draw at some megabytes."""
NUM_WORDS = 3
"""64-bit words per number; each gives four integers of 15 bits."""


def draw_weights(whole: Any, seed: int, device: torch.device) -> None:
    """Give every parameter of a (partial) model memory on `device` and its first value; meta buffers must be real already.

    If a parameter has several names, the module of the first draws it and the others draw nothing.
    """
    names: dict[int, str] = {}
    real_of: dict[int, nn.Parameter] = {}
    tied: list[tuple[nn.Module, str, nn.Parameter]] = []
    held = list(whole.parameters())  # keeps them alive, so that no id is reused
    for path, module in whole.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in real_of:
                tied.append((module, name, real_of[id(parameter)]))
                setattr(module, name, nn.Parameter(torch.empty(parameter.shape, device="meta")))
                continue
            real = real_of[id(parameter)] = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32, device=device))
            setattr(module, name, real)
            names[id(real)] = f"{path}.{name}" if path else name
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    with torch.no_grad(), _Draws(seed, names):
        for path, module in _children_first("", whole):
            with seeded(seed, path):
                whole._init_weights(module)
    for module, name, real in tied:
        setattr(module, name, real)
    del held


def _children_first(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules in the library's order: a module may overwrite what its children have drawn."""
    for name, child in module.named_children():
        yield from _children_first(f"{path}.{name}" if path else name, child)
    yield path, module


class _Draws(TorchFunctionMode):
    """Replaces torch's normal draws by portable ones."""

    def __init__(self, seed: int, names: dict[int, str]) -> None:
        super().__init__()
        self._seed = seed
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__ if getattr(func, "__module__", "") == "torch.nn.init" else ""
        if name not in ("normal_", "trunc_normal_"):
            return func(*args, **kwargs)
        given = dict(zip(("tensor", "mean", "std", "a", "b"), args, strict=False)) | kwargs
        tensor: Tensor = given["tensor"]
        if tensor.is_meta:
            return tensor
        generator = generator_of(self._seed, self._names.get(id(tensor), ""))
        fill_normal(tensor, given.get("mean", 0.0), given.get("std", 1.0), generator)
        if name == "trunc_normal_":
            tensor.clamp_(given.get("a", -2.0), given.get("b", 2.0))
        return tensor


@torch.no_grad()
def fill_normal(tensor: Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    """Fill with normal numbers, as sums of twelve uniform integers (Irwin-Hall): exact up to the last product and sum in float64."""
    filled = torch.empty(tensor.numel(), dtype=tensor.dtype)
    for start in range(0, filled.numel(), CHUNK):
        part = filled[start : start + CHUNK]
        part.copy_(_standard_normal(part.numel(), generator).mul_(std).add_(mean))
    tensor.copy_(filled.view(tensor.shape))


def _standard_normal(count: int, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, float64 [count]. The sum of n uniform integers below m has the variance n (m^2 - 1) / 12."""
    words = torch.empty(NUM_WORDS, count, dtype=torch.int64).random_(generator=generator)
    total = torch.zeros(count, dtype=torch.int64)
    for word in words:
        for shift in (0, 15, 30, 45):
            total += (word >> shift) & 0x7FFF
    num_terms, modulus = 4 * NUM_WORDS, 1 << 15
    centred = total.mul_(2).sub_(num_terms * (modulus - 1)).double()
    return centred.div_(2 * math.sqrt(num_terms * (modulus**2 - 1) / 12))
