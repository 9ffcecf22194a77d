"""What the pages show besides `peerd`: scripts and their flags, parts of a run.toml, and other tools with who tries them.

tests/cli/test_documents.py has the commands of peerd itself.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerd.config.manifest import parse
from tests.cli.test_documents import PAGES, lines_of, spans_of

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "scripts" / "benchmarks"
PLACEHOLDERS = {"NAME", "SCENARIO", "KIND", "TABLE"}
OTHERS = {
    "git clone": "needs the address at which the sources are published",
    "pipx install": "tests/test_wheel.py installs the wheel into an empty environment",
    "pip install": "tests/test_wheel.py does the same",
    "docker build": "needs an engine; tests/deploy/test_image.py builds the file with buildah",
    "podman build": "needs an engine; tests/deploy/test_image.py builds the file with buildah",
    "docker compose": "needs an engine; tests/deploy/test_containers.py reads the file",
    "docker run": "needs an engine; tests/deploy/test_containers.py reads the line, test_image.py beside it starts a peer in the image",
    "docker exec": "needs an engine; tests/deploy/test_image.py asks a peer in the image",
    "docker stop": "needs an engine; tests/deploy/test_image.py sends the signal",
    "python3 -m": "makes an environment for the whole machine; tests/test_wheel.py makes one in a folder",
    "useradd --system": "changes the whole machine",
    "install -D": "changes the whole machine",
    "cp deploy/systemd/peerd.service": "changes the whole machine; tests/deploy/test_units.py reads the unit",
    "pkill -USR1": "tests/daemon/test_stack_dump.py sends the signal",
    "eval $(_PEERD_COMPLETE=bash_source peerd)": "tests/cli/test_contract.py asks for completions",
    "sudo sysctl": "changes the whole machine",
}
"""By their first two words: who runs the commands of other programs that pages show as lines to paste, or why nobody does."""


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each pasteable line, and of each span that begins with a script; continued lines joined, assignments left out."""
    lines = "\n".join(lines_of(page)).replace("\\\n", " ").splitlines()
    for text in (*lines, *(span for span in spans_of(page) if span.startswith("scripts/"))):
        try:
            words = shlex.split(text, comments=True)
        except ValueError:
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words:
            yield words


def is_shell(words: list[str]) -> bool:
    """Whether the line is a command and not output, a table of a run.toml or a list of numbers."""
    return words[0] in {each.split()[0] for each in OTHERS} or words[0].startswith("scripts/")


SHOWN = [(page.name, words) for page in PAGES for words in commands_of(page)]
SCRIPTS = sorted({(where, tuple(words)) for where, words in SHOWN if words[0].startswith("scripts/") and words[0] != "scripts/peerd"})
TOML = [
    (page.name, "".join(f"{line[4:]}\n" for line in block.splitlines()))
    for page in PAGES
    for block in re.findall(r"(?m)^(    \[\w+\]\n(?:    .*\n)+)", page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize(("where", "words"), SCRIPTS, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_a_script_that_is_shown_exists_and_so_do_its_flags(where: str, words: tuple[str, ...]) -> None:
    script, *arguments = words
    assert (ROOT / script).exists(), where
    if script not in ("scripts/bench", "scripts/paper") or not arguments or arguments[0] in PLACEHOLDERS:
        return
    name = "paper" if script == "scripts/paper" else arguments[0]
    source = (BENCHMARKS / f"{name}.py").read_text()
    if script == "scripts/paper":
        assert f'"{arguments[0]}"' in source
    beside = "".join(path.read_text() for path in BENCHMARKS.rglob("_*.py"))
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--") and word != "--help"):
        assert f'"{flag}"' in source or f'"{flag}"' in beside, f"{name} has no {flag}"


@pytest.mark.parametrize(("where", "text"), TOML)
def test_a_part_of_a_run_toml_that_is_shown_is_accepted(where: str, text: str) -> None:
    parse(tomllib.loads(text), where)


def test_parts_of_a_run_toml_are_found() -> None:
    assert len(TOML) >= 4


def test_each_command_of_another_program_has_somebody_who_runs_it_or_a_reason() -> None:
    parts = [part for _, words in SHOWN if is_shell(words) and not words[0].startswith("scripts/") for part in split_at_and(words)]
    assert {" ".join(part[:2]) for part in parts if not part[0].startswith(("/opt/peerd", "systemctl", "cd"))} == OTHERS.keys()
    named = {path for reason in OTHERS.values() for path in re.findall(r"tests/[\w/]+\.py", reason)}
    assert [path for path in named if not (ROOT / path).exists()] == []


def split_at_and(words: list[str]) -> Iterator[list[str]]:
    part: list[str] = []
    for word in (*words, "&&"):
        if word == "&&":
            yield part
            part = []
        else:
            part.append(word)
