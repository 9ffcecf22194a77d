"""How the arguments of policies are drawn, and the objects whose methods are called: by class, or by the name of a parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from peerd.policy.owner.governor import Limits
from peerd.policy.route.diverging import Diverging
from peerd.policy.route.evaluating import Takeover
from peerd.policy.route.launching import Late, Standstill
from peerd.policy.route.wiring import Router
from peerd.policy.step.acts import LoadCheckpoint, Reload, Wait
from peerd.policy.step.certificates import STATEMENT
from peerd.policy.step.clocks import StepClocks
from peerd.policy.step.contributions import Report, StageTally, Tally
from peerd.policy.step.copying import DueCopies
from peerd.policy.step.following import Followers
from peerd.policy.step.groups import Levels
from peerd.policy.step.probation import Probation
from peerd.policy.step.recovery import Beginning
from peerd.policy.step.roster import entry_of
from peerd.policy.step.sidelining import Sidelining
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.swarm.checkup import Dialled
from peerd.policy.swarm.choosing import Joiner
from peerd.policy.swarm.clocks import ClockOffset
from peerd.policy.swarm.coordinates import NetworkPosition
from peerd.policy.swarm.health import Facts, advance
from peerd.policy.swarm.pace import still_since
from peerd.policy.swarm.queues import QueueReadings
from peerd.policy.swarm.rates import SampleDemand
from peerd.policy.swarm.rebalance import Rebalancing, Rule
from peerd.policy.swarm.rebalance import plan as plan_move
from peerd.policy.swarm.spreading import DirectoryReading, News, ToldBy
from peerd.table.record import MAX_LOSS, MAX_STAGES, NO_RECORD, AverageId, PeerId, PeerRecord, Phase, RawRecord, RunId
from peerd.table.swarm_view import SwarmView
from peerd.table.view import LiveView
from tests.policy import fuzz_accounts, fuzz_audits, fuzz_rounds
from tests.policy.fuzz_records import PERIOD_S, TTL_S, World
from tests.policy.fuzz_rounds import roster


def _rules(world: World) -> StepRules:
    random = world.random
    return StepRules(
        num_stages=world.num_stages,
        num_microbatches=world.num_microbatches,
        ttl_s=TTL_S,
        averaging_s=0.6 * TTL_S,
        last_step=random.choice((0, 0, world.step)),
        shares_norms=random.random() < 0.5,
        ties_stages=random.random() < 0.5,
        group_size=random.choice((0, 1, 4, 32)),
        num_sections=random.choice((1, 2, 16)),
        certifies=random.random() < 0.5,
        local_batch=random.choice((0, 0, 1, 4)),
        local_after=random.choice((0, 0, 3)),
    )


def _situation(world: World) -> Situation:
    """This peer in any phase, at a moment at which rules may have waited long enough."""
    random = world.random
    own = replace(world.own, phase=random.choice(list(Phase)))

    def since_s() -> float | None:
        return random.choice((None, 0.0, world.now_s))

    some = frozenset((world.some_peer(), own.step) for _ in range(random.randrange(4)))
    state = OwnState(
        record=own,
        round_roster=world.maybe(lambda: roster(world)),
        round_still_s=random.choice((0.0, world.now_s)),
        judge_silent_s=random.choice((0.0, world.now_s)),
        open_since_s=tuple((aside.other, random.choice((0.0, world.now_s))) for aside in own.asides),
        propose_after_s=random.choice((0.0, 2 * world.now_s)),
        complete_since_s=since_s(),
        averaged_since_s=since_s(),
        step_s=random.choice((None, 0.0, 1e9)),
        round_s=random.choice((None, 0.0, 1e9)),
        lost_since_s=since_s(),
        back_since_s=since_s(),
        outlived_since_s=since_s(),
        later_since_s=since_s(),
        fetching=frozenset((world.some_peer(), random.randrange(16)) for _ in range(random.randrange(4))),
        refused=some,
        unanswered=some,
        joined=frozenset(world.many(lambda: AverageId(world.raw(16)))),
        refuted=world.maybe(lambda: roster(world)),
        has_start=random.random() < 0.8,
        unproven=random.choice(("", "why")),
    )
    return Situation(state, world.live, world.now_s, _rules(world))


def _facts(world: World) -> Facts:
    return Facts(
        mine=world.own,
        live=world.live,
        num_stages=world.num_stages,
        num_microbatches=world.num_microbatches,
        decision="",
        progress=advance(None, world.live, world.num_stages, world.num_microbatches, world.random.choice((0.0, world.now_s))),
        now_s=world.now_s,
        lifetime_s=TTL_S,
        has_met_others=True,
    )


def _demand(world: World) -> SampleDemand:
    random = world.random
    return SampleDemand(work=random.uniform(0.5, 2.0), sends=random.choice((0.0, 1.0, 1e9)), receives=random.choice((0.0, 5e-324, 1e9)))


def _joiner(world: World) -> Joiner:
    random, stages = world.random, range(world.num_stages)
    return Joiner(
        lacking=[random.choice(["", "memory"]) for _ in stages],
        is_reliable=random.random() < 0.5,
        up=random.choice((0.0, 1.0, 1e6)),
        down=random.choice((0.0, 1.0, 1e6)),
        coordinate=world.maybe(world.coordinate),
        demands=random.choice(((), tuple(_demand(world) for _ in stages))),
        round_rates=random.choice(((), [random.choice((0.0, 1.0, 1e9)) for _ in stages])),
    )


def _rebalancing(world: World) -> Rebalancing:
    demands = tuple(_demand(world) for _ in range(world.num_stages))
    return Rebalancing(rule=world.random.choice(list(Rule)), demands=world.random.choice(((), demands)))


def _news(world: World) -> News:
    news = News(PERIOD_S)
    for record in world.random.sample(world.records, min(300, len(world.records))):
        news.note(record, NO_RECORD, world.now_s - world.random.choice((0.0, PERIOD_S)))
    return news


def _followers(world: World) -> Followers:
    followers = Followers()
    for _ in range(world.random.randrange(5)):
        followers.began(world.some_peer(), world.some_step(), world.now_s)
    return followers


def _late(world: World) -> tuple[Late, ...]:
    return tuple(Late(world.peer(), world.some_step(), world.random.randint(1, 8)) for _ in range(world.random.randrange(9)))


def _standstill(world: World) -> Standstill:
    return Standstill(world.some_step(), world.ledger(), world.random.choice((0.0, world.now_s)), _late(world))


def _takeover(world: World) -> Takeover:
    takeover = Takeover(8, 8)
    takeover.look(world.some_step(), world.some_step(), False, world.random.choice((0.0, world.now_s)))
    return takeover


def _router(world: World) -> Router:
    router = Router()
    for _ in range(world.random.randrange(30)):
        router.observe(world.some_peer(), *(world.random.choice((0.0, 5e-324, 1.0, 1e6)) for _ in range(2)))
    for record in world.random.choices(world.records, k=world.random.randrange(4)):
        router.ban(record)
    return router


def _position(world: World) -> NetworkPosition:
    position = NetworkPosition(world.live.me)
    for _ in range(world.random.randrange(80)):
        position.answered(world.some_peer(), world.random.choice((5e-324, 1e-3, 0.1, 10.0)), world.maybe(world.coordinate))
    return position


def _report(world: World) -> Report:
    rows = world.many(lambda: Tally(peer=world.peer(), steps=world.count(), microbatches=world.count(), tokens=world.count()))
    first, last, steps = world.count(), world.count(), world.count()
    stage = world.random.choice((world.some_stage(), world.count()))
    return Report(reporter=world.peer(), tally=StageTally(stage=stage, first_step=first, last_step=last, steps=steps, tallies=rows))


def _sidelining(world: World) -> Sidelining:
    sidelining = Sidelining(world.live.me)
    for _ in range(world.random.randrange(9)):
        sidelining.closed(roster(world), world.some_peer(), world.some_peer(), world.real(1e9), world.now_s)
        sidelining.lied(world.some_peer())
    return sidelining


def _probation(world: World) -> Probation:
    probation = Probation()
    for _ in range(world.random.randrange(99)):
        probation.begin(world.some_peer())
    return probation


def _way(world: World) -> tuple[PeerId, ...]:
    return tuple(world.some_peer() for _ in range(world.num_stages))


def _peers(world: World) -> frozenset[Any]:
    return frozenset(world.peer() for _ in range(world.random.randrange(6)))


def _some(world: World) -> list[PeerRecord]:
    return world.random.sample(world.records, world.random.randint(1, len(world.records)))


def _signed(mine: Any) -> RawRecord:
    return (repr(mine).encode()[:8], b"")


MAKERS: Mapping[type, Callable[[World], Any]] = {
    LiveView: lambda w: w.live,
    SwarmView: World.new_view,
    Situation: _situation,
    Reload: lambda w: Reload("", w.peer(), w.some_step()),
    Router: _router,
    NetworkPosition: _position,
    News: _news,
    Followers: _followers,
    DueCopies: lambda w: DueCopies(w.live.me),
    Takeover: _takeover,
    Diverging: lambda _w: Diverging(),
    DirectoryReading: lambda w: DirectoryReading(w.random.choice((w.live, LiveView(me=w.live.me, records=()))), w.random.randint(1, 12)),
    Probation: _probation,
    Sidelining: _sidelining,
    Levels: lambda w: Levels(_some(w), w.random.choice((0, 1, 4, 32))),
    **fuzz_rounds.MAKERS,
    **fuzz_audits.MAKERS,
    **fuzz_accounts.MAKERS,
    QueueReadings: lambda _w: QueueReadings(),
    StepClocks: lambda _w: StepClocks(),
}
"""By class: an object whose methods are called."""

ARGUMENTS: Mapping[str | tuple[str, str], Callable[[World], Any]] = {
    "live": lambda w: w.live,
    "view": World.new_view,
    "now": _situation,
    "own": lambda w: _situation(w).own,
    "act": lambda w: w.random.choice((Wait(""), LoadCheckpoint("", w.some_step(), w.random.random() < 0.5))),
    "facts": _facts,
    "rules": _rules,
    "judge": World.some_peer,
    "author": World.some_peer,
    ("named", "PeerId | None"): lambda w: w.random.choice((None, w.peer())),
    ("named", "PeerId"): World.peer,
    "params": _rebalancing,
    ("records", "Sequence[PeerRecord]"): lambda w: list(w.records),
    "joiner": _joiner,
    "mine": lambda w: w.own,
    ("mine", "Evaluation | None"): lambda w: w.own.evaluation,
    ("mine", "Sequence[Who]"): lambda w: list(w.names),
    "far_speakers": lambda w: w.names[:3],
    **dict.fromkeys(("record", "accused"), lambda w: w.random.choice(w.records)),
    **dict.fromkeys(("mate", "known"), lambda w: w.random.choice(w.records)),
    "other": lambda w: w.random.choice(w.records),
    ("other", "PeerId"): World.peer,
    ("other", "PeerId | None"): lambda w: w.maybe(w.peer),
    "candidates": _some,
    "members": _some,
    "voting": _some,
    "mates": _some,
    "num_stages": lambda w: w.num_stages,
    "num_microbatches": lambda w: w.num_microbatches,
    "microbatches_per_step": lambda w: w.num_microbatches,
    "stage": World.some_stage,
    "step": World.some_step,
    ("caller", "PeerRecord | None"): lambda w: w.maybe(lambda: w.random.choice(w.records)),
    "reached": World.some_step,
    "due": World.some_step,
    "kept": lambda w: w.maybe(w.some_step),
    "newest_seen": World.count,
    "index": lambda w: w.random.randrange(w.num_microbatches),
    **dict.fromkeys(("peer", "caller", "teller", "first", "callee", "sender", "receiver", "holder"), World.peer),
    "me": lambda w: w.live.me,
    "absent": _peers,
    "heard": _peers,
    "last": lambda w: [w.peer() for _ in range(w.random.randrange(9))],
    "prefer": _peers,
    **dict.fromkeys(("tried", "given"), _peers),
    "held": _peers,
    "refused": _peers,
    "names": _peers,
    "banned": _peers,
    "left_s": lambda w: {peer: w.random.uniform(0.0, 600.0) for peer in _peers(w)},
    "missed": lambda w: {peer: w.random.randrange(4) for peer in w.names},
    ("before", "Standstill"): _standstill,
    ("stands", "Standstill"): _standstill,
    ("before", "Progress | None"): lambda w: _facts(w).progress,
    ("before", "Progress"): lambda w: _facts(w).progress,
    ("before", "Mapping[PeerId, float]"): lambda _w: {},
    ("before", "Mapping[PeerId, tuple[Mark, float]]"): lambda w: still_since({}, w.live, 0.0),
    "beginning": lambda w: Beginning(step=0, reached=w.count(), founder=w.random.random() < 0.5, needs_state=w.random.random() < 0.5),
    "found": lambda w: plan_move(w.live, w.num_stages, 0, _rebalancing(w)),
    "entries": lambda w: [entry_of(record) for record in _some(w)],
    "accept_mark": lambda w: (w.own.incarnation, w.own.ledger_no),
    "lineage": World.lineage,
    "tied": World.lineage,
    **dict.fromkeys(("average_id", "round_id", "group"), lambda w: w.raw(16)),
    ("early", "Collection[PeerId]"): lambda w: [w.some_peer()] * w.random.randrange(3),
    ("group", "Collection[PeerId]"): lambda w: [w.some_peer()] * w.random.randrange(3),
    ("judges", "Collection[PeerId]"): lambda w: [w.some_peer()] * w.random.randrange(3),
    "told": lambda w: {w.some_peer(): AverageId(w.raw(16)) for _ in range(w.random.randrange(300))},
    "serving": lambda w: _some(w),
    "certifies": lambda w: w.random.random() < 0.5,
    "done": World.ledger,
    "local_batch": lambda w: w.random.choice((1, 4, 4096)),
    "seals": lambda w: w.random.random() < 0.5,
    "whole": lambda w: (1 << w.num_microbatches) - 1,
    "key": lambda w: (int, w.own, w.random.randint(0, 9)),
    "make": lambda w: lambda: w.num_microbatches,
    "group_size": lambda w: w.random.choice((0, 1, 4, 32)),
    "num_sections": lambda w: w.random.choice((1, 2, 16)),
    "number": lambda w: w.random.randrange(16),
    "length": lambda w: w.random.choice((0, 1, 1 << 30)),
    "sums": lambda w: [[record] for record in _some(w)],
    "sections": lambda w: [roster(w) for _ in range(w.random.randint(1, 3))],
    "applied": lambda w: w.raw(16),
    "tied_sum": lambda w: w.raw(16),
    "norm": lambda w: w.maybe(w.norm),
    "seed": World.count,
    "speed": lambda w: w.random.choice((0.0, 5e-324, 1.0, 1e9)),
    "demand": _demand,
    "demands": lambda w: w.maybe(lambda: [_demand(w)] * MAX_STAGES) or (),
    "samples": lambda w: w.random.randint(1, 512),
    "samples_per_step": lambda w: w.random.randint(1, 1 << 20),
    "slowness": lambda w: w.random.choice((0.0, 1e-9, 0.5, 1.0, 1e9)),
    "microbatch_size": lambda w: w.random.randint(1, 512),
    "stages": lambda w: range(w.num_stages),
    **dict.fromkeys(("ranks", "attempt"), lambda w: w.random.randrange(9)),
    **dict.fromkeys(("why", "why_no_quic"), lambda w: w.random.choice(("", "its upload is too slow for this run"))),
    ("before", "int"): World.count,
    "had_work": lambda w: w.random.random() < 0.5,
    "most": lambda w: w.random.randint(1, 9),
    "how_many": lambda w: w.random.randint(1, 9),
    "slots": lambda w: w.random.randint(1, 64),
    "stages_left": lambda w: w.random.randint(1, w.num_stages),
    "most_slots": lambda w: w.random.randint(0, 64),
    "underway": lambda w: w.random.randrange(100),
    "total": lambda w: w.random.randint(1, 1000),
    "last_step": lambda w: w.random.choice((0, w.step)),
    "point": lambda w: w.random.random(),
    "since": lambda w: w.random.choice((0.0, 1.0, 1e9)),
    "heard_after_s": lambda w: w.random.choice((0.0, w.now_s)),
    "now_s": lambda w: w.now_s,
    "ttl_s": lambda _w: TTL_S,
    "takeover_s": lambda w: w.random.choice((4.0, 600.0)),
    "waited_s": lambda w: w.random.choice((0.0, 4.0, w.now_s)),
    "lasted_s": lambda w: w.random.choice((0.0, 5.0, w.now_s)),
    "averaging_s": lambda _w: 0.6 * TTL_S,
    **dict.fromkeys(("way_s", "microbatch_s"), lambda w: w.random.choice((0.0, 0.1, 60.0, 1e6))),
    "response_s": lambda w: w.random.choice((0.0, 5e-324, 1.0, 1e6)),
    "elapsed_s": lambda w: w.random.choice((0.0, 5e-324, 1.0, 1e6)),
    "later_s": lambda w: w.random.choice((-1.0, 0.0, 1.0, 1e308, math.inf, math.nan)),
    "least_patience_s": lambda _w: TTL_S,
    "raw": lambda w: _signed(w.own),
    ("told_by", "ToldBy"): lambda w: w.random.choice([*ToldBy]),
    "tags": lambda w: [w.raw(7) for _ in range(w.random.choice((0, 1, 256)))],
    "table": lambda w: [(record.peer, NO_RECORD) for record in w.records],
    "after": World.peer,
    "reports": lambda w: [_report(w) for _ in range(w.random.randrange(9))],
    "tally": lambda w: _report(w).tally,
    "tokens_at": lambda _w: lambda step: 1 + step // 100,
    "offsets": lambda w: [ClockOffset(w.peer(), w.real(1e300) - w.real(1e300), w.real(10.0)) for _ in range(w.random.randint(1, 5))],
    "answers": lambda w: [Dialled(w.peer(), w.random.choice(("", "1.2.3.4")), w.random.choice((None, True, False))) for _ in range(5)],
    "port": lambda w: w.random.randrange(65536),
    "round_trip_s": lambda w: w.random.choice((-1.0, 0.0, 5e-324, 0.1, 1e308, math.inf, math.nan)),
    **dict.fromkeys(("coordinate", "one"), lambda w: w.maybe(w.coordinate)),
    ("text", "bytes"): lambda w: w.random.choice((STATEMENT, b"")) + w.raw(16) + w.raw(32) + w.random.choice((b"run\0", b"")) + w.raw(8),
    "run": lambda _w: RunId("run"),
    **dict.fromkeys(("voter", "member"), lambda w: w.random.choice(w.records)),
    **fuzz_rounds.ARGUMENTS,
    "ahead": _some,
    **dict.fromkeys(("joined", "refuted"), lambda w: frozenset(w.many(lambda: AverageId(w.raw(16))))),
    **dict.fromkeys(("is_signed", "is_counted", "is_late", "is_certified"), lambda w: w.random.random() < 0.5),
    ("one", "PeerRecord"): lambda w: w.random.choice(w.records),
    **fuzz_audits.ARGUMENTS,
    **fuzz_accounts.ARGUMENTS,
    "limits": lambda _w: Limits(),
    "share": lambda w: w.random.choice((1e-4, 0.05)),
    "at_once": lambda w: w.random.randint(1, 5),
    "num_jurors": lambda w: w.random.randint(0, 5),
    ("tried", "Mapping[Way, float]"): lambda w: {_way(w): w.real(MAX_LOSS) for _ in range(9)},
    "span": World.count,
    ("mine", "str"): World.peer,
    "num_serving": lambda w: w.random.randrange(9),
    **dict.fromkeys(("again", "early", "overlaps", "is_known", "holds_previous"), lambda w: w.random.random() < 0.5),
    **dict.fromkeys(("in_group", "in_groups"), lambda w: w.random.random() < 0.5),
}
"""By name, or by name and type, of a parameter."""
