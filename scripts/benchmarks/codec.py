"""Codecs: how fast one thread encodes and decodes activations, into how many bytes, and with what error.

MB/s count the plain tensor's bytes; `none` is the copy that sending needs anyway. A codec pays on a link if plain bytes / MB/s of both
ends is less than the time that it saves there. Sides take turns in each round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from peerd.config.codec import EXAMPLES, Codec, parse_codec
from peerd.wire.tensors import decode, encode
from scripts.benchmarks._report import SCHEMA

NAMES = (*EXAMPLES, "topk:0.01")


@dataclass(slots=True)
class Side:
    codec: Codec
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    num_bytes: int = 0
    error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One codec's figures."""

    codec: str
    encode_mb_per_s: float
    decode_mb_per_s: float
    bytes_ratio: float
    """Plain bytes divided by encoded bytes."""
    relative_error: float
    encode_time_to_none: float
    decode_time_to_none: float


def timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def measure(side: Side, tensor: Tensor, device: torch.device) -> None:
    sent = encode(tensor, side.codec)

    def back() -> Tensor:
        found = decode(sent, device)
        return found[..., -1].cpu()  # waits for a GPU

    side.encode_s.append(timed(lambda: encode(tensor, side.codec)))
    side.decode_s.append(timed(back))
    side.num_bytes = sent.num_bytes
    side.error = float((decode(sent, device) - tensor).norm() / tensor.norm())


def lines_of(sides: list[Side], tensor: Tensor) -> list[Line]:
    plain = statistics.median(sides[0].encode_s), statistics.median(sides[0].decode_s)
    return [
        Line(
            codec=str(side.codec),
            encode_mb_per_s=1e-6 * tensor.nbytes / statistics.median(side.encode_s),
            decode_mb_per_s=1e-6 * tensor.nbytes / statistics.median(side.decode_s),
            bytes_ratio=tensor.nbytes / side.num_bytes,
            relative_error=side.error,
            encode_time_to_none=statistics.median(side.encode_s) / plain[0],
            decode_time_to_none=statistics.median(side.decode_s) / plain[1],
        )
        for side in sides
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench codec", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="rounds, in each of which all codecs run (default 15)")
    parser.add_argument("--device", default="cpu", help="where the tensor lies (default cpu)")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds must be at least 1")
    torch.set_num_threads(1)
    device = torch.device(given.device)
    tensor = torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(0)).to(device)
    sides = [Side(parse_codec(name)) for name in NAMES]
    for number in range(given.rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            measure(side, tensor, device)
    lines = lines_of(sides, tensor)
    if given.json:
        print(json.dumps({"schema": SCHEMA, "device": given.device, "rows": [asdict(line) for line in lines]}))
        return 0
    print(f"[1, 512, 4096] float32 on {given.device}, one thread, median of {given.rounds} rounds")
    print(f"{'codec':<10} {'encode MB/s':>12} {'decode MB/s':>12} {'bytes':>8} {'error':>9}  time to none, encode / decode")
    for line in lines:
        print(
            f"{line.codec:<10} {line.encode_mb_per_s:>12,.0f} {line.decode_mb_per_s:>12,.0f} {'1/' + format(line.bytes_ratio, '.1f'):>8}"
            f" {line.relative_error:>9.1e}  {line.encode_time_to_none:.1f}x / {line.decode_time_to_none:.1f}x"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
