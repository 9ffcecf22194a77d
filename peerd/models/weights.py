"""Initialisation that all kinds of stages share: from a module without memory to one with its first weights."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def give_memory(module: nn.Module, device: torch.device) -> None:
    """Like nn.Module.to_empty, without the half second that the latter takes to load torch's symbolic shapes."""
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            setattr(owner, name, nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device)))
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


class Uninitialised(TorchFunctionMode):
    """Skips torch.nn.init: there is nothing to fill, and filling tensors without memory imports torch's compiler (1 s, 70 MB)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextlib.contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Seed torch's default generator, which some modules draw from, with run seed and name; restore its state afterwards."""
    state = torch.random.get_rng_state()
    torch.default_generator.manual_seed(seed_of(seed, name))
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


def generator_of(seed: int, name: str) -> torch.Generator:
    """The generator for the parameter `name`."""
    return torch.Generator().manual_seed(seed_of(seed, name))


def seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8, person=b"peerd weights").digest()
    return int.from_bytes(digest, "little") >> 1
