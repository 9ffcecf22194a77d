"""Measures the costs of a model's parts on the model itself, built without memory for its parameters.

The request is a manifest; the answer has the fields of `ModelLoads`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from peerd.config.manifest import parse
from peerd.models.stages import model_loads


def run(request: dict[str, Any]) -> dict[str, Any]:
    return dataclasses.asdict(model_loads(parse(request, "the manifest")))
