"""Thinning of old samples, which keeps a history small however long a run lasts. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from peerd.observe.entries import FinishedStep, Sample

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
TIERS = ((HOUR_S, 30.0), (DAY_S, 300.0), (30 * DAY_S, HOUR_S))
"""Age and span in seconds: samples older than the age are merged into one for each span."""


def merged(samples: Sequence[Sample]) -> Sample:
    """Merge consecutive samples into one: counters are added, other values averaged over time."""
    last, span_s = samples[-1], sum(sample.span_s for sample in samples)
    totals: dict[str, int] = {}
    for sample in samples:
        for name, count in sample.counters.items():
            totals[name] = totals.get(name, 0) + count
    return Sample(
        time_s=last.time_s,
        span_s=span_s,
        step=last.step,
        tokens_per_second=_mean(((s.tokens_per_second, s.span_s) for s in samples), span_s),
        peers=_means([s.peers for s in samples], samples, span_s),
        queue=_means([s.queue for s in samples], samples, span_s),
        suspects=max(sample.suspects for sample in samples),
        counters=totals,
    )


def thinned(samples: Sequence[Sample], span_s: float) -> list[Sample]:
    """Merge the samples of each span of time into one, in order."""
    return [merged(list(group)) for _, group in groupby(samples, key=lambda sample: sample.time_s // span_s)]


def every_so_many(steps: Sequence[FinishedStep], most: int) -> list[FinishedStep]:
    """At most `most` steps for a chart, evenly spaced, including the newest."""
    size = -(-len(steps) // most)
    return list(steps[::-1][:: max(1, size)][::-1])


def at_most(samples: Sequence[Sample], most: int) -> list[Sample]:
    """At most `most` samples for a chart, over the same time."""
    size = -(-len(samples) // most)
    return [merged(samples[start : start + size]) for start in range(0, len(samples), size)] if samples else []


def _mean(values: Iterable[tuple[float, float]], span_s: float) -> float:
    return sum(value * weight for value, weight in values) / span_s if span_s else 0.0


def _means(rows: Sequence[tuple[int, ...]], samples: Sequence[Sample], span_s: float) -> tuple[int, ...]:
    """The mean of each stage. A run's number of stages never changes."""
    width = min(len(row) for row in rows)
    return tuple(round(_mean(((row[i], s.span_s) for row, s in zip(rows, samples, strict=True)), span_s)) for i in range(width))
