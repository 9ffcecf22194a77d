"""The codecs that tensors travel in: what a manifest and a message call them, and how many bytes each takes.

Sizes follow from codec and shape alone, so a message of another size is refused before its bytes come. How values become
bytes is `wire/codecs.py`.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

INT8_BLOCK = 256
"""Values that share one scale."""
TOPK_CHUNK = 4096
"""Values among which the largest are chosen; a position inside fits 2 bytes."""
SCALE_BYTES = 4
KEPT_BYTES = 6
"""Of one kept value: itself in float32, and its position."""
_HALF = frozenset({"bfloat16", "float16"})
_TOPK = re.compile(r"topk:(0\.\d{1,6}|1)", re.ASCII)
KNOWN = '"none", "bfloat16", "float16", "int8" or "topk:RATIO" with a ratio such as 0.1'


@dataclass(frozen=True, slots=True)
class Codec:
    """How a tensor of float32 travels. `none` is raw bytes, of any type."""

    name: str
    ratio: float = 1.0
    """Share of values that top-k keeps."""

    def __str__(self) -> str:
        return f"topk:{self.ratio:.6f}".rstrip("0").rstrip(".") if self.name == "topk" else self.name

    @property
    def is_lossy(self) -> bool:
        return self.name != "none"

    @property
    def is_half(self) -> bool:
        return self.name in _HALF

    def kept(self, length: int) -> int:
        """How many of a chunk's values top-k keeps."""
        return max(1, math.ceil(self.ratio * length)) if length else 0

    def num_kept(self, length: int) -> int:
        """How many of `length` values top-k keeps, chunk by chunk."""
        return length // TOPK_CHUNK * self.kept(TOPK_CHUNK) + self.kept(length % TOPK_CHUNK)

    def is_dense(self, length: int) -> bool:
        """Whether top-k sends everything, because positions beside the values would take more."""
        return KEPT_BYTES * self.num_kept(length) >= 4 * length

    def num_bytes(self, length: int) -> int:
        """Bytes of `length` values of float32."""
        if self.is_half:
            return 2 * length
        if self.name == "int8":
            return length + SCALE_BYTES * -(-length // INT8_BLOCK)
        if self.name == "topk" and not self.is_dense(length):
            return KEPT_BYTES * self.num_kept(length)
        return 4 * length


NONE = Codec("none")


@functools.cache
def _known(text: str) -> Codec:
    match = _TOPK.fullmatch(text)
    if match is not None and float(match[1]) > 0:
        return Codec("topk", float(match[1]))
    if text in _HALF or text in ("none", "int8"):
        return Codec(text)
    raise ValueError(f"{text[:20]!r} is no codec; known are {KNOWN}")


def parse_codec(text: str) -> Codec:
    """ValueError for a name that is none."""
    if len(text) > 16:
        raise ValueError(f"{text[:20]!r} is no codec; known are {KNOWN}")
    return _known(text)
