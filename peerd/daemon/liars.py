"""Lies on demand, for tests and benchmarks: code from outside the tree that runs inside this daemon. Only if Settings.allow_faults is set.

The control verb `lie` names a module: a path that ends with .py, or a dotted name. Its coroutine `lie(peer, arguments)` then runs beside
the daemon's own work until it returns or the daemon ends. `peer` (daemon/peer.py) has the key, the table and the clients, so a liar can
sign and send whatever it wants under this daemon's key; it may also wrap functions of other rooms, as faults.py does. `arguments` are the
other fields of the request.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog

from peerd import background
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say
from peerd.daemon.peer import Peer
from peerd.errors import UsageError

Lie = Callable[[Peer, Mapping[str, Any]], Coroutine[Any, Any, None]]
LOG = structlog.get_logger()


class Liars:
    """The lies of one daemon."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    async def lie(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """The control verb."""
        told = load(request.get("module"))
        arguments = {name: value for name, value in request.items() if name not in ("verb", "module")}
        LOG.warning("a lie was ordered", module=request["module"], **arguments)
        background.start(told(self._peer, arguments))
        return {"schema": SCHEMA}


def load(name: object) -> Lie:
    """The coroutine `lie` of a module."""
    if not isinstance(name, str) or not name:
        raise UsageError("a lie needs a module", "name a file that ends with .py, or a module that can be imported")
    try:
        found = getattr(_module(name), "lie", None)
    except Exception as error:
        raise UsageError(f"the module {name} cannot be loaded: {error!r}", "mend the module, or name another one") from error
    if not callable(found):
        raise UsageError(f"the module {name} has no coroutine lie(peer, arguments)", "peerd/daemon/liars.py says what it does")
    return found  # type: ignore[no-any-return]


def _module(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
