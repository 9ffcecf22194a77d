"""What a command has another process do, because it needs torch: a request as JSON in, an answer as JSON out.

A process that cannot answer says why in one line on standard error and ends with that error's exit code, which the command makes its own.
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
    """Do the work on the one argument and print what it returns. Returns the exit code; an interrupt ends with the line given."""
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
    """UsageError where the text is not a JSON object of that dataclass."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"not a request: {place + ': ' if place else ''}{first['msg']}", REMEDY) from None
