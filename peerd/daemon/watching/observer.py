"""Looks at the table once a second and notes what changed: the one part that feeds the history. It decides nothing.

It outlives a move to another stage, so that what is seen before and after a move is compared.
"""

from __future__ import annotations

import asyncio
import time
from itertools import takewhile

import structlog

from peerd.daemon.answers import Answers
from peerd.daemon.link_needs import why_unaveraged
from peerd.daemon.peer import Peer
from peerd.daemon.watching.loop_lag import LoopLag
from peerd.daemon.watching.sinks import scalars
from peerd.observe.changes import PeerState, SwarmState, changes
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.sinks import Sinks
from peerd.policy.step.ledger import work_step
from peerd.policy.step.losses import loss_of, told_losses
from peerd.policy.step.roster import Roster
from peerd.policy.swarm.health import unaveraged_for
from peerd.swarm.clock import clock_s
from peerd.table.record import Evaluation, PeerId, PeerRecord, Phase

LOOK_PERIOD_S = 1.0
LOOKS_PER_SAMPLE = 2
LOOKS_PER_WRITE = 10
"""At least; whatever is more than a sample goes to disk with the next sample."""
MAX_LOSSES = 64
MOST_UNCONFIRMED = 8
"""Steps whose loss too few of the last stage have told so far; the newest ones."""
LOG = structlog.get_logger()


class Observer:
    """Runs while this peer is in the swarm."""

    def __init__(self, peer: Peer, answers: Answers) -> None:
        self._peer, self._answers, self.archive = peer, answers, peer.archive
        self.phase_s: dict[str, float] = {phase.name.lower(): 0.0 for phase in Phase}
        """How long this peer has been in each phase."""
        self.lag = LoopLag(peer)
        self.sinks: Sinks | None = None
        self._before: SwarmState | None = None
        self._losses: dict[int, float] = {}
        self._known_history = -1
        """The newest step that was taken from the stage's own history."""
        self._told_losses: dict[int, dict[PeerId, float]] = {}
        """By step, the losses that some of the last stage have told, of steps that are not in `_losses` yet."""
        self._evaluated: Evaluation | None = None
        """The evaluation that was noted last. One that is put right is noted again."""
        self._unlisted: dict[PeerId, bool] = {}
        """Of each peer that is there, whether it wants not to be named."""
        self._counters: dict[str, int] = {}
        self._sampled_s = 0.0
        self._phase: tuple[str, float] | None = None

    async def run(self) -> None:
        looks = 0
        self._note_phase()
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            looks += 1
            try:
                self.look(time.time())
                if looks % LOOKS_PER_SAMPLE == 0:
                    self._sample(time.time())
            except Exception as error:  # the edge of what only looks: it must never end what trains
                LOG.warning("the observer stumbled", error=repr(error))
            if looks % LOOKS_PER_WRITE == 0 or (looks % LOOKS_PER_SAMPLE == 0 and self.archive.has_news):
                await self.archive.write()

    def look(self, now_s: float) -> None:
        """Note what changed since the last look; the first one only says that this daemon is there."""
        self._note_phase()
        self._note_losses()
        self._note_unlisted()
        self._note_downloaded_history()
        after = self._snapshot(now_s)
        if self._before is None:
            record = self._peer.seat.state.record
            self.archive.note_event(Event(time_s=now_s, kind="started", peer=record.peer, stage=record.stage))
            self._before = SwarmState(time_s=now_s, peers=after.peers, partly_known=after.partly_known, banned=after.banned)
        for event in changes(self._before, after):
            self.archive.note_event(event)
        self._before = after

    def _note_unlisted(self) -> None:
        """Note who does not want to be named, and who wants it again: what is told of a peer outlasts its record."""
        told = {record.peer: record.unlisted for record in self._peer.membership.live().records}
        for peer in [peer for peer, unlisted in told.items() if self._unlisted.get(peer) is not unlisted]:
            self.archive.note_listed(peer, not told[peer])
        self._unlisted = told

    def _snapshot(self, now_s: float) -> SwarmState:
        peer = self._peer
        live = peer.membership.live()
        peers: dict[str, PeerState] = {
            r.peer: PeerState(r.stage, r.leaving, r.paused, unaveraged=self._unaveraged(r)) for r in live.records
        }
        peers |= {r.peer: PeerState(r.stage, suspect=True) for r in live.suspected if not r.leaving}
        return SwarmState(
            time_s=now_s,
            peers=peers,
            partly_known=frozenset(stage for stage in range(peer.place.manifest.train.num_stages) if live.speakers(stage)),
            health={item["code"]: item["title"] for item in self._answers.health()},
            moves=frozenset((move.peer, move.to_stage, move.reason) for move in peer.seat.rebalance_moves),
            banned={str(each): reason for each, reason in peer.membership.access.listed.banned.items()},
            resumed_at=peer.seat.stepper.resumed_at,
        )

    def _unaveraged(self, record: PeerRecord) -> str:
        """That a peer works for nothing, and why; empty if it does not."""
        if not unaveraged_for(record):
            return ""
        return unaveraged_for(record, why_unaveraged(self._peer.place.manifest, self._peer.membership.live(), record))

    def _sample(self, now_s: float) -> None:
        peer, counters = self._peer, {name: int(str(count)) for name, count in self._answers.counters().items()}
        live, num_stages = peer.membership.live(), peer.place.manifest.train.num_stages
        grown = {name: count - self._counters.get(name, 0) for name, count in counters.items()}
        self.archive.note_sample(
            Sample(
                time_s=now_s,
                span_s=min(now_s - self._sampled_s, 2 * LOOKS_PER_SAMPLE * LOOK_PERIOD_S),
                step=work_step(live, num_stages) or peer.seat.state.record.step,
                tokens_per_second=self._answers.tokens_per_second(),
                peers=tuple(live.num_serving(stage) for stage in range(num_stages)),
                queue=tuple(live.queue(stage) for stage in range(num_stages)),
                suspects=len(live.suspected),
                counters={name: count for name, count in grown.items() if count},
            )
        )
        self._counters, self._sampled_s = counters, now_s

    def noticed(self) -> None:
        """This peer's row changed, which it does with every microbatch. Every loss is told for longer than one of its phases lasts."""
        before = self._phase
        self._note_phase()
        if before is None or self._phase is None or before[0] != self._phase[0]:
            self._note_losses()

    def _note_losses(self) -> None:
        """What most of the last stage tell."""
        num_stages = self._peer.place.manifest.train.num_stages
        live = self._peer.membership.live()
        reached = max(work_step(live, num_stages) or 0, self._peer.seat.state.record.step) + 1
        for step, told in told_losses(live, num_stages).items():
            if step < reached and step not in self._losses:
                self._told_losses.setdefault(step, {}).update(told)
        serving = len(live.serving(num_stages - 1))
        for step in sorted(self._told_losses):
            if (loss := loss_of(self._told_losses[step], serving)) is not None:
                self._note_loss(step, loss)
        waiting = sorted(self._told_losses.keys() - self._losses.keys())[-MOST_UNCONFIRMED:]
        self._told_losses = {step: self._told_losses[step] for step in waiting}

        evaluation = self._peer.seat.training.evaluation
        if evaluation is not None and evaluation != self._evaluated:
            self._evaluated = evaluation
            self.archive.note_evaluation(evaluation)

    def _note_loss(self, step: int, loss: float) -> None:
        """Keep a loss that the last stage announced. A step that is finished here already gets its loss now."""
        self._losses[step] = loss
        if len(self._losses) > MAX_LOSSES:
            del self._losses[min(self._losses)]
        if step in self._peer.seat.commits.times_s:
            tokens = self._peer.place.manifest.tokens_per_step_at(step)
            self.archive.note_step(FinishedStep(step=step, loss=loss, tokens=tokens, time_s=None))
            self._tell(step, loss)

    def _note_phase(self) -> None:
        phase, now_s = self._peer.seat.state.record.phase.name.lower(), clock_s()
        if self._phase is not None:
            self.phase_s[self._phase[0]] += now_s - self._phase[1]
        self._phase = (phase, now_s)

    def applied(self, roster: Roster) -> None:
        """An average was applied: the step is finished here, and its roster says who computed it."""
        manifest = self._peer.place.manifest
        tokens_each = manifest.tokens_per_microbatch_at(roster.step)
        self.archive.note_average(roster, tokens_each)
        self._peer.accounting.applied(roster, tokens_each)
        loss = self._losses.get(roster.step)
        tokens = manifest.tokens_per_step_at(roster.step)
        self.archive.note_step(FinishedStep(step=roster.step, loss=loss, tokens=tokens, time_s=time.time()))
        if loss is not None:
            self._tell(roster.step, loss)

    def _tell(self, step: int, loss: float) -> None:
        """The sinks, once a step: it is finished here and its loss is known."""
        if self.sinks is not None:
            self.sinks.note((step, time.time(), scalars(self._peer, self._answers, loss)))

    def _note_downloaded_history(self) -> None:
        """The last stage's state brings the losses of steps before this daemon was there."""
        known, history = self._known_history, self._peer.seat.state.history
        if not history or history[-1].step == known:
            return
        self._known_history = history[-1].step
        for entry in takewhile(lambda entry: entry.step > known, history[::-1]):
            self.archive.note_step(FinishedStep(step=entry.step, loss=entry.loss, tokens=entry.tokens, time_s=None))
