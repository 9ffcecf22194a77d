"""With the parameters of which step a text goes on, and over which peers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peerd.table.record import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOffer:
    """What one peer says when it is asked whether it goes on with texts."""

    peer: PeerId
    steps: frozenset[int]
    """The steps whose parameters it holds; empty: it goes on with no text."""
    wait_s: float = 0.0
    """Seconds until it may compute a pass."""
    round_trip_s: float = 0.0
    is_off: bool = False
    """Its owner lets nobody ask the model there."""


@dataclass(frozen=True, slots=True)
class TextPath:
    step: int
    peers: tuple[PeerId, ...]
    """By stage."""


def choose_path(offers: Sequence[Sequence[TextOffer]], lasts: Callable[[int], bool], present: int | None = None) -> TextPath | None:
    """The path of a text that is at step `present`; None if there is none now.

    `offers` are those of each stage's peers. `lasts` tells whether peers keep the parameters of a step while they train on. A text stays
    at its step as long as each stage holds that. Otherwise it takes the newest step that lasts, and without one the newest of all.
    """
    held = [frozenset[int]().union(*(offer.steps for offer in stage)) for stage in offers]
    common = frozenset.intersection(*held) if held else frozenset[int]()
    if not common:
        return None
    step = present if present in common else max(common, key=lambda each: (lasts(each), each))
    return TextPath(step, tuple(_soonest(stage, step) for stage in offers))


def _soonest(offers: Sequence[TextOffer], step: int) -> PeerId:
    holders = [offer for offer in offers if step in offer.steps]
    return min(holders, key=lambda offer: (offer.wait_s + offer.round_trip_s, offer.peer)).peer
