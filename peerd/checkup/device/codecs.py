"""Tests each codec on the device: what it loses is bounded, and what another machine has packed decodes to the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from peerd.config.codec import CODECS, EXAMPLES, CodecSpec, parse_codec
from peerd.transfers import to_host
from peerd.wire import codecs

LENGTH = 2 * 4096 + 77
"""Whole chunks and blocks of every codec, and some values more."""


def values() -> Tensor:
    """Float32 numbers of very different magnitudes, the same on every machine: [LENGTH]."""
    steps = torch.arange(LENGTH, dtype=torch.int64)
    mixed = ((steps * 1103515245 + 12345) % 65536 - 32768).float() / 32768
    return mixed * torch.exp2(((steps // 128) % 13 - 6).float())


def fault(example: str, device: torch.device) -> str:
    """Return what is wrong with a codec on the device, in words; empty if nothing is."""
    codec, spec, given = parse_codec(example), _spec(example), values()
    packed = codecs.encode(codec, given.to(device))
    there = codecs.decode(codec, packed, LENGTH)
    (packed_here,), (back,) = to_host(packed), to_host(there)
    here = codecs.decode(codec, packed_here, LENGTH)
    if not torch.equal(here, back):
        return f"{_count(here != back)} of {LENGTH} numbers decode to other values than on the processor"
    lost = (back - given).abs()
    if spec.name == "topk":
        kept = back != 0
        if not torch.equal(back[kept], given[kept]):
            return "the numbers that are kept are others than those given"
        return "" if _count(kept) == codec.num_kept(LENGTH) else f"{_count(kept)} numbers are kept in place of {codec.num_kept(LENGTH)}"
    within = spec.error * (_largest_of_block(given, spec.block) if spec.block else given.abs())
    wrong = _count(lost > within * 1.001 + 1e-30)
    return f"{wrong} of {LENGTH} numbers lose more than {spec.error:g} of their size" if wrong else ""


CHECKS: dict[str, Callable[[torch.device], str]] = {example: partial(fault, example) for example in EXAMPLES}
"""By codec."""


def _spec(example: str) -> CodecSpec:
    return next(spec for spec in CODECS if spec.example == example)


def _largest_of_block(given: Tensor, block: int) -> Tensor:
    """For each number the largest magnitude of its block."""
    padded = torch.nn.functional.pad(given.abs(), (0, -len(given) % block)).view(-1, block)
    return padded.amax(1, keepdim=True).expand_as(padded).reshape(-1)[: len(given)]


def _count(found: Tensor) -> int:
    return int(found.sum())
