"""What surrounds a microbatch where it is launched and where it is served, for daemons that export traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from peerd.wire.messages import Call


class CallTracing(Protocol):
    """The call that a context gives is the one that goes on."""

    def launched(self, call: Call) -> AbstractContextManager[Call]: ...

    def served(self, call: Call) -> AbstractContextManager[Call]: ...


class Untraced:
    """Calls go on as they are."""

    def launched(self, call: Call) -> AbstractContextManager[Call]:
        return nullcontext(call)

    def served(self, call: Call) -> AbstractContextManager[Call]:
        return nullcontext(call)
