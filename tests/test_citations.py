"""docs/protocol.md and whatever cites it: each number leads there, what it names exists, and no document is cited that is not here."""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from peerd.policy.step import stepping
from peerd.table.record import PeerRecord

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "peerd" / "docs"
PAGE = (DOCS / "protocol.md").read_text(encoding="utf-8")
PAPERS = {"SWARM"}
OUTSIDE = r"\b(?:PROTOCOL|DESIGN|ALGORITHMS|HOUSE|STYLE|TRUST)\b"
"""Words that once stood for notes beside the project."""

_LAW = r"[TWJNI]\d(?!\d)"
_NUMBER = rf"(?:{_LAW}|\d+)(?: \([a-z][a-z -]*\))?"
_LIST = rf"{_NUMBER}(?:(?:, | and | to ){_NUMBER})*"
KNOWN = dict(re.findall(rf"\*\*((?:(?:hole|gap) )?(?:{_LAW}|\d+))(?: \(([^)]+)\))?\*\*", PAGE))
"""Each anchor of the page and its name: "7" is propose, "hole 14" is zombie."""


def citations(text: str) -> Iterator[tuple[str, str]]:
    """(anchor, the name given with it) of every rule, hole, gap and invariant that a text cites."""
    for kind, listed in re.findall(rf"\b([Rr]ule|[Hh]ole|[Gg]ap)s? ({_LIST})", text):
        for number, name in re.findall(rf"({_LAW}|\d+)(?: \(([^)]+)\))?", listed):
            yield (number if kind.lower() == "rule" else f"{kind.lower()} {number}"), name
    yield from re.findall(rf"\b({_LAW})\b(?: \(([a-z][a-z -]*)\))?", text)
    for numbers in re.findall(r"\btest_holes?_(\d+(?:_and_\d+)*)_", text):
        yield from ((f"hole {number}", "") for number in numbers.split("_and_"))


def wrong_in(text: str) -> list[str]:
    """Citations that lead nowhere, or by another name than the page's, and documents that are not in the repository."""
    text = re.sub(r"\s+(?:# )?", " ", text)
    wrong = [f"{anchor} ({name})" for anchor, name in citations(text) if anchor not in KNOWN or name not in ("", KNOWN[anchor])]
    wrong += re.findall(OUTSIDE, text)
    wrong += [each for each in re.findall(r"\b([A-Z]{3,})(?:'s)? (?:section|appendix|rule|hole)s? [\dA-Z]", text) if each not in PAPERS]
    pages = {"README.md"} | {prefix + page.name for page in DOCS.glob("*.md") for prefix in ("", "docs/", "peerd/docs/")}
    return wrong + [each for each in re.findall(r"(?:(?:peerd/)?docs/|(?<![\w/]))[\w-]+\.md\b", text) if each not in pages]


@cache
def prose_of(path: Path) -> str:
    """Of Python its comments, docstrings and names of tests; of anything else all of it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".py", ".pyi"):
        return text
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    is_prose = {tokenize.COMMENT: "#", tokenize.STRING: '"""', tokenize.NAME: "test_hole"}
    return "\n".join(each.string for each in tokens if each.type in is_prose and each.string.startswith(is_prose[each.type]))


def sources() -> list[Path]:
    found = [path for folder in ("peerd", "tests", "scripts", "deploy", "protos") for path in (ROOT / folder).rglob("*") if path.is_file()]
    text = [path for path in found if "__pycache__" not in path.parts and b"\0" not in path.read_bytes()]
    return [ROOT / "README.md", ROOT / "pyproject.toml", *text]


def test_whatever_is_cited_stands_in_the_page_by_that_name_and_no_document_is_cited_that_is_not_here() -> None:
    assert {f"{path.relative_to(ROOT)}: {each}" for path in sources() for each in wrong_in(prose_of(path))} == set()


def test_the_code_cites_the_page() -> None:
    cited = [anchor for path in (ROOT / "peerd").rglob("*.py") for anchor, _ in citations(re.sub(r"\s+", " ", prose_of(path)))]
    assert len(cited) > 60
    assert {*map(str, range(1, 14)), "T1", "T2", "T3", "T4", "T5"} <= set(cited)


@pytest.mark.parametrize(
    "wrong",
    [
        *("rule 99", "rules 7 and 99", "rule 7 (adopt)", "rules 7 (propose) and 8 (commit)", "rule 7\n    # (adopt)"),
        *("J9", "T2 (order)", "hole 177", "holes 1, 2 and 199", "hole 3 (ghost)", "N9", "def test_holes_4_and_171_of_something"),
        *("DESIGN section 6", "(PROTOCOL, opening)", "NOTES section 2", "docs/law.md", "see NOTES.md", "peerd/docs/nothing.md"),
    ],
)
def test_a_wrong_citation_would_be_noticed(wrong: str) -> None:
    assert wrong_in(wrong)


@pytest.mark.parametrize("right", ["rules 7 (propose) and 8 (exchange)", "holes 1, 2 and 14 (zombie)", "T3 (fence)", "SWARM appendix I"])
def test_a_right_one_is_left_alone(right: str) -> None:
    assert wrong_in(right) == []


def test_rules_stand_in_the_page_in_the_order_in_which_they_are_tried() -> None:
    tried = [re.match(r"Rule (\d+) \(([a-z ]+)\): ", rule.__doc__ or "") for rule in stepping._RULES]
    assert [each.groups() for each in tried if each] == re.findall(r"^\| \*\*(\d+) \(([^)]+)\)\*\* \|", PAGE, re.MULTILINE)
    assert all(tried)
    assert len([anchor for anchor in KNOWN if anchor.isdecimal()]) == len(tried) + 4, (
        "rules 8 (exchange), 20 (audit), 21 (prove) and 22 (size) are no decisions"
    )


def test_every_hole_names_the_tests_that_guard_it_and_they_exist() -> None:
    holes = re.split(r"^- \*\*hole \d+ ", PAGE.partition("\n## Holes\n")[2].partition("\n## ")[0], flags=re.MULTILINE)[1:]
    assert len(holes) == len([anchor for anchor in KNOWN if anchor.startswith("hole ")])
    guards = [re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", hole) for hole in holes]
    assert all(guards)
    modules = {name: ast.parse((ROOT / name).read_text(encoding="utf-8")) for name in {name for each in guards for name, _ in each}}
    tests = ((name, node) for name, module in modules.items() for node in module.body)
    known = {(name, node.name) for name, node in tests if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {guard for each in guards for guard in each} - known == set()


def test_fields_and_constants_that_the_page_names_exist() -> None:
    table = PAGE.partition("\n## What a record says of a step\n")[2].partition("\n## ")[0]
    fields = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert len(fields) > 15
    assert fields - {field.name for field in dataclasses.fields(PeerRecord)} == set()
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "peerd").rglob("*.py"))
    named = re.findall(r"`([A-Z]+(?:_[A-Z]+)+|[a-z]+(?:_[a-z]+)+_s)`", PAGE)
    assert len(named) > 10
    assert [name for name in named if not re.search(rf"\b{name}\b", code)] == []
