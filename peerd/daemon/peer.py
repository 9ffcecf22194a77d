"""A daemon's part in the swarm, entered once: identity, network, table, data. It outlives the stages that the daemon serves."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial

import structlog

from peerd.audit.cases import Cases
from peerd.audit.store import CaseStore
from peerd.background import Part, start
from peerd.config.paths import cache_folder
from peerd.config.settings import Settings
from peerd.daemon.admission import watch
from peerd.daemon.clocks import ClockWatch
from peerd.daemon.line_probe import LineProbes
from peerd.daemon.network import Network, describe_self
from peerd.daemon.notes import Notes
from peerd.daemon.open_files import limit, num_open
from peerd.daemon.place import Entry, Place
from peerd.daemon.reachability import Reachability
from peerd.daemon.reception import Reception
from peerd.daemon.run_data import SWARM
from peerd.daemon.seat import Seat
from peerd.daemon.training import HeldData
from peerd.daemon.watching.accounts import Accounting
from peerd.daemon.watching.history import Past
from peerd.daemon.watching.otel import MicrobatchTraces
from peerd.errors import WrongStateError
from peerd.observe.archive import Archive
from peerd.owner.governor import Governor
from peerd.policy.step.contributions import StageTally
from peerd.policy.step.evidence import coins_text
from peerd.policy.swarm.access import NO_VERSION
from peerd.policy.swarm.connections import kept_unused_s
from peerd.policy.swarm.pace import way_s
from peerd.policy.swarm.reaching import missed_since
from peerd.stage.executor import Priority
from peerd.stage.malloc import give_back_free_memory
from peerd.swarm.gossip import Gossip
from peerd.swarm.liveness import Liveness
from peerd.swarm.meeting import Meeting
from peerd.table.record import PeerId
from peerd.timeline.spans import SpanRing
from peerd.train.sharing import DataFetcher, DataGiver
from peerd.wire.accounts import AccountsTold, AccountsWanted
from peerd.wire.audit_service import AuditServicer
from peerd.wire.call_tracing import CallTracing
from peerd.wire.checkup import CheckupServicer
from peerd.wire.clients import DataClient
from peerd.wire.data_service import DataServicer
from peerd.wire.door import Door, nobody
from peerd.wire.messages import Description
from peerd.wire.services import AveragingServicer, StageServicer, StateServicer, SwarmServicer
from peerd.wire.swarm_client import SwarmClient
from peerd.wire.text_service import TextServicer

MIN_PATIENCE_S = 5.0
SWEEP_PERIOD_S = 5.0
TRIM_PERIOD_S = 60.0
ADDRESS_PERIOD_S = 5.0
FORGET_AFTER_TTLS = 10
MAX_BOOTSTRAP = 8
LOG = structlog.get_logger()


class Peer:
    """The parts of a daemon that do not depend on the stage that it serves."""

    def __init__(self, settings: Settings, place: Place, network: Network, entry: Entry, governor: Governor, archive: Archive) -> None:
        manifest, run, membership = place.manifest, place.signed.run, entry.membership
        self.settings, self.place, self.network, self.governor, self.archive = settings, place, network, governor, archive
        self.membership, self.local, self.directory, self._row = membership, entry.local, entry.directory, entry.row
        self.patience_s = max(MIN_PATIENCE_S, membership.view.ttl_s)
        self.spans = SpanRing() if settings.observe else SpanRing(0)
        self.swarm_client = SwarmClient(network.links, run, membership.access)
        self.traces = MicrobatchTraces(self.spans, membership.me, manifest.train.microbatches_per_step) if settings.otel else None
        self.tracing = self.traces or CallTracing()
        self.liveness = Liveness(membership, self.swarm_client, network.links.traffic.heard_s, network.links)
        period_s, num_stages = manifest.swarm.announce_period_s, manifest.train.num_stages
        reached = (membership, self.swarm_client, entry.directory, self.liveness)
        self.gossip = Gossip(*reached, period_s, num_stages, manifest.swarm.group_size)
        self.meeting = Meeting(membership, self.liveness, network.links.drop, period_s)
        network.serves(run, membership.access.is_banned)
        self.reachability = Reachability(network, membership, run, self)
        self.clocks = ClockWatch(network.links, membership, period_s)
        self._line_probes = LineProbes(network.links, membership)
        self.notes = Notes(membership, entry.local, manifest.train)
        self.accounting = Accounting(self, archive)
        self.past = Past(self, archive)
        self.fetcher = DataFetcher(DataClient(network.links, run), membership, manifest.data, cache_folder(), self.patience_s)
        self.giver = DataGiver(manifest.data, cache_folder())
        self.data = HeldData(manifest, place.corpus, self.fetcher if place.data_source == SWARM else None, self.giver)
        self.reception = Reception()
        self.cases = Cases(membership.me, run)
        self.coins_seed = membership.identity.sign(coins_text(run)) if manifest.swarm.audits else b""
        self.case_store = CaseStore(network.home.audits(run), self.cases)
        proven = network.direct.caller if network.direct is not None else nobody
        traffic, slots = network.links.traffic, lambda: self.reception.slots
        self.door = Door(
            run, self.patience_s, traffic, self.spans, proven, slots, membership.is_known, bans=membership.bans, admission=membership.access
        )
        self.p2pd_restarts = 0
        self.p2pd_problem = ""
        """Why p2pd could not be rebuilt at the last attempt; empty while it runs."""
        self.num_asking = 0
        """Texts that its user asks the swarm for now."""
        self.moves = 0
        self.earlier_counts: Counter[str] = Counter()
        """Counts of the earlier seats."""
        self.is_pausing = False
        """True while this peer leaves its stage for a pause."""
        self.is_resting = False
        """True while this peer is out of the swarm during a pause, and from its farewell on: it serves no stage."""
        self.room_wanted = ""
        """Why no stage fits the memory that there is, in words, while this peer waits for more."""
        self.outgrew = -1
        """The stage that this peer left last because the device's memory did not suffice; -1: none."""
        self.outgrown: dict[int, int] = {}
        """Bytes of the device that have not sufficed for a stage, by stage, whatever the estimate says."""
        self._seat: Seat | None = None

    @property
    def seat(self) -> Seat:
        """The current seat; while this peer rests or moves, the last one. There is one as soon as the daemon is ready."""
        if self._seat is None:
            raise RuntimeError("no stage has been served yet")
        return self._seat

    @property
    def is_idle(self) -> bool:
        return self._seat is None or self._seat.is_idle

    @property
    def has_served(self) -> bool:
        return self._seat is not None

    def take(self, seat: Seat) -> None:
        """Publish this seat in the table and send calls to it from now on."""
        if self._seat is not None:
            self.earlier_counts.update(self._seat.counts())
            seat.follows(self._seat)
        self._seat = seat
        self._row.show(seat)
        self.reception.open(seat)

    @property
    def stays_hours(self) -> int:
        """How long its owner still means to let it run; 0: not said."""
        return self._row.stays_hours

    async def serve(self) -> None:
        """Start to answer other peers."""
        direct = self.network.direct
        await self.network.serve(
            (
                SwarmServicer(self.door, self.gossip, self),
                StageServicer(self.door, self.reception),
                AveragingServicer(self.door, self.reception),
                StateServicer(self.door, self.reception),
                AuditServicer(self.door, self.reception),
                TextServicer(self.door, self.reception),
                CheckupServicer(self.door, self.network.tunnel.seen_at),
                DataServicer(self.door, self.giver),
                *([direct.servicer(self.door, lambda peer: peer in self.membership.view.sightings)] if direct is not None else []),
            )
        )

    def in_swarm(self) -> Sequence[Part]:
        """Return the work that runs while this peer is in the swarm, also during a move."""
        direct = self.network.direct
        return (
            self.gossip.run,
            partial(self.liveness.follow, self.network.tunnel.broken),
            self.liveness.follow_accusations,
            self.liveness.follow_moves,
            self.meeting.run,
            self.reachability.run,
            self.notes.run,
            self.accounting.run,
            self.clocks.run,
            self._line_probes.run,
            self._sweep,
            *([direct.endpoint.run] if direct is not None else []),
        )

    def always(self) -> Sequence[Part]:
        """Return the work that runs from entering to leaving, also while this peer rests."""
        return (self._watch_addresses, self._keep_limits, partial(watch, self.membership.access))

    # What this peer tells of itself

    def announce(self, urgent: bool = True) -> None:
        """Tell all peers the present state of this one."""
        self.gossip.announce(urgent)

    def describe(self) -> Description:
        return describe_self([self.place.signed], self.membership.access.newer_than(NO_VERSION))

    async def tallies(self) -> Sequence[StageTally]:
        return await self.past.tallies()

    async def accounts(self, wanted: AccountsWanted) -> AccountsTold:
        return await self.accounting.told(wanted)

    async def hide(self, hidden: bool) -> None:
        """Join the DHT in the other role: a peer that cannot be dialled reads and writes, and stores nothing for others."""
        self.directory.is_client = hidden
        try:
            await self.directory.rebuild(self.network.p2pd.p2p, self.place.signed.run, self.bootstrap())
        except Exception as error:  # hivemind raises plain exceptions here, and gossip works without the DHT
            LOG.warning("the DHT could not be joined anew", error=repr(error))

    def bootstrap(self) -> tuple[str, ...]:
        """Return addresses of a few peers that can be dialled, one each."""
        return self.membership.bootstrap(MAX_BOOTSTRAP)

    # Housekeeping

    async def _sweep(self) -> None:
        """Close connections to peers that are gone for good or not needed now, and give free memory back to the system."""
        trimmed_s, missed = time.monotonic(), dict[PeerId, float]()
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            now_s = time.monotonic()  # while this machine sleeps it misses nobody
            if now_s - trimmed_s > TRIM_PERIOD_S:
                trimmed_s = now_s
                await self._give_back_memory()
            missed = missed_since(missed, self.membership.view, self.membership.live(), now_s)
            for peer, since_s in missed.items():
                if peer in self.membership.raws and now_s - since_s > FORGET_AFTER_TTLS * self.membership.view.ttl_s:
                    self.membership.forget(peer)
                    await self.network.forget(peer)
            await self._forget_strangers(now_s)
            await self.network.links.close_unused(kept_unused_s(num_open(), limit()))

    async def _give_back_memory(self) -> None:
        """What passes have left goes first, on their thread: another has another heap, and would lock theirs until all of it is gone."""
        if self._seat is not None:
            going = start(self._seat.executor.run(Priority.CONTROL, give_back_free_memory), expects=(WrongStateError,))
            await asyncio.wait({going})  # if the stage is left meanwhile, it is cancelled
        await asyncio.to_thread(give_back_free_memory)

    async def _forget_strangers(self, now_s: float) -> None:
        """Forget peers that called once and never got into the table: visitors, and keys that were made up."""
        known, heard_s = self.membership.view.sightings, self.network.links.traffic.heard_s
        for peer in [peer for peer, at_s in heard_s.items() if now_s - at_s > FORGET_AFTER_TTLS * self.membership.view.ttl_s]:
            if peer not in known:
                await self.network.forget(peer)

    async def _watch_addresses(self) -> None:
        """Announce this peer's addresses at once when they change because its router forwards a port or stops to."""
        while self.network.config.map_port:
            await asyncio.sleep(ADDRESS_PERIOD_S)
            if await self.network.look_at_addresses():
                LOG.info("addresses changed", addresses=self.network.addresses)
                self.reachability.look_again()
                self.announce()

    async def _keep_limits(self) -> None:
        """Pass the owner's limits to the stage that is served and to the endpoint of direct connections."""
        while True:
            limits = await self.governor.new_limits()
            if self._seat is not None:
                self._seat.keep_limits(limits)
            if self.network.direct is not None:
                train = self.place.manifest.train
                microbatch_s = way_s(self.membership.live(), train.num_stages, train.microbatch_size)
                self.network.direct.endpoint.look_again(call_s=2 * microbatch_s)
