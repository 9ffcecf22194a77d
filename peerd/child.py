"""Child processes of commands, for work that needs torch: `python -m peerd.child MODULE REQUEST`.

The module has a function `run(request: Request)`; the request comes as JSON, and what `run` returns is printed as JSON. A child that
fails prints one line on standard error and exits with the error's exit code, which the command then uses as its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from peerd import SCHEMA
from peerd.errors import ERROR_PREFIX, ExitCode, PeerdError, UsageError, system_error

REMEDY = "the peerd commands start this process with one request, a JSON text"


def main(arguments: Sequence[str]) -> int:
    """Let the module do its work and print what it returns. Returns the exit code."""
    return exit_code_of(lambda: _answer(arguments))


def exit_code_of(work: Callable[[], int]) -> int:
    """Do the work of a process, which imports gRPC and hivemind only now. Returns its exit code.

    An error that peerd or the system raises on purpose ends it with one line on standard error.
    """
    for name, value in (("GRPC_VERBOSITY", "NONE"), ("GRPC_ENABLE_FORK_SUPPORT", "0"), ("HIVEMIND_LOGLEVEL", "CRITICAL")):
        os.environ.setdefault(name, value)  # they are read when these libraries are imported
    try:
        return work()
    except PeerdError as error:
        told = error
    except OSError as error:
        meant = system_error(error)
        if meant is None:
            raise
        told = meant
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    print(f"{ERROR_PREFIX}{told}", file=sys.stderr)
    return told.exit_code


def _answer(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        raise UsageError(f"{len(arguments)} arguments given", REMEDY)
    run = importlib.import_module(arguments[0]).run
    print(json.dumps({"schema": SCHEMA, **run(parse_request(get_type_hints(run)["request"], arguments[1]))}))
    return ExitCode.OK


def parse_request(kind: Any, text: str) -> Any:
    """Parse a request. UsageError if the text is not a JSON object with the fields of that dataclass."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UsageError(f"not a request: {place + ': ' if place else ''}{first['msg']}", REMEDY) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
