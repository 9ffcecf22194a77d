"""The stepper: asks policy/ for this peer's next act in the life of a step, and performs it, one act at a time."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from typing import Protocol

import structlog

from peerd.averaging.rounds import Rounds
from peerd.background import INTERNAL_ERRORS
from peerd.errors import BadMessageError, RemoteError, StageError, WrongStateError
from peerd.policy.step import acts
from peerd.policy.step.acts import Act
from peerd.policy.step.clocks import StepClocks
from peerd.policy.step.recovery import Beginning, is_given_up, plan
from peerd.policy.step.roster import Roster
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide, looks_lost
from peerd.stage.download import Downloader
from peerd.stage.executor import Executor, Priority
from peerd.stage.snapshots import Downloaded
from peerd.stage.state import StageState
from peerd.step.believing import Belief
from peerd.step.fetching import Fetching
from peerd.step.joining import Joining
from peerd.step.proving import Proving
from peerd.step.rules import rules_in
from peerd.step.trials import Trials
from peerd.swarm.clock import clock_s
from peerd.swarm.membership import Membership
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase

TICK_S, IDLE_TICK_S = 0.1, 1.0
"""The longest time between two decisions: while time alone may change the decision, and otherwise."""
RETRY_PAUSE_S = 0.25
LOG = structlog.get_logger()
_TOLD: dict[type[Act], str] = {
    acts.Reload: "downloading the stage's state",
    acts.GiveUpAverage: "average given up",
    acts.DropSums: "a part of the ledger dropped",
    acts.SkipStep: "step given up: it is not exact",
    acts.StepBack: "going back to a checkpoint",
}
"""The acts that cost work or exactness, with the text that the log shows for each."""


class StepHost(Protocol):
    """The peer that steps, as the stepper sees it."""

    def announce(self) -> None:
        """Publish the record: phase, step or ledger has changed. Commits and rounds are published separately."""

    def committed(self) -> None:
        """Called after a commit: this peer is at the next step."""

    def load_checkpoint(self, step: int) -> Downloaded | None:
        """The stage's checkpoint of this step; None if it is gone. Called on another thread."""

    async def load_start(self) -> Downloaded:
        """The stage's part of the state that the run begins from. Raises RemoteError or StageError while nobody can give it."""


class Stepper:
    """Drives one stage's state by the rules of stepping.py."""

    def __init__(
        self,
        state: StageState,
        executor: Executor,
        membership: Membership,
        rounds: Rounds,
        downloader: Downloader,
        rules: StepRules,
        beginning: Beginning,
        host: StepHost,
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
        self._trials = Trials(executor)
        self.joining = Joining(state, downloader)
        self._belief = Belief(state, membership, rounds, rules)
        self._fetching = Fetching(state, executor, rounds, downloader, self._trials, self.joining, self._belief)
        self.proving = Proving(state, executor, membership, downloader, rules)
        self._done_seen = 0
        self._fence_to = 0
        self._committed = asyncio.Event()
        """Set at the next commit, and then replaced by a new event."""
        self._retiring = asyncio.Event()
        self._retired = asyncio.Event()
        self._clocks = StepClocks()
        self._beginning = self._at_first = beginning
        self._host = host
        self.decision: Act = acts.Wait("just begun")
        self._done: tuple[Act, PeerRecord] | None = None
        """The last act and the record before it."""
        self._told: tuple[type[Act], str, int] | None = None
        self.resumed_at: int | None = None
        """The step of the checkpoint from which this peer resumed."""
        self.reloads = 0
        self.resets = 0
        self.duplicates = 0
        """Microbatches counted twice in averages that this peer applied; must stay 0."""
        self.lost = 0
        """Microbatches missing from averages that this peer applied; must stay 0."""

    async def run(self) -> None:
        while not self._retiring.is_set():
            try:
                await self._take_turn()
            except Exception as error:  # a bug
                await self._trials.failed(error, self._state.record.step, self.decision.reason)
        self._fetching.stop()
        self.proving.end()
        await self._executor.run(Priority.LEDGER, self._state.begin_joining)
        await self._rounds.close_present("leaving")
        self._host.announce()
        self._retired.set()

    async def _take_turn(self) -> None:
        is_quiet = self._membership.is_quiet
        if self._fence_to:
            await self._apply_fence()
        await self.proving.keep_up()
        record = self._state.record
        act = acts.Wait("listening after a fence") if is_quiet and record.phase is Phase.JOINING else self._decide_or_wait()
        in_vain = (act, record) == self._done
        self.decision, self._done = act, None
        if isinstance(act, acts.Wait) or in_vain:  # an act that changed nothing may not even have let other tasks run
            await self._membership.changed(TICK_S if self._is_pressed or in_vain else IDLE_TICK_S)
        else:
            await self._do(act)
            self._done = (act, record)

    @property
    def _is_pressed(self) -> bool:
        """Whether time alone may change the decision; every other change wakes the stepper."""
        if self._lost_since_s is not None or self._clocks.run or self._state.record.phase is not Phase.ACCUMULATING:
            return True
        return self._fetching.remembers or self._propose_after_s + TICK_S > clock_s()

    async def retire(self) -> None:
        """Stop serving for good, and return once this peer is JOINING."""
        self._retiring.set()
        self._membership.wake()
        await self._retired.wait()

    async def committed(self, timeout_s: float) -> None:
        """Wait until this peer commits a step, or for `timeout_s` seconds. Waiters go on in the order of their calls."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._committed.wait()

    def fence(self, incarnation: int) -> None:
        """T3 (fence): called by gossip; the stepper fences before its next decision."""
        self._fence_to = max(self._fence_to, incarnation)
        self._membership.wake()

    def own_state(self) -> OwnState:
        current, last, record = self._rounds.open, self._rounds.last, self._state.record
        roster = self._state.round  # read after the record: in phase AVERAGING it was set before the record
        return OwnState(
            record=record,
            round_roster=roster if roster is not None and self._rounds.runs(roster.average_id) else None,
            round_still_s=current.still_s if current else 0.0,
            judge_silent_s=current.judge_silent_s if current else math.inf,
            round_lost=current.lost if current else frozenset(),
            joined=frozenset(self._rounds.joined),
            refuted=self._belief.refuted,
            giving_to=last.giving_to if last else frozenset(),
            propose_after_s=self._propose_after_s,
            attempt=self._attempt,
            last_in_turn=self._rounds.absences.sidelining.last_in_turn(record.step),
            lost_since_s=self._lost_since_s,
            keeps_versions=self._state.keeps_versions,
            fetching=self._fetching.sections,
            refused=self._fetching.refused(),
            unanswered=self._fetching.unanswered(),
            unbelieved=self._fetching.unbelieved(),
            reloads_in_vain=self._fetching.reloads_in_vain,
            lacks_previous=self._fetching.lacks_previous(self._beginning.step),
            previous_s=self._fetching.previous_s,
            has_start=not self._beginning.needs_state,
        )

    def _decide_or_wait(self) -> Act:
        """A bug in a rule shows in what some record says. That peer must not end this daemon, and what it says changes."""
        try:
            return self._decide()
        except Exception as error:
            INTERNAL_ERRORS.report("a rule of the step", error, step=self._state.record.step)
            return acts.Wait(f"internal error in a rule: {error!r}")

    def _decide(self) -> Act:
        own = self.own_state()
        live = self._clocks.claims.believed(self._membership.live(), own.record, self._rules, clock_s())
        now = Situation(own, live, clock_s(), rules_in(live, self._rules, self._state.microbatch_size))
        if self._rounds.absences.look(now, self._membership.bans.left()):
            self._host.announce()
        self._belief.look(now)
        grew, self._done_seen = own.record.done != self._done_seen, own.record.done
        if not looks_lost(now) or grew:
            self._lost_since_s = None
        elif self._lost_since_s is None:
            self._lost_since_s = now.now_s
        in_vain = self.joining.why_wait(live, now.now_s) if own.record.phase is Phase.JOINING else ""
        own = replace(own, lost_since_s=self._lost_since_s, cannot_catch_up=in_vain)
        own = self.proving.noted(self._clocks.noted(own, live, self._rules, now.now_s), now)
        resumes = own.record.phase is Phase.JOINING and own.record.step <= self._beginning.step and not live.serving(own.record.stage)
        act = self._recover(now) if resumes else decide(replace(now, own=own))
        return self._clocks.once_settled(act, now.rules, now.now_s)

    def _recover(self, now: Situation) -> Act:
        """The act of a joiner that holds no more than the run's start, while nobody serves its stage: policy/step/recovery.py."""
        seen = [sighting.record for sighting in self._membership.view.sightings.values() if sighting.record.peer != self._membership.me]
        newest_seen = max((record.step for record in seen), default=0)
        beginning = self._beginning
        act = plan(now.mine, now.live, self._rules, beginning=beginning, newest_seen=newest_seen)
        if isinstance(act, acts.Serve | acts.LoadStart) and beginning.loses_steps:
            LOG.warning("beginning anew", reason=act.reason, remedy="if a peer has one: `peerd leave`, and `peerd join` once it is back")
            self._beginning = replace(beginning, reached=beginning.step)  # so that this is logged once
        return act

    async def _load_start(self) -> None:
        try:
            found = await self._host.load_start()
        except (RemoteError, StageError) as error:
            LOG.info("nobody could give the state that the run begins from yet", error=error.message)
            await asyncio.sleep(RETRY_PAUSE_S)
            return
        LOG.info("beginning from the state of an earlier run", step=found.step)
        await self._take_over(found)

    async def _take_over(self, found: Downloaded) -> None:
        await self._trials.update(lambda: self._state.load(found.tensors, found.step, found.lineage, found.history))
        self._beginning = replace(self._beginning, needs_state=False)

    async def _load_checkpoint(self, act: acts.LoadCheckpoint) -> None:
        """Load a checkpoint; the joiner is then at its step and serves by J1 (join). A checkpoint that fails is offered no more."""
        step, found = act.step, await asyncio.to_thread(self._host.load_checkpoint, act.step)
        if found is not None and not act.is_lasting:
            mates = self._membership.live().serving(self._state.record.stage)
            found = None if is_given_up(step, found.lineage, mates) else found
        LOG.info("resuming from disk" if found else "the checkpoint is gone, or given up by the run", step=step, reason=act.reason)
        try:
            if found is not None:
                await self._take_over(found)
                self.proving.end()
                self.resumed_at = step
                return
        except BadMessageError as error:  # the organiser has changed the run since it was written
            LOG.warning("the checkpoint does not fit the run", step=step, error=error.message)
        left = [held for held in self._state.record.checkpoints if held != step]
        await self._executor.run(Priority.LEDGER, lambda: self._state.offer_checkpoints(left))

    async def _give_up_state(self) -> None:
        """Serve no more, and hold the first weights, from which the run begins unless it begins from a state. It is not to begin anew."""
        await self._trials.update(lambda: self._state.give_up_state(self._beginning.step))
        self._beginning = replace(self._beginning, founder=False, needs_state=self._at_first.needs_state)

    async def _apply_fence(self) -> None:
        incarnation, self._fence_to = self._fence_to, 0
        self._lost_since_s = None
        self._clocks.restart()
        await self._executor.run(Priority.LEDGER, lambda: self._state.fence(incarnation))
        await self._rounds.close_present("fenced")
        self._rounds.absences.sidelining.forget()
        self._host.announce()

    def _is_left_behind(self) -> bool:
        """Whether a mate is at a later step."""
        mine = self._state.record
        return any(mate.step > mine.step for mate in self._membership.live().serving(mine.stage))

    def _tell(self, act: Act, step: int) -> None:
        """Log an act that costs work or exactness; one that is repeated at the same step for the same reason is logged once."""
        told = (type(act), act.reason, step)
        if told[0] in _TOLD and told != self._told:
            tell = LOG.warning if isinstance(act, acts.SkipStep) else LOG.info
            tell(_TOLD[told[0]], step=step, reason=act.reason)
            self._told = told

    async def _do(self, act: Act) -> None:
        before = self._state.record
        self._tell(act, before.step)
        match act:
            case acts.Wait():
                return
            case acts.Propose(roster=roster):
                await self._propose(roster)
            case acts.Commit(norm=norm, tied_sum=tied_sum):
                await self._commit(norm, tied_sum)
            case acts.FetchAverage():
                await self._rounds.close_present("a mate has the average")
                await self._fetching.average(act)
            case acts.FetchSection():
                self._fetching.begin_section(act, self._took_section)
            case acts.FetchTied():
                await self._fetching.tied(act)
            case acts.CopyTied():
                await self._fetching.copy_of_tied(act)
            case acts.FetchPrevious():
                await self._fetching.previous(act, self._is_left_behind, lambda: self.proving.begin(previous=True))
            case acts.Reload():
                await self._reload(act)
            case acts.CloseRound(reason=reason):
                self._propose_after_s = clock_s() + RETRY_PAUSE_S
                await self._rounds.close_present(reason)
            case acts.GiveUpAverage():
                await self._rounds.give_up_average()
            case acts.DropSums(names=names):
                self.resets += 1
                await self._executor.run(Priority.LEDGER, lambda: self._state.drop_sums(names))
            case acts.SealBatch(name=name):
                await self._executor.run(Priority.LEDGER, lambda: self._state.seal_batch(name))
            case acts.SkipStep():
                self._lost_since_s = None  # the next step must look lost for the whole time again
                await self._trials.update(self._state.skip_step)
            case acts.StepBack():  # once no mate serves either, J3 (resume) says which peer loads the checkpoint
                await self._give_up_state()
                await self._rounds.close_present("going back to a checkpoint")
            case acts.GiveUpState(reason=reason):
                await self._give_up_state()  # until it is gone nothing may count as proven
                self.proving.give_up(reason)
            case acts.Serve():
                await self._executor.run(Priority.CONTROL, self._state.serve)
            case acts.LoadCheckpoint():
                await self._load_checkpoint(act)
            case acts.LoadStart():
                await self._load_start()
        if self._state.record != before and not isinstance(act, acts.Propose | acts.Commit):
            self._host.announce()

    def _took_section(self) -> None:
        """A section has come, or not: what is told to others is told with the next record, unless it was the last one."""
        if self._state.record.phase is Phase.AVERAGED:
            self._host.announce()
        self._membership.wake()

    async def _commit(self, norm: float | None, tied_sum: AverageId | None) -> None:
        try:
            held = await self._trials.update(lambda: self._state.commit(norm, tied_sum))
        except WrongStateError:
            return
        self._clocks.committed(clock_s())
        self._rounds.applied(held)
        self._count(held.roster)
        self._fetching.forget()
        self._attempt = 0
        self._committed.set()
        self._committed = asyncio.Event()
        await asyncio.sleep(0)  # waiting microbatches start to compute before the swarm is told
        self._host.committed()

    def _count(self, roster: Roster) -> None:
        """Count duplicates and losses in an applied average from its roster, independently of the rules that should make it exact."""
        union, total = 0, 0
        for entry in roster.entries:
            union |= entry.done
            total += entry.done.bit_count()
        twice, lost = total - union.bit_count(), self._rules.num_microbatches - union.bit_count()
        if twice or lost:
            LOG.error("an average is not exact", step=roster.step, counted_twice=twice, lost=lost)
        self.duplicates += twice
        self.lost += lost

    async def _reload(self, act: acts.Reload) -> None:
        """Become a joiner and download the state. A peer that has one drops it only once a donor has shown the header of another."""
        donor: PeerId | None = act.peer
        if self._state.record.phase is not Phase.JOINING or self._state.record.step:
            donor = await self._fetching.donor(act)
            if donor is None:
                return
        self.reloads += 1
        self.joining.downloads(clock_s())
        await self._executor.run(Priority.LEDGER, self._state.begin_joining)
        await self._rounds.close_present("reloading")
        self._host.announce()
        try:
            await self._take_over(await self._downloader.download(self._state.record.stage, donor))
            self.proving.begin()
            self._fetching.previous_s = self._downloader.previous_s
            self._fetching.forget_refusals()
        except (RemoteError, StageError):
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _propose(self, roster: Roster) -> None:
        self._attempt += 1
        if await self._rounds.lead(roster):
            self._propose_after_s = clock_s() + RETRY_PAUSE_S
