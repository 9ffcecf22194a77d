"""The stepper: asks policy/ what this peer does next in the life of a step, and does it. One action at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from peerd.averaging.rounds import Rounds
from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, RemoteError, StageError, WrongStateError
from peerd.policy.step.recovery import Beginning, plan
from peerd.policy.step.roster import Roster
from peerd.policy.step.stepping import Act, Decision, OwnState, StepRules, decide, looks_lost
from peerd.policy.step.tied import other_end
from peerd.stage.executor import Executor, Priority
from peerd.stage.snapshots import Downloaded, Downloader
from peerd.stage.state import StageState
from peerd.swarm.membership import Membership, clock_s
from peerd.table.record import PeerId, Phase
from peerd.table.view import LiveView

TICK_S, IDLE_TICK_S = 0.1, 1.0
"""Between two looks that nothing asks for: while something is under way that time decides, and otherwise."""
RETRY_PAUSE_S = 0.25
FORGET_REFUSAL_S = 2.0
LOG = structlog.get_logger()
_TOLD = {
    Act.RELOAD: "downloading the stage's state",
    Act.RESET_LEDGER: "ledger dropped",
    Act.SKIP_STEP: "step given up: it is not exact",
}
"""Decisions that cost work or exactness, and what the log calls them."""


class Stepper:
    """Drives one stage's state by the rules of stepping.py."""

    def __init__(
        self, state: StageState, executor: Executor, membership: Membership, rounds: Rounds, downloader: Downloader, rules: StepRules
    ) -> None:
        self._state = state
        self._executor = executor
        self._membership = membership
        self._rounds = rounds
        self._downloader = downloader
        self._rules = rules
        self._attempt = 0
        self._propose_after_s = 0.0
        self._lost_since_s: float | None = None
        self._refused: dict[tuple[PeerId, int], float] = {}
        self._unanswered: dict[tuple[PeerId, int], float] = {}
        """(mate, step) that would not or could not give an average, and when; forgotten after a while."""
        self._done_seen = 0
        self._fence_to = 0
        self._committed = asyncio.Event()
        """Set with the next commit, and then another."""
        self._retiring = asyncio.Event()
        self._retired = asyncio.Event()
        self._resumable: tuple[int, float] = (-1, 0.0)
        """The checkpoint step to resume at, and since when it has been that."""
        self.load_checkpoint: Callable[[int], Downloaded | None] = lambda _step: None
        self.beginning = Beginning()
        self.load_start: Callable[[], Awaitable[Downloaded]] | None = None
        """Gives the state that the run begins from; None where it begins with first weights, or once that state is loaded."""
        self.most_state_bytes = 1 << 40
        self.decision = Decision(Act.WAIT, "just begun")
        self._told: tuple[Act, str, int] | None = None
        self.resumed_at: int | None = None
        """Step of the checkpoint this peer took over."""
        self.reloads = 0
        self.resets = 0
        self.duplicates = 0
        """Microbatches counted twice in an average this peer applied, and those missing from one: both must stay 0."""
        self.lost = 0
        self.on_change: Callable[[], None] = lambda: None
        """Phase, step or ledger changed by a decision, but for a commit, and for a round that I lead: `Rounds` tells of those."""
        self.on_commit: Callable[[], None] = lambda: None
        """I am at the next step."""

    async def run(self) -> None:
        while not self._retiring.is_set():
            if self._fence_to:
                await self._apply_fence()
            self.decision = self._decide()
            if self.decision.act is Act.WAIT:
                await self._membership.changed(TICK_S if self._is_pressed else IDLE_TICK_S)
            else:
                await self._do(self.decision)
        if self._rounds.open is not None:
            await self._rounds.close(self._rounds.open.roster.average_id, "leaving")
        await self._executor.run(Priority.CONTROL, self._state.begin_joining)
        self.on_change()
        self._retired.set()

    @property
    def _is_pressed(self) -> bool:
        """Whether time alone may change the decision; whatever else does wakes me."""
        asked, waits = self._refused or self._unanswered, self._propose_after_s + TICK_S > clock_s()
        return bool(self._state.record.phase is not Phase.ACCUMULATING or asked or waits or self._lost_since_s is not None)

    async def retire(self) -> None:
        """Serve no more: from here on nobody counts on this peer. It owes nothing, so nothing is lost by it."""
        self._retiring.set()
        self._membership.wake()
        await self._retired.wait()

    async def committed(self, timeout_s: float) -> None:
        """Returns once I have committed a step, or so many seconds later. Who waits goes on in the order of coming."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._committed.wait()

    def fence(self, incarnation: int) -> None:
        """T3 (fence), asked for by gossip: done before the next decision."""
        self._fence_to = max(self._fence_to, incarnation)
        self._membership.wake()

    def own_state(self) -> OwnState:
        current = self._rounds.open
        return OwnState(
            record=self._state.record,
            round_roster=current.roster if current else None,
            round_since_s=current.progress_s if current else clock_s(),
            propose_after_s=self._propose_after_s,
            attempt=self._attempt,
            lost_since_s=self._lost_since_s,
            refused=_recent(self._refused),
            unanswered=_recent(self._unanswered),
            has_start=self.load_start is None,
        )

    def _decide(self) -> Decision:
        live, now_s, own = self._membership.live(), clock_s(), self.own_state()
        grew, self._done_seen = own.record.done != self._done_seen, own.record.done
        if looks_lost(own, live, self._rules) and not grew:
            self._lost_since_s = self._lost_since_s if self._lost_since_s is not None else now_s
        else:
            self._lost_since_s = None
        at_start = own.record.step <= self.beginning.step
        if own.record.phase is Phase.JOINING and at_start and not live.serving(own.record.stage):
            return self._recover(live, now_s)
        if own.lost_since_s != self._lost_since_s:
            own = replace(own, lost_since_s=self._lost_since_s)
        return decide(own, live, now_s, self._rules_in(live))

    def _rules_in(self, live: LiveView) -> StepRules:
        """Where records live longer than three periods, what looks lost has to look so for longer."""
        mine = live.mine
        return self._rules if mine is None or mine.periods == 1 else replace(self._rules, ttl_s=self._rules.ttl_s * mine.periods)

    def _recover(self, live: LiveView, now_s: float) -> Decision:
        """Nobody serves my stage and I hold the run's start at best: policy/recovery says what to do."""
        seen = [sighting.record for sighting in self._membership.view.sightings.values() if sighting.record.peer != self._membership.me]
        newest_seen = max((record.step for record in seen), default=0)
        beginning = replace(self.beginning, needs_state=self.load_start is not None)
        found = plan(self._state.record, live, self._rules.num_stages, beginning=beginning, newest_seen=newest_seen)
        if found.anew:
            LOG.warning("beginning anew", reason=found.reason, remedy="if a peer has one: `peerd leave`, and `peerd join` once it is back")
            self.beginning = replace(self.beginning, reached=self.beginning.step)  # said once
        if found.begin:
            return Decision(Act.SERVE if self.load_start is None else Act.LOAD_START, found.reason)
        if found.load is None:
            return Decision(Act.WAIT, found.reason)
        if found.load != self._resumable[0]:
            self._resumable = (found.load, now_s)
        if now_s - self._resumable[1] < self._rules.ttl_s:  # others, with a newer step, may be on their way
            return Decision(Act.WAIT, found.reason)
        return Decision(Act.LOAD, found.reason, step=found.load)

    async def _load_start(self) -> None:
        assert self.load_start is not None
        try:
            found = await self.load_start()
        except (RemoteError, StageError) as error:
            LOG.info("the state that the run begins from could not be had yet", error=error.message)
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        LOG.info("beginning from the state of an earlier run", step=found.step)
        await self._take_over(found)

    async def _take_over(self, found: Downloaded) -> None:
        await self._executor.run(Priority.CONTROL, lambda: self._state.load(found.tensors, found.step, found.lineage, found.history))
        self.load_start = None

    async def _load(self, decision: Decision) -> None:
        """Take over a checkpoint; a joiner at that step then serves like any other."""
        assert decision.step is not None
        step = decision.step
        found = await asyncio.to_thread(self.load_checkpoint, step)
        LOG.info("resuming from disk" if found else "the checkpoint is gone", step=step, reason=decision.reason)
        try:
            if found is not None:
                await self._take_over(found)
                self.resumed_at = step
        except BadMessageError as error:  # of a run that the organiser has changed since
            LOG.warning("the checkpoint does not fit the run", step=step, error=error.message)
        await self._executor.run(Priority.CONTROL, lambda: self._state.offer_checkpoints(()))

    async def _apply_fence(self) -> None:
        incarnation, self._fence_to = self._fence_to, 0
        self._lost_since_s = None
        if self._rounds.open is not None:
            await self._rounds.close(self._rounds.open.roster.average_id, "fenced")
        await self._executor.run(Priority.CONTROL, lambda: self._state.fence(incarnation))
        self.on_change()

    def _tell(self, decision: Decision, step: int) -> None:
        """The log, once for what is tried again and again."""
        told = (decision.act, decision.reason, step)
        if decision.act in _TOLD and told != self._told:
            tell = LOG.warning if decision.act is Act.SKIP_STEP else LOG.info
            tell(_TOLD[decision.act], step=step, reason=decision.reason)
            self._told = told

    async def _do(self, decision: Decision) -> None:
        before = self._state.record
        self._tell(decision, before.step)
        match decision.act:
            case Act.COMMIT:
                await self._commit(decision)
            case Act.FETCH_AVERAGE:
                await self._fetch(decision)
            case Act.FETCH_TIED:
                await self._fetch_tied(decision)
            case Act.COPY_TIED:
                await self._copy_tied(decision)
            case Act.RELOAD:
                await self._reload(decision.peer)
            case Act.CLOSE_ROUND:
                await self._close_round(decision.reason)
            case Act.RESET_LEDGER:
                self.resets += 1
                await self._executor.run(Priority.CONTROL, self._state.reset_ledger)
            case Act.PROPOSE:
                await self._propose(decision)
            case Act.SKIP_STEP:
                self._lost_since_s = None  # the next step is not lost before it has looked so for as long
                await self._executor.run(Priority.CONTROL, self._state.skip_step)
            case Act.SERVE:
                await self._executor.run(Priority.CONTROL, self._state.serve)
            case Act.LOAD:
                await self._load(decision)
            case Act.LOAD_START:
                await self._load_start()
            case Act.WAIT:
                return
        if self._state.record != before and decision.act not in (Act.PROPOSE, Act.COMMIT):
            self.on_change()

    async def _commit(self, decision: Decision) -> None:
        try:
            held = await self._executor.run(Priority.CONTROL, lambda: self._state.commit(decision.norm, decision.tied_sum))
        except WrongStateError:
            return
        self._rounds.applied(held)
        self._count(held.roster)
        self._refused.clear()
        self._unanswered.clear()
        self._attempt = 0
        self._committed.set()
        self._committed = asyncio.Event()
        await asyncio.sleep(0)  # who waits for it computes while the rest of the swarm is told
        self.on_commit()

    def _count(self, roster: Roster) -> None:
        """What was applied, counted from its roster and not from the rule that should have made it exact."""
        union, total = 0, 0
        for entry in roster.entries:
            union |= entry.done
            total += entry.done.bit_count()
        twice, lost = total - union.bit_count(), self._rules.num_microbatches - union.bit_count()
        if twice or lost:
            LOG.error("an average is not exact", step=roster.step, counted_twice=twice, lost=lost)
        self.duplicates += twice
        self.lost += lost

    async def _fetch(self, decision: Decision) -> None:
        assert decision.peer is not None
        assert decision.step is not None
        if self._rounds.open is not None:
            await self._rounds.close(self._rounds.open.roster.average_id, "a mate has the average")
        asked = self._state.record
        try:
            found = await self._rounds.fetch(decision.peer, decision.step)
            if decision.tied_sum is not None and (found.tied is None or found.tied.id != decision.tied_sum):
                raise WrongStateError("it has finished the step with another tied sum than it told")
        except (WrongStateError, BadMessageError):
            self._refused[decision.peer, decision.step] = clock_s()
            return
        except RemoteError:
            self._unanswered[decision.peer, decision.step] = clock_s()
            return
        now = self._state.record
        if (now.incarnation, now.ledger_no, now.step) != (asked.incarnation, asked.ledger_no, asked.step):
            return
        if now.phase is Phase.JOINING:
            average = (found.roster, found.flat_sum, decision.norm, found.tied)
            self._rounds.applied(await self._executor.run(Priority.CONTROL, lambda: self._state.catch_up(*average)))
        else:
            taken = (found.roster, found.flat_sum, found.tied)
            await self._executor.run(Priority.CONTROL, lambda: self._state.take_average(*taken))

    async def _fetch_tied(self, decision: Decision) -> None:
        """What my average lacks of a tied weight, from whoever has it."""
        peer, step, wanted, given = decision.peer, decision.step, decision.tied_sum, decision.ask_for
        assert peer is not None
        assert step is not None
        assert wanted is not None
        assert given is not None
        average_id = self._state.record.average_id
        try:
            values = await self._rounds.fetch_tied(peer, step, given)
        except (WrongStateError, BadMessageError):
            self._refused[peer, step] = clock_s()
        except RemoteError:
            self._unanswered[peer, step] = clock_s()
        else:
            await self._executor.run(Priority.CONTROL, lambda: self._state.take_tied(average_id, wanted, given, values))

    async def _copy_tied(self, decision: Decision) -> None:
        """The other stage's copy of a tied weight in place of mine."""
        assert decision.peer is not None
        mine = self._state.record
        LOG.warning("the copies of the tied weight differ: taking the other stage's", step=mine.step, peer=decision.peer)
        other = other_end(mine.stage, self._rules.num_stages)
        assert other is not None
        try:
            found = await self._downloader.download(other, self.most_state_bytes, decision.peer, tied_only=True)
            await self._executor.run(Priority.CONTROL, lambda: self._state.copy_tied(found.tensors, found.step))
        except (RemoteError, StageError):
            self._refused[decision.peer, mine.step] = clock_s()

    async def _reload(self, peer: PeerId | None) -> None:
        """Drop the ledger, download, and be a joiner until equal to the stage."""
        if self._rounds.open is not None:
            await self._rounds.close(self._rounds.open.roster.average_id, "reloading")
        self.reloads += 1
        await self._executor.run(Priority.CONTROL, self._state.begin_joining)
        self.on_change()
        try:
            found = await self._downloader.download(self._state.record.stage, self.most_state_bytes, peer)
            await self._take_over(found)
            self._refused.clear()
        except (RemoteError, StageError):
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _close_round(self, reason: str) -> None:
        self._propose_after_s = clock_s() + RETRY_PAUSE_S
        if self._rounds.open is not None:
            await self._rounds.close(self._rounds.open.roster.average_id, reason)
        else:
            await self._executor.run(Priority.CONTROL, self._state.close_round)

    async def _propose(self, decision: Decision) -> None:
        assert decision.roster is not None
        self._attempt += 1
        if await self._rounds.lead(decision.roster):
            self._propose_after_s = clock_s() + RETRY_PAUSE_S


def rules_of(manifest: Manifest, ttl_s: float, averaging_s: float) -> StepRules:
    """Of a run, as its manifest sets them."""
    train = manifest.train
    return StepRules(
        num_stages=train.num_stages,
        num_microbatches=train.microbatches_per_step,
        ttl_s=ttl_s,
        averaging_s=averaging_s,
        last_step=train.steps,
        shares_norms=train.shares_norms,
        ties_stages=manifest.ties_stages,
    )


def _recent(asked: dict[tuple[PeerId, int], float]) -> frozenset[tuple[PeerId, int]]:
    """Drop what is too old to count, in place, and give the rest."""
    now_s = clock_s()
    for key in [key for key, at_s in asked.items() if now_s - at_s > FORGET_REFUSAL_S]:
        del asked[key]
    return frozenset(asked)
