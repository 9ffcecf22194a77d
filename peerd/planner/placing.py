"""Places peers on the stages of a run, by the steady state that comes of it.

`joining`: each peer in turn takes the weakest stage, as joiners of a running swarm do. `dealt`: the strongest first. `searched`: moves
and swaps from the better of both, counted and not timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from peerd.planner.steady import Members, SteadyModel

MOST_WORK = 2_000_000
"""Pairs of peers of neighbouring stages that a search looks at in all: some 10 s of one core."""
FLOW_WORK = 8
"""Times as much work a pair is where the swarm's rate is a flow."""
MOST_TRIES = 4000
HOT, COLD = 0.03, 0.0003
"""Rise of the step's time that is accepted once in e times, as a share of it: at the beginning, and at the end."""


def joining(steady: SteadyModel) -> Members:
    """In the order of the list."""
    return _filled(steady, range(len(steady.topology.peers)))


def dealt(steady: SteadyModel) -> Members:
    """The peers that do most first, so that the small ones even out what is left. First those that fit fewest stages."""
    stages = range(len(steady.run.stages))

    def weight(peer: int) -> tuple[int, float]:
        return sum(steady.fits(stage, peer) for stage in stages), -max(steady.peer_rate(stage, peer).rate for stage in stages)

    return _filled(steady, sorted(range(len(steady.topology.peers)), key=weight))


def at_random(steady: SteadyModel, seed: int) -> Members:
    """Dealt in a random order, as many to each stage: to compare with."""
    order, num_stages = list(range(len(steady.topology.peers))), len(steady.run.stages)
    Random(seed).shuffle(order)
    return tuple(tuple(peer for peer in order[stage::num_stages] if steady.fits(stage, peer)) for stage in range(num_stages))


def _filled(steady: SteadyModel, peers: Sequence[int]) -> Members:
    """Each peer in turn goes where it fits and the rate is least; peers that fit nowhere are left out."""
    members: list[list[int]] = [[] for _ in steady.run.stages]
    rates = [0.0] * len(members)
    for peer in peers:
        options = [stage for stage in range(len(members)) if steady.fits(stage, peer)]
        if options:
            stage = min(options, key=lambda each: rates[each])
            members[stage].append(peer)
            rates[stage] += steady.peer_rate(stage, peer).rate
    return tuple(map(tuple, members))


def searched(steady: SteadyModel, seed: int) -> Members:
    """The best placement that is found; at least as good as `joining` and `dealt`. Peers that would hold the others up are left out."""
    states = {members: _step_s(steady, members) for members in (joining(steady), dealt(steady))}
    start = min(states, key=lambda members: states[members])
    if not all(start):
        return start
    num_peers = sum(map(len, start))
    work = MOST_WORK // FLOW_WORK if steady.has_pair_limits else MOST_WORK
    tries = min(MOST_TRIES, work * len(start) // num_peers**2)
    random = Random(seed)
    best = now = (*start, ())
    best_s = now_s = scale = states[start]
    for number in range(tries):
        candidate = _changed(steady, now, random)
        if candidate is None:
            continue
        step_s = _step_s(steady, candidate[:-1])
        heat = scale * HOT * (COLD / HOT) ** (number / tries)
        if step_s <= now_s - heat * math.log(1 - random.random()):
            now, now_s = candidate, step_s
            if step_s < best_s:
                best, best_s = candidate, step_s
    return best[:-1]


def _step_s(steady: SteadyModel, members: Members) -> float:
    return steady.state(members).step_s


def _changed(steady: SteadyModel, groups: Members, random: Random) -> Members | None:
    """One peer moved, or two swapped; None if what was drawn may not be. The last group has no stage."""
    spare = len(groups) - 1
    a, b = random.sample(range(len(groups)), 2)
    if not groups[a]:
        return None
    i = random.randrange(len(groups[a]))
    peer = groups[a][i]
    if b != spare and not steady.fits(b, peer):
        return None
    changed = [list(peers) for peers in groups]
    if random.random() < 0.5 or not groups[b]:
        if a != spare and len(groups[a]) == 1:
            return None
        changed[b].append(changed[a].pop(i))
    else:
        j = random.randrange(len(groups[b]))
        if a != spare and not steady.fits(a, groups[b][j]):
            return None
        changed[a][i], changed[b][j] = groups[b][j], peer
    return tuple(map(tuple, changed))
