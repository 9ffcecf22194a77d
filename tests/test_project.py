"""The house: what lies where, how large it may get, and that generated code and documents are current."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from peerd import __version__
from peerd.cli.main import cli

ROOT = Path(__file__).resolve().parents[1]
TOP_LEVEL = {"LICENSE", "README.md", "deploy", "peerd", "protos", "pyproject.toml", "scripts", "tests"}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
PAGES = (ROOT / "README.md", ROOT / ".github" / "SECURITY.md", *sorted((ROOT / "peerd" / "docs").glob("*.md")))
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc", "base"}


def own_sources() -> list[Path]:
    return [
        path for folder in ("peerd", "tests", "scripts") for path in sorted((ROOT / folder).rglob("*.py")) if "generated" not in path.parts
    ]


def test_the_top_level_holds_what_people_expect_and_nothing_else() -> None:
    found = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".")}
    assert found - TOP_LEVEL - {"shared"} == set()  # a link of that name may be laid beside a checkout
    assert TOP_LEVEL - {"deploy"} <= found


def test_no_file_is_too_long_to_read() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in own_sources()}
    assert [f"{path.relative_to(ROOT)}: {lines} lines" for path, lines in lengths.items() if lines > MAX_FILE_LINES] == []


def test_no_function_is_too_long_to_read() -> None:
    long = []
    for path in own_sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert long == []


def test_no_file_is_named_after_nothing() -> None:
    assert [str(path.relative_to(ROOT)) for path in own_sources() if path.stem in FORBIDDEN_NAMES] == []


def test_no_class_name_is_borne_twice() -> None:
    bearers: dict[str, list[str]] = {}
    for path, tree in sources_of_peerd():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bearers.setdefault(node.name, []).append(str(path))
    assert {name: paths for name, paths in bearers.items() if len(paths) > 1} == {}


def test_callbacks_are_given_to_constructors() -> None:
    """Nobody sets another object's callback later, and no attribute is a lambda: "go to definition" leads to the code that runs."""
    trees = sources_of_peerd()
    callbacks = {name for _, tree in trees for name in callback_attributes(tree)}
    found = []
    for path, tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign | ast.AnnAssign):
                continue
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if not isinstance(target, ast.Attribute):
                    continue
                is_own = isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
                is_callback = target.attr in callbacks or target.attr.startswith("on_")
                if isinstance(node.value, ast.Lambda) or (is_callback and not is_own):
                    found.append(f"{path}:{node.lineno} sets {target.attr}")
    assert found == []


def sources_of_peerd() -> list[tuple[Path, ast.Module]]:
    return [(path.relative_to(ROOT), ast.parse(path.read_text())) for path in own_sources() if path.is_relative_to(ROOT / "peerd")]


def callback_attributes(tree: ast.Module) -> set[str]:
    """Attributes whose annotation says that they are called."""
    annotated = [node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Callable")]
    return {node.target.attr for node in annotated if isinstance(node.target, ast.Attribute)}


def test_sources_are_ascii() -> None:
    assert [str(path.relative_to(ROOT)) for path in own_sources() if not path.read_bytes().isascii()] == []


def test_generated_code_is_what_the_protos_say(tmp_path: Path) -> None:
    checked_in = ROOT / "peerd" / "generated"
    subprocess.run(
        [ROOT / "scripts" / "protos", tmp_path], check=True, cwd=ROOT, env={**os.environ, "PYTHON": sys.executable}, capture_output=True
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "peerd" / "generated").iterdir() if path.name != "__init__.py"}
    known = {path.name: path.read_text() for path in checked_in.iterdir() if path.suffix in (".py", ".pyi") and path.name != "__init__.py"}
    assert sorted(fresh) == sorted(known)
    assert [name for name in fresh if fresh[name] != known[name]] == []


def test_the_readme_promises_a_newcomer_two_commands() -> None:
    blocks = dict(re.findall(r"^```bash (run|test)\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL))
    assert blocks == {"run": "scripts/peerd demo\n", "test": "scripts/test\n"}


def test_the_readme_shows_something_to_run_on_its_first_screen() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert lines.index("```bash run") < 25


def test_the_volunteers_page_stays_short() -> None:
    lines = (ROOT / "peerd" / "docs" / "volunteer.md").read_text().splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 150


def test_links_inside_the_repository_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([\w-]+))?\)", page.read_text(encoding="utf-8")):
            path = page.parent / target if target else page
            if not path.exists() or (anchor and anchor not in anchors_of(path)):
                broken.append(f"{page.name}: {target}#{anchor}")
    assert broken == []


def anchors_of(page: Path) -> set[str]:
    """What a link may name after `#`: the headings in small letters, blanks as `-`, without other signs."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_documents_name_only_files_that_exist() -> None:
    named = [
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"`((?:peerd|tests|scripts|protos|deploy)/[\w./-]+)`", page.read_text(encoding="utf-8"))
    ]
    assert len(named) > 30
    assert [(page, name) for page, name in named if not (ROOT / name).exists()] == []


def test_documents_name_only_verbs_that_exist() -> None:
    unknown = []
    for page in PAGES:
        for verb in re.findall(r"(?:^    |`)(?:scripts/)?peerd ([a-z]+(?:-[a-z]+)*)", page.read_text(encoding="utf-8"), re.MULTILINE):
            if verb not in cli.commands:
                unknown.append(f"{page.name}: peerd {verb}")
    assert unknown == []


def test_the_page_on_errors_lists_every_state_that_status_can_name() -> None:
    sources = "".join((ROOT / "peerd" / name).read_text() for name in ("policy/swarm/health.py", "daemon/answers.py"))
    named = set(re.findall(r'(?:_item|HealthNote)\("([\w-]+)", .*"(info|warning|problem)"', sources))
    assert len(named) == len(re.findall(r'\b(?:_item|HealthNote)\("', sources))
    page = (ROOT / "peerd" / "docs" / "errors.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \| (\w+) \|", page, re.MULTILINE)) == named


def test_the_page_on_faults_has_a_row_for_every_point_at_which_a_daemon_is_made_to_fail() -> None:
    page = (ROOT / "peerd" / "docs" / "faults.md").read_text()
    deaths, others = (page.partition(f"## A peer that {what}")[2].partition("\n## ")[0] for what in ("dies", "is slow"))
    points = re.findall(r"^    ([A-Z]+) = \"(\w+)\"$", (ROOT / "peerd" / "daemon" / "faults.py").read_text(), re.MULTILINE)
    assert re.findall(r"^\| [^|]*\*\*(\w+)\*\*", deaths, re.MULTILINE) == [word for _, word in points]
    assert re.findall(r"^\| \*\*(\w+)\*\*", others, re.MULTILINE) == ["slow", "cut", "corrupt", "bug"]
    tried = (ROOT / "tests" / "swarm" / "test_live_faults.py").read_text()
    assert [name for name, _ in points if f"Point.{name}," not in tried and f"Point.{name})" not in tried] == []


@pytest.mark.parametrize("script", ["peerd", "test", "check", "fix", "bench", "protos"])
def test_scripts_can_be_run(script: str) -> None:
    path = ROOT / "scripts" / script
    assert os.access(path, os.X_OK)
    subprocess.run(["bash", "-n", path], check=True)


def test_the_constraints_pin_every_library_to_one_version() -> None:
    lines = [line for line in (ROOT / "scripts" / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9A-Za-z.!]*", line)] == []
    names = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {re.split("[<>=]", name)[0] for name in (*project["dependencies"], *project["optional-dependencies"]["dev"])}
    assert wanted - names == set()


def test_the_version_is_a_version() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
