"""Which trainers evaluate which step, when another takes over, and which evaluation is the newest.

One trainer makes a whole evaluation, so that its mean needs no agreement. A second one, made by a trainer that thought the first
one stuck, costs time and gives the same value.

Where averages are certified, a trainer or a peer of a stage may lie. There the first few trainers in order are a jury: each of them makes
the evaluation, and it counts once more than half of them tell the same loss. A member of the jury sends each microbatch through two peers
of each stage, in all combinations, and through others until such ways have the same loss.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low

from peerd.policy.hashing import digest
from peerd.policy.route.launching import those_who_train
from peerd.policy.step.ledger import work_step
from peerd.table.record import Evaluation, PeerId, PeerRecord
from peerd.table.view import LiveView

LEAST_TAKEOVER_S, FIRST_TAKEOVER_S = 60.0, 600.0
"""An owner that is alive but has announced no result counts as stuck after this time at the earliest; the second one while it is not known
here how long steps take."""
Way = tuple[PeerId, ...]
"""By stage, the peers that a microbatch goes through."""
JURY = 5
"""The most trainers whose word on an evaluation counts. Two of them may lie."""
MOST_LOOKED = 3
"""Steps at most, of those that enough peers tell of, whose evaluations are looked at; the newest ones."""
MOST_CROSSED, CROSSED = 3, 3
"""With so many stages at most a microbatch goes all ways through two peers of each stage, of the first three."""
MOST_WAYS, APART = 12, 3
"""With more stages it is sent so many ways at most, until so many that have no peer in common have the same loss."""
LOSSES_APART, ROUNDED_LOSSES_APART = 1e-4, 5e-2
"""How far two honest losses may be apart, as a share: in float32, and where values on the way are rounded more."""
TAKEOVER_TIMES = 3.0
"""How often the time that the last evaluation took, or that so many microbatches of a step take."""


def due_step(step: int, every_steps: int, last_step: int) -> int | None:
    """The newest step at or before `step` that is evaluated: every `every_steps` steps, and the last one. None if there is none."""
    if not every_steps:
        return None
    return last_step if last_step and step >= last_step else step - step % every_steps


def newest_evaluation(live: LiveView, num_stages: int, mine: Evaluation | None) -> Evaluation | None:
    """Return the evaluation of the newest step that the swarm has reached, this peer's own included: the median of what is told of it."""
    reached = work_step(live, num_stages)
    told = [record.evaluation for record in live.records if record.evaluation is not None]
    known = [each for each in told if reached is not None and each.step <= reached] + ([mine] if mine is not None else [])
    newest = max((each.step for each in known), default=None)
    return None if newest is None else Evaluation(newest, median_low([each.loss for each in known if each.step == newest]))


def jury_of(live: LiveView, step: int) -> list[PeerId]:
    """The trainers whose word on the evaluation of `step` counts, in order."""
    return _ranked(live, step)[:JURY]


def needed_of(num_jurors: int) -> int:
    """How many of a jury have to tell the same: more than half, and one of one."""
    return num_jurors // 2 + 1


def are_alike(one: float, other: float, share: float) -> bool:
    """Whether two losses may be the same one, computed by two honest ways."""
    return abs(one - other) <= share * max(abs(one), abs(other))


def settled_evaluation(live: LiveView, step: int, share: float) -> Evaluation | None:
    """The evaluation of `step` on which most of its jury agree. `share`: how far losses that are the same may be apart."""
    made, jury = _told_of(live, step, "evaluated"), jury_of(live, step)
    loss = _most([made[peer] for peer in jury if peer in made], needed_of(len(jury)), share)
    return None if loss is None else Evaluation(step, loss)


def agreed_evaluation(live: LiveView, num_stages: int, mine: Evaluation | None, share: float) -> Evaluation | None:
    """The evaluation of the newest step that this peer believes, where peers may lie.

    What it has made itself counts at once; else what most of the jury have made; else what more than half of all that tell of this step
    believe, as many as a jury's majority at least: some jurors may have left, or be known only to others.
    """
    reached, needed = work_step(live, num_stages), needed_of(min(JURY, len(_able_to_evaluate(live))))
    counts = Counter(step for record in live.records for step in {e.step for e in (record.evaluated, record.evaluation) if e is not None})
    told = {step for step, count in counts.items() if reached is not None and step <= reached and count >= needed}
    for step in sorted(told | ({mine.step} if mine is not None else set()), reverse=True)[:MOST_LOOKED]:
        found = mine if mine is not None and mine.step == step else settled_evaluation(live, step, share)
        if found is None:
            heard = _told_of(live, step, "evaluation").values()
            loss = _most(list(heard), max(2, needed, needed_of(len(heard))), share)
            found = None if loss is None else Evaluation(step, loss)
        if found is not None:
            return found
    return mine


def _told_of(live: LiveView, step: int, field: str) -> dict[PeerId, float]:
    told = ((record.peer, getattr(record, field)) for record in live.records)
    return {peer: each.loss for peer, each in told if each is not None and each.step == step}


def _most(losses: Sequence[float], least: int, share: float) -> float | None:
    """The first loss that as many tell alike."""
    ordered = sorted(losses)

    def tellers(one: float) -> int:
        return bisect_right(ordered, one / (1.0 - share)) - bisect_left(ordered, one * (1.0 - share))

    return next((one for one in losses if tellers(one) >= max(1, least)), None)


def ways(live: LiveView, num_stages: int, step: int, index: int) -> Iterator[Way]:
    """The ways that a microbatch of an evaluation is sent, one after another: first all through the first two peers of each stage.

    Nothing comes where a stage has no peer that may hold the parameters of `step`.
    """
    able, orders = _able(live, num_stages, step), list[list[PeerId]]()
    for records in able:
        ordered = sorted(records, key=lambda r: (r.step != step, digest("evaluates", r.peer, step, index, size=8)))
        orders.append([record.peer for record in ordered])
    if not all(orders):
        return
    if num_stages <= MOST_CROSSED:
        places = itertools.product(*(range(min(CROSSED, len(order))) for order in orders))
        yield from (tuple(order[at] for order, at in zip(orders, each, strict=True)) for each in sorted(places, key=max))
    else:
        for number in range(MOST_WAYS):
            yield tuple(order[(number + stage * (number // len(order))) % len(order)] for stage, order in enumerate(orders))


def may_check(live: LiveView, num_stages: int, step: int) -> bool:
    """Whether each microbatch of the evaluation of `step` can be sent through two peers of each stage of two or more."""
    able = _able(live, num_stages, step)
    return all(len(records) >= min(2, size) for records, size in zip(able, _sizes(live, num_stages), strict=True))


def _able(live: LiveView, num_stages: int, step: int) -> list[list[PeerRecord]]:
    """By stage, the peers that may hold the parameters of a step: those that are at it, and those that have gone on, which keep them."""
    return [[r for r in live.serving(stage) if r.step >= step and not r.leaving] for stage in range(num_stages)]


def _sizes(live: LiveView, num_stages: int) -> list[int]:
    """The number of peers in each stage, at whatever step: one that is the first or the last at a step is not alone (hole 68)."""
    return [max(1, sum(not record.leaving for record in live.serving(stage))) for stage in range(num_stages)]


def agreed_loss(tried: Mapping[Way, float], live: LiveView, share: float) -> float | None:
    """The loss of a microbatch that cannot be false while no more than one peer of a stage lies; None: more ways have to be tried.

    With few stages that is one which all ways have that lead through two peers of each stage, in all combinations: one of these ways has no
    liar. With many stages it is one that three ways have which have no peer in common. A stage of one peer is not checked.
    """
    sizes = _sizes(live, len(next(iter(tried)))) if tried else []
    if len(sizes) > MOST_CROSSED:
        least = min([APART, *(size for size in sizes if size > 1)]) if any(size > 1 for size in sizes) else 1
        groups = itertools.combinations(tried, least)
        return next((tried[some[0]] for some in groups if _are_apart(some, sizes) and _all_alike(some, tried, share)), None)
    used = [[peer for peer, _ in Counter(way[stage] for way in tried).most_common(CROSSED + 2)] for stage in range(len(sizes))]
    picks = [itertools.combinations(peers, min(2, max(1, size))) for peers, size in zip(used, sizes, strict=True)]
    for pick in itertools.product(*picks):
        crossed = list(itertools.product(*pick))
        if _all_alike(crossed, tried, share):
            return tried[crossed[0]]
    return None


def _all_alike(some: Sequence[Way], tried: Mapping[Way, float], share: float) -> bool:
    """Whether all of these ways were tried, and have the same loss."""
    return bool(some) and all(way in tried and are_alike(tried[way], tried.get(some[0], math.nan), share) for way in some)


def _are_apart(some: Sequence[Way], sizes: Sequence[int]) -> bool:
    """Whether these ways have no peer in common, but for those that are alone in their stage."""
    return all(size < 2 or len({way[stage] for way in some}) == len(some) for stage, size in enumerate(sizes))


class Takeover:
    """How long an evaluation may take before its owner counts as stuck, from what this peer sees. Times are seconds on its clock."""

    def __init__(self, num_microbatches: int, num_of_step: int) -> None:
        """`num_microbatches` make an evaluation, `num_of_step` a step."""
        self._num_microbatches = num_microbatches
        self._share_of_step = num_microbatches / num_of_step
        self._step: tuple[int, float] | None = None
        """The step that the swarm is at, and since when."""
        self._due: tuple[int, float] | None = None
        """The evaluation that has no result yet, and since when."""
        self._expected_s: float | None = None
        self._is_measured = False

    def look(self, reached: int, due: int, is_known: bool, now_s: float) -> None:
        """The swarm is at step `reached`; step `due` is to be evaluated, if its result is not known already."""
        if self._step is None or reached != self._step[0]:
            if self._step is not None and not self._is_measured:
                self._expected_s = self._share_of_step * (now_s - self._step[1]) / abs(reached - self._step[0])
            self._step = reached, now_s
        if is_known and self._due is not None:
            self._expected_s, self._is_measured = now_s - self._due[1], True
        if is_known:
            self._due = None
        elif self._due is None or self._due[0] != due:
            self._due = due, now_s

    def is_mine(self, live: LiveView, now_s: float, microbatch_s: float, at_once: int = 1) -> bool:
        """True if this peer shall make the evaluation that has no result. A microbatch takes `microbatch_s` in all stages; 0: unknown.

        `at_once`: how many trainers begin without waiting for one another.
        """
        first_s = max(FIRST_TAKEOVER_S, self._num_microbatches * microbatch_s)
        after_s = first_s if self._expected_s is None else max(LEAST_TAKEOVER_S, TAKEOVER_TIMES * self._expected_s)
        return self._due is not None and is_my_turn(live, self._due[0], now_s - self._due[1], after_s, at_once)


def is_my_turn(live: LiveView, step: int, waited_s: float, takeover_s: float, at_once: int = 1) -> bool:
    """True if this peer shall evaluate `step`, due for `waited_s`: the first `at_once` trainers at once, the next ones each after another
    `takeover_s`.
    """
    ranked = _ranked(live, step)
    return live.me in ranked and waited_s >= takeover_s * max(0, ranked.index(live.me) + 1 - at_once)


def is_my_turn_in_jury(live: LiveView, step: int) -> bool:
    """True if this peer is of the jury, and either one of as many as have to agree, or all before it have told, and do not agree."""
    jury = jury_of(live, step)
    if live.me not in jury:
        return False
    place, told = jury.index(live.me), _told_of(live, step, "evaluated")
    return place < needed_of(len(jury)) or all(peer in told for peer in jury[:place])


def _ranked(live: LiveView, step: int) -> list[PeerId]:
    """The trainers in the order in which they evaluate a step."""
    return sorted(_able_to_evaluate(live), key=lambda peer: digest("evaluates", peer, step, size=8))


def _able_to_evaluate(live: LiveView) -> list[PeerId]:
    return [record.peer for record in those_who_train(live) if not record.leaving]
