"""The clocks of one peer's step rules: since when what a rule waits for has held at every look, and how long a step takes."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.round.proposing import num_in_turn
from peerd.policy.step.acts import Act, LoadCheckpoint, Wait
from peerd.policy.step.claims import Claims
from peerd.policy.step.groups import forms_groups
from peerd.policy.step.ledger import why_no_average
from peerd.policy.step.recovery import holds_later, step_to_go_back_to
from peerd.policy.step.roster import is_complete, turns
from peerd.policy.step.situation import OwnState, StepRules
from peerd.policy.step.steady import Steady, TotalTime
from peerd.table.record import Aside, PeerId, Phase
from peerd.table.view import LiveView

STEPS_TIMED = 2
MUTE_STEPS, MOST_TIMES, MOST_MUTE = 16, 8, 64
"""Steps in which a member that did not propose in its turn comes after the others; twice as many each time in a row, up to so many times.
So many members are remembered."""
LAST_WORD = 4 / 3
"""In lives of a record: so long after their death the dead are believed to live, as their last record may come an announce period late."""


class StepClocks:
    """What one peer remembers from look to look. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """T3 (fence): a peer that slept has not looked meanwhile."""
        self._complete, self._averaged, self.claims = TotalTime(), Steady(), Claims()
        self._mute: dict[PeerId, tuple[int, int]] = {}
        """Members that did not propose when it was their turn: in which step, and how often in a row that was so."""
        self._exchanging = Steady()
        self._round: tuple[int, float] | None = None
        """The step of the last round that this peer was in, and for how long it has been seen in it."""
        self._resumable, self._going_back, self._outlived, self._later = Steady(), Steady(), Steady(), Steady()
        self._lacking = Steady()
        self._open: dict[Aside, float] = {}
        self._is_full = False
        """Whether an open batch is full."""
        self._committed_s: float | None = None
        self._durations_s: tuple[float, ...] = ()

    def committed(self, now_s: float) -> None:
        """Note that this peer finished a step."""
        if self._committed_s is not None:
            self._durations_s = (*self._durations_s, now_s - self._committed_s)[-STEPS_TIMED:]
        self._committed_s = now_s

    @property
    def step_s(self) -> float | None:
        """How long a step takes: the shorter of the last two, as one may have waited for a peer to come back. None: none was timed."""
        return min(self._durations_s, default=None)

    @property
    def run(self) -> bool:
        """Whether time alone may change what a peer does that accumulates."""
        return self._going_back.holds or self._outlived.holds or self._complete.holds or self._is_full

    def noted(self, own: OwnState, live: LiveView, rules: StepRules, now_s: float) -> OwnState:
        """Look once. Returns the state with the times of the rules 7 (propose), 10 (commit), 14, 15, 19 (seal) and J1 (join)."""
        mine = own.record
        complete = is_complete(mine, live, rules.num_microbatches, rules.group_size, rules.num_sections)
        waiting = None if mine.phase is Phase.AVERAGING else mine.step  # what was waited for begins anew with each round of this peer's
        if local_batch := rules.batch_at(mine.step):
            self._open = {batch: self._open.get(batch, now_s) for batch in mine.asides}
            self._is_full = any(batch.done.bit_count() >= local_batch for batch in mine.asides)
        averaged = mine.step if mine.phase is Phase.AVERAGED and _is_averaged(live, rules, mine.step) else None
        exchanging_since_s = self._exchanging.since_s(mine.step if mine.phase is Phase.AVERAGING else None, now_s)
        if exchanging_since_s is not None:
            self._round = mine.step, now_s - exchanging_since_s
        complete_since_s = self._complete.since_s(waiting, complete, now_s)
        if complete_since_s is not None and not forms_groups(live.members(mine.stage, mine.step), rules.group_size):
            self._note_mute(own, live, num_in_turn(now_s - complete_since_s, rules.averaging_s) - 1)
        return replace(
            own,
            last_in_turn=self._last_in_turn(own),
            round_s=self._round[1] if self._round is not None and self._round[0] == mine.step else None,
            complete_since_s=complete_since_s,
            averaged_since_s=self._averaged.since_s(averaged, now_s),
            step_s=self.step_s,
            open_since_s=tuple((batch.other, since_s) for batch, since_s in self._open.items()),
            back_since_s=self._going_back.since_s(step_to_go_back_to(mine, live, rules), now_s),
            outlived_since_s=self._outlived.since_s(live.is_outlived(mine) or None, now_s),
            lacking_since_s=self._lacking.since_s(mine.step if own.lacks_previous else None, now_s),
            later_since_s=self._later.since_s(holds_later(mine, live) or None, now_s),
        )

    def _last_in_turn(self, own: OwnState) -> tuple[PeerId, ...]:
        """The members that propose after all others, those that were mute in earlier steps among them."""
        step = own.record.step
        mute = (peer for peer, (at, times) in self._mute.items() if at < step <= at + _mute_steps(times))
        return (*sorted(set(mute).difference(own.last_in_turn)), *own.last_in_turn)

    def _note_mute(self, own: OwnState, live: LiveView, num: int) -> None:
        """Note the first members in turn, so many, that have let their turns pass; this peer may be among them."""
        step = own.record.step
        for peer in turns(live.members(own.record.stage, step), self._last_in_turn(own))[:num] if num else ():
            at, times = self._mute.pop(peer, (step, 0))
            if at < step or not times:
                times = min(times + 1, MOST_TIMES) if step <= at + 2 * _mute_steps(times) else 1
            self._mute[peer] = step, times
        for peer in [*self._mute][:-MOST_MUTE]:
            del self._mute[peer]

    def once_settled(self, act: Act, rules: StepRules, now_s: float) -> Act:
        """Wait with a checkpoint until it has been the one to load for a while: the dead live until their last record ends."""
        if not isinstance(act, LoadCheckpoint) or not act.is_lasting:
            return act
        since_s = self._resumable.since_s(act, now_s)
        wait_s = LAST_WORD * rules.ttl_s if act.is_lossless else rules.lost_wait_s
        return act if since_s is not None and now_s - since_s >= wait_s else Wait(act.reason)


def _is_averaged(live: LiveView, rules: StepRules, step: int) -> bool:
    """Whether every stage has the average of this step, or is past it."""
    return not any(why_no_average(live, stage, step) for stage in range(rules.num_stages))


def _mute_steps(times: int) -> int:
    return MUTE_STEPS << max(0, times - 1)
