"""Whether others can reach this peer, by the answers of peers that dialled back, and what follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peerd.policy.hashing import digest
from peerd.policy.swarm.checkup import Dialled
from peerd.table.circuit import host_in
from peerd.table.record import HIDDEN, PeerId, PeerRecord, Phase, Reach
from peerd.table.swarm_view import SwarmView
from peerd.table.view import LiveView

_ORDER = (Reach.DIRECT, Reach.UNKNOWN, Reach.RELAYED, Reach.CLIENT)
WITNESSES = 3
"""So many peers are asked whether they reach one that does not answer this peer."""


def can_be_dialled(answers: Sequence[Dialled]) -> bool | None:
    """The majority of the peers that could tell; None if none could. One peer behind a strict firewall does not decide."""
    said = [answer.reached for answer in answers if answer.reached is not None]
    return None if not said else 2 * sum(said) > len(said)


def is_out_of_reach(mine: PeerRecord | None, other: PeerRecord) -> bool:
    """True if this peer cannot reach the other by design, so that its silence tells nothing."""
    return other.reach is Reach.CLIENT and mine is not None and mine.reach in HIDDEN


def cut_off(live: LiveView) -> frozenset[PeerId]:
    """Live peers that this peer cannot call, or that cannot call it: it hears of them from others (hole 22)."""
    mine = live.mine
    unreached = mine.unreached if mine is not None else ()
    return frozenset(record.peer for record in live.records if record.peer in unreached or live.me in record.unreached)


def is_in_round_with(mine: PeerRecord | None, other: PeerRecord) -> bool:
    """T5 (suspicion): True while this peer is in a round, and the other one accumulates or averages the same step in the same stage."""
    place = (other.stage, other.step)
    return mine is not None and mine.phase is Phase.AVERAGING and (mine.stage, mine.step) == place and other.phase is not Phase.JOINING


def witnesses(live: LiveView, accused: PeerRecord) -> tuple[PeerId, ...]:
    """T5 (suspicion): the peers to ask whether they reach one that this peer does not reach. Its mates are the likeliest to know."""
    no_use = {live.me, accused.peer, *cut_off(live)}
    able = [record for record in live.records if record.peer not in no_use and not record.leaving]
    turns = {record.peer: digest("witness", live.me, accused.peer, record.peer, size=8) for record in able}
    return tuple(r.peer for r in sorted(able, key=lambda r: (r.stage != accused.stage, turns[r.peer]))[:WITNESSES])


def is_reached(num_asked: int, words: Sequence[bool]) -> bool | None:
    """Whether a peer lives, as more than half of its witnesses say; None while what `words` lacks decides it."""
    if 2 * sum(words) > num_asked:
        return True
    return None if 2 * (num_asked - words.count(False)) > num_asked else False


def hosts_among(addresses: Sequence[str]) -> frozenset[str]:
    """The IPv4 hosts at which a peer can be dialled without a relay."""
    return frozenset(filter(None, map(host_in, addresses)))


def has_moved(before: Sequence[str], now: Sequence[str]) -> bool:
    """True if a peer has lost a host and has another one: connections to the lost one are dead. A port that a router forwards, or stops to,
    only adds a host or takes one away, and so does a relay.
    """
    if before == now:
        return False
    old, new = hosts_among(before), hosts_among(now)
    return bool(old - new and new - old)


def whom_to_ask(live: LiveView, most: int) -> tuple[PeerId, ...]:
    """Peers to ask to dial back, best first: those that others can dial come before those behind a relay. Each asks in its own order."""
    able = [record for record in live.records if record.peer != live.me and not record.leaving]
    turns = {record.peer: digest("dial back", live.me, record.peer, size=8) for record in able}
    return tuple(record.peer for record in sorted(able, key=lambda record: (_ORDER.index(record.reach), turns[record.peer]))[:most])


def missed_since(before: Mapping[PeerId, float], view: SwarmView, live: LiveView, now_s: float) -> dict[PeerId, float]:
    """Since when each known peer has been missing from the live ones, as this peer saw it in its looks.

    When a record rose does not tell: after a fence no record counts until it rises again, and all are there a moment later.
    """
    return {peer: before.get(peer, now_s) for peer in view.sightings if peer != view.me and live.find(peer) is None}


def all_gone_silent(view: SwarmView, now_s: float, heard_after_s: float) -> tuple[PeerId, ...]:
    """The peers heard last, if every peer has expired: then this peer may be the one cut off.

    Empty if some peer is still fresh, if none was heard after `heard_after_s`, or if only one fell silent: it may have died.
    """
    others = [seen for peer, seen in view.sightings.items() if peer != view.me and not seen.record.leaving]
    last_s = max((seen.risen_at_s for seen in others), default=heard_after_s)
    if last_s <= heard_after_s or any(seen.is_fresh(now_s, view.ttl_s) for seen in others):
        return ()
    together = [seen for seen in others if last_s - seen.risen_at_s < view.ttl_s * seen.record.periods]
    return tuple(sorted(seen.record.peer for seen in together)) if len(together) > 1 else ()
