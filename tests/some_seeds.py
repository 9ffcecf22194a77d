"""Seeds of random runs: some are tried each time, and all of them with `-m slow`."""

from __future__ import annotations

from typing import Any

import pytest


def some(most: int, all_of: int) -> list[Any]:
    """The seeds below `all_of` as parameters of a test. Those from `most` on are slow."""
    return [*range(most), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(most, all_of))]
