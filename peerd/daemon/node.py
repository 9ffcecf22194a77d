"""One daemon's parts, wired to one another. Building only: what runs them is run.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import structlog

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.background import start
from peerd.config.settings import Settings
from peerd.daemon.device import has_own_memory
from peerd.daemon.network import Network, describe_self
from peerd.daemon.place import Place, Stage, Swarm
from peerd.daemon.reachability import Reachability
from peerd.daemon.run_data import SWARM
from peerd.daemon.training import Training
from peerd.errors import BadMessageError
from peerd.models.stages import affordable_slots
from peerd.policy.owner.governor import Limits
from peerd.policy.step.acts import Commit
from peerd.policy.step.contributions import StageTally
from peerd.policy.step.ledger import missing
from peerd.policy.step.recovery import Beginning
from peerd.policy.swarm.health import Facts, Progress, advance
from peerd.policy.swarm.rebalance import Move
from peerd.stage.adapting import LinkCodecs
from peerd.stage.executor import Pace
from peerd.stage.malloc import give_back_free_memory
from peerd.stage.service import StageService
from peerd.stage.snapshots import MOST_STATE_BYTES, Downloaded, Downloader, SnapshotServer
from peerd.stage.start import start_lineage
from peerd.step.stepper import Stepper, rules_of
from peerd.swarm.directory import Directory
from peerd.swarm.gossip import Gossip
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import clock_s
from peerd.table.circuit import direct
from peerd.table.record import HIDDEN, Evaluation, Phase, RawRecord
from peerd.timeline.spans import SpanRing
from peerd.train.samples import Microbatches
from peerd.train.trainer import Trainer
from peerd.wire.checkup import CheckupServicer
from peerd.wire.clients import AveragingClient, DataClient, StageClient, StateClient
from peerd.wire.data_service import DataServicer
from peerd.wire.dispatch import Dispatcher
from peerd.wire.messages import Description
from peerd.wire.services import AveragingServicer, Door, StageServicer, StateServicer, SwarmServicer
from peerd.wire.swarm_client import SwarmClient

AVERAGING_SHARE_OF_TTL = 0.6
MICROBATCH_TOTAL_S = 600.0
MIN_PATIENCE_S = 5.0
SWEEP_PERIOD_S = 5.0
TRIM_PERIOD_S = 60.0
NOTES_PERIOD_S = 1.0
ADDRESS_PERIOD_S = 5.0
FORGET_AFTER_TTLS = 10
MAX_COMMIT_TIMES = 100_000
MAX_BOOTSTRAP = 8
LOG = structlog.get_logger()


class Node:
    """All parts of a daemon that serves a stage."""

    def __init__(self, settings: Settings, place: Place, network: Network, swarm: Swarm, stage: Stage) -> None:
        manifest = place.manifest
        train = manifest.train
        self.settings, self.place, self.network = settings, place, network
        self.membership, self.local, self.executor, self.state = swarm.membership, swarm.local, stage.executor, stage.state
        self.store = stage.store
        membership = swarm.membership
        self.leaving = False
        self.trained_enough = False
        """Leaving, and done with launching."""
        self.p2pd_restarts = 0
        self.rebalance_reason = "not considered yet"
        self.progress: Progress | None = None
        self.rebalance_moves: tuple[Move, ...] = ()
        """Those of the last plan, anybody's."""
        self.tallies: Callable[[], Coroutine[Any, Any, Sequence[StageTally]]] = _no_tallies
        self.evaluations: Callable[[], Awaitable[Sequence[Evaluation]]] = _no_evaluations
        """All that this home's daemons know of."""
        self.on_news: Callable[[], None] = lambda: None
        """My phase, step or ledger changed."""
        self._entered_s = clock_s()
        self.join_took_s = 0.0
        """Measured: from having chosen the stage to serving it."""
        self._saving: asyncio.Task[None] | None = None
        self.commit_times_s: dict[int, float] = {}
        """Wall clock of the last commits, by step."""
        ttl_s = membership.view.ttl_s
        averaging_s, patience_s = AVERAGING_SHARE_OF_TTL * ttl_s, max(MIN_PATIENCE_S, ttl_s)
        run, links = place.signed.run, network.links

        pace = Pace(settings.compute_stand_in_ms / 1000, settings.slow_factor)
        stage_client = StageClient(links, run)
        self.dispatcher = Dispatcher(
            stage_client, membership, train.num_stages, train.microbatches_per_step, patience_s, MICROBATCH_TOTAL_S
        )
        self.link_codecs = LinkCodecs(manifest, membership.live, links.traffic)
        self.service = StageService(manifest, self.state, self.executor, self.dispatcher, pace)
        held = self.state.module, self.state.keep_graph
        self.service.slots = affordable_slots(manifest, *held, place.memory_bytes, on_gpu=has_own_memory(place.device))
        log = AverageLog(network.home.averages, self.state.accumulator.flat.dtype)
        self.rounds = Rounds(self.state, self.executor, AveragingClient(links, run), log, averaging_s, clock_s)
        self._start = stage.start
        self.snapshots = SnapshotServer(self.state, self.executor, self._read_start if stage.start else None)
        self.downloader = Downloader(StateClient(links, run), membership, patience_s)
        rules = rules_of(manifest, ttl_s, averaging_s)
        self.stepper = Stepper(self.state, self.executor, membership, self.rounds, self.downloader, rules)
        swarm_client = SwarmClient(links, run)
        self.liveness = Liveness(membership, swarm_client)
        self.spans = SpanRing() if settings.observe else SpanRing(0)
        self.door = Door(run, patience_s, links.traffic, self.spans)
        if network.direct is not None:
            self.door.proven = network.direct.caller
        self.state.spans = self.service.spans = self.rounds.spans = stage_client.spans = self.spans
        self.training = Training(manifest, membership, self.dispatcher, DataClient(links, run), patience_s)
        self.gossip: Gossip
        self.directory: Directory
        network.serves(run)
        self.reachability = Reachability(network, membership, run)
        self.swarm_client = swarm_client
        swarm.row.show(self)

    def attach(self, directory: Directory, corpus: Microbatches | None) -> None:
        """The parts that need the DHT or the data, and every callback."""
        period_s = self.place.manifest.swarm.announce_period_s
        self.directory = directory
        num_stages = self.place.manifest.train.num_stages
        self.gossip = Gossip(self.membership, self.swarm_client, directory, self.liveness, period_s, num_stages)
        self.training.on_change = self.announce
        self.training.fetches = corpus is None and self.place.data_source == SWARM
        if corpus is not None:
            self.training.begin(corpus)
        self.reachability.on_change = self.announce
        self.reachability.on_hidden = self._hidden
        self.dispatcher.adapt = self.link_codecs.adapt
        self.dispatcher.on_failure = self.liveness.report_failure
        self.rounds.on_failure = self.liveness.report_failure
        self.rounds.on_opened = self._round_opened
        self.rounds.on_change = self.announce
        self.rounds.own_record = self._own_record
        self.rounds.on_record = lambda record: self.membership.absorb([record])
        start = self.place.manifest.start
        self.stepper.beginning = Beginning(step=start.step, founder=bool(self.settings.run_file))
        self.stepper.load_start = self._load_start if start.state else None
        self.stepper.on_change = self.announce
        self.stepper.on_commit = self._committed
        self.stepper.load_checkpoint = lambda step: self.store.load(self.place.stage, step)
        self.service.records = lambda: [self._own_record()]
        self.service.on_records = lambda _caller, records: self.membership.absorb(records)
        self.service.on_progress = self._ledger_grew
        self.service.changed = self.stepper.committed
        self.service.is_committing = lambda: isinstance(self.stepper.decision, Commit)

    @property
    def trainer(self) -> Trainer | None:
        return self.training.trainer

    @property
    def servicers(self) -> Sequence[object]:
        direct = self.network.direct
        return (
            SwarmServicer(self.door, self.gossip, self),
            StageServicer(self.door, self.service),
            AveragingServicer(self.door, self.rounds),
            StateServicer(self.door, self.snapshots),
            CheckupServicer(self.door, self.network.tunnel.seen_at),
            DataServicer(self.door, self.training.giver),
            *([direct.servicer(self.door)] if direct is not None else []),
        )

    # News of myself

    async def sweep(self) -> None:
        """Close what leads to peers that are gone for good, and give memory back."""
        trimmed_s = clock_s()
        while True:
            await asyncio.sleep(SWEEP_PERIOD_S)
            if clock_s() - trimmed_s > TRIM_PERIOD_S:
                trimmed_s = clock_s()
                await asyncio.to_thread(give_back_free_memory)
            forgotten_s = clock_s() - FORGET_AFTER_TTLS * self.membership.view.ttl_s
            live = {record.peer for record in self.membership.live().records}
            for peer, seen in list(self.membership.view.sightings.items()):
                if seen.risen_at_s < forgotten_s and peer != self.membership.me and peer not in live:
                    self.gossip.forget(peer)
                    await self.network.forget(peer)

    async def watch_addresses(self) -> None:
        """Others learn at once where this peer can be reached, when its router forwards a port or no longer does."""
        while self.network.config.map_port:
            await asyncio.sleep(ADDRESS_PERIOD_S)
            if await self.network.look_at_addresses():
                LOG.info("addresses changed", addresses=self.network.addresses)
                self.reachability.look_again()
                self.announce()

    async def keep_notes(self) -> None:
        """Of the table, once it has changed: how far the run is, and who is there. The latter goes to disk soon: all may be killed at
        any moment, and then nobody knows where to come back to."""
        train = self.place.manifest.train
        noted, remembered = None, None
        while True:
            live = self.membership.live()
            if live is not noted:
                self.progress = advance(self.progress, live, train.num_stages, train.microbatches_per_step, clock_s())
                noted, addresses = live, self._addresses_met()
                if addresses != remembered:
                    await asyncio.to_thread(self.local.remember_peers, addresses)
                    remembered = addresses
            await asyncio.sleep(NOTES_PERIOD_S)

    def remember_peers(self) -> None:
        """For coming back without an address."""
        self.local.remember_peers(self._addresses_met())

    def _addresses_met(self) -> list[str]:
        others = [r for r in self.membership.live().records if r.peer != self.membership.me and r.addresses]
        # The second too: a router may not lead those behind it back to its own public address.
        second = {r.peer: [address for address in r.addresses[1:2] if not address.startswith("/ip4/127.")] for r in others}
        return [address for r in others for address in (r.addresses[0], *second[r.peer])]

    def describe(self) -> Description:
        """What this peer tells anybody who asks which runs it serves."""
        return describe_self([self.place.signed])

    @property
    def is_idle(self) -> bool:
        """Whether no microbatch is here or under way from here, and no round is open."""
        launches = self.trainer is not None and self.trainer.in_flight > 0
        return not (launches or self.service.queue or self.rounds.open is not None)

    def facts(self) -> Facts:
        """What this peer's health is derived from."""
        train, record = self.place.manifest.train, self.state.record
        last = sorted(self.commit_times_s.items())[-2:]
        return Facts(
            mine=record,
            live=self.membership.live(),
            num_stages=train.num_stages,
            num_microbatches=train.microbatches_per_step,
            decision=self.stepper.decision.reason,
            still_s=clock_s() - self.progress.since_s if self.progress else 0.0,
            step_s=last[1][1] - last[0][1] if len(last) == 2 else 0.0,
            complete=bool(train.steps) and record.step >= train.steps,
        )

    def announce(self, urgent: bool = True) -> None:
        """Phase, step or incarnation changed: everybody shall know."""
        if not self.join_took_s and self.state.record.phase is not Phase.JOINING:
            self.join_took_s = clock_s() - self._entered_s
        self.gossip.announce(urgent)
        self.on_news()

    def _round_opened(self) -> None:
        self.membership.wake()
        self.on_news()

    def _ledger_grew(self) -> None:
        """The reply carries my ledger up the path; my stage's peers hear of it when I have nothing better to do.

        Where steps overlap there always is something: they hear of the last microbatch that I have of this step.
        """
        mine, num_microbatches = self.state.record, self.place.manifest.train.microbatches_per_step
        is_last = mine.next_ledger_no > 0 and mine.phase is Phase.ACCUMULATING and self.service.queue_of(mine.step) <= 1
        if is_last or self.service.queue <= 1:
            self.gossip.push(everybody=False, urgent=not missing(self.membership.live(), mine.stage, mine.step, num_microbatches))

    def _committed(self) -> None:
        """It is expected by all who have heard that every stage has averaged. Where steps overlap, the next launches wait for it."""
        self.snapshots.forget()
        step = self.state.record.step - 1
        self.commit_times_s[step] = time.time()
        self.commit_times_s.pop(step - MAX_COMMIT_TIMES, None)
        loss = self.state.history[-1].loss if self.state.history else None
        if self._checkpoint_due(step + 1):
            self._saving = start(self.save_checkpoint())
        LOG.info("step finished", step=step, loss=loss, accumulated=self.service.counters.accumulated)
        self.announce(urgent=self.state.record.next_ledger_no > 0)

    def _checkpoint_due(self, step: int) -> bool:
        """The same steps at every peer, so that all stages have some in common. Skipped while the last is being written."""
        manifest = self.place.manifest
        every = manifest.swarm.checkpoint_every_steps
        due = every > 0 and (step % every == 0 or step == manifest.train.steps)
        return due and (self._saving is None or self._saving.done())

    async def save_checkpoint(self) -> None:
        """My stage as it is, on disk."""
        state = await self.snapshots.own()
        await asyncio.to_thread(self.store.save, self.place.stage, state)

    def keep_limits(self, limits: Limits) -> None:
        """Those of the owner's limits that the stage has to do with."""
        self.service.pace = replace(self.service.pace, duty=limits.duty)
        self.store.quota_bytes = limits.disk
        if self.network.direct is not None:
            self.network.direct.endpoint.look_again()

    def release(self) -> None:
        """The stage's memory is free again; what was counted and the last record stay for those who ask. Closed for good."""
        self.state.release()

    @property
    def start_path(self) -> str:
        return str(self._start.path) if self._start else ""

    def _read_start(self, stage: int) -> Downloaded:
        assert self._start is not None
        return self._start.of_stage(self.place.manifest, stage)

    async def _load_start(self) -> Downloaded:
        """My stage's part of the state that the run begins from: from this machine's file, else from a peer that has it."""
        if self._start is not None:
            return await asyncio.to_thread(self._read_start, self.place.stage)
        found = await self.downloader.download_start(self.place.stage, MOST_STATE_BYTES)
        if found.step == self.place.manifest.start.step and found.lineage != start_lineage(self.place.manifest):
            raise BadMessageError("the state that the run begins from is another than the manifest says")
        return found

    def _own_record(self) -> RawRecord:
        signed = self.membership.publish()
        assert signed is not None
        return signed.raw

    def bootstrap(self, most: int) -> tuple[str, ...]:
        """Addresses of peers that can be dialled, one each."""
        others = [direct(r.addresses) for r in self.membership.live().records if r.peer != self.membership.me and r.reach not in HIDDEN]
        return tuple(addresses[0] for addresses in others if addresses)[:most]

    async def _hidden(self, hidden: bool) -> None:
        """A peer that nobody can dial reads and writes in the DHT, and keeps nothing for others."""
        self.directory.is_client = hidden
        try:
            await self.directory.rebuild(self.network.p2pd.p2p, self.place.signed.run, self.bootstrap(MAX_BOOTSTRAP))
        except Exception as error:  # hivemind raises plain exceptions here, and gossip carries on without the DHT
            LOG.warning("the DHT could not be joined anew", error=repr(error))


async def _no_evaluations() -> Sequence[Evaluation]:
    return ()


async def _no_tallies() -> Sequence[StageTally]:
    return ()
