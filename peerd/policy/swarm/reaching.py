"""Whether others reach this peer, as those found who were asked to dial back, and what that makes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from peerd.policy.swarm.checkup import Dialled
from peerd.table.record import HIDDEN, PeerId, PeerRecord, Reach
from peerd.table.view import LiveView, SwarmView

_ORDER = (Reach.DIRECT, Reach.UNKNOWN, Reach.RELAYED, Reach.CLIENT)


def can_be_dialled(answers: Sequence[Dialled]) -> bool | None:
    """By most of those that could say; None where nobody could. One peer behind a strict firewall shall not count for all."""
    said = [answer.reached for answer in answers if answer.reached is not None]
    return None if not said else 2 * sum(said) > len(said)


def is_out_of_reach(mine: PeerRecord | None, other: PeerRecord) -> bool:
    """Whether there is no way from me to the other by design, so that its silence tells nothing."""
    return other.reach is Reach.CLIENT and mine is not None and mine.reach in HIDDEN


def whom_to_ask(live: LiveView, most: int) -> tuple[PeerId, ...]:
    """Peers to ask to dial back, best first: those that others can call; one behind a relay may have dialled me, and then tells as well."""
    able = [record for record in live.records if record.peer != live.me and not record.leaving]
    return tuple(record.peer for record in sorted(able, key=lambda record: (_ORDER.index(record.reach), record.peer))[:most])


def all_gone_silent(view: SwarmView, now_s: float, heard_after_s: float) -> tuple[PeerId, ...]:
    """Those heard last, if it was for everybody longer ago than a record lives: then it may be me whom nobody reaches.

    () where somebody was heard since, nobody after `heard_after_s`, or where but one fell silent, who may have died.
    """
    others = [seen for peer, seen in view.sightings.items() if peer != view.me and not seen.record.leaving]
    last_s = max((seen.risen_at_s for seen in others), default=heard_after_s)
    if last_s <= heard_after_s or any(seen.is_fresh(now_s, view.ttl_s) for seen in others):
        return ()
    together = [seen for seen in others if last_s - seen.risen_at_s < view.ttl_s * seen.record.periods]
    return tuple(sorted(seen.record.peer for seen in together)) if len(together) > 1 else ()
