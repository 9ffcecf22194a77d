"""What a proposal assumes of the links of its members: rates, a codec for each, and how long the round will take and may take.

Where the run allows it, a slower member sends in a codec with fewer bytes. A round waits for a slow line as long as that is one that homes
have: what the members have computed would else be lost. It does not wait for a line that is far slower than the others, and than a home's,
whatever its owner says of it (`assumed_s`): nobody holds up a stage by moving little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nsmallest
from statistics import fmean, median, median_low

from peerd.policy.round.slices import least_exchange_s, shares_by_rate

SLOWDOWN = 20.0
"""How many times slower than expected a link may become in the middle of a round: a home's line that others begin to use, too."""
SOME = 32
"""Of so many members one takes the next codec at a time, and so does one more for each further as many: a stage may have hundreds."""
TURN = 2.0
"""Averaging times after which the next member in turn proposes, where those before it are mute."""


def turn_after_s(rank: int, averaging_s: float) -> float:
    """Rule 7 (propose): how long nothing is missing, and no round is open, before the member of this rank proposes."""
    return TURN * rank * averaging_s


def num_in_turn(waited_s: float, averaging_s: float) -> int:
    """Rule 7 (propose): how many members may propose once nothing has been missing for `waited_s` seconds, with no round open."""
    return 1 + int(waited_s / turn_after_s(1, averaging_s))


def most_s(averaging_s: float, round_share: float, compute_s: float) -> float:
    """How long a round may take, at the rates that its proposal assumes; `compute_s`: for how long the step computes."""
    return max(averaging_s, round_share * compute_s)


def usual_s(num_bytes: float, rates: Sequence[float], home_rate: float) -> float:
    """How long a round of so many bytes a member takes where no line is slower than the one in the middle, or than a home's, in seconds.

    `rates`: bytes per second of each member. Of an even number of members the slower one of the two in the middle counts: what a member
    with a fast line can do is not asked of one with a home's.
    """
    return 2 * (len(rates) - 1) / len(rates) * num_bytes / max(median_low(rates), home_rate)


def assumed_s(expected_s: float, usual_s: float, averaging_s: float) -> float:
    """How long a round may take at the rates that its debts assume, in seconds. At half of them a member is at fault.

    What is expected follows from what members say and have shown, so one that says little, or moves little in each round, may make it as
    long as it likes. It is allowed no more than what others need: `usual_s`.
    """
    return max(averaging_s, SLOWDOWN * min(expected_s, usual_s))


def filled(rates: Sequence[float | None], otherwise: float) -> list[float]:
    """The rates, where one that is not known is that of the others in the middle, or `otherwise` where none is known."""
    usual = median([rate for rate in rates if rate is not None] or [otherwise])
    return [usual if rate is None else rate for rate in rates]


def believed(claimed: float, measured: float | None) -> float:
    """The rate of a link: what its owner claims, as far as those who receive from it have measured it."""
    return claimed if measured is None else min(claimed, measured)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The members of a round, as its links allow. Tuples are in the order of the members that were given."""

    codecs: tuple[int, ...]
    """The place of each member's codec among those allowed; -1: the member is too slow for the round."""
    shares: tuple[float, ...]
    """The share of the accumulator that each member reduces."""
    expected_s: float
    """How long the round takes at the rates told, without the delay of any link."""


def fit(up: Sequence[float], down: Sequence[float], codec_bytes: Sequence[float], within_s: float) -> Fitted:
    """Choose codecs, slices and members so that a round takes no longer than `within_s`.

    `up`, `down`: bytes per second of each candidate; `codec_bytes`: what an accumulator takes in each codec that is allowed, the most exact
    first. The slowest member takes the next codec, until the round is short enough or it has none left. A codec of its own does not help a
    member whose download is too slow.
    """
    least = min(codec_bytes)
    codecs = [0 if least <= within_s * min(pair) else -1 for pair in zip(up, down, strict=True)]
    while True:
        members = [k for k, codec in enumerate(codecs) if codec >= 0]
        sent = [codec_bytes[codecs[k]] for k in members]
        ups = [up[k] / each for k, each in zip(members, sent, strict=True)]
        mean = fmean(sent) if sent else 1.0  # what comes is in the codecs of others
        downs = [down[k] / mean for k in members]
        paces = [min(pair) for pair in zip(ups, downs, strict=True)]
        took_s = least_exchange_s(1.0, paces) if members else 0.0
        if took_s <= within_s:
            break
        slowest = nsmallest(1 + len(members) // SOME, range(len(members)), key=paces.__getitem__)
        for place in slowest:
            sends_slowly = ups[place] <= downs[place]
            codec = _next_codec(codecs[members[place]], codec_bytes) if sends_slowly else -1
            if codec < 0 and place != slowest[0]:
                break  # the round may be short enough without those before it
            codecs[members[place]] = codec
    shares = dict(zip(members, shares_by_rate(paces), strict=True)) if members else {}
    return Fitted(tuple(codecs), tuple(shares.get(k, 0.0) for k in range(len(codecs))), took_s)


def _next_codec(codec: int, codec_bytes: Sequence[float]) -> int:
    """The next codec that takes fewer bytes; -1: there is none."""
    return next((rung for rung in range(codec + 1, len(codec_bytes)) if codec_bytes[rung] < codec_bytes[codec]), -1)
