"""The next act of a peer in the life of a step: the first rule that holds, in the order of this file.

A step without faults goes through these points, from top to bottom:

    microbatches are added        working: "6 of 16 microbatches done"
    nothing is missing            _propose, by the leader of the stage, or by the next member where the leader is mute
    the round exchanges slices    wait: "the round is under way" (averaging/ does it: rule 8, exchange)
    the average is complete       wait until every stage has averaged; _fetch_tied if two stages hold one weight
    every stage has averaged      _commit, and the next step begins

The other rules handle peers that fell behind, failed rounds, and averages or copies of a weight that differ. `decide` reads a peer's own
exact state and the live view, and returns one act with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from peerd.policy.hashing import turn_of
from peerd.policy.round.proposing import num_in_turn
from peerd.policy.step import acts
from peerd.policy.step.acts import Act
from peerd.policy.step.asides import sums_to_drop
from peerd.policy.step.batches import batch_to_seal
from peerd.policy.step.certifying import are_ahead, as_proven, mates_to_follow, reload_better, why_give_up, why_uncounted
from peerd.policy.step.judging import given_up_after_s
from peerd.policy.step.ledger import full, held, stage_step, why_no_average, why_no_work, why_not_averaged
from peerd.policy.step.recovery import (
    checkpoint_to_bring,
    checkpoint_to_return_with,
    holds_later,
    is_left_behind,
    is_served_everywhere,
    step_of_stage_left_behind,
    step_to_go_back_to,
)
from peerd.policy.step.roster import compose
from peerd.policy.step.sections import comes_by_sections, is_to_open, section_to_fetch
from peerd.policy.step.situation import Situation
from peerd.policy.step.tied import better_copy, witnesses
from peerd.table.record import PeerRecord, Phase

LONG_ROUND_S = 2.0
"""A round that is expected to take so long says how long it takes."""


def decide(now: Situation) -> Act:
    """The first rule that holds; Wait when none does."""
    if now.mine.phase is Phase.JOINING:
        return as_proven(now, _join(now))
    for rule in _RULES:
        act = rule(now)
        if act is not None and not (now.own.reloads_in_vain and isinstance(act, acts.Reload)):
            return act
    return _wait(now)


def _join(now: Situation) -> Act:
    """Rules J1 (join), J5 (bring) and J6 (return): load a newer checkpoint, catch up from a mate's kept averages, or download again.

    A joiner serves once no mate is ahead of it, or has a better lineage at its step.
    """
    mine, rules, mates = now.mine, now.rules, mates_to_follow(now)
    newest = max((m.step for m in mates), default=None)
    if now.live.is_outlived(mine):
        return _follow_run(now) or acts.Wait("the run has gone back while this peer joined")
    if newest is None or newest < mine.step:
        if (held_back := step_to_go_back_to(mine, now.live, rules)) is not None:
            return _step_back(now) or acts.Wait(f"the run can resume only at step {held_back}")
        far = now.other_end_step
        if newest is not None and far is not None and far < mine.step and not is_left_behind(mine, newest, now.live, rules):
            peer = min(mates, key=lambda m: (-m.step, turn_of(mine.peer, m.peer))).peer
            return acts.Reload("the other end of the tied weight needs a step whose sum this peer does not hold", peer)
        return acts.Serve("no peer of the stage is ahead of what this peer holds")
    brought = checkpoint_to_bring(mine, now.live, rules)
    if brought is not None:
        return brought
    back = step_to_go_back_to(mine, now.live, rules)
    if back is not None:
        return acts.Wait(f"the stage is about to go back to step {back}")
    if holds_later(mine, now.live) and not _has_heard_of_all(now):
        return acts.Wait(f"the stage is at step {newest}, this peer has later ones on disk, and it has not heard enough of every stage yet")
    returning = checkpoint_to_return_with(mine, mates, rules)
    if returning is not None:
        return returning
    best = min(mates, key=lambda m: (-m.step, turn_of(mine.peer, m.peer)))
    if not now.own.has_start:
        return acts.Reload("the run began from a state that this peer does not hold", best.peer)
    if newest == mine.step:
        better = reload_better(now)
        if better is not None:
            return better
        if is_left_behind(mine, newest, now.live, rules):
            return acts.Wait(f"the stage seems to be at step {newest}, and other stages cannot go on from there")
        if now.own.lacks_previous:
            return _get_previous(now)
        return acts.Serve(f"at step {mine.step} like the stage")
    if now.own.cannot_catch_up:
        return acts.Wait(now.own.cannot_catch_up)
    able = now.willing([m for m in mates if m.step - m.kept_averages <= mine.step < m.step])
    if able:
        return _fetch_average(now, f"the stage is at step {newest}", able)
    return acts.Reload(f"the stage is at step {newest}, and no mate gives the average of step {mine.step}", best.peer)


def _get_previous(now: Situation) -> Act:
    """Rule J1 (join), hole 15: a joiner has the previous parameters from the first average that it applies; in a long step it fetches them.

    It waits for that average as long as fetching would take, so it waits no more than twice as long as it must.
    """
    own, since_s = now.own, now.own.lacking_since_s
    at_my_step = [m for m in now.mates if m.step == now.mine.step and m.lineage == now.mine.lineage]
    if since_s is None or now.now_s - since_s < own.previous_s or not at_my_step:
        return acts.Wait("it serves once it has the parameters of the step before: they come with the average of this step")
    peer = min(at_my_step, key=lambda m: turn_of(now.mine.peer, m.peer)).peer
    return acts.FetchPrevious(f"step {now.mine.step} takes longer than fetching the parameters of the one before", peer, now.mine.step)


def _has_heard_of_all(now: Situation) -> bool:
    """Whether some peer serves each stage, and this joiner has heard of them for one life of a record: the first word may be an old one."""
    since_s, rules = now.own.later_since_s, now.rules
    is_settled = since_s is not None and now.now_s - since_s >= rules.ttl_s
    return is_settled and is_served_everywhere(now.live, rules)


# Those that fell behind


def _commit_behind_mate(now: Situation) -> Act | None:
    """Rule 1 (commit behind): a mate at a later step proves that this step was decided (hole 6)."""
    ahead = [m for m in now.mates if m.step > now.mine.step]
    if now.mine.phase is not Phase.AVERAGED or not ahead or not now.counts(now.mine.average_id):
        return None
    peer = min(ahead, key=lambda m: (-m.step, turn_of(now.mine.peer, m.peer))).peer
    if now.lacks_norm():
        return acts.Reload("no peer tells this step's gradient norm any more", peer, now.mine.step + 1)
    if now.lacks_tied():
        return _fetch_tied(now) or acts.Reload("no peer has this step's tied gradients any more", peer, now.mine.step + 1)
    return _committing(now, "a stage mate has committed this step")


def _give_up_average(now: Situation) -> Act | None:
    """Rule 18 (certify): what this peer holds is not the average of the stage."""
    reason = why_give_up(now)
    return acts.GiveUpAverage(reason) if reason else None


def _fetch_from_ahead(now: Situation) -> Act | None:
    """Rule 2 (fetch from ahead): a peer that is one step behind takes the average that a mate has kept (holes 5 and 6)."""
    ahead = [m for m in now.mates if m.step == now.mine.step + 1]
    if not now.may_take_average or not ahead:
        return None
    able = now.willing(ahead if are_ahead(now, ahead) else now.not_left_out(ahead))
    if able:
        return _fetch_average(now, "a stage mate is one step ahead", able)
    if all(m.peer in now.unreached for m in ahead) or not are_ahead(now, ahead):
        return None  # nobody waits for this peer, which catches up once it can call one of them
    return acts.Reload("no stage mate ahead could give its average", ahead[0].peer, now.mine.step + 1)


def _copy_tied(now: Situation) -> Act | None:
    """Rule 12 (copy tied): a copy with a better history at the other stage replaces this peer's, and the step begins anew."""
    mine = now.mine
    if not now.rules.ties_stages or mine.phase is not Phase.ACCUMULATING or any(m.step > mine.step for m in now.mates):
        return None
    found = better_copy(mine, now.live, now.rules.num_stages, now.rules.certifies)
    if found is None or not now.willing([found]):
        return None
    return acts.CopyTied("the other stage's copy of the tied weight has the better history", found.peer, found.stage)


def _reload(now: Situation) -> Act | None:
    """Rule 3 (reload): the peer is too far behind, or a mate has a better lineage."""
    mine = now.mine
    if mine.phase is Phase.AVERAGING and not now.round_is_slow:
        return None
    far = [m for m in now.mates if m.step > mine.step + 1]
    if far and are_ahead(now, [m for m in now.mates if m.step > mine.step]):
        return acts.Reload(f"the stage is at step {far[0].step}", max(far, key=lambda m: m.step).peer, mine.step + 2)
    return reload_better(now)


# The round, and the ledgers that it needs


def _close_round(now: Situation) -> Act | None:
    """Rule 4 (close): a round that has lost a member, or of whose judges nothing is heard, cannot finish. Closing is always safe.

    Where a judge closes it, the exchange does so at once. A round that no task of this peer runs would stay open for ever (hole 21).
    """
    mine, roster = now.mine, now.own.round_roster
    if mine.phase is not Phase.AVERAGING:
        return None
    if roster is None:
        return acts.CloseRound("nothing at this peer would end the round")
    if min(now.own.round_still_s, now.own.judge_silent_s) > given_up_after_s(len(roster.entries), now.rules.averaging_s):
        return acts.CloseRound("nobody makes progress, and no judge says anything")
    silent = (r for r in now.live.expired if r.peer not in now.own.round_lost and not r.leaving)
    present = {(r.peer, r.incarnation) for r in (mine, *now.live.records, *silent)}
    gone = [entry.peer for entry in roster.entries if (entry.peer, entry.incarnation) not in present]
    return acts.CloseRound(f"{gone[0]} left the round") if gone else None


def _fetch_from_averaged(now: Situation) -> Act | None:
    """Rule 5 (fetch): an average that a live mate has is never computed again (hole 3)."""
    asked = [m for m in now.averaged_like_me() if now.may_ask(m)]
    able = now.willing(asked) if now.may_take_average and not comes_by_sections(now) else []
    return _fetch_average(now, "a stage mate has the average", able) if able else None


def _reset_overlap(now: Situation) -> Act | None:
    """Rule 6 (reset): of two overlapping sums the smaller is dropped; never both, because a sum only grows (hole 7)."""
    mine = now.mine
    if mine.phase is not Phase.ACCUMULATING or not mine.done:
        return None
    is_local = now.rules.batch_at(mine.step) > 0
    for mate in now.live.members(mine.stage, mine.step):
        names = sums_to_drop(mine, mate, is_local) if mate.peer != mine.peer and mate.lineage == mine.lineage else []
        if names:
            return acts.DropSums(f"the ledger shares microbatches with that of {mate.peer}", tuple(names))
    return None


def _open_ledger(now: Situation) -> Act | None:
    """Rule 16 (open): where all hold sums of groups, nobody can add what is missing. One gives its copy of a sum up, and takes it."""
    reason = "microbatches are missing, and all members hold sums of groups"
    return acts.DropSums(reason, (now.mine.peer,)) if is_to_open(now) else None


def _propose(now: Situation) -> Act | None:
    """Rule 7 (propose): the leader proposes a roster that is exact (holes 1 and 2); where it is mute the next member does (hole 33)."""
    if now.mine.phase is not Phase.ACCUMULATING or now.now_s < now.own.propose_after_s:
        return None
    since_s = now.own.complete_since_s
    ranks = 1 if since_s is None else num_in_turn(now.now_s - since_s, now.rules.averaging_s)
    rules, own = now.rules, now.own
    roster = compose(now.mine, now.live, rules.num_microbatches, own.attempt, ranks, own.last_in_turn, rules.group_size, rules.num_sections)
    return acts.Propose("every microbatch is held exactly once", roster) if roster else None


def _seal(now: Situation) -> Act | None:
    """Rule 19 (seal): where steps are local, an open batch that nobody else has computed becomes an update of this peer's own."""
    name = batch_to_seal(now)
    return None if name is None else acts.SealBatch("a batch is full, and nobody else shows a microbatch of it", name)


def _fetch_section(now: Situation) -> Act | None:
    """Rule 17 (gather): a section of the average that a mate holds."""
    found = section_to_fetch(now) if now.mine.phase is Phase.ACCUMULATING else None
    return acts.FetchSection("mates hold sections of the average", found[0], now.mine.step, found[1]) if found else None


# From the average to the next step


def _adopt_smaller(now: Situation) -> Act | None:
    """Rule 9 (adopt): two exact averages differ in rounding. While nobody has moved on, all take the one with the smaller id.

    One that counts comes before one that does not: rule 18 (certify).
    """
    mine = now.mine
    if mine.phase is not Phase.AVERAGED or _newest_step(now) > mine.step:
        return None
    smaller = now.willing([m for m in now.averaged_like_me() if now.is_worth_asking(m)])
    return _fetch_average(now, "a stage mate's average has the smaller id", smaller) if smaller else None


def _fetch_tied(now: Situation) -> Act | None:
    """Rule 13 (fetch tied): get the other stage's gradients of the tied weight, as soon as some peer there has averaged."""
    mine, wanted = now.mine, now.wanted_sum() if now.mine.phase is Phase.AVERAGED else None
    if wanted is None or wanted.id == mine.tied_sum:
        return None
    able = [source for source in wanted.sources if (source.peer, mine.step) not in now.own.refused]
    source = min(able, key=lambda each: (each.peer, mine.step) in now.own.unanswered, default=None)
    if source is None:
        return None
    reason = "the tied weight's gradients are to be summed over both stages"
    return acts.FetchTied(reason, source.peer, mine.step, wanted.id, source.id, *witnesses(wanted, source, now.live, now.rules.certifies))


def _commit(now: Situation) -> Act | None:
    """Rule 10 (commit): every stage has averaged, and no member still lacks the average, or it has had its time (holes 4, 5 and 39)."""
    is_due = now.mine.phase is Phase.AVERAGED and not _why_uncommitted(now)
    return _committing(now, "every stage has averaged") if is_due else None


def _skip_lost(now: Situation) -> Act | None:
    """Rule 11 (skip): no live peer can finish this step any more (holes 14 and 16)."""
    since_s, rules = now.own.lost_since_s, now.rules
    if since_s is None or not looks_lost(now):
        return None
    if not is_served_everywhere(now.live, rules):
        return None  # no step is finished meanwhile, and rule 14 (step back) may still find one that every stage can provide
    if step_of_stage_left_behind(now.mine, now.live, rules) is not None:
        return None  # the others go back to this step: rule 14
    is_far = _newest_step(now) >= now.mine.step + 2
    if now.now_s - since_s >= (3 * rules.ttl_s if is_far else rules.lost_wait_s):
        return acts.SkipStep("other stages moved on and nobody alive holds this step's average")
    return None


def _step_back(now: Situation) -> Act | None:
    """Rule 14 (step back): another stage died, or was out of sight, and has older steps than the serving stages hold in memory."""
    since_s, rules = now.own.back_since_s, now.rules
    if since_s is None or now.now_s - since_s < rules.lost_wait_s:
        return None
    step = step_to_go_back_to(now.mine, now.live, rules)
    if step is None:
        return None
    return acts.StepBack(f"the run can resume only at step {step}, the newest that every stage can provide", step)


def _follow_run(now: Situation) -> Act | None:
    """Rule 15 (follow): the run went back to a checkpoint while this peer was away, and its mates with it (hole 25)."""
    mine, since_s = now.mine, now.own.outlived_since_s
    if since_s is None or now.now_s - since_s < now.rules.ttl_s or mine.phase is Phase.AVERAGING or not now.mates:
        return None
    best = min(now.mates, key=lambda m: (-m.step, turn_of(mine.peer, m.peer)))
    return acts.Reload(f"the run went back to step {best.step} without this peer", best.peer)


_RULES: tuple[Callable[[Situation], Act | None], ...] = (
    _commit_behind_mate,
    _give_up_average,
    _fetch_from_ahead,
    _copy_tied,
    _reload,
    _close_round,
    _fetch_from_averaged,
    _reset_overlap,
    _open_ledger,
    _propose,
    _seal,
    _fetch_section,
    _adopt_smaller,
    _fetch_tied,
    _commit,
    _skip_lost,
    _step_back,
    _follow_run,
)


def _fetch_average(now: Situation, reason: str, able: Sequence[PeerRecord]) -> acts.FetchAverage:
    return acts.FetchAverage(reason, now.first_to_ask(able).peer, now.mine.step, now.others_to_ask(able))


def _committing(now: Situation, reason: str) -> acts.Commit:
    return acts.Commit(reason, norm=now.norm(), tied_sum=now.mine.tied_sum if now.is_tied else None)


def _why_uncommitted(now: Situation) -> str:
    """Why rule 10 (commit) does not hold yet; empty if it holds."""
    live, step, given, stages = now.live, now.mine.step, now.own.giving_to, range(now.rules.num_stages)
    reasons = (why_no_average(live, s, step) if now.is_late else why_not_averaged(live, s, step, given) for s in stages)
    if reason := next(filter(None, reasons), "") or why_uncounted(now):
        return reason
    if now.lacks_norm():
        return "the gradient norm of this step is not known"
    return "the tied weight's gradients are not summed over both stages yet" if now.lacks_tied() else ""


def _why_wait(now: Situation) -> str:
    match now.mine.phase:
        case Phase.AVERAGED:
            return _why_uncommitted(now)
        case Phase.AVERAGING:
            expected_s = now.own.round_roster.expected_s if now.own.round_roster is not None else 0.0
            return f"the round is under way, and takes about {expected_s:.0f} s" if expected_s >= LONG_ROUND_S else "the round is under way"
    if 0 < now.rules.last_step <= now.mine.step:
        return "the run is complete"
    return "all microbatches are done; their average comes next" if now.mine.phase is Phase.ACCUMULATING else "this peer does not serve yet"


def _wait(now: Situation) -> acts.Wait:
    whole, done = now.rules.num_microbatches, (held(now.live, now.mine.stage, now.mine.step) & full(now.rules.num_microbatches)).bit_count()
    works = now.mine.phase is Phase.ACCUMULATING and done < whole and not 0 < now.rules.last_step <= now.mine.step
    reason = why_no_work(now.live, now.rules.num_stages) if works else _why_wait(now)
    return acts.Wait(reason) if reason else acts.Working(f"{done} of {whole} microbatches done")


def looks_lost(now: Situation) -> bool:
    """The condition of rule 11 (skip) at this moment. The caller remembers since when it has held without a break."""
    mine, num_stages = now.mine, now.rules.num_stages
    # An average is useless without its step's norm or tied sum. Peers that knew them have finished the step long ago, or given it up.
    is_useless = mine.phase is Phase.AVERAGED and (now.lacks_norm() or (now.is_tied and now.wanted_sum() is None))
    if mine.phase is not Phase.ACCUMULATING and not is_useless:
        return False
    if any(m.step > mine.step or (m.step == mine.step and m.phase is Phase.AVERAGED and not is_useless) for m in now.mates):
        return False
    others = [stage_step(now.live, stage) for stage in range(num_stages) if stage != mine.stage]
    known = [step for step in others if step is not None]
    if any(step >= mine.step + 2 for step in known) or (is_useless and any(step > mine.step for step in known)):
        return True
    return bool(known) and len(known) == len(others) and all(step > mine.step for step in known)


def _newest_step(now: Situation) -> int:
    """The newest step that any stage is at."""
    return max(stage_step(now.live, stage) or 0 for stage in range(now.rules.num_stages))
