"""The one way in which a field that is out of its bounds is refused."""

from __future__ import annotations


def between(name: str, value: float, low: float, high: float) -> None:
    """ValueError, naming the field, unless low <= value <= high (so not for NaN)."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low:g} and {high:g}")
