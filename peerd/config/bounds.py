"""The check of numeric bounds that all configuration fields share."""

from __future__ import annotations


def between(name: str, value: float, low: float, high: float) -> None:
    """Raise a ValueError that names the field, unless low <= value <= high. NaN is refused, too."""
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; it must be between {low:g} and {high:g}")
