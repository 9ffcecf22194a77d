"""What the leader of a round proposes: who reduces how much, in which codecs, and how finely the slices are cut.

Where the run says `auto`, each member gets the most exact codec with which the round takes a small share of a step: a stage does nothing
else while it averages, and once a round takes a tenth of a step, stronger compression gains nothing. The first round is judged like any
other: its time follows from sizes and rates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from peerd.averaging.compression import Compression
from peerd.averaging.layout import RoundLayout, shares_of
from peerd.config.codec import Allowed
from peerd.link.links import HOME_BYTES_PER_S
from peerd.policy.round.chunks import num_chunks
from peerd.policy.round.leads import KnownLine, SentRate, believed_ups, is_as_expected, line_after
from peerd.policy.round.proposing import assumed_s, filled, fit, usual_s
from peerd.policy.round.slices import exchange_s, rates_matter, shares_by_rate, shares_of_neighbours
from peerd.policy.step.groups import section_bounds
from peerd.policy.step.roster import MOST_CHUNKS, MOST_EXPECTED_S, WHOLE, Roster
from peerd.table.record import PeerId

AVERAGING_SHARE = 0.1
"""Time for a round, as a share of the rest of the step."""
NEAR_BYTES_PER_S = 1e9
"""Between peers on one machine there is no line: a round shows how busy its processors are, and each chunk keeps them busier."""
Rates = Callable[[PeerId], tuple[float | None, float | None]]
"""Returns bytes per second up and down of a peer; None where nothing is known."""


class Proposing:
    """What this peer has learned of the rounds of its stage. Any member may lead next."""

    def __init__(
        self,
        allowed: Allowed,
        averaging_s: float,
        rates: Rates,
        now_s: float,
        is_lossy: Callable[[PeerId], bool] = lambda _peer: False,
        is_near: Callable[[PeerId], bool] = lambda _peer: False,
    ) -> None:
        """`is_lossy`: whether packets to a peer are lost. `is_near`: whether it is on this machine, so that no line leads to it."""
        self._allowed = allowed
        self._averaging_s = averaging_s
        self._rates = rates
        self._is_lossy = is_lossy
        self._is_near = is_near
        self._known: dict[PeerId, KnownLine] = {}
        """What rounds have shown of each peer's uplink."""
        self._begun_s = now_s
        """When the present step began here."""

    def exchanged(self, sent: Mapping[PeerId, SentRate], took_s: float, expected_s: float) -> None:
        """Note what a round that is done has shown of its members' lines; `sent` is empty where this peer was no judge of it."""
        is_as_planned = is_as_expected(took_s, expected_s, self._averaging_s)
        if not is_as_planned:
            self._known.clear()
        for peer, each in sent.items():
            self._known[peer] = line_after(self._known.get(peer), each, self._rates(peer)[0], is_as_planned)

    def applied(self, now_s: float) -> None:
        """Note that an average was applied: a step begins."""
        self._begun_s = now_s

    def planned(self, roster: Roster, compression: Compression, length: int, now_s: float, room: int = 0) -> Roster:
        """Return the roster as it is proposed. `length`: elements of a member's part, the last `room` of them for parameters."""
        if len(roster.entries) == 1:
            return roster
        up, down = self._believed(roster.peers)
        codecs = self._allowed.at(roster.step)
        start, end = section_bounds(length - room, roster.section, roster.num_sections, room if roster.averages_parameters else 0)
        sizes = [compression.num_bytes(compression.piece(length, start, end, codec)) for codec in codecs]
        within_s = AVERAGING_SHARE * max(now_s - self._begun_s, 0.0) if self._allowed.is_auto else math.inf
        fitted = fit(up, down, sizes, within_s)
        chosen = [codec if codec >= 0 else len(codecs) - 1 for codec in fitted.codecs]
        paces = [min(up[k], down[k]) / sizes[codec] for k, codec in enumerate(chosen)]
        if self._are_neighbours(roster.peers):
            shares = shares_of(shares_of_neighbours(len(paces), max(sizes[codec] for codec in chosen), roster.step % len(paces)))
        else:
            shares = shares_of(shares_by_rate(paces)) if rates_matter(paces, self._averaging_s) else ()
        weights = [share / WHOLE for share in shares] or [1 / len(paces)] * len(paces)
        expected_s = min(exchange_s(1.0, paces, weights), MOST_EXPECTED_S)
        names = tuple(str(codecs[codec]) for codec in chosen) if self._allowed.is_auto else ()
        plan = replace(roster, codecs=names, shares=shares, expected_s=expected_s)
        layout = RoundLayout(plan, length, compression, [codecs[codec] for codec in chosen], room)
        lasts_s = min(expected_s, self.within_s(plan, sum(layout.slice_bytes)))  # judges end a longer one: no chunk is cut for it
        count = num_chunks(layout.slice_bytes, lasts_s, self._averaging_s, any(map(self._is_lossy, roster.peers)))
        return replace(plan, num_chunks=min(count, MOST_CHUNKS))

    def within_s(self, roster: Roster, num_bytes: int) -> float:
        """How long a round may take at the rates that its judges assume; `num_bytes`: what a member's part takes.

        Every judge says so by what it knows of the lines: the leader may lie, and so may a member that says that its line is slow.
        """
        rates = [min(pair) for pair in zip(*self._believed(roster.peers), strict=True)]
        return assumed_s(roster.expected_s, usual_s(num_bytes, rates, HOME_BYTES_PER_S), self._averaging_s)

    def _are_neighbours(self, peers: Sequence[PeerId]) -> bool:
        """Whether no line lies between any two of them."""
        return all(map(self._is_near, peers))

    def _believed(self, peers: Sequence[PeerId]) -> tuple[list[float], list[float]]:
        """Bytes per second up and down of each member; one of which nothing is known is as fast as the others in the middle.

        What rounds have shown here counts before what records say, for both directions: a peer measures no more of its line than it had to
        send, and no more than others sent to it.
        """
        if self._are_neighbours(peers):
            return [NEAR_BYTES_PER_S] * len(peers), [NEAR_BYTES_PER_S] * len(peers)
        told = [self._rates(peer) for peer in peers]
        ups = filled(believed_ups([up for up, _ in told], [self._known.get(peer) for peer in peers]), HOME_BYTES_PER_S)
        downs = [math.inf if down is None or peer in self._known else down for peer, (_, down) in zip(peers, told, strict=True)]
        return [max(up, 1.0) for up in ups], [max(down, 1.0) for down in downs]
