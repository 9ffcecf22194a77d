"""How much peers falsify before audits find them: the policies of rule 20 (audit) on simulated stages, whose results are small vectors.

One stage is simulated, step by step. Each step is audited during the next one, with whose end its cases end. All honest peers know the
same, as they do where messages arrive. Every third peer computes in bfloat16. Right work that honest peers compute again has no
consequence, so only work that may open a case is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random

from peerd.policy.hashing import digest
from peerd.policy.step.auditing import (
    NEWCOMER_STEPS,
    AuditWord,
    DeviceKind,
    Item,
    Precision,
    Rates,
    chance,
    due,
    tolerance,
)
from peerd.policy.step.verdicts import Case, Standing, asked, verdict_on, why_unheard
from peerd.table.record import PeerId

SIZE = 16
"""Elements of a result."""
LIMIT = 350.0
"""A liar is to be out before it has done so many microbatches, or steps of its own where it falsifies its parts, divided by `share`."""
GIVE_UP_TIMES = 20.0
RATES = Rates()
HONEST_NOISE = {Precision.FLOAT32: 3e-7, Precision.BFLOAT16: 1e-2}
Vector = list[float]


class Lie(StrEnum):
    """What a liar falsifies."""

    NEGATED_PART = "part x -1"
    NEGATED_LARGE_PART = "part x -10"
    LARGE_PART = "part x 1000"
    NOISE = "noise as activations"
    LARGE_GRADIENTS = "gradients x 100"
    FREE_RIDING = "free riding"
    FRAMING = "framing"
    """It computes rightly, and accuses each time that its coins draw something."""

    @property
    def is_of_parts(self) -> bool:
        """Whether it falsifies whole parts of a step, and not single microbatches."""
        return self in (Lie.NEGATED_PART, Lie.NEGATED_LARGE_PART, Lie.LARGE_PART)

    def falsified(self, right: Vector, rng: Random) -> Vector:
        """What the liar gives in place of a right result."""
        match self:
            case Lie.NOISE:
                return [rng.gauss(0, 1) for _ in right]
            case Lie.FRAMING:
                return right
            case _:
                return [_FACTORS[self] * value for value in right]


_FACTORS = {Lie.NEGATED_PART: -1.0, Lie.NEGATED_LARGE_PART: -10.0, Lie.LARGE_PART: 1000.0, Lie.LARGE_GRADIENTS: 100.0, Lie.FREE_RIDING: 0.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class LiarSettings:
    """One stage with liars in it, simulated `num_runs` times."""

    lie: Lie
    num_peers: int = 4
    num_liars: int = 1
    """They never accuse one another."""
    protects: bool = False
    """They also judge one another's work as right. That contradicts all honest judges, so it costs them more than it saves."""
    share: float = 1.0
    """The share of its work that a liar falsifies."""
    microbatches: int = 16
    """That each peer does in a step."""
    begins: int = NEWCOMER_STEPS
    """Steps that liars do honestly before."""
    rate: float = RATES.usual
    """The share of all work that is computed again."""
    settled: float | None = None
    """The same of peers that were clean for long; None: no other."""
    num_runs: int = 100
    seed: int = 0

    @property
    def rates(self) -> Rates:
        settled = self.rate if self.settled is None else self.settled
        return replace(RATES, usual=self.rate, settled=settled, odd=max(self.rate, RATES.odd))


@dataclass(frozen=True, slots=True, kw_only=True)
class LiarRow:
    """What came of all runs.

    `found`: how much each liar had falsified when it was out, in order; of framers, for how many steps each had accused.
    """

    settings: LiarSettings
    found: tuple[int, ...]
    num_within: int
    """Liars that were out within the limit."""
    num_honest_lost: int
    """Honest peers that have lost their standing, of all runs."""

    def quantile(self, share: float) -> int:
        """What this share of the liars had falsified at most when they were out."""
        return self.found[max(0, math.ceil(share * len(self.found)) - 1)]

    def expected(self, share: float) -> int | None:
        """What the chance of honest auditors alone makes of that quantile: without the time that an audit takes. None for framers."""
        given = self.settings
        if given.lie is Lie.FRAMING:
            return None
        rate = given.rates.rate(given.begins) * (given.num_peers - given.num_liars) / (given.num_peers - 1)
        return math.ceil(math.log(1.0 - share) / math.log(1.0 - rate))


def simulate_liars(settings: LiarSettings) -> LiarRow:
    """Simulate all runs. A liar that is not out after 20 times the limit counts with what it has falsified by then."""
    rng = Random(f"{settings.seed} {settings}")
    found, num_within, num_honest_lost = list[int](), 0, 0
    for _ in range(settings.num_runs):
        stage = _Stage(settings, rng)
        stage.run()
        found += stage.falsified.values()
        num_within += stage.num_within
        num_honest_lost += sum(stage.standing.has_lost(peer) for peer in stage.peers if peer not in stage.liars)
    return LiarRow(settings=settings, found=tuple(sorted(found)), num_within=num_within, num_honest_lost=num_honest_lost)


class _Stage:
    """One run of a stage."""

    def __init__(self, settings: LiarSettings, rng: Random) -> None:
        self._settings, self._rng = settings, rng
        self.peers = [PeerId(f"p{number}") for number in range(settings.num_peers)]
        self.liars = self.peers[: settings.num_liars]
        self.falsified = dict.fromkeys(self.liars, 0)
        self.num_within = 0
        kinds = (DeviceKind("cuda", Precision.BFLOAT16), DeviceKind("cpu", Precision.FLOAT32), DeviceKind("cpu", Precision.FLOAT32))
        self._kind_of = {peer: kinds[number % 3] for number, peer in enumerate(self.peers)}
        self.standing = Standing(settings.rates)
        self.standing.found(self.peers)
        self._run = rng.getrandbits(64)

    def run(self) -> None:
        """Steps until all liars are out."""
        settings = self._settings
        for step in range(settings.begins):
            self.standing.finished(self.peers, step)
        per_step = 1 if settings.lie.is_of_parts or settings.lie is Lie.FRAMING else settings.microbatches
        limit = LIMIT / settings.share
        step, done, audited = settings.begins, 0, list[Item]()
        while (liars := self._active()) and done < GIVE_UP_TIMES * limit:
            done += per_step
            fresh = [item for liar in liars for item in self._falsified_by(liar, step)]
            self._audit(audited, step)
            self.num_within += sum(self.standing.has_lost(liar) for liar in liars) * (done <= limit)
            self.standing.finished(self._present(), step)
            audited, step = fresh, step + 1

    def _active(self) -> list[PeerId]:
        return [liar for liar in self.liars if not self.standing.has_lost(liar)]

    def _present(self) -> list[PeerId]:
        return [peer for peer in self.peers if not self.standing.has_lost(peer)]

    def _falsified_by(self, liar: PeerId, step: int) -> list[Item]:
        """What one liar falsifies in a step. A free rider has neither computed its microbatches nor its part."""
        settings = self._settings
        if settings.lie is Lie.FRAMING:
            self.falsified[liar] += 1
            honest = (peer for peer in self._present() if peer not in self.liars)
            return [self._item(peer, step, index) for peer in honest for index in (None, *range(settings.microbatches))]
        if settings.lie.is_of_parts:
            indices = list[int | None]([None] if self._rng.random() < settings.share else [])
            self.falsified[liar] += len(indices)
        else:
            chosen = [index for index in range(settings.microbatches) if self._rng.random() < settings.share]
            self.falsified[liar] += len(chosen)
            indices = [*chosen, None] if chosen and settings.lie is Lie.FREE_RIDING else [*chosen]
        return [self._item(liar, step, index) for index in indices]

    def _item(self, peer: PeerId, step: int, index: int | None) -> Item:
        return Item(peer, 0, step, index, digest("signed", self._run, peer, step, "part" if index is None else index))

    def _audit(self, items: list[Item], step: int) -> None:
        """All auditors draw their coins, and what they find wrong comes to its end."""
        is_framing = self._settings.lie is Lie.FRAMING
        opened: list[Case] = []
        for auditor in self.standing.standing(self.peers):
            if (auditor in self.liars) != is_framing:
                continue
            num_auditors = len(self._present()) - 1
            each = ((item, chance(self.standing.rate_of(item.audited, step), num_auditors)) for item in items)
            for item in due(digest("secret", self._run, auditor, step), each):
                case = Case(item, auditor, {auditor: self._word(auditor, item)})
                if not why_unheard(case, self._standing(), opened, True, self.standing.is_paused(auditor, step)):
                    opened.append(case)
        for case in opened:
            if not self.standing.has_lost(case.item.audited) and self.standing.stands(case.accuser):
                self._settle(case, step)

    def _standing(self) -> frozenset[PeerId]:
        return self.standing.standing(self.peers)

    def _settle(self, case: Case, step: int) -> None:
        standing = self._standing()
        while judges := asked(case, standing):
            for judge in judges:
                case = case.with_word(judge, self._word(judge, case.item))
            if not case.insists and not asked(case, standing):
                case = replace(case, insists=True)
        verdict = verdict_on(case, standing, is_late=True)
        self.standing.closed(case, verdict, step)

    def _word(self, judge: PeerId, item: Item) -> AuditWord:
        """What a peer says of an item: what it measures, or, if it is a liar, what serves it."""
        bound = tolerance(self._kind_of[judge], self._kind_of[item.audited])
        if judge in self.liars and (self._settings.protects or self._settings.lie is Lie.FRAMING):
            return AuditWord(2.0 if self._settings.lie is Lie.FRAMING else 0.0, bound)
        rng = Random(item.id)
        right = [rng.gauss(0, 1) for _ in range(SIZE)]
        told = self._settings.lie.falsified(right, rng) if item.audited in self.liars else right
        own = list(self._noisy(judge, right))
        return AuditWord(_norm([a - b for a, b in zip(self._noisy(item.audited, told), own, strict=True)]) / _norm(own), bound)

    def _noisy(self, peer: PeerId, values: Vector) -> Iterator[float]:
        noise = HONEST_NOISE[self._kind_of[peer].precision]
        return (value * (1.0 + noise * self._rng.uniform(-1, 1)) for value in values)


def _norm(values: Vector) -> float:
    return math.sqrt(sum(value * value for value in values))
