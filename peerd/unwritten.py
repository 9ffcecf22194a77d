"""What this process could not write to disk lately: the one place that `health` reads, and where the log hears of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from peerd.errors import DiskError, LimitError, PeerdError, disk_error

LOG = structlog.get_logger()


class Unwritten:
    """What this process could not write lately and tries again, by what it is. Any thread may use it."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._errors: dict[str, PeerdError] = {}

    @contextmanager
    def trying(self, what: str, place: Path) -> Iterator[None]:
        """The block writes it. A failure is logged, noted until the next success, and raised no further."""
        try:
            yield
        except OSError as error:
            self.note(what, disk_error(place, error))
        except (DiskError, LimitError) as error:
            self.note(what, error)
        else:
            self.forget(what)

    def note(self, what: str, error: PeerdError, *, is_logged: bool = True) -> None:
        with self._guard:
            is_news = str(self._errors.get(what)) != str(error)
            self._errors[what] = error
        if is_news and is_logged:
            LOG.warning("cannot be written; it is tried again", what=what, error=str(error))

    def forget(self, what: str, *, is_logged: bool = True) -> None:
        if what not in self._errors:
            return
        with self._guard:
            was_noted = self._errors.pop(what, None) is not None
        if was_noted and is_logged:
            LOG.info("can be written again", what=what)

    def __contains__(self, what: str) -> bool:
        return what in self._errors

    def errors(self) -> dict[str, PeerdError]:
        with self._guard:
            return dict(self._errors)


UNWRITTEN = Unwritten()
