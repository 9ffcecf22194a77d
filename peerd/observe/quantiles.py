"""Quantiles of a few numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least this share of them does not exceed; 0 without any."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0
