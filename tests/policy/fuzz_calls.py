"""Calls of all policies: which functions take what peers say, and how their arguments are drawn.

The functions are found by walking peerd.policy, so that a new one is not forgotten: a parameter that nobody says how to draw is an error.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import peerd.policy
import peerd.table.swarm_view
import peerd.table.view
from tests.policy.fuzz_arguments import ARGUMENTS, MAKERS
from tests.policy.fuzz_records import World

MOST_S = 0.05
"""Processor time that a call may take."""
TRIES = 3
"""A call counts as slow if it is slow each time: the collector of garbage strikes any."""
_TYPES = (
    "LiveView SwarmView PeerRecord RawRecord Situation Facts Roster RosterEntry Report StageTally ClockOffset Dialled Lineage SignedSlice"
    " SignedOutcome Item AuditWord Case Receipt SignedPass SignedWord Evidence SignedAccount WorkReceipt"
)
TOLD = re.compile(rf"\b({'|'.join(_TYPES.split())})\b")
"""Types of values that peers say, or that hold such values."""


@dataclass(frozen=True, slots=True)
class Call:
    """A public function, method or property of a policy."""

    name: str
    function: Callable[..., Any]
    owner: type | None
    """The class whose method it is."""

    def draw(self, world: World) -> Callable[[], Any]:
        """The call with drawn arguments."""
        arguments, named = [], {}
        if self.owner is not None:
            arguments.append(_maker(self.owner)(world))
        parameters = list(inspect.signature(self.function).parameters.values())[len(arguments) :]
        for parameter in parameters:
            value = _argument(self.name, parameter, world)
            if parameter.kind is parameter.KEYWORD_ONLY:
                named[parameter.name] = value
            else:
                arguments.append(value)

        def call() -> None:
            result = self.function(*arguments, **named)
            if isinstance(result, Iterator):
                list(result)

        return call


def modules() -> list[ModuleType]:
    found = [importlib.import_module(each.name) for each in pkgutil.walk_packages(peerd.policy.__path__, "peerd.policy.")]
    return [*found, peerd.table.view, peerd.table.swarm_view]


@lru_cache
def calls() -> list[Call]:
    """Everything in the policies that takes what peers say. Of a class, all methods if one does."""
    found = []
    for module in modules():
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            label = f"{module.__name__.removeprefix('peerd.')}.{name}"
            if inspect.isclass(value):
                methods = _methods(value)
                if any(_is_told(method) for method in methods.values()):
                    found += [Call(f"{label}.{key}", method, value) for key, method in methods.items()]
            elif inspect.isfunction(value) and _is_told(value):
                found.append(Call(label, value, None))
    return found


def _methods(owner: type) -> dict[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for name, value in vars(owner).items():
        method = value.fget if isinstance(value, property) else value
        if not name.startswith("_") and inspect.isfunction(method):
            found[name] = method
    return found


def _is_told(function: Callable[..., Any]) -> bool:
    return any(TOLD.search(str(parameter.annotation)) for parameter in inspect.signature(function).parameters.values())


def slowest(call: Callable[[], Any]) -> float:
    """Run the call and return the processor time that it took, seconds; of several tries the least, if the first is too slow."""
    best = math.inf
    for _ in range(TRIES):
        began = time.thread_time()
        call()
        best = min(best, time.thread_time() - began)
        if best <= MOST_S:
            break
    return best


def _maker(owner: type) -> Callable[[World], Any]:
    if owner not in MAKERS:
        raise LookupError(f"say in tests/policy/fuzz_arguments.py, in MAKERS, how to make a {owner.__name__} whose methods are called")
    return MAKERS[owner]


def _argument(call: str, parameter: inspect.Parameter, world: World) -> Any:
    kind = str(parameter.annotation)
    for key in ((parameter.name, kind), parameter.name):
        if key in ARGUMENTS:
            return ARGUMENTS[key](world)
    raise LookupError(f"say in tests/policy/fuzz_arguments.py, in ARGUMENTS, how to draw {parameter.name}: {kind}, of {call}")
