"""A run's name, and the manifest's [about]: what people read of a run before they join. Nothing is computed from [about]."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MAX_NAME_CHARS = 64
MAX_CHARS = {"purpose": 600, "licence": 80, "contact": 120, "page": 200}


def check_name(name: str) -> None:
    """Raise a ValueError if a run cannot have this name."""
    if not (1 <= len(name) <= MAX_NAME_CHARS and all(c.isalnum() or c in "-_." for c in name)):
        raise ValueError(f"name must be 1 to {MAX_NAME_CHARS} letters, digits, '-', '_' or '.'")


@dataclass(frozen=True, slots=True, kw_only=True)
class AboutConfig:
    """Texts by the organiser, shown as text in `peerd status --long` and on the dashboard."""

    purpose: str = ""
    """What is trained, and what for, in a few sentences; shown to everybody who looks at the run."""
    licence: str = ""
    """Licence of the trained model, for example "Apache-2.0"."""
    contact: str = ""
    """Where the organiser is reached: an e-mail address, or a page."""
    page: str = ""
    """An https address with more about the run."""

    def __post_init__(self) -> None:
        for entry in dataclasses.fields(self):
            text, most = getattr(self, entry.name), MAX_CHARS[entry.name]
            if len(text) > most:
                raise ValueError(f"about.{entry.name} has {len(text)} characters; the limit is {most}")
            if not text.isprintable():
                raise ValueError(f"about.{entry.name} must be one line without control characters")
        if self.page and not self.page.startswith("https://"):
            raise ValueError("about.page must begin with https://")

    @property
    def told(self) -> dict[str, str]:
        """The texts that are not empty, by field."""
        return {name: text for name, text in dataclasses.asdict(self).items() if text}
