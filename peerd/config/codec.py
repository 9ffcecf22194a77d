"""The codecs of tensors on the wire: their names in manifests and messages, and their sizes.

The size follows from codec and shape alone, so a message of another size is refused before its bytes arrive. `wire/codecs.py` converts
values to bytes; `policy/route/compressing.py` chooses a codec for each link.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

TOPK_CHUNK = 4096
"""Number of values in a chunk, of which top-k keeps the largest. A position inside a chunk fits in 2 bytes."""
SCALE_BYTES = 4
KEPT_BYTES = 6
"""Size of one kept value: float32 and its position."""
LEVEL_BYTES = 4
"""Size of the two magnitudes that the values of a chunk have in the sparse codec."""
MOST_SPARSE = 1024
"""The most values that it keeps of a chunk."""
MOST_RANK = 64
"""Largest rank of PowerSGD. The cost of compression grows with the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Properties of a codec that do not depend on a tensor."""

    example: str
    """Its name in a run.toml, with a parameter after a colon if it has one."""
    bits: int = 0
    """Size of each value; 0 if the parameter decides."""
    block: int = 0
    """Number of consecutive values that share one scale; 0 if none do."""
    error: float
    """Bound on the error of one value, as a share of the value or, in a block, of its largest value."""
    auto: tuple[str, ...] = ()
    """Its variants that `auto` may choose, from the most exact to the smallest."""
    is_for_averaging: bool = False
    """True if it is allowed for averaged gradients only."""
    decay: float = 1.0
    """Share of what averaging has left out so far that is added at the next step."""
    remark: str
    """Text for the table of codecs in docs/organiser.md."""

    @property
    def name(self) -> str:
        return self.example.partition(":")[0]


CODECS = (
    CodecSpec(example="none", bits=32, error=0.0, auto=("none",), remark="nothing is lost"),
    CodecSpec(example="bfloat16", bits=16, error=0.004, auto=("bfloat16",), remark="keeps the range of float32"),
    CodecSpec(example="float16", bits=16, error=0.0005, remark="values beyond 65504 become 65504"),
    CodecSpec(
        example="int8", bits=8, block=256, error=0.004, auto=("int8",), remark="0.7 % of normal values; SWARM found no cost in quality"
    ),
    CodecSpec(example="int6", bits=6, block=128, error=0.017, auto=("int6",), remark="2.7 % of normal values"),
    CodecSpec(example="int5", bits=5, block=128, error=0.034, auto=("int5",), remark="5.5 % of normal values"),
    CodecSpec(example="int4", bits=4, block=128, error=0.072, auto=("int4",), remark="12 % of normal values"),
    CodecSpec(
        example="topk:0.1",
        error=1.0,
        auto=("topk:0.08", "topk:0.06", "topk:0.05"),
        remark=f"sends the largest tenth of each {TOPK_CHUNK} values; for averaging, where the rest is made up for later",
    ),
    CodecSpec(
        example="powersgd:4",
        error=1.0,
        is_for_averaging=True,
        remark="size for a matrix of 1024 by 1024; sends its best approximation of rank 4 so far; the rest is made up for later",
    ),
    CodecSpec(
        example="sparse:64",
        error=1.0,
        is_for_averaging=True,
        decay=0.95,
        remark=f"for local steps; sends the 64 largest of each {TOPK_CHUNK} values in 2 bits each; most of the rest is made up for later",
    ),
)
"""Every codec, from the most exact to the smallest. wire/codecs.py implements them, averaging/lowrank.py implements PowerSGD."""
EXAMPLES = tuple(spec.example for spec in CODECS if not spec.is_for_averaging)
"""One codec of each name that is allowed for every kind of tensor."""
FOR_AVERAGING = tuple(spec.example for spec in CODECS if spec.is_for_averaging)
"""One codec of each name that is allowed for averaged gradients only."""
_SPECS = {spec.name: spec for spec in CODECS}
_TOPK = re.compile(r"topk:(0\.\d{1,6}|1)", re.ASCII)
_POWERSGD = re.compile(r"powersgd:([1-9]\d?)", re.ASCII)
_SPARSE = re.compile(r"sparse:([1-9]\d{0,3})", re.ASCII)
_AUTO = re.compile(r"auto(?::(.+))?", re.ASCII)
_PLAIN = tuple(spec.name for spec in CODECS if spec.bits)
KNOWN = ", ".join(f'"{name}"' for name in _PLAIN) + ' or "topk:RATIO" with a ratio such as 0.1'
KNOWN_WITH_AUTO = f'{KNOWN}, or "auto", or "auto:CODEC" with the smallest of them that may be used'


@dataclass(frozen=True, slots=True)
class Codec:
    """The encoding of a float32 tensor. `none` is raw bytes, of any element type."""

    name: str
    ratio: float = 1.0
    """Share of values that top-k and the sparse codec keep."""
    rank: int = 0
    """Rank of PowerSGD's factors, which replace matrices; values outside matrices are sent raw."""

    def __str__(self) -> str:
        if self.rank:
            return f"{self.name}:{self.rank}"
        if self.is_sparse:
            return f"{self.name}:{self.kept(TOPK_CHUNK)}"
        return f"topk:{self.ratio:.6f}".rstrip("0").rstrip(".") if self.name == "topk" else self.name

    @property
    def is_lossy(self) -> bool:
        return self.name != "none"

    @property
    def is_sparse(self) -> bool:
        """True for the codec of `wire/sparse.py`."""
        return self.name == "sparse"

    @property
    def spec(self) -> CodecSpec:
        return _SPECS[self.name]

    def kept(self, length: int) -> int:
        """Number of values that are kept of a chunk of `length`."""
        return max(1, math.ceil(self.ratio * length)) if length else 0

    def num_kept(self, length: int) -> int:
        """Number of values that are kept of `length`, which are split into chunks."""
        return length // TOPK_CHUNK * self.kept(TOPK_CHUNK) + self.kept(length % TOPK_CHUNK)

    def is_dense(self, length: int) -> bool:
        """True if all values are sent, because values with positions would be larger."""
        return self._bytes_of_kept(length) >= 4 * length

    def _bytes_of_kept(self, length: int) -> int:
        """Size of the values that top-k or the sparse codec keeps of `length`, with their positions."""
        kept = self.num_kept(length)
        if self.is_sparse:
            return LEVEL_BYTES * -(-length // TOPK_CHUNK) + bytes_of_signs(kept) + bytes_of_places(kept)
        return KEPT_BYTES * kept

    def num_bytes(self, length: int) -> int:
        """Size of `length` float32 values outside matrices."""
        spec = self.spec
        if spec.bits:
            return -(-spec.bits * length // 8) + (SCALE_BYTES * -(-length // spec.block) if spec.block else 0)
        if self.name == "topk" or self.is_sparse:
            return min(self._bytes_of_kept(length), 4 * length)
        return 4 * length


def bytes_of_signs(kept: int) -> int:
    """Size of the 2-bit values of the sparse codec."""
    return -(-kept // 4)


def bytes_of_places(kept: int) -> int:
    """Size of the 12-bit positions of the sparse codec."""
    return -(-3 * kept // 2)


NONE = Codec("none")


@functools.cache
def _known(text: str) -> Codec:
    match = _TOPK.fullmatch(text)
    if match is not None and float(match[1]) > 0:
        return Codec("topk", float(match[1]))
    if text in _PLAIN:
        return Codec(text)
    raise ValueError(f"{text[:20]!r} is not a codec; known are {KNOWN}")


def parse_codec(text: str) -> Codec:
    """Parse a codec's name. ValueError for an unknown one."""
    if len(text) > 16:
        raise ValueError(f"{text[:20]!r} is not a codec; known are {KNOWN}")
    return _known(text)


LADDER = tuple(parse_codec(name) for spec in CODECS for name in spec.auto)
"""The choices of `auto`. Each is smaller and less exact than the one before; for activations top-k loses far more than 4 bits do."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """The codecs that a run allows for one kind of tensor: one, or several with `auto`, from the most exact to the smallest."""

    codecs: tuple[Codec, ...]
    exact_before: int = 0
    """In steps before this one tensors pass exactly."""

    def at(self, step: int) -> tuple[Codec, ...]:
        """Those of a step, in this order."""
        return self.codecs if step >= self.exact_before else (NONE,)

    def __str__(self) -> str:
        return f"auto:{self.codecs[-1]}" if self.is_auto else str(self.codecs[0])

    @property
    def most_exact(self) -> Codec:
        return self.codecs[0]

    @property
    def is_auto(self) -> bool:
        return len(self.codecs) > 1

    @property
    def is_lossy(self) -> bool:
        return self.codecs[-1].is_lossy

    def permits(self, codec: Codec) -> bool:
        return codec in self.codecs


def parse_allowed(text: str) -> Allowed:
    """Parse a codec's name or `auto`. ValueError for anything else."""
    match = _AUTO.fullmatch(text)
    if match is None:
        try:
            return Allowed((parse_codec(text),))
        except ValueError:
            raise ValueError(f"{text[:20]!r} is not a codec; known are {KNOWN_WITH_AUTO}") from None
    smallest = LADDER[-1] if match[1] is None else parse_codec(match[1])
    if smallest not in LADDER[1:] and (smallest.name != "topk" or smallest.num_bytes(TOPK_CHUNK) >= Codec("int8").num_bytes(TOPK_CHUNK)):
        known = ", ".join(str(codec) for codec in LADDER[1:] if codec.name != "topk")
        raise ValueError(f"{text[:20]!r}: auto may go down to {known}, or topk:RATIO with a ratio of at most 0.16")
    above = [codec for codec in LADDER if codec.num_bytes(TOPK_CHUNK) > smallest.num_bytes(TOPK_CHUNK)]
    return Allowed((*above, smallest))


def parse_averaged(text: str) -> Allowed:
    """Parse the codec of averaged gradients. It may be one that is for averaging only, too. ValueError for anything else."""
    match = _POWERSGD.fullmatch(text)
    if match is not None and int(match[1]) <= MOST_RANK:
        return Allowed((Codec("powersgd", rank=int(match[1])),))
    match = _SPARSE.fullmatch(text)
    if match is not None and int(match[1]) <= MOST_SPARSE:
        return Allowed((Codec("sparse", ratio=int(match[1]) / TOPK_CHUNK),))
    try:
        return parse_allowed(text)
    except ValueError as error:
        others = f'"powersgd:RANK" with a rank of 1 to {MOST_RANK}, or "sparse:NUMBER" with 1 to {MOST_SPARSE} values of each {TOPK_CHUNK}'
        raise ValueError(f"{error}; for averaging also {others}") from None


def averaged_codecs(text: str, local_after: int) -> Allowed:
    """The same for each step of a run whose steps are local from `local_after` on: a sparse codec leaves out too much of gradients."""
    allowed = parse_averaged(text)
    return replace(allowed, exact_before=local_after) if allowed.most_exact.is_sparse else allowed


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a parameter as a matrix, as close to square as its dimensions allow. A vector has one column."""
    cuts = range(1, max(2, len(shape)))
    return min(((math.prod(shape[:cut]), math.prod(shape[cut:])) for cut in cuts), key=sum)
