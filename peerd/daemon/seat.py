"""One stage as a daemon serves it: its state and the parts that work on it. A move leaves one seat and takes another."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import structlog

from peerd.averaging.log import AverageLog
from peerd.averaging.rounds import Rounds
from peerd.background import start
from peerd.daemon.asking import texts_of
from peerd.daemon.auditing import auditor_of, witness_of
from peerd.daemon.commits import Commits
from peerd.daemon.device import give_back_memory
from peerd.daemon.dispatching import dispatcher_of
from peerd.daemon.move_copies import copies_of
from peerd.daemon.other_peers import OtherPeers
from peerd.daemon.thread_stacks import give_back_stacks
from peerd.daemon.training import Training
from peerd.errors import BadMessageError, PeerdError
from peerd.models.stages import affordable_slots, largest_state_bytes, placing_of_stage
from peerd.planner.memory import Room
from peerd.policy.owner.governor import Limits
from peerd.policy.round.needs import averaging_s as averaging_s_of
from peerd.policy.step.acts import Commit
from peerd.policy.step.contributions import unaveraged_after
from peerd.policy.step.following import Followers, num_kept
from peerd.policy.step.ledger import missing
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.roster import Roster
from peerd.policy.swarm.queues import MeanQueue
from peerd.policy.swarm.rates import SampleDemand, computed_elsewhere
from peerd.policy.swarm.rebalance import Move
from peerd.stage.adapting import LinkCodecs
from peerd.stage.calls import StageService
from peerd.stage.checkpoints import CheckpointStore
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor, Pace, Priority
from peerd.stage.kept_parts import KeptParts
from peerd.stage.leases import Lease
from peerd.stage.results import HeldAverage
from peerd.stage.snapshots import Downloaded, SnapshotServer
from peerd.stage.start import start_lineage
from peerd.stage.state import StageState
from peerd.stage.state_bytes import most_state_bytes
from peerd.step.rules import rules_of
from peerd.step.stepper import Stepper
from peerd.swarm.clock import clock_s
from peerd.swarm.signed import has_signed
from peerd.table.record import NO_RECORD, PeerId, Phase, RawRecord, RunId
from peerd.train.trainer import Trainer
from peerd.transfers import is_out_of_memory
from peerd.wire.clients import AveragingClient
from peerd.wire.state_client import StateClient

if TYPE_CHECKING:
    from peerd.daemon.peer import Peer

OVER_S = 60.0
"""Time over which queues are averaged in a run whose peers never move."""
LOG = structlog.get_logger()


class Watcher(Protocol):
    """Observes a seat and decides nothing."""

    def noticed(self) -> None:
        """This peer's phase, step or ledger changed."""

    def applied(self, roster: Roster) -> None:
        """An average was applied to the parameters."""


class Unwatched:
    """Observes nothing."""

    def noticed(self) -> None: ...

    def applied(self, roster: Roster) -> None: ...


class Seat(OtherPeers):
    """The parts that serve one stage. It passes their news to the swarm and to each other."""

    def __init__(
        self,
        peer: Peer,
        executor: Executor,
        state: StageState,
        store: CheckpointStore,
        room: Room,
        beginning: Beginning,
        watcher: Watcher,
    ) -> None:
        place, membership, links, settings = peer.place, peer.membership, peer.network.links, peer.settings
        manifest, run = place.manifest, place.signed.run
        super().__init__(peer, state.record.stage)
        self.executor, self.state, self.store, self.room = executor, state, store, room
        self._watcher = watcher
        self.leaving = self.is_left = False
        """True once its tensors may be gone; the counts and the last record can still be read."""
        self.trained_enough = False
        """True while leaving, once nothing is left to launch."""
        self.rebalance_reason = "not considered yet"
        self.rebalance_moves: tuple[Move, ...] = ()
        """The moves of all peers in the last plan."""
        self.demands: tuple[SampleDemand, ...] = ()
        self._throughput_before = 0.0
        self.backlog = MeanQueue(manifest.swarm.rebalance_period_s or OVER_S)
        self._chosen_s = clock_s()
        self.join_took_s = 0.0
        """Measured time from the choice of the stage to serving it."""
        self._unaveraged = self._accumulated = self._reloads = 0
        """In how many steps in a row its gradients were in no average; microbatches and reloads when the last average was applied."""
        self._saving: asyncio.Task[None] | None = None
        self.has_no_memory = asyncio.Event()
        """Set once the device's memory does not suffice for this stage."""
        self.commits = Commits()
        averaging_s = averaging_s_of(manifest.swarm.announce_period_s)
        self.witness = witness_of(self, room)
        self.link_codecs = LinkCodecs(manifest, membership.live, links.traffic)
        self.dispatcher = dispatcher_of(self)
        pace = Pace(settings.compute_stand_in_ms / 1000, settings.slow_factor, rest=executor.rest)
        self.service = StageService(manifest, state, executor, self.dispatcher, pace, self, peer.tracing, self.witness, peer.data)
        self.auditor, self.texts = auditor_of(self), texts_of(self, room)
        placing = placing_of_stage(manifest, self.stage, room)
        self.service.slots = affordable_slots(manifest, self.stage, state.keep_graph, room.device, placing)
        rules = rules_of(manifest, membership.view.ttl_s, averaging_s, largest_state_bytes(manifest))
        log = AverageLog(peer.network.home.averages, state.accumulator.flat.dtype, store.room, num_kept(rules))
        averaging = AveragingClient(links, run)
        self._copies = copies_of(self, averaging, averaging_s)
        self.rounds = Rounds(state, executor, averaging, log, averaging_s, clock_s, self, peer.spans)
        self._followers = Followers()
        start_of = partial(place.start.of_stage, manifest) if place.start else None
        self.snapshots = SnapshotServer(state, executor, self._followers, peer.patience_s, start_of, state.spools)
        most = partial(most_state_bytes, manifest)
        self.downloader = Downloader(StateClient(links, run), membership, most, peer.patience_s, state.spools, certifies=state.certifies)
        self.stepper = Stepper(state, executor, membership, self.rounds, self.downloader, rules, beginning, self)
        self.training = Training(manifest, membership, self.dispatcher, peer.data, self.announce, peer.tracing)

    @property
    def trainer(self) -> Trainer | None:
        return self.training.trainer

    @property
    def _had_work(self) -> bool:
        """Whether it has added microbatches since it last applied an average."""
        return self.service.counters.accumulated > self._accumulated

    @property
    def unaveraged(self) -> int:
        """In how many steps in a row it had work, and its gradients were in no average. A reload loses those of at least one step."""
        return self._unaveraged + (self.stepper.reloads - self._reloads if self._had_work or self._unaveraged else 0)

    @property
    def served_s(self) -> float:
        """Seconds since this peer chose the stage."""
        return clock_s() - self._chosen_s

    def follows(self, before: Seat) -> None:
        """This peer comes from another seat. It is as fast here as it was there until it is measured: others would take it for a usual one,
        and could move another peer after it. What it has contributed counts on."""
        self.demands = before.demands
        self.service.counters.tokens += before.service.counters.tokens
        self.texts.counts = before.texts.counts
        self._throughput_before = computed_elsewhere(before.throughput, before.demands, before.stage, self.stage)

    @property
    def throughput(self) -> float:
        """Samples per second of computing time; 0: not known yet."""
        return self.service.throughput or self._throughput_before

    @property
    def is_idle(self) -> bool:
        """True if no microbatch is here or under way from here, and no round is open."""
        launches = self.trainer is not None and self.trainer.in_flight > 0
        return not (launches or self.service.queue or self.rounds.open is not None)

    def counts(self) -> Counter[str]:
        """Return the counts since this stage is served."""
        trainer, service, stepper = self.trainer, self.service.counters, self.stepper
        return Counter(
            accumulated_microbatches=service.accumulated,
            duplicate_microbatches=stepper.duplicates,
            lost_microbatches=stepper.lost,
            microbatch_calls=self.dispatcher.num_calls,
            replayed_microbatches=self.dispatcher.replayed + (trainer.replayed if trainer else 0),
            suppressed_microbatches=service.suppressed,
            ledger_resets=stepper.resets,
            reloads=stepper.reloads,
            rounds_failed=self.rounds.failed,
            group_sums=self.rounds.sums.num_of_groups,
            own_updates=self.state.num_own_updates,
            average_sections=self.rounds.sums.num_of_sections,
        )

    def keep_limits(self, limits: Limits) -> None:
        """Apply the owner's limits that concern the stage."""
        self.service.pace = self.texts.pace = replace(self.service.pace, duty=limits.duty)
        self.store.room.quota_bytes = limits.disk
        self.texts.turns.set_share(limits.inference)

    async def close(self, *, for_good: bool) -> None:
        """Stop serving. The counts and the last record can still be read.

        Unless the daemon ends, wait for the pass under way and free the stage's memory.
        """
        self.is_left = True
        self.peer.reception.close()
        self.rounds.shut()
        if self._copies is not None:
            await self._copies.close()
        self.executor.close()
        if not for_good:
            await self.executor.ended()
            self.state.release()
            self.snapshots.forget()
            held = await asyncio.to_thread(give_back_memory, self.peer.governor.device)
            await asyncio.to_thread(give_back_stacks, self.peer.governor.device)
            LOG.info("memory given back", still_held=held)

    async def keep_checkpoint(self) -> None:
        """Write the stage as it is to disk. If that fails, the log says why."""
        try:
            lease, state = await self.executor.run(Priority.LEDGER, self._lend)
            try:
                await asyncio.to_thread(self.store.save, self.stage, state, lease.end)
            finally:
                lease.end()
            steps = await asyncio.to_thread(self.store.steps, self.stage)
            await self.executor.run(Priority.LEDGER, lambda: self.state.offer_checkpoints(steps))
        except (PeerdError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            LOG.warning("the checkpoint could not be kept", error=str(error))

    def _lend(self) -> tuple[Lease, Downloaded]:
        """Lend the state as it is. The commit of the step under way waits until it is written."""
        lease = self.state.holdings.lend(record := self.state.record)
        return lease, Downloaded(record.step, record.lineage, lease.tensors, tuple(self.state.history))

    # News of the parts

    def announce(self, urgent: bool = True) -> None:
        """Tell all peers that phase, step or incarnation changed."""
        if not self.join_took_s and self.state.record.phase is not Phase.JOINING:
            self.join_took_s = clock_s() - self._chosen_s
        self.peer.announce(urgent)
        self._watcher.noticed()

    def round_opened(self) -> None:
        self.peer.membership.wake()
        self._watcher.noticed()

    def ledger_grew(self) -> None:
        """Send the ledger to the stage's other peers when this peer is about to be idle; replies carry it up the path anyway.

        If steps overlap this peer is never idle, so the ledger is sent with the last microbatch that it has of this step. A call whose
        tensors still come does not keep it busy: they may take as long as the caller likes.
        """
        mine, num_microbatches = self.state.record, self.peer.place.manifest.train.microbatches_per_step
        is_last = mine.next_ledger_no > 0 and mine.phase is Phase.ACCUMULATING and self.service.num_here(mine.step) <= 1
        if is_last or self.service.num_here() <= 1:
            is_whole = not missing(self.peer.membership.live(), mine.stage, mine.step, num_microbatches)
            self.peer.gossip.push(everybody=False, urgent=is_whole)

    def committed(self) -> None:
        """Note a commit. Peers that know that every stage has averaged expect it; if steps overlap, the next launches wait for it."""
        self.snapshots.forget()
        step = self.state.record.step - 1
        self.commits.note(step)
        loss = self.state.history[-1].loss if self.state.history else None
        if self._checkpoint_due(step + 1):
            self._saving = start(self.keep_checkpoint())
        LOG.info("step finished", step=step, loss=loss, accumulated=self.service.counters.accumulated)
        self.announce(urgent=self.state.record.next_ledger_no > 0)

    def _checkpoint_due(self, step: int) -> bool:
        """True at the same steps for every peer, so that all stages have checkpoints in common. False while the last is being written."""
        manifest = self.peer.place.manifest
        every = manifest.swarm.checkpoint_every_steps
        due = every > 0 and (step % every == 0 or step == manifest.train.steps)
        return due and (self._saving is None or self._saving.done())

    @property
    def num_waiting(self) -> int:
        """Microbatches and gradients that wait for the executor or for the uplink."""
        return self.service.num_waiting + self.peer.network.links.traffic.waiting.count

    def cannot_compute(self) -> None:
        self.has_no_memory.set()

    def own_record(self) -> RawRecord:
        signed = self.peer.membership.current()
        return signed.raw if signed is not None else NO_RECORD

    def own_records(self) -> list[RawRecord]:
        return [self.own_record()]

    @property
    def is_committing(self) -> bool:
        return isinstance(self.stepper.decision, Commit)

    async def until_committed(self, timeout_s: float) -> None:
        await self.stepper.committed(timeout_s)

    @property
    def run(self) -> RunId:
        return self.peer.membership.run

    @property
    def coins_seed(self) -> bytes:
        return self.peer.coins_seed

    @property
    def kept_parts(self) -> KeptParts | None:
        return self.witness.parts if self.witness is not None else None

    def sign(self, message: bytes) -> bytes:
        return self.peer.membership.identity.sign(message)

    def has_signed(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return has_signed(peer, message, signature)

    def averages_needed_from(self) -> int | None:
        return self._followers.needed_from(self.peer.membership.live(), self.state.record, clock_s())

    def applied(self, held: HeldAverage) -> None:
        if self.state.record.phase is not Phase.JOINING:  # else it catches up with steps that it had no part in
            me, in_group = self.state.record.peer, bool(held.group)
            self._unaveraged = unaveraged_after(self.unaveraged, held.roster, me, had_work=self._had_work, in_group=in_group)
            self._accumulated, self._reloads = self.service.counters.accumulated, self.stepper.reloads
            if self.auditor is not None:
                self.auditor.applied(held.roster, held.lineage)
        if self._copies is not None:
            self._copies.fetch(held.roster.computed.keys())
        self._watcher.applied(held.roster)

    def load_checkpoint(self, step: int) -> Downloaded | None:
        return self.store.load(self.stage, step)

    async def load_start(self) -> Downloaded:
        """Return the stage's part of the state that the run begins from: from this machine's file, otherwise from a peer that has it."""
        manifest, start = self.peer.place.manifest, self.peer.place.start
        if start is not None:
            return await asyncio.to_thread(start.of_stage, manifest, self.stage)
        found = await self.downloader.download_start(self.stage)
        if found.step == manifest.start.step and found.lineage != start_lineage(manifest):
            raise BadMessageError("the state that the run begins from is another than the manifest says")
        return found
