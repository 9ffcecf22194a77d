"""The events between two states of the swarm. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from peerd.observe.entries import Event


@dataclass(frozen=True, slots=True)
class PeerState:
    """The state of a peer in the table."""

    stage: int
    leaving: bool = False
    paused: bool = False
    """It leaves because it is paused."""
    suspect: bool = False
    unaveraged: str = ""
    """That its gradients are in no average, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmState:
    """The state of the swarm at one time. A leaving peer that no longer answers is absent: it has left, or rests while it is paused."""

    time_s: float
    peers: Mapping[str, PeerState] = field(default_factory=dict)
    partly_known: frozenset[int] = frozenset()
    """Stages of a large swarm whose known peers are a changing sample, so that a new one has not necessarily joined."""
    health: Mapping[str, str] = field(default_factory=dict)
    """Title by code."""
    moves: frozenset[tuple[str, int, str]] = frozenset()
    """Peer, target stage and reason of each move in the last rebalancing plan."""
    banned: Mapping[str, str] = field(default_factory=dict)
    """Peers that the organiser has banned, with the reasons."""
    resumed_at: int | None = None
    """The step of the checkpoint that this daemon resumed from."""


def changes(before: SwarmState, after: SwarmState) -> list[Event]:
    """Events about peers, then decisions, then health, each in a fixed order."""
    return [*_of_peers(before, after), *_of_bans(before, after), *_of_decisions(before, after), *_of_health(before, after)]


def _of_peers(before: SwarmState, after: SwarmState) -> Iterator[Event]:
    for peer in sorted(before.peers.keys() | after.peers.keys()):
        old, new = before.peers.get(peer), after.peers.get(peer)
        if old == new or {each.stage for each in (old, new) if each is not None} <= before.partly_known | after.partly_known:
            continue
        if new is not None:
            if old is None:
                yield Event(time_s=after.time_s, kind="joined", peer=peer, stage=new.stage)
            yield from _of_one(peer, old or PeerState(new.stage), new, after.time_s)
        elif old is not None and peer not in after.banned and not (old.leaving and old.paused):  # that it pauses was told
            yield Event(time_s=after.time_s, kind="left" if old.leaving else "gone", peer=peer, stage=old.stage)


def _of_one(peer: str, old: PeerState, new: PeerState, time_s: float) -> Iterator[Event]:
    if old.stage != new.stage:
        yield Event(time_s=time_s, kind="moved", peer=peer, stage=new.stage, text=f"from stage {old.stage}")
    if old.suspect != new.suspect:
        yield Event(time_s=time_s, kind="suspect" if new.suspect else "back", peer=peer, stage=new.stage)
    if bool(new.unaveraged) != bool(old.unaveraged):
        yield Event(time_s=time_s, kind="unaveraged" if new.unaveraged else "averaged", peer=peer, stage=new.stage, text=new.unaveraged)
    if new.leaving and (old.leaving, old.paused) != (True, new.paused):
        yield Event(time_s=time_s, kind="paused" if new.paused else "leaving", peer=peer, stage=new.stage)


def _of_bans(before: SwarmState, after: SwarmState) -> Iterator[Event]:
    """A ban of a peer that was there says its stage, and stands for the event that it is gone."""
    for peer in sorted(before.banned.keys() | after.banned.keys()):
        if peer not in before.banned:
            was = before.peers.get(peer)
            yield Event(time_s=after.time_s, kind="banned", peer=peer, stage=was.stage if was else None, text=after.banned[peer])
        elif peer not in after.banned:
            yield Event(time_s=after.time_s, kind="lifted", peer=peer)


def _of_decisions(before: SwarmState, after: SwarmState) -> Iterator[Event]:
    for peer, stage, reason in sorted(after.moves - before.moves):
        yield Event(time_s=after.time_s, kind="rebalancing", peer=peer, stage=stage, text=reason)
    if after.resumed_at is not None and after.resumed_at != before.resumed_at:
        yield Event(time_s=after.time_s, kind="resumed", text=f"from the checkpoint of step {after.resumed_at}")


def _of_health(before: SwarmState, after: SwarmState) -> Iterator[Event]:
    for code in sorted(before.health.keys() | after.health.keys()):
        if code not in before.health:
            yield Event(time_s=after.time_s, kind="raised", text=f"{code}: {after.health[code]}")
        elif code not in after.health:
            yield Event(time_s=after.time_s, kind="cleared", text=f"{code}: {before.health[code]}")
