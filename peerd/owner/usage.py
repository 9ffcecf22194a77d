"""Bytes moved today and this month, kept in the home so that a quota outlives the daemon."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.unwritten import UNWRITTEN


class Usage:
    """By the owner's own calendar. What a killed daemon moved since its last note is not counted."""

    def __init__(self, home: Home, others: Sequence[Home] = ()) -> None:
        """`others` are the homes of daemons that use the same quotas. What these move counts once they have noted it."""
        self._home = home
        self._others = others
        self._day, self._month = _days()
        self._own_today, self._own_month = _noted(home, self._day, self._month)
        self._others_today, self._others_month = 0, 0
        self._saved = (self._day, self._month, self._own_today, self._own_month)
        self.read_others()

    @property
    def today(self) -> int:
        return self._own_today + self._others_today

    @property
    def this_month(self) -> int:
        return self._own_month + self._others_month

    def add(self, num_bytes: int) -> None:
        day, month = _days()
        if day != self._day:
            self._day, self._own_today, self._others_today = day, 0, 0
        if month != self._month:
            self._month, self._own_month, self._others_month = month, 0, 0
        self._own_today += num_bytes
        self._own_month += num_bytes

    def read_others(self) -> None:
        """Read what the other daemons have noted."""
        noted = [_noted(home, self._day, self._month) for home in self._others]
        self._others_today, self._others_month = sum(today for today, _ in noted), sum(month for _, month in noted)

    def save(self) -> None:
        """Write what has been counted since the last time. A full disk costs the count, not the daemon."""
        counted = (self._day, self._month, self._own_today, self._own_month)
        if counted == self._saved:
            return
        with UNWRITTEN.trying("traffic of today and this month", self._home.usage):
            known = {"day": self._day, "month": self._month, "today": self._own_today, "this_month": self._own_month}
            replace_file(self._home.usage, json.dumps(known))
            self._saved = counted


def _days() -> tuple[str, str]:
    """Today and this month, as the owner names them."""
    now = datetime.datetime.now()  # noqa: DTZ005 - the owner's own day
    return now.strftime("%Y-%m-%d"), now.strftime("%Y-%m")


def _noted(home: Home, day: str, month: str) -> tuple[int, int]:
    """Bytes that a home's daemon has noted for this day and this month. A damaged file counts as none."""
    try:
        known = json.loads(home.usage.read_text())
        today, this_month = int(known["today"]), int(known["this_month"])
        return today * (known["day"] == day), this_month * (known["month"] == month)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0, 0
