"""Finds out how others reach this peer: directly, at a port that the router forwards, through relays, or not at all. Repeats this.

Other peers find out whether it can be dialled (dial-back). While it cannot, it holds reservations at relays that volunteer, and its record
shows their addresses followed by its own id. A router may take any time to forward the port.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

import structlog

from peerd.daemon.network import Network
from peerd.errors import PeerdError
from peerd.link.circuits import Reservation
from peerd.policy.swarm.reaching import can_be_dialled, whom_to_ask
from peerd.policy.swarm.relaying import NUM_RELAYS, relays_to_ask
from peerd.swarm.membership import Membership
from peerd.table.circuit import direct
from peerd.table.record import HIDDEN, PeerId, PeerRecord, Reach, RunId
from peerd.wire.dial_back import MAX_DIALLERS, dial_backs

LOOK_PERIOD_S = 2.0
ASK_AGAIN_S, RECHECK_S = 20.0, 300.0
"""Periods of asking: while no peer could tell, and afterwards."""
DIALLED_WITHIN_S = 8.0
REFUSED_S = 30.0
"""Time for which a relay that refused or was lost is not asked again."""
LOG = structlog.get_logger()


class Herald(Protocol):
    """Tells others how this peer is reached."""

    def announce(self) -> None:
        """The addresses or the kind of reach changed."""

    async def hide(self, hidden: bool) -> None:
        """This peer can no longer be dialled (`hidden`), or can be dialled again."""


class Reachability:
    """Runs while this peer is in the swarm."""

    def __init__(self, network: Network, membership: Membership, run: RunId, herald: Herald) -> None:
        self._network = network
        self._membership = membership
        self._run = run
        self._dialled: bool | None = None
        self._ask_at_s = 0.0
        self._held: dict[PeerId, Reservation] = {}
        self._refused_until_s: dict[PeerId, float] = {}
        self._refusal = ""
        self._again = asyncio.Event()
        self._found = ""
        """The result of the last dial-back, in words."""
        self._told = network.addresses
        self._is_local = network.config.host.startswith("127.")
        self.reach, self.reason = Reach.UNKNOWN, "nobody was there yet to dial back"
        if self._is_local:
            self.reach, self.reason = Reach.DIRECT, "it listens for peers of this machine only"
        self._herald = herald

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses for the record. A peer that cannot be dialled shows only those through relays."""
        if self._dialled or not self._held:
            return self._network.addresses
        return tuple(each.address for each in self._held.values())

    @property
    def relays(self) -> tuple[PeerId, ...]:
        """The relays at which it holds reservations."""
        return tuple(self._held)

    def look_again(self) -> None:
        """Check again, because the addresses may have changed."""
        self._ask_at_s = 0.0
        self._again.set()

    async def run(self) -> None:
        if self._is_local:
            return
        async with asyncio.TaskGroup() as group:
            while True:
                await self._look(group)
                try:
                    async with asyncio.timeout(LOOK_PERIOD_S):
                        await self._again.wait()
                except TimeoutError:
                    continue
                finally:
                    self._again.clear()

    async def _look(self, group: asyncio.TaskGroup) -> None:
        await self._seek(group)
        if time.monotonic() >= self._ask_at_s:
            await self._ask_to_be_dialled()
            await self._seek(group)

    async def _seek(self, group: asyncio.TaskGroup) -> None:
        """Hold reservations if this peer cannot be dialled, and give them up if it can."""
        if self._dialled:
            for reservation in self._held.values():
                reservation.give_up()
        elif self._dialled is False:
            await self._hold_reservations(group)
        await self._judge()

    async def _ask_to_be_dialled(self) -> None:
        live, port = self._membership.live(), self._network.outside_port
        answers = await dial_backs(self._network.links, self._run, whom_to_ask(live, MAX_DIALLERS), port, DIALLED_WITHIN_S)
        dialled = can_be_dialled(answers)
        self._ask_at_s = time.monotonic() + (ASK_AGAIN_S if dialled is None else RECHECK_S)
        if dialled is None:
            return
        self._dialled = dialled
        said = [answer for answer in answers if answer.reached is not None]
        self._found = f"{sum(bool(answer.reached) for answer in said)} of {len(said)} peers reached port {port}"

    async def _hold_reservations(self, group: asyncio.TaskGroup) -> None:
        """Hold reservations at up to NUM_RELAYS of the volunteering relays."""
        now_s = time.monotonic()
        refused = [peer for peer, until_s in self._refused_until_s.items() if until_s > now_s]
        for record in relays_to_ask(self._membership.live(), self._held, refused):
            if len(self._held) >= NUM_RELAYS:
                return
            reservation = await self._reserve(record)
            if reservation is not None:
                self._held[record.peer] = reservation
                group.create_task(self._keep(reservation))

    async def _reserve(self, record: PeerRecord) -> Reservation | None:
        try:
            return await self._network.circuits.reserve(record.peer, direct(record.addresses)[0])
        except (PeerdError, OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            self._refused_until_s[record.peer] = time.monotonic() + REFUSED_S
            self._refusal = str(error) or "it does not answer"
            return None

    async def _keep(self, reservation: Reservation) -> None:
        """Keep a reservation until it ends. Then look for another relay at once, and check whether this peer can be dialled."""
        try:
            why = await reservation.held()
        finally:
            self._network.circuits.give_up(reservation)
            del self._held[reservation.relay]
        if not self._dialled:
            LOG.warning("a relay is lost", relay=reservation.relay, reason=why)
            self._refused_until_s[reservation.relay] = time.monotonic() + REFUSED_S
            self._refusal = why
        self.look_again()

    async def _judge(self) -> None:
        """Derive reach and reason, and announce changes."""
        before, addresses = self.reach, self.addresses
        if self._dialled is None:
            return
        if self._dialled:
            self.reach, self.reason = Reach.DIRECT, self._found
        elif self._held:
            count = "a relay" if len(self._held) == 1 else f"{len(self._held)} relays"
            self.reach, self.reason = Reach.RELAYED, f"{self._found}; through {count}"
        else:
            why = self._refusal or "nobody volunteers as a relay"
            self.reach, self.reason = Reach.CLIENT, f"{self._found}, and no relay is at hand: {why}"
        if self.reach is before and addresses == self._told:
            return
        self._told = addresses
        LOG.info("reach", reach=self.reach.name.lower(), reason=self.reason)
        self._herald.announce()
        if (self.reach in HIDDEN) != (before in HIDDEN):
            await self._herald.hide(self.reach in HIDDEN)
