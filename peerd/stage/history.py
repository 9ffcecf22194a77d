"""The losses of a run's finished steps, as they are kept in memory and in files: as JSON beside a state's tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

PIECE = 1000
"""The number of entries that are encoded at once, which takes about a millisecond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One finished step: a line of history.jsonl."""

    step: int
    """Counted from 0; `loss` was computed with the parameters before this step's update."""
    loss: float
    """The mean over the step's microbatches, in nats per token. Those that overflow float16 are left out; the last known loss if all do."""
    tokens: int
    """The number of tokens that the step trained on."""


def entry_after(history: Sequence[HistoryEntry], step: int, loss: float, tokens: int) -> HistoryEntry:
    """The next line; `loss` is not finite where every microbatch of the step overflowed."""
    last = history[-1].loss if history else 0.0
    return HistoryEntry(step=step, loss=loss if math.isfinite(loss) else last, tokens=tokens)


def history_json(history: Sequence[HistoryEntry]) -> str:
    """The history as JSON, encoded piece by piece: a long history in one call would block all other threads."""
    rows = [[entry.step, entry.loss, entry.tokens] for entry in history]
    pieces = (json.dumps(rows[start : start + PIECE])[1:-1] for start in range(0, len(rows), PIECE))
    return f"[{', '.join(pieces)}]"


def history_from(text: str) -> tuple[HistoryEntry, ...]:
    """The history from `history_json`. Raises one of many errors for text that another program wrote: the caller knows what that means."""
    return tuple(HistoryEntry(step=int(step), loss=float(loss), tokens=int(tokens)) for step, loss, tokens in json.loads(text))
