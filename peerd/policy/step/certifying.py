"""Rule 18 (certify) as a peer sees it in its situation: whether the averages of its step count, and when it gives its own up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from peerd.policy.step.acts import Act, FetchPrevious, GiveUpState, Reload, Serve, Wait
from peerd.policy.step.certificates import apart_from_most, is_backed_by, voters, why_unproven
from peerd.policy.step.ledger import FEWEST, stage_step
from peerd.policy.step.situation import Situation
from peerd.table.record import PeerId, PeerRecord, Phase


def why_uncounted(now: Situation) -> str:
    """Why the averages of this step do not count yet; empty if they do, or the run certifies none."""
    mine, rules = now.mine, now.rules
    if not rules.certifies:
        return ""
    if not now.counts(mine.average_id):
        return "no more than half of the stage's members hold this average"
    others = (why_unproven(now.live, stage, mine.step, now.is_late) for stage in range(rules.num_stages) if stage != mine.stage)
    return next(filter(None, others), "")


def why_give_up(now: Situation) -> str:
    """Why this peer holds its average no more; empty if it keeps it."""
    mine = now.mine
    if mine.phase is not Phase.AVERAGED or not now.rules.certifies or now.counts(mine.average_id):
        return ""
    if now.own.refuted is not None:
        return "one of its reducers has signed two slices of it"
    words = voters(mine, now.live)
    elsewhere = sum(m.step > mine.step and not is_backed_by(m, mine.average_id, mine) for m in words)
    has_majority = len(words) >= FEWEST and 2 * elsewhere > len(words)
    return "most of the stage has finished the step with another one" if has_majority else ""


def better_mates(now: Situation) -> list[PeerRecord]:
    """Rules 3 (reload) and J1 (join): the mates at this step with a better lineage.

    Where the run certifies it is that of more than half of the stage, whichever is smaller; only where all are at this step, and no
    lineage is that of more than half, the smallest one. A joiner has no word in it.
    """
    mine, mates = now.mine, now.mates
    at_step = [m for m in mates if m.step == mine.step]
    smaller = [m for m in at_step if m.worth < mine.worth]
    serving = [*mates] if mine.phase is Phase.JOINING else [mine, *mates]
    if not now.rules.certifies or len(serving) < FEWEST:
        return smaller
    [(lineage, number)] = Counter(m.lineage for m in serving if m.step == mine.step).most_common(1) or [(mine.lineage, 0)]
    if 2 * number > len(serving):
        return [m for m in at_step if m.lineage == lineage != mine.lineage]
    return smaller if len(at_step) == len(mates) else []


def reload_better(now: Situation) -> Reload | None:
    """Download the state of the mates at this step with a better lineage; None if there are none."""
    better = min(better_mates(now), key=lambda m: m.worth, default=None)
    if better is None:
        return None
    wanted = better.lineage if now.rules.certifies else None
    return Reload("a stage mate has the better lineage", better.peer, now.mine.step, wanted)


def are_ahead(now: Situation, ahead: Sequence[PeerRecord]) -> bool:
    """Whether this peer gives its ledgers up for a state that these mates say is ahead.

    Where the run certifies, half of the stage has to be ahead, or another stage: one that has finished this step has seen it averaged.
    """
    mine, rules = now.mine, now.rules
    words = 1 + len(now.mates)
    if not rules.certifies or words < FEWEST or 2 * len(ahead) >= words:
        return True
    steps = (stage_step(now.live, stage) for stage in range(rules.num_stages) if stage != mine.stage)
    return max((step for step in steps if step is not None), default=0) > mine.step


def ahead_alone(now: Situation) -> list[PeerId]:
    """Mates that say that they are ahead of this peer, where too few of the stage are for it to follow them: T6 (sideline) counts them."""
    if not now.rules.certifies or now.mine.phase is Phase.JOINING:
        return []
    ahead = [m for m in now.mates if m.step > now.mine.step]
    return [] if are_ahead(now, ahead) else [m.peer for m in ahead]


def holding_alone(now: Situation) -> list[PeerId]:
    """Mates that hold an average of this step that does not count, where nobody is in a round that could make it count.

    Nobody proposes meanwhile: rule 18 (certify) counts those of which that stays true. In groups averages come by sections.
    """
    mine, live = now.mine, now.live
    if not now.rules.certifies or mine.phase is not Phase.ACCUMULATING or now.rules.num_sections > 1:
        return []
    members = [m for m in live.members(mine.stage, mine.step) if m.peer != mine.peer]
    if any(m.phase is Phase.AVERAGING for m in members):
        return []
    return [m.peer for m in members if m.phase is Phase.AVERAGED and not now.counts(m.average_id)]


def telling_early(now: Situation) -> frozenset[PeerId]:
    """Peers of the stage that tell an average of this step which neither this peer nor another member tells: T6 (sideline)."""
    mine, live = now.mine, now.live
    told = {m.peer: m.average_id for m in (*live.members(mine.stage, mine.step), mine) if m.phase is Phase.AVERAGED}
    doubted = (m for m in live.suspected if m.stage == mine.stage)
    holders = [m for m in (*now.mates, *doubted) if m.step == mine.step and m.phase is Phase.AVERAGED]
    return frozenset(m.peer for m in holders if all(each != m.average_id for peer, each in told.items() if peer != m.peer))


def mates_to_follow(now: Situation) -> list[PeerRecord]:
    """The mates by whose steps a joiner goes."""
    apart = apart_from_most(now.mates) if now.rules.certifies else ()
    return [m for m in now.mates if m.peer not in apart]


def as_proven(now: Situation, act: Act) -> Act:
    """Rule 21 (prove): the act of a joiner in place of `act`, as long as its downloaded state is not known to be that of its stage."""
    if now.own.disproved:
        return GiveUpState(now.own.disproved)
    return Wait(now.own.unproven) if now.own.unproven and isinstance(act, Serve | FetchPrevious) else act
