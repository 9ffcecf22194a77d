"""The losses of steps, as the peers of the last stage tell them: what most of them tell is shown, so one liar decides none. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median_low

from peerd.table.record import PeerId
from peerd.table.view import LiveView


def told_losses(live: LiveView, num_stages: int) -> dict[int, dict[PeerId, float]]:
    """By step, what each peer of the last stage tells of its loss: each tells that of the last step that it has ended."""
    told: dict[int, dict[PeerId, float]] = {}
    for record in live.serving(num_stages - 1):
        if record.last_loss is not None:
            told.setdefault(record.step - 1, {})[record.peer] = record.last_loss
    return told


def loss_of(told: Mapping[PeerId, float], num_serving: int) -> float | None:
    """The loss of a step, once more than half of the `num_serving` peers of the last stage have told one: the median. None: not yet."""
    return median_low(told.values()) if 2 * len(told) > num_serving else None


def newest_loss(live: LiveView, num_stages: int) -> float | None:
    """The loss of the newest step that more than half of the last stage have ended, by the median of those that tell it; None: unknown."""
    told = told_losses(live, num_stages)
    counts = Counter({step: len(each) for step, each in told.items()})
    ended = [step for step in counts if 2 * sum(n for later, n in counts.items() if later >= step) > counts.total()]
    return median_low(told[max(ended)].values()) if ended else None
