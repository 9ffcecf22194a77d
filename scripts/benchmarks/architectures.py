"""Which language models of transformers can be trained in stages, and why can the others not?

Each architecture of the installed transformers, with its default config, is imported as by `peerd new --model hf:NAME`: a tiny copy is
trained in one piece and in three stages, and losses and all gradients must be equal bit for bit. Otherwise the model is refused with a
reason. Exits with 1 if an architecture fails in any other way, or if one that was named does not split.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import FrameType

import torch

from peerd.config.manifest import Manifest, TrainConfig
from peerd.equality import check_split
from peerd.errors import ExitCode, PeerdError
from peerd.models.hf.library import load_library
from peerd.models.hf.manifest_model import choose_model
from scripts.benchmarks._report import SCHEMA, progress, run

SPLITS, REFUSED, FAILED = "splits", "refused", "FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    outcome: str
    reason: str
    seconds: float


class TooLongError(BaseException):
    """An architecture took too long. It is not an Exception, because the code under test would catch that."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    def too_long(_number: int, _frame: FrameType | None) -> None:
        raise TooLongError(f"not done within {seconds} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def known_names() -> list[str]:
    """Every architecture that has a causal or a masked language model."""
    load_library()
    from transformers.models.auto import modeling_auto

    return sorted({*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES})


def tried(name: str, most_seconds: int) -> Line:
    began_s, outcome, reason = time.monotonic(), SPLITS, ""
    try:
        with at_most(most_seconds):
            model = choose_model(name, {}, {})
            check_split(Manifest(model=model, train=TrainConfig(num_stages=1)))
    except PeerdError as error:
        outcome, reason = REFUSED, error.message
    except (Exception, TooLongError) as error:  # any failure of the library's models is a result
        outcome, reason = FAILED, f"{type(error).__name__}: {error}"
    return Line(name=name, outcome=outcome, reason=" ".join(reason.split())[:200], seconds=round(time.monotonic() - began_s, 1))


def report(lines: Sequence[Line]) -> None:
    width = max(len(line.name) for line in lines)
    for line in sorted(lines, key=lambda each: each.outcome != SPLITS):
        print(f"{line.name:<{width}}  {line.outcome:<7}  {line.seconds:>5.1f} s  {line.reason}".rstrip())
    counts = ", ".join(f"{sum(line.outcome == outcome for line in lines)} {outcome}" for outcome in (SPLITS, REFUSED, FAILED))
    print(f"{len(lines)} architectures: {counts}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench architectures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as llama (default: all that the installed transformers has)")
    parser.add_argument("--most-seconds", type=int, default=120, metavar="N", help="for each (default 120)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    given = parser.parse_args()
    if given.most_seconds < 1:
        parser.error("--most-seconds must be at least 1")
    torch.set_num_threads(1)
    lines: list[Line] = []
    for name in given.names or known_names():
        lines.append(tried(name, given.most_seconds))
        progress(f"{name}: {lines[-1].outcome} {lines[-1].reason}".rstrip())
    if given.json:
        print(json.dumps({"schema": SCHEMA, "rows": [asdict(line) for line in lines]}))
    else:
        report(lines)
    wrong = [line for line in lines if line.outcome == FAILED or (given.names and line.outcome != SPLITS)]
    return ExitCode.FAILURE if wrong else ExitCode.OK


if __name__ == "__main__":
    sys.exit(run(main))
