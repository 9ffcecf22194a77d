"""Measures the costs of a model's parts on the model itself, built without memory for its parameters.

`python -m peerd.costs MANIFEST` takes a manifest as JSON and prints the fields of `ModelLoads`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from peerd.child import answer
from peerd.config.manifest import parse_bytes
from peerd.models.stages import model_loads


def costs_of(manifest: str) -> dict[str, Any]:
    """The whole command. Returns the fields to print."""
    return dataclasses.asdict(model_loads(parse_bytes(manifest.encode(), "the manifest")))


def main(arguments: Sequence[str]) -> int:
    return answer(costs_of, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
