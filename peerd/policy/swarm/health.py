"""What a user should know about this peer and its run, as named states with a reason and a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from peerd.errors import PeerdError
from peerd.policy.step.contributions import UNAVERAGED_STEPS
from peerd.policy.step.diverged import DIVERGED_REMEDY, diverged_step
from peerd.policy.step.ledger import full, has_trainer, held, stage_step
from peerd.policy.step.proving import DISPUTE_REMEDY
from peerd.policy.step.roster import unreached_mates
from peerd.policy.swarm.checkup import files_needed, too_few_files
from peerd.policy.swarm.devices import kinds_of
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView

MOST_LINKS_TOLD = MOST_TOLD = 3
STALLED_AFTER_S = 30.0
STALLED_AFTER_GAPS = 3.0
STALLED_AFTER_ROUNDS = 2.0
FIRST_PROGRESS_S, FIRST_PROGRESS_EACH_S = 300.0, 150.0
"""How long a run may stand still before this peer has seen any progress, and so knows what a microbatch takes; and the same for each stage:
the first microbatch has to pass all of them, forward and back."""
NEVER_S = float("-inf")
TRAINER, OTHERS = -1, -2
"""Beside the stages' numbers: what a run needs, of which this peer notes since when it is not there."""
FEW_FILES_LEFT = 0.9


@dataclass(frozen=True, slots=True)
class HealthNote:
    """`severity` is info, warning or problem."""

    code: str
    title: str
    severity: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the run has come, how fast, and what it lacks. Its clocks begin when every stage has a peer."""

    steps: int
    """The stages' steps added up."""
    step: int
    """The step of the stage that is behind."""
    missing: int
    """The fewest microbatches that were missing since `steps` changed."""
    began_s: float
    """When `step` began."""
    since_s: float
    """When the run last came further."""
    gap_s: float = 0.0
    """The longest time without progress in this step."""
    last_gap_s: float = 0.0
    """The same of the step before."""
    step_s: float = 0.0
    """How long the step before took; 0: unknown."""
    lacks_since_s: Mapping[int, float] = field(default_factory=dict)
    """By stage without a peer, TRAINER or OTHERS: since when nobody is there; NEVER_S if this peer has never seen one."""

    def patience_s(self, num_stages: int, microbatch_s: float = 0.0) -> float:
        """How long this run may stand still, from the time that it took between two microbatches, and for a step.

        One takes `microbatch_s` in all stages, by what their peers say; 0: unknown.
        """
        first_s = max(FIRST_PROGRESS_S, FIRST_PROGRESS_EACH_S * num_stages)
        gap_s = max(self.gap_s, self.last_gap_s)
        step_s = self.step_s or self.since_s - self.began_s
        least_s = max(STALLED_AFTER_S, STALLED_AFTER_GAPS * gap_s, step_s) if gap_s else first_s
        return max(least_s, STALLED_AFTER_GAPS * microbatch_s)


def _not_told(_record: PeerRecord) -> str:
    """Nothing: why averages leave a peer out is not known."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the states are derived from."""

    mine: PeerRecord
    live: LiveView
    num_stages: int
    num_microbatches: int
    decision: str
    """The step rules' last reason."""
    progress: Progress
    now_s: float
    rounds_s: float = 0.0
    """How long a round of a stage takes, by what its members say of their lines."""
    microbatch_s: float = 0.0
    """Computing time of a microbatch in all stages (`way_s`); 0: unknown."""
    lifetime_s: float
    """Life of a record. A peer that is missed for less time may have restarted, or may be suspected wrongly."""
    join_plan: str = ""
    """When this peer will serve, in words, while it joins (`JoinPlan`)."""
    cannot_catch_up: bool = False
    """Whether that is never, unless its line or its stage's steps change."""
    disputed: str = ""
    """Why this joiner cannot know whether its state is that of its stage: rule 21 (prove)."""
    has_met_others: bool = False
    """Whether there was another peer that has not said that it leaves."""
    complete: bool = False
    computed: int = 0
    """Microbatches that this daemon has computed in its stages since it started."""
    lets_drift: bool = False
    """Whether the run never averages parameters, so that what unlike devices round differently stays."""
    contradictory: frozenset[PeerId] = frozenset()
    """Peers that signed two records under one version, or two slices of one round."""
    convicted: frozenset[PeerId] = frozenset()
    """Peers that have lost their standing by audits: rule 20 (audit)."""
    own_fault: str = ""
    """Why this peer has, in words; empty if it has not."""
    banned: Mapping[PeerId, str] = field(default_factory=dict)
    """Peers that the organiser has banned, with the reasons."""
    invitation_ends: bool = False
    """Whether this peer takes part by an invitation that ends soon."""
    why_unaveraged: Callable[[PeerRecord], str] = _not_told
    """Why averages leave out a peer whose record says so, as far as that is known; else empty."""


def advance(before: Progress | None, live: LiveView, num_stages: int, num_microbatches: int, now_s: float) -> Progress:
    """`before`, or what has come further. Rounds that fail and ledgers that are dropped are no progress; a resumed run begins anew."""
    stages = [(stage, stage_step(live, stage)) for stage in range(num_stages)]
    known = [step for _, step in stages if step is not None]
    steps, step = sum(known), min(known, default=0)
    missing = sum(
        (full(num_microbatches) & ~held(live, stage, step)).bit_count() if step is not None else num_microbatches for stage, step in stages
    )
    lacks = {key: before.lacks_since_s.get(key, now_s) if before is not None else NEVER_S for key in _lacking(live, num_stages)}
    if before is None:
        return Progress(steps=steps, step=step, missing=missing, began_s=now_s, since_s=now_s, lacks_since_s=lacks)
    came = replace(before, steps=steps, step=step, missing=missing, since_s=now_s, lacks_since_s=lacks)
    if len(known) < num_stages:
        return replace(before, lacks_since_s=lacks) if lacks != before.lacks_since_s else before
    if any(key >= 0 for key in before.lacks_since_s):
        return replace(came, began_s=now_s)
    gap_s = max(before.gap_s, now_s - before.since_s)
    if step != before.step:
        return replace(came, began_s=now_s, step_s=now_s - before.began_s, gap_s=0.0, last_gap_s=gap_s)
    if steps != before.steps or missing < before.missing:
        return replace(came, gap_s=gap_s)
    return replace(before, lacks_since_s=lacks) if lacks != before.lacks_since_s else before


def resumed(before: Progress, now_s: float) -> Progress:
    """The progress from which a peer goes on that was away: what it lacked before is not known now, and the time away is no standstill."""
    return replace(before, began_s=now_s, since_s=now_s, lacks_since_s={})


def _lacking(live: LiveView, num_stages: int) -> list[int]:
    """What there is nobody for: stages, TRAINER and OTHERS."""
    others = any(record.peer != live.me for record in live.records)
    empty = [stage for stage in range(num_stages) if not live.serving(stage)]
    return [*empty, *([] if has_trainer(live) else [TRAINER]), *([] if others else [OTHERS])]


def health(facts: Facts) -> list[HealthNote]:
    """Problems first."""
    swarm = (
        [_cut_off(facts)]
        if _cut_off(facts)
        else [_empty_stages(facts), _no_trainer(facts), _diverged(facts), _stalled(facts), _complete(facts)]
    )
    stage = [
        _dead_links(facts),
        _sidelined(facts),
        _contradictory(facts),
        _convicted(facts),
        _inexact(facts),
        _joining(facts),
        _unlike(facts),
    ]
    stage += [_banned(facts), _invitation(facts)]
    found = [item for item in (*swarm, *stage, *_unaveraged(facts)) if item]
    return sorted(found, key=lambda item: ("problem", "warning", "info").index(item.severity))


def unwritten_files(errors: Mapping[str, PeerdError]) -> list[HealthNote]:
    """One state for each remedy; `errors` gives the reason by the kind of file."""
    notes = []
    for remedy in dict.fromkeys(error.remedy for error in errors.values()):
        files = [kind for kind, error in errors.items() if error.remedy == remedy]
        title = f"cannot write {', '.join(files)}: {errors[files[0]].message}"
        notes.append(HealthNote("disk", title, "problem", f"{remedy}; training goes on, and it is tried again"))
    return notes


def open_files(num_open: int, limit: int, num_peers: int) -> list[HealthNote]:
    """At the limit nothing can be opened, which would look like a broken disk and a bad network."""
    title, remedy = too_few_files(limit, num_peers)
    if num_open >= FEW_FILES_LEFT * limit:
        return [HealthNote("open-files", f"{num_open} files are open; {title}", "problem", f"{remedy}; then start this peer again")]
    if limit < files_needed(num_peers):
        return [HealthNote("few-open-files", f"{num_open} files are open; {title}", "warning", f"{remedy}; then start this peer again")]
    return []


def _missed(facts: Facts) -> list[int]:
    """What has been lacking for longer than a record lives."""
    since_s = facts.progress.lacks_since_s
    return [key for key in _lacking(facts.live, facts.num_stages) if facts.now_s - since_s.get(key, facts.now_s) >= facts.lifetime_s]


def _cut_off(facts: Facts) -> HealthNote | None:
    if OTHERS not in _missed(facts) or not facts.has_met_others:
        return None
    title = "this peer reaches nobody: its connection is down, or all others are gone"
    return HealthNote("cut-off", title, "problem", "`peerd doctor` says what is wrong with the connection; the daemon goes on trying")


def _empty_stages(facts: Facts) -> HealthNote | None:
    """Stages that nobody serves; not the one whose state this peer has on disk, and serves in a moment."""
    brings = facts.mine.stage if facts.mine.phase is Phase.JOINING and facts.mine.checkpoints else -1
    empty = [str(stage) for stage in _missed(facts) if stage >= 0 and stage != brings]
    if not empty:
        return None
    which = ("stage " if len(empty) == 1 else "stages ") + ", ".join(empty)
    return HealthNote("stage-empty", f"nobody serves {which}", "problem", "more peers have to join; training waits for them")


def _no_trainer(facts: Facts) -> HealthNote | None:
    if TRAINER not in _missed(facts):
        return None
    return HealthNote("no-trainer", "no peer has the run's data", "problem", "start a peer that has the data, with --data PATH")


def _diverged(facts: Facts) -> HealthNote | None:
    step = diverged_step(facts.live, facts.num_stages)
    if step is None:
        return None
    return HealthNote("diverged", f"diverged at step {step}: the loss or its gradients are not finite", "problem", DIVERGED_REMEDY)


def _complete(facts: Facts) -> HealthNote | None:
    """The run has made all its steps: thanks, and how to get the model."""
    if not facts.complete:
        return None
    computed = f"{facts.computed:,} microbatch{'es' * (facts.computed > 1)}"
    gave = f"; this peer has computed {computed} since it started" if facts.computed else ""
    title = f"the run is complete after {facts.mine.step:,} steps. Thank you{gave}"
    remedy = "`peerd contributions` shows what each peer gave, `peerd export FOLDER` writes the model, `peerd leave` ends this peer"
    return HealthNote("complete", title, "info", remedy)


def _stalled(facts: Facts) -> HealthNote | None:
    """No microbatch added and no step finished anywhere for longer than this run takes; not where another state says why."""
    still_s, is_empty = facts.now_s - facts.progress.since_s, any(key >= 0 for key in _lacking(facts.live, facts.num_stages))
    if facts.complete or is_empty or still_s < _patience_s(facts) or _diverged(facts):
        return None
    title = f"no progress for {still_s:.0f} s: {_what_lacks(facts)}; this peer: {facts.decision}"
    return HealthNote("stalled", title, "problem", "it recovers by itself where it can; else `peerd peers` shows which stage needs a peer")


def _patience_s(facts: Facts) -> float:
    return facts.progress.patience_s(facts.num_stages, facts.microbatch_s) + STALLED_AFTER_ROUNDS * facts.rounds_s


def _what_lacks(facts: Facts) -> str:
    """The stage that is behind the others, and by what."""
    steps = [(stage_step(facts.live, stage) or 0, stage) for stage in range(facts.num_stages)]
    step = min(steps)[0]
    for at, stage in steps:
        absent = (full(facts.num_microbatches) & ~held(facts.live, stage, at)).bit_count()
        averaged = any(record.phase is Phase.AVERAGED for record in facts.live.members(stage, at))
        if at == step and absent and not averaged:
            return f"stage {stage} lacks {absent} of {facts.num_microbatches} microbatches of step {step}"
    waiting = [stage for at, stage in steps if at == step]
    return f"stage {waiting[0]} has not averaged step {step}"


def _dead_links(facts: Facts) -> HealthNote | None:
    """Mates of this peer's stage that live and of which one cannot call the other: hole 22 (one way to a mate)."""
    away = unreached_mates(facts.live, facts.mine.stage)
    both = [(one, other) for one, others in away.items() for other in others if one < other and one in away.get(other, ())]
    one_way = [(one, other) for one, others in away.items() for other in others if one not in away.get(other, ())]
    told = [f"{one} and {other} cannot call each other" for one, other in both[:MOST_LINKS_TOLD]]
    told += [f"{one} cannot call {other}, which can call it" for one, other in one_way[:MOST_LINKS_TOLD]]
    if not told:
        return None
    num_more = len(both) + len(one_way) - MOST_LINKS_TOLD
    more = f", and {num_more} more" if num_more > 0 else ""
    remedy = "rounds go around the link; `peerd doctor` at both peers says more"
    title = "; ".join(told[:MOST_LINKS_TOLD]) + more
    if both:
        return HealthNote("link-dead", title, "warning", remedy)
    return HealthNote("link-one-way", title, "warning", remedy)


def _sidelined(facts: Facts) -> HealthNote | None:
    """Mates of this peer's stage, or this peer itself, that have no part in its steps: hole 36 (absent)."""
    found = sorted(facts.live.sidelined(facts.mine.stage))
    if not found:
        return None
    who = "this peer" if facts.mine.peer in found else ", ".join(found)
    why = "what averages need from there, or what shows how they were made, does not come"
    title = f"{who} sidelined: {why}, so its work counts for nothing for a while"
    return HealthNote("sidelined", title, "warning", "its mates try again by themselves; `peerd doctor` there says more of its links")


def unaveraged_for(record: PeerRecord, why: str = "") -> str:
    """In one sentence without its subject, that a peer works for nothing, and why; empty if it does not."""
    if record.unaveraged < UNAVERAGED_STEPS:
        return ""
    return f"gradients have not been in an average for {record.unaveraged} steps" + (f": {why}" if why else "")


def _unaveraged(facts: Facts) -> list[HealthNote]:
    """This peer, and others of any stage, that work for nothing."""
    found, notes = {r.peer: r for r in (*facts.live.records, facts.mine) if unaveraged_for(r)}, list[HealthNote]()
    mine = found.pop(facts.mine.peer, None)
    if mine is not None:
        title = f"its {unaveraged_for(mine, facts.why_unaveraged(mine))}"
        remedy = "`peerd limits` shows what it may upload, `peerd doctor` what its line carries; smaller stages and codecs need less"
        notes.append(HealthNote("unaveraged", title, "problem", remedy))
    if found:
        told = [f"{peer}: its {unaveraged_for(r, facts.why_unaveraged(r))}" for peer, r in sorted(found.items())[:MOST_TOLD]]
        more = f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
        remedy = "others do its share again; its own `peerd status` says so too"
        notes.append(HealthNote("others-unaveraged", "; ".join(told) + more, "warning", remedy))
    return notes


def _contradictory(facts: Facts) -> HealthNote | None:
    found = sorted(facts.contradictory)
    if not found:
        return None
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    title = f"{found[0]}{more} signed two things that contradict each other, and counts for nothing for a while"
    remedy = "its home may have been copied and run twice; or its software is broken, or it lies"
    return HealthNote("contradictory", title, "warning", remedy)


def _convicted(facts: Facts) -> HealthNote | None:
    """Peers that compute wrongly or lie, by the word of most of their mates. This one hears it first."""
    if facts.own_fault:
        remedy = (
            "its device computes wrongly: `peerd doctor` tests it; its key takes no part in this run any more, so join with another --home"
        )
        return HealthNote("convicted", facts.own_fault, "problem", remedy)
    found = sorted(facts.convicted - {facts.mine.peer})
    if not found:
        return None
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    title = f"{found[0]}{more} lost its standing: most of its mates found its work or its word wrong"
    return HealthNote("convicted", title, "warning", "others do its share; `peerd audit` shows the case")


def _banned(facts: Facts) -> HealthNote | None:
    """Whom the organiser's list bans."""
    found = sorted(facts.banned.items())
    if not found:
        return None
    told = [peer + (f" ({reason})" if reason else "") for peer, reason in found[:MOST_TOLD]]
    more = f" and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    return HealthNote("banned", f"banned by the organiser: {', '.join(told)}{more}", "info", "nothing to do; others do their share")


def _invitation(facts: Facts) -> HealthNote | None:
    if not facts.invitation_ends:
        return None
    title = "this peer's invitation ends within three days; it leaves the run then"
    remedy = f"send the organiser its id, {facts.mine.peer}, and join again with the answer"
    return HealthNote("invitation-ends", title, "warning", remedy)


def _unlike(facts: Facts) -> HealthNote | None:
    """Mates on unlike devices, whose parameters drift apart by rounding."""
    kinds = kinds_of(facts.live.serving(facts.mine.stage))
    if len(kinds) < 2 or not facts.lets_drift:
        return None
    told = ", ".join(kinds[:MOST_TOLD]) + (f" and {len(kinds) - MOST_TOLD} more" if len(kinds) > MOST_TOLD else "")
    title = f"stage {facts.mine.stage} computes on unlike devices ({told}), so its peers drift apart by rounding"
    return HealthNote("unlike-devices", title, "info", "a run with train.average_parameters takes the drift back")


def _inexact(facts: Facts) -> HealthNote | None:
    given_up = facts.mine.lineage.inexact
    return HealthNote("inexact", f"{given_up} steps of this stage were given up", "warning", "see the log") if given_up else None


def _joining(facts: Facts) -> HealthNote | None:
    if facts.mine.phase is not Phase.JOINING:
        return None
    if facts.disputed:
        return HealthNote("unlike-states", facts.disputed, "warning", DISPUTE_REMEDY)
    if facts.cannot_catch_up:
        remedy = "join from a faster line; it tries again after a while, or once steps take longer"
        return HealthNote("cannot-catch-up", facts.join_plan, "warning", remedy)
    newest = stage_step(facts.live, facts.mine.stage)
    if newest is not None and 0 < facts.mine.step < newest:
        title = f"at step {facts.mine.step}, its stage at {newest}: {facts.join_plan or facts.decision}"
        return HealthNote("behind", title, "warning", "nothing to do; it catches up")
    return HealthNote("joining", facts.join_plan or facts.decision, "info", "nothing to do; it serves when it has caught up")
