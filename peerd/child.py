"""Child processes of commands, for work that needs torch: they take a request as JSON and print an answer as JSON.

A child that fails prints one line on standard error and exits with the error's exit code, which the command then uses as its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from peerd import SCHEMA
from peerd.errors import ExitCode, PeerdError, UsageError

REMEDY = "the peerd commands start this process with one request, a JSON text"
Request = TypeVar("Request")


def answer(work: Callable[[str], Mapping[str, Any]], arguments: Sequence[str], *, interrupted: str = "") -> int:
    """Do the work on the one argument and print what it returns. Returns the exit code; an interrupt prints the line given."""
    try:
        if len(arguments) != 1:
            raise UsageError(f"{len(arguments)} arguments given", REMEDY)
        print(json.dumps({"schema": SCHEMA, **work(arguments[0])}))
    except PeerdError as error:
        print(f"peerd: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        if interrupted:
            print(f"peerd: {interrupted}", file=sys.stderr)
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def parse_request(kind: type[Request], text: str) -> Request:
    """Parse a request. UsageError if the text is not a JSON object with the fields of that dataclass."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"not a request: {place + ': ' if place else ''}{first['msg']}", REMEDY) from None
