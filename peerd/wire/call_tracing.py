"""The hook around each microbatch, where it is launched and where it is served, for daemons that export traces."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from peerd.wire.messages import Call


class CallTracing:
    """Each method returns a context that yields the call to go on with. This base class traces nothing and yields the call unchanged."""

    def launched(self, call: Call) -> AbstractContextManager[Call]:
        return nullcontext(call)

    def served(self, call: Call) -> AbstractContextManager[Call]:
        return nullcontext(call)
