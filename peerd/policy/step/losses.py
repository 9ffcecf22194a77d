"""The losses of steps, as the peers of the last stage tell them: what most of them tell is shown, so one liar decides none. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from peerd.policy.step.ledger import FEWEST
from peerd.table.record import PeerId
from peerd.table.view import LiveView

SAME = 1e-4
"""How far two honest losses of one step may be apart, as a share: averages of unlike rosters differ by rounding."""


def told_losses(live: LiveView, num_stages: int) -> dict[int, dict[PeerId, float]]:
    """By step, what each peer of the last stage tells of its loss: each tells that of the last step that it has ended."""
    told: dict[int, dict[PeerId, float]] = {}
    for record in live.serving(num_stages - 1):
        if record.last_loss is not None:
            told.setdefault(record.step - 1, {})[record.peer] = record.last_loss
    return told


def loss_of(told: Mapping[PeerId, float], num_serving: int) -> float | None:
    """The loss of a step, once more than half of the `num_serving` peers of the last stage have told the same; None: not yet.

    Of two peers nobody can say which one is wrong: the smaller one is shown.
    """
    losses = sorted(told.values())
    if num_serving < FEWEST:
        return median_low(losses) if 2 * len(losses) > num_serving else None
    for loss in losses:
        alike = [other for other in losses if abs(other - loss) <= SAME * abs(loss)]
        if 2 * len(alike) > num_serving:
            return median_low(alike)
    return None


def newest_loss(live: LiveView, num_stages: int) -> float | None:
    """The loss of the newest step that more than half of the last stage tell alike. Where they are at several steps, the median of all
    that they tell, which lies between losses of honest ones. None: unknown."""
    told = told_losses(live, num_stages)
    losses = [loss for each in told.values() for loss in each.values()]
    agreed = (loss_of(told[step], max(FEWEST, len(losses))) for step in sorted(told, reverse=True))
    found = next((loss for loss in agreed if loss is not None), None)
    return found if found is not None or not losses else median_low(losses)
