"""Bytes moved today and this month, kept in the home so that a quota outlives the daemon."""

from __future__ import annotations

import contextlib
import datetime
import json

from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.unwritten import UNWRITTEN


class Usage:
    """By the owner's own calendar. What a killed daemon moved since its last note is not counted."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._day, self._month = "", ""
        self.today = 0
        self.this_month = 0
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged file counts as none
            known = json.loads(home.usage.read_text())
            today, this_month = int(known["today"]), int(known["this_month"])
            self._day, self._month, self.today, self.this_month = str(known["day"]), str(known["month"]), today, this_month
        self.add(0)
        self._saved = (self._day, self._month, self.today, self.this_month)

    def add(self, num_bytes: int) -> None:
        now = datetime.datetime.now()  # noqa: DTZ005 - the owner's own day
        day, month = now.strftime("%Y-%m-%d"), now.strftime("%Y-%m")
        if day != self._day:
            self._day, self.today = day, 0
        if month != self._month:
            self._month, self.this_month = month, 0
        self.today += num_bytes
        self.this_month += num_bytes

    def save(self) -> None:
        """Write what has been counted since the last time. A full disk costs the count, not the daemon."""
        counted = (self._day, self._month, self.today, self.this_month)
        if counted == self._saved:
            return
        with UNWRITTEN.trying("traffic of today and this month", self._home.usage):
            known = {"day": self._day, "month": self._month, "today": self.today, "this_month": self.this_month}
            replace_file(self._home.usage, json.dumps(known))
            self._saved = counted
