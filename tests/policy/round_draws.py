"""Drawn rounds: members with unlike lines, slices that are cut by rate or alike, and sizes that their links can just carry, or easily."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from peerd.policy.round.chunks import LEEWAY, num_chunks
from peerd.policy.round.links import HomeLink, RoundLinks
from peerd.policy.round.simulated import RoundPlan
from peerd.policy.round.slices import exchange_s, shares_by_rate

AVERAGING_S = 9.0
MBIT = 1e6 / 8
_SIZES = range(2, 17)


@dataclass(frozen=True, slots=True)
class Drawn:
    plan: RoundPlan
    links: RoundLinks
    bound_s: float
    """The least time of the round, without delays."""
    rng: Random

    @property
    def num_members(self) -> int:
        return len(self.plan.slice_bytes)

    def some_member(self) -> int:
        return self.rng.randrange(self.num_members)

    def some_pair(self) -> tuple[int, int]:
        one, other = self.rng.sample(range(self.num_members), 2)
        return one, other

    def some_time_s(self) -> float:
        """The beginning, or a time at which the round is under way."""
        return self.rng.choice((0.0, self.rng.uniform(0.0, 0.7 * self.bound_s)))

    def with_links(self, **faults: object) -> Drawn:
        return replace(self, links=replace(self.links, **faults))  # type: ignore[arg-type]


def draw(seed: int, least: int = 2, margins: tuple[float, ...] = (1.0, 1.0, 0.7, 0.3, 0.05)) -> Drawn:
    """A round of `least` to 16 members, fewer more often; of the time that its proposal allows the links need one of these shares."""
    rng = Random(seed)
    sizes = [size for size in _SIZES if size >= least]
    num_members = rng.choices(sizes, [size**-2 for size in sizes])[0]
    ups = [MBIT * rng.choice((1, 2, 5, 10, 20, 50, 100)) for _ in range(num_members)]
    lines = [HomeLink(up, up * rng.choice((1, 1, 2, 5, 10))) for up in ups]
    shares = shares_by_rate(ups) if rng.random() < 0.7 else (1 / num_members,) * num_members
    within_s = AVERAGING_S * rng.choice((1.0, 1.0, 1.0, 2.0, 3.0))
    bound_s = within_s * rng.choice(margins)
    num_bytes = bound_s / exchange_s(1.0, ups, shares)
    slice_bytes = [round(share * num_bytes) for share in shares]
    delay_s = [[0.0] * num_members for _ in range(num_members)]
    for one in range(num_members):
        for other in range(one):
            delay_s[one][other] = delay_s[other][one] = rng.uniform(0.005, 0.15)
    plan = RoundPlan(
        slice_bytes=slice_bytes,
        num_chunks=num_chunks(slice_bytes, within_s / LEEWAY, AVERAGING_S),
        within_s=within_s,
        averaging_s=AVERAGING_S,
        turns=rng.sample(range(num_members), num_members),
    )
    return Drawn(plan, RoundLinks(lines=lines, delay_s=delay_s), bound_s, rng)
