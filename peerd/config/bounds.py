"""Numeric bounds of configuration fields. A field states them in its annotation: `Annotated[int, Between(1, 4096)]`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints


@dataclass(frozen=True, slots=True)
class Between:
    low: float
    high: float

    def check(self, name: str, value: float) -> None:
        """Raise a ValueError that names the field, unless low <= value <= high. NaN is refused, too."""
        if not self.low <= value <= self.high:
            raise ValueError(f"{name} is {value}; it must be between {self.low:g} and {self.high:g}")


NumSteps = Annotated[int, Between(0, 1 << 40)]


def check_bounds(section: str, config: Any) -> None:
    """Check every field of a section that states bounds. `section` stands before the field's name in the error."""
    for name, bounds in _bounds_of(config.__class__):
        bounds.check(f"{section}{name}", getattr(config, name))


@functools.cache
def _bounds_of(kind: Any) -> list[tuple[str, Between]]:
    hints = get_type_hints(kind, include_extras=True).items()
    return [(name, each) for name, hint in hints for each in getattr(hint, "__metadata__", ()) if isinstance(each, Between)]
