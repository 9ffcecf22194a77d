"""This peer's own row in the table: the step state of the stage that it serves, and measured values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import structlog

from peerd import __version__
from peerd.daemon.auditing import left_out
from peerd.daemon.device import describe
from peerd.policy.step.coins import heads_of
from peerd.policy.swarm.rates import carried
from peerd.swarm.clock import clock_s
from peerd.swarm.own_row import OwnRow
from peerd.table.record import MAX_BACKLOG, MAX_DRIFT, MAX_STAY_HOURS, MAX_THROUGHPUT, PeerRecord, Vitals, believable_loss

if TYPE_CHECKING:
    from peerd.daemon.seat import Seat

LOG = structlog.get_logger()


class Row(OwnRow):
    """The row that `Membership` publishes; there is none before a stage is served."""

    def __init__(self, stays_s: float = 0.0, nickname: str = "", team: str = "", unlisted: bool = False) -> None:
        """`stays_s`: how long this peer means to stay from now on; 0: not said. The names are checked ones."""
        self._names, self._unlisted = (nickname, team), unlisted
        self._seat: Seat | None = None
        self._stays_until_s = clock_s() + stays_s

    def show(self, seat: Seat) -> None:
        """Publish the state of this seat from now on."""
        self._seat = seat

    def record(self) -> PeerRecord | None:
        return self._seat.state.record if self._seat is not None else None

    @property
    def stays_hours(self) -> int:
        return min(max(0, math.ceil((self._stays_until_s - clock_s()) / 3600)), MAX_STAY_HOURS)

    def vitals(self) -> Vitals:
        seat = self._seat
        if seat is None:
            return Vitals()
        peer, counters, history, trainer = seat.peer, seat.service.counters, seat.state.history, seat.trainer
        line = peer.network.links.traffic.line
        up, down = line.claims(peer.governor.limits)
        throughput, computes = min(seat.throughput, MAX_THROUGHPUT), 0.0
        if line.is_sound and seat.demands:
            computes, throughput = throughput, min(throughput, carried(up, down, seat.demands[seat.stage]))
        return Vitals(
            addresses=peer.reachability.addresses,
            reach=peer.reachability.reach,
            relays=not peer.network.relay.off,
            leaving=seat.leaving,
            paused=seat.leaving and (peer.is_pausing or peer.is_resting),
            trains=trainer is not None and not seat.trained_enough,
            trains_from=seat.training.trains_from,
            queue=seat.service.queue,
            in_flight=trainer.in_flight if trainer else 0,
            throughput=throughput,
            computes=computes,
            backlog=min(round(seat.backlog.mean, 2), MAX_BACKLOG),
            stays_hours=self.stays_hours,
            drift=min(seat.state.holdings.drift or 0.0, MAX_DRIFT),
            nickname=self._names[0],
            team=self._names[1],
            unlisted=self._unlisted,
            tokens=counters.tokens,
            last_loss=believable_loss(history[-1].loss) if history else None,
            evaluation=seat.training.evaluation,
            evaluated=seat.training.evaluated,
            software=__version__,
            device=describe(peer.governor.device),
            memory_bytes=seat.room.device,
            kept_averages=seat.rounds.kept.num_kept,
            diverged_at=trainer.diverged_at if trainer else None,
            sidelined=left_out(seat),
            unaveraged=seat.unaveraged,
            up=up,
            down=down,
            coins=heads_of(peer.coins_seed, seat.state.record.step) if peer.coins_seed else b"",
            coordinate=peer.gossip.position.coordinate,
        )

    def fenced(self, reason: str) -> None:
        seat = self._seat
        if seat is not None:
            LOG.warning("fenced: ledger dropped, view cleared", reason=reason)
            seen = max(seat.state.record.incarnation, seat.peer.membership.word.highest_seen)
            seat.stepper.fence(seat.peer.local.raise_incarnation(seen))
