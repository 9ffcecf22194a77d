"""The run.toml that `peerd new` writes: a manifest with a line of explanation above each field.

The line is the first of the docstring below the field, in the class that defines the section.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
from typing import Any

from peerd.config.codec import EXAMPLES
from peerd.config.data_config import AGREED
from peerd.config.manifest import Manifest

_HEAD = """\
# A peerd run: what is trained, on what, and how. It is the same for every peer and is signed when the run starts.
# Fields left out take their defaults. `peerd help organiser` goes through the steps.
"""

_CODECS = ", ".join(f'"{name}"' for name in EXAMPLES)
# Filled in when the run starts; the organiser does not write them.
_DERIVED = {("start", "step"), ("start", "blake3"), *(("data", name) for name in ("source_blake3", *AGREED))}

_SECTIONS = {
    "about": "What people read before they join. Peers with an older peerd cannot join a run that fills it in.",
    "model": "What is trained.",
    "data": "The text to train on. A list of blocks makes its own samples.",
    "start": "What the run begins from.",
    "train": "How it is trained. One step is one update of the whole model.",
    "compute": "How each peer computes.",
    "wire": f"How tensors travel: {_CODECS}; see `peerd help organiser`.",
    "swarm": "How peers keep track of each other.",
}


def explained(manifest: Manifest) -> str:
    """The text of a run.toml that parses to `manifest`, without the fields that are filled in when the run starts."""
    lines = [_HEAD]
    for entry in dataclasses.fields(Manifest):
        value = getattr(manifest, entry.name)
        if not dataclasses.is_dataclass(value):
            lines += _assignment(Manifest, entry.name, value)
    for section, purpose in _SECTIONS.items():
        lines += ["", *(f"# {line}" for line in textwrap.wrap(purpose, 125)), f"[{section}]"]
        part = getattr(manifest, section)
        for entry in dataclasses.fields(part):
            if (section, entry.name) not in _DERIVED:
                lines += _assignment(type(part), entry.name, getattr(part, entry.name))
    return "\n".join(lines) + "\n"


def _assignment(section: type, name: str, value: object) -> list[str]:
    import tomli_w

    comment = _comments_in(section).get(name)
    assignment = tomli_w.dumps({name: value}).rstrip("\n")
    if isinstance(value, tuple):
        assignment = f"{name} = [{', '.join(_inline(each) for each in value)}]"  # on one line
    if isinstance(value, str) and "\n" in value and value.isascii() and value.replace("\n", "").isprintable() and "'''" not in value:
        assignment = f"{name} = '''\n{value}'''"  # verbatim, over several lines
    return [f"# {comment}", assignment] if comment else [assignment]


@functools.cache
def _comments_in(section: Any) -> dict[str, str]:
    """The explanations of a section's fields."""
    found: dict[str, str] = {}
    body = next(node.body for node in ast.walk(ast.parse(inspect.getsource(section))) if isinstance(node, ast.ClassDef))
    for pair in itertools.pairwise(body):
        match pair:
            case (ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text)))):
                found[name] = text.strip().partition("\n")[0]
    return found


def _inline(value: object) -> str:
    import tomli_w

    return tomli_w.dumps({"x": value}).removeprefix("x = ").rstrip("\n")
