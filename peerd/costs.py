"""What the parts of a run's model cost, asked of the model itself, which is built without memory for its parameters.

`python -m peerd.costs MANIFEST` takes a manifest as JSON and prints the fields of `ModelLoads`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from peerd.config.manifest import parse_bytes
from peerd.errors import ExitCode, PeerdError, UsageError
from peerd.models.stages import model_loads

SCHEMA = 1


def costs_of(manifest: str) -> dict[str, Any]:
    """The whole command. Returns what goes to standard output."""
    return {"schema": SCHEMA, **dataclasses.asdict(model_loads(parse_bytes(manifest.encode(), "the manifest")))}


def main(arguments: list[str]) -> int:
    try:
        if len(arguments) != 1:
            raise UsageError(f"{len(arguments)} arguments given", "python -m peerd.costs takes one manifest as JSON")
        print(json.dumps(costs_of(arguments[0])))
    except PeerdError as error:
        print(f"peerd: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
