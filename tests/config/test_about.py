"""What a run says of itself: bounds of its texts, and that older daemons can read a run that says nothing."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path

import pytest

from peerd.cli.main import run
from peerd.config import manifest
from peerd.config.manifest import AboutConfig, Manifest
from peerd.config.run_file import explained
from peerd.errors import ManifestError

ABOUT = AboutConfig(purpose="A model of poems.", licence="Apache-2.0", contact="anna@example.org", page="https://example.org/run")


def test_the_texts_survive_the_signed_form_and_the_file() -> None:
    told = Manifest(about=ABOUT)
    assert manifest.parse_bytes(told.canonical_bytes(), "x") == told
    assert manifest.parse(tomllib.loads(explained(told)), "x") == told


def test_a_run_that_says_nothing_has_the_bytes_that_older_daemons_read() -> None:
    assert "about" not in json.loads(Manifest().canonical_bytes())
    assert manifest.parse_bytes(Manifest().canonical_bytes(), "x").about == AboutConfig()
    assert AboutConfig(licence="MIT").told == {"licence": "MIT"}


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("purpose", "x" * 601, "600"),
        ("licence", "MIT\n", "one line"),
        ("contact", "\x1b[31m", "one line"),
        ("page", "http://example.org", "https://"),
        ("page", "javascript:alert(1)", "https://"),
    ],
)
def test_a_text_that_is_too_long_or_no_plain_line_is_refused(name: str, text: str, told: str) -> None:
    document = {"about": dataclasses.asdict(ABOUT) | {name: text}}
    with pytest.raises(ManifestError, match=told):
        manifest.parse(document, "x")


def test_new_writes_what_its_flags_say(tmp_path: Path) -> None:
    flags = ("--purpose", "A model of poems.", "--licence", "MIT", "--contact", "anna@example.org")
    assert run(["new", str(tmp_path / "r"), *flags]) == 0
    about = manifest.load(tmp_path / "r" / "run.toml").about
    assert about == AboutConfig(purpose="A model of poems.", licence="MIT", contact="anna@example.org")
    assert run(["new", str(tmp_path / "q"), "--licence", "x" * 81]) == 2
