"""What a peer does next in the life of a step: the table of rules in docs/protocol.md, first rule that holds.

`decide` reads a peer's own exact state and the live view and answers with one action and its reason. Rule 8 (exchange)
is averaging/'s doing. The page names the holes, too, and the test that guards each.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peerd.policy.hashing import peer_rank, turn_of
from peerd.policy.step.ledger import stage_step, why_not_averaged
from peerd.policy.step.norms import norm_of_step, told_by
from peerd.policy.step.roster import Roster, compose
from peerd.policy.step.tied import better_copy, other_end, sum_of_step, sum_told
from peerd.table.record import AverageId, PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

KEPT_AVERAGES = 4
"""Averaged gradients a peer logs for mates that catch up (K)."""


class Act(enum.Enum):
    WAIT = "wait"
    COMMIT = "commit"
    FETCH_AVERAGE = "fetch the average"
    FETCH_TIED = "fetch the tied weight's gradients"
    COPY_TIED = "copy the tied weight"
    RELOAD = "download the state"
    CLOSE_ROUND = "close the round"
    RESET_LEDGER = "drop my ledger"
    PROPOSE = "propose a roster"
    SKIP_STEP = "give the step up as inexact"
    SERVE = "serve"
    LOAD = "load a checkpoint"
    LOAD_START = "load the state that the run begins from"


@dataclass(frozen=True, slots=True)
class Decision:
    """One action with its reason. `peer` is whom to ask, `step` whose average to fetch, `norm` the step's gradient norm to apply.

    `tied_sum` is the sum to apply to a tied weight, or to get; then `ask_for` is what the asked peer has of it.
    """

    act: Act
    reason: str
    peer: PeerId | None = None
    step: int | None = None
    roster: Roster | None = None
    norm: float | None = None
    tied_sum: AverageId | None = None
    ask_for: AverageId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """Numbers the rules need. `averaging_s`, the averaging time, is shorter than the TTL."""

    num_stages: int
    num_microbatches: int
    ttl_s: float
    averaging_s: float
    lost_after_s: float = 40.0
    last_step: int = 0
    """The run ends at this step; 0: never."""
    shares_norms: bool = False
    """An average is applied with the whole model's gradient norm of its step (norms.py)."""
    ties_stages: bool = False
    """The first and the last stage apply the sum of their gradients to a weight that both hold (tied.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnState:
    """My exact state: the record as it is now, and what the record does not say."""

    record: PeerRecord
    round_roster: Roster | None = None
    round_since_s: float = 0.0
    """When the open round began or last made progress."""
    propose_after_s: float = 0.0
    """Not before this may I propose again (a round of mine has just failed)."""
    attempt: int = 0
    lost_since_s: float | None = None
    """Since when the stage has looked lost at every tick, without a fence and without a gradient added meanwhile."""
    refused: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, step) that said it has no such average for me. The caller forgets these after a while."""
    unanswered: frozenset[tuple[PeerId, int]] = frozenset()
    """(mate, step) that did not answer when asked for its average: others are asked first (hole 19)."""
    has_start: bool = True
    """False: the run begins from a state that I do not hold yet, so my parameters are nobody's."""


def decide(own: OwnState, live: LiveView, now_s: float, rules: StepRules) -> Decision:
    """The first rule that holds; WAIT when none does."""
    if own.record.phase is Phase.JOINING:
        return _joining(own, live, rules)
    mates = [r for r in live.serving(own.record.stage) if r.peer != own.record.peer]
    for rule in _RULES:
        decision = rule(own, mates, live, now_s, rules)
        if decision is not None:
            return decision
    return Decision(Act.WAIT, _why_wait(own, live, rules))


def looks_lost(own: OwnState, live: LiveView, rules: StepRules) -> bool:
    """Rule 11 (skip): its condition at this moment; the caller remembers since when it has been true without a break."""
    mine = own.record
    # An average without its step's norm or tied sum is of no use. Whoever could tell has finished the step long ago, or given it up.
    idle = mine.phase is Phase.AVERAGED and not _knows_what_to_apply(mine, live, rules)
    if mine.phase is not Phase.ACCUMULATING and not idle:
        return False
    mates = [r for r in live.serving(mine.stage) if r.peer != mine.peer]
    if any(m.step > mine.step or (m.step == mine.step and m.phase is Phase.AVERAGED and not idle) for m in mates):
        return False
    others = [stage_step(live, stage) for stage in range(rules.num_stages) if stage != mine.stage]
    known = [step for step in others if step is not None]
    if any(step >= mine.step + 2 for step in known):
        return True
    return bool(known) and len(known) == len(others) and all(step > mine.step for step in known)


def _knows_what_to_apply(mine: PeerRecord, live: LiveView, rules: StepRules) -> bool:
    """With the average: norm and tied sum, where the run has them."""
    if rules.shares_norms and norm_of_step(mine, live, rules.num_stages) is None:
        return False
    return not _is_tied(mine, rules) or sum_of_step(mine, live, rules.num_stages) is not None


def _is_tied(mine: PeerRecord, rules: StepRules) -> bool:
    """Whether my stage holds a weight that another holds, too."""
    return rules.ties_stages and other_end(mine.stage, rules.num_stages) is not None


def _joining(own: OwnState, live: LiveView, rules: StepRules) -> Decision:
    """Rule J1 (join): catch up from the log of a mate, or download again, and serve only when equal to the stage."""
    mine = own.record
    mates = live.serving(mine.stage)
    newest = max((m.step for m in mates), default=None)
    if newest is None or newest < mine.step:
        return Decision(Act.SERVE, "nobody of the stage is further than what I hold")
    best = min(mates, key=lambda m: (-m.step, turn_of(mine.peer, m.peer)))
    if not own.has_start:
        return Decision(Act.RELOAD, "the run began from a state that I do not hold", peer=best.peer)
    if newest == mine.step:
        better = [m for m in mates if m.step == newest and m.worth < mine.worth]
        if better:
            return Decision(Act.RELOAD, "a stage mate has the better lineage", peer=better[0].peer)
        return Decision(Act.SERVE, f"at step {mine.step} like the stage")
    able = [m for m in mates if m.step > mine.step and (m.peer, mine.step) not in own.refused]
    norms = {m.peer: told_by(m, mine.step) for m in able}
    if rules.shares_norms:
        able = [m for m in able if norms[m.peer] is not None]
    sums = {m.peer: sum_told(m, mine.step) for m in able}
    if _is_tied(mine, rules):
        able = [m for m in able if sums[m.peer] is not None]
    if newest - mine.step <= KEPT_AVERAGES and able:
        peer = _first_to_ask(own, able)
        reason = f"the stage is at step {newest}"
        return Decision(Act.FETCH_AVERAGE, reason, peer=peer, step=mine.step, norm=norms[peer], tied_sum=sums[peer])
    return Decision(Act.RELOAD, f"the stage is at step {newest}, too far to catch up", peer=best.peer)


def _commit_behind_mate(own: OwnState, mates: Sequence[PeerRecord], live: LiveView, _now_s: float, rules: StepRules) -> Decision | None:
    """Rule 1 (commit behind): the mate proves that the step was decided (hole 6)."""
    ahead = [m for m in mates if m.step > own.record.step]
    if own.record.phase is not Phase.AVERAGED or not ahead:
        return None
    norm = norm_of_step(own.record, live, rules.num_stages) if rules.shares_norms else None
    peer = max(ahead, key=lambda m: (m.step, m.peer)).peer
    if rules.shares_norms and norm is None:
        return Decision(Act.RELOAD, "nobody tells this step's gradient norm any more", peer=peer)
    wanted = sum_of_step(own.record, live, rules.num_stages) if rules.ties_stages else None
    if _is_tied(own.record, rules) and (wanted is None or wanted.id != own.record.tied_sum):
        fetching = _fetch_tied(own, mates, live, _now_s, rules)
        return fetching or Decision(Act.RELOAD, "nobody gives this step's tied gradients any more", peer=peer)
    return Decision(Act.COMMIT, "a stage mate has committed this step", norm=norm, tied_sum=wanted.id if wanted else None)


def _fetch_from_ahead(own: OwnState, mates: Sequence[PeerRecord], _live: LiveView, now_s: float, rules: StepRules) -> Decision | None:
    """Rule 2 (fetch from ahead): one step behind, take the average from the log of a mate (holes 5 and 6)."""
    mine = own.record
    if mine.phase is not Phase.ACCUMULATING and not _round_is_slow(own, now_s, rules.averaging_s):
        return None
    ahead = [m for m in mates if m.step == mine.step + 1]
    able = [m for m in ahead if (m.peer, mine.step) not in own.refused]
    if able:
        return Decision(Act.FETCH_AVERAGE, "a stage mate is one step ahead", peer=_first_to_ask(own, able), step=mine.step)
    if ahead:
        return Decision(Act.RELOAD, "no stage mate ahead could give its average", peer=ahead[0].peer)
    return None


def _reload(own: OwnState, mates: Sequence[PeerRecord], _live: LiveView, now_s: float, rules: StepRules) -> Decision | None:
    """Rule 3 (reload): too far behind, or descended from another average than a mate."""
    mine = own.record
    if mine.phase is Phase.AVERAGING and not _round_is_slow(own, now_s, rules.averaging_s):
        return None
    far = [m for m in mates if m.step > mine.step + 1]
    if far:
        return Decision(Act.RELOAD, f"the stage is at step {far[0].step}", peer=max(far, key=lambda m: m.step).peer)
    better = [m for m in mates if m.step == mine.step and m.worth < mine.worth]
    if better:
        return Decision(Act.RELOAD, "a stage mate has the better lineage", peer=min(better, key=lambda m: m.worth).peer)
    return None


def _copy_tied(own: OwnState, mates: Sequence[PeerRecord], live: LiveView, _now_s: float, rules: StepRules) -> Decision | None:
    """Rule 12 (copy tied): the other stage's copy of the weight has the better history: it becomes mine, and this step begins anew."""
    mine = own.record
    if not rules.ties_stages or mine.phase is not Phase.ACCUMULATING or any(m.step > mine.step for m in mates):
        return None
    found = better_copy(mine, live, rules.num_stages)
    if found is None or (found.peer, mine.step) in own.refused:
        return None
    return Decision(Act.COPY_TIED, "the other stage's copy of the tied weight has the better history", peer=found.peer, step=mine.step)


def _close_round(own: OwnState, _mates: Sequence[PeerRecord], live: LiveView, now_s: float, rules: StepRules) -> Decision | None:
    """Rule 4 (close): a round without progress, or one that lost a member, cannot finish. Closing is always safe."""
    roster = own.round_roster
    if own.record.phase is not Phase.AVERAGING or roster is None:
        return None
    if now_s - own.round_since_s > 2 * rules.averaging_s:
        return Decision(Act.CLOSE_ROUND, "the round made no progress for too long")
    present = {(r.peer, r.incarnation) for r in live.records} | {(own.record.peer, own.record.incarnation)}
    gone = [entry.peer for entry in roster.entries if (entry.peer, entry.incarnation) not in present]
    if gone:
        return Decision(Act.CLOSE_ROUND, f"{gone[0]} left the round")
    return None


def _fetch_from_averaged(own: OwnState, mates: Sequence[PeerRecord], _live: LiveView, now_s: float, rules: StepRules) -> Decision | None:
    """Rule 5 (fetch): never average again what a live mate has (hole 3)."""
    mine = own.record
    if mine.phase is not Phase.ACCUMULATING and not _round_is_slow(own, now_s, rules.averaging_s):
        return None
    able = [m for m in _averaged_like_me(mine, mates) if (m.peer, mine.step) not in own.refused]
    if able:
        return Decision(Act.FETCH_AVERAGE, "a stage mate has the average", peer=_first_to_ask(own, able), step=mine.step)
    return None


def _reset_overlap(own: OwnState, mates: Sequence[PeerRecord], live: LiveView, _now_s: float, _rules: StepRules) -> Decision | None:
    """Rule 6 (reset): of two ledgers that meet, the smaller is dropped; never both, for counts only grow (hole 7)."""
    mine = own.record
    if mine.phase is not Phase.ACCUMULATING or not mine.done:
        return None
    my_key = _overlap_key(mine)
    for mate in live.members(mine.stage, mine.step):
        meets = mate.peer != mine.peer and mate.lineage == mine.lineage and mate.done & mine.done
        if meets and my_key < _overlap_key(mate):
            return Decision(Act.RESET_LEDGER, f"my ledger meets that of {mate.peer}")
    return None


def _propose(own: OwnState, _mates: Sequence[PeerRecord], live: LiveView, now_s: float, rules: StepRules) -> Decision | None:
    """Rule 7 (propose): a roster that is exact (holes 1 and 2)."""
    if own.record.phase is not Phase.ACCUMULATING or now_s < own.propose_after_s:
        return None
    roster = compose(own.record, live, rules.num_microbatches, own.attempt)
    return Decision(Act.PROPOSE, "every microbatch is held exactly once", roster=roster) if roster else None


def _adopt_smaller(own: OwnState, mates: Sequence[PeerRecord], live: LiveView, _now_s: float, rules: StepRules) -> Decision | None:
    """Rule 9 (adopt): two exact averages differ in rounding; the smaller id is everyone's, while nobody has moved on."""
    mine = own.record
    if mine.phase is not Phase.AVERAGED or any((stage_step(live, s) or 0) > mine.step for s in range(rules.num_stages)):
        return None
    averaged = _averaged_like_me(mine, mates)
    smaller = [m for m in averaged if m.average_id < mine.average_id and (m.peer, m.step) not in own.refused]
    if smaller:
        return Decision(Act.FETCH_AVERAGE, "a stage mate's average has the smaller id", peer=_first_to_ask(own, smaller), step=mine.step)
    return None


def _fetch_tied(own: OwnState, _mates: Sequence[PeerRecord], live: LiveView, _now_s: float, rules: StepRules) -> Decision | None:
    """Rule 13 (fetch tied): the other stage's gradients of the weight that both hold. Not waited for until all have averaged."""
    mine = own.record
    if not rules.ties_stages or mine.phase is not Phase.AVERAGED:
        return None
    wanted = sum_of_step(mine, live, rules.num_stages)
    if wanted is None or wanted.id == mine.tied_sum:
        return None
    able = [source for source in wanted.sources if (source.peer, mine.step) not in own.refused]
    if not able:
        return None
    source = min(able, key=lambda each: (each.peer, mine.step) in own.unanswered)
    reason = "the tied weight's gradients are to be summed over both stages"
    return Decision(Act.FETCH_TIED, reason, peer=source.peer, step=mine.step, tied_sum=wanted.id, ask_for=source.id)


def _commit(own: OwnState, _mates: Sequence[PeerRecord], live: LiveView, _now_s: float, rules: StepRules) -> Decision | None:
    """Rule 10 (commit): every stage has the average, and nobody is left behind (holes 4 and 5)."""
    if own.record.phase is Phase.AVERAGED and not _uncommitted_reason(own, live, rules):
        norm = norm_of_step(own.record, live, rules.num_stages) if rules.shares_norms else None
        tied_sum = own.record.tied_sum if _is_tied(own.record, rules) else None
        return Decision(Act.COMMIT, "every stage has averaged", norm=norm, tied_sum=tied_sum)
    return None


def _skip_lost(own: OwnState, _mates: Sequence[PeerRecord], live: LiveView, now_s: float, rules: StepRules) -> Decision | None:
    """Rule 11 (skip): nobody alive holds this stage's step any more (holes 14 and 16)."""
    if own.lost_since_s is None or not looks_lost(own, live, rules):
        return None
    far = any((stage_step(live, s) or 0) >= own.record.step + 2 for s in range(rules.num_stages))
    if now_s - own.lost_since_s >= (3 * rules.ttl_s if far else max(rules.lost_after_s, 3 * rules.ttl_s)):
        return Decision(Act.SKIP_STEP, "other stages moved on and nobody alive holds this step's average")
    return None


Rule = Callable[[OwnState, Sequence[PeerRecord], LiveView, float, StepRules], Decision | None]
_RULES: tuple[Rule, ...] = (
    _commit_behind_mate,
    _fetch_from_ahead,
    _copy_tied,
    _reload,
    _close_round,
    _fetch_from_averaged,
    _reset_overlap,
    _propose,
    _adopt_smaller,
    _fetch_tied,
    _commit,
    _skip_lost,
)


def _round_is_slow(own: OwnState, now_s: float, averaging_s: float) -> bool:
    return own.record.phase is Phase.AVERAGING and now_s - own.round_since_s > averaging_s


def _first_to_ask(own: OwnState, able: Sequence[PeerRecord]) -> PeerId:
    """Who answered so far, then the smallest average."""
    return min(able, key=lambda m: ((m.peer, own.record.step) in own.unanswered, m.average_id, m.peer)).peer


def _averaged_like_me(mine: PeerRecord, mates: Sequence[PeerRecord]) -> list[PeerRecord]:
    """Mates whose average of my step was computed with my very parameters."""
    return [m for m in mates if m.step == mine.step and m.phase is Phase.AVERAGED and m.lineage == mine.lineage]


def _overlap_key(record: PeerRecord) -> tuple[int, bytes]:
    """(popcount, -hash): among equal counts the peer with the higher hash gives way."""
    inverted = bytes(255 - byte for byte in peer_rank(record.peer, record.stage, record.step))
    return (record.done.bit_count(), inverted)


def _uncommitted_reason(own: OwnState, live: LiveView, rules: StepRules) -> str:
    """Why rule 10 (commit) does not hold yet; empty when it does."""
    step = own.record.step
    for stage in range(rules.num_stages):
        reason = why_not_averaged(live, stage, step)
        if reason:
            return reason
    if rules.shares_norms and norm_of_step(own.record, live, rules.num_stages) is None:
        return "the gradient norm of this step is not known"
    if _is_tied(own.record, rules):
        wanted = sum_of_step(own.record, live, rules.num_stages)
        if wanted is None or wanted.id != own.record.tied_sum:
            return "the tied weight's gradients are not summed over both stages yet"
    return ""


def _why_wait(own: OwnState, live: LiveView, rules: StepRules) -> str:
    phase = own.record.phase
    if phase is Phase.AVERAGED:
        return _uncommitted_reason(own, live, rules)
    if phase is Phase.AVERAGING:
        return "the round is under way"
    if rules.last_step and own.record.step >= rules.last_step:
        return "the run is complete"
    return "microbatches are still missing"
