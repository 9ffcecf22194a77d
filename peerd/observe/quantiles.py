"""Quantiles of a few numbers. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values such that at least `share` of them are not larger; 0 if there are none."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
