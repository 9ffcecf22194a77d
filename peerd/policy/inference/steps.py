"""With the parameters of which step the swarm answers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def answering_step(offers: Sequence[Collection[Collection[int]]]) -> int | None:
    """The newest step that a text can pass all stages with; None if there is none.

    `offers`: for each stage, for each of its peers that answers at all, the steps whose parameters it holds.
    """
    common: set[int] | None = None
    for stage in offers:
        held = {step for peer in stage for step in peer}
        common = held if common is None else common & held
    return max(common, default=None) if common else None
