"""Devices as peers name them."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.table.record import PeerRecord


def kinds_of(members: Sequence[PeerRecord]) -> list[str]:
    """The kinds of device on which these peers compute, sorted. Two kinds round differently. A device without a name is unknown."""
    return sorted({member.device for member in members if member.device})
