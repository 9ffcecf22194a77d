"""The command line accepts every command shown in a document or in a verb's help; cheap ones are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from peerd.cli.main import cli
from peerd.config.limits import owner_info
from peerd.config.paths import Home
from peerd.daemon.watching.tracing import trace_reply
from peerd.policy.owner.governor import Limits
from tests.cli.conftest import Command
from tests.cli.replies import audit_reply, contributions_reply, history_reply, peers_reply, status_reply
from tests.cli.test_contract import verbs_of
from tests.command_line import check
from tests.control.fake_daemon import serving
from tests.timeline.pipelines import one_step

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / ".github" / "SECURITY.md", *sorted((ROOT / "peerd" / "docs").glob("*.md")))
SEPARATORS = {"&&", "||", "|", ";", "&"}
STANDS_FOR = {"N": "3", "S": "2", "SECONDS": "30", "SHARE": "0.1", "VERB": "status", "TOPIC": "volunteer", "FILE.png": "plot.png"}
OWNER = {"schema": 1, **owner_info(Limits())}
REPLIES = {
    "history": dict(history_reply(3)),
    "contributions": dict(contributions_reply()),
    "receipt": {"schema": 1, "receipt": "AAAA"},
    "dashboard": {"schema": 1, "address": "http://127.0.0.1:8642/"},
    "pause": OWNER,
    "resume": OWNER,
    "limits": OWNER,
    "status": dict(status_reply()),
    "audit": dict(audit_reply()),
    "peers": dict(peers_reply()),
    "wait": {"schema": 1, "step": 4, "serving": True},
    "leave": {"schema": 1},
    "trace": dict(trace_reply(first=3, last=3, timelines=one_step(), silent=[], num_not_asked=0, run="paper")),
}

ELSEWHERE = {
    **dict.fromkeys(
        ("start", "join", "doctor", "data", "export", "generate", "reference", "demo", "simulate", "logs"), "swarm/test_live_documents.py"
    ),
    "top": "cli/top/test_terminal.py",
    "service": "cli/test_service.py",
    "plan": "cli/test_plan.py",
    **dict.fromkeys(("invite", "ban"), "cli/test_access.py"),
    "serve-api": "cli/test_serve_api.py",
    "chat": "cli/test_ask.py",
    "runs": "cli/test_runs.py",
    "verify-receipt": "cli/test_receipts.py",
}
"""The test that runs a verb which no paper daemon can answer."""


def commands_in(text: str) -> Iterator[list[str]]:
    """The arguments of each `peerd` in a line of shell. A `peerd` without arguments is the name of a user or a service."""
    try:
        words = shlex.split(text)
    except ValueError:  # prose with an apostrophe
        return
    for index, word in enumerate(words):
        if word == "peerd" or word.endswith(("scripts/peerd", "bin/peerd")):
            rest = words[index + 1 :]
            end = next((place for place, following in enumerate(rest) if following in SEPARATORS), len(rest))
            arguments = [STANDS_FOR.get(argument, argument) for argument in rest[:end]]
            if arguments and (arguments[0] in cli.commands or arguments[0].startswith("--")):
                yield arguments


def lines_of(page: Path) -> Iterator[str]:
    """Lines of code blocks, without blocks of output."""
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```bash[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield from block.splitlines()
    yield from re.findall(r"^    (.*)$", _prose(text), re.MULTILINE)


def spans_of(page: Path) -> Iterator[str]:
    """Code within sentences, where a command may lack required arguments."""
    yield from (re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", _prose(page.read_text(encoding="utf-8"))))


def _prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def shown_by(command: click.Command) -> list[str]:
    """The examples in a verb's help."""
    return re.findall(r"^ +(peerd .*)$", command.help or "", re.MULTILINE)


FROM_PAGES = [(page.name, arguments) for page in PAGES for line in lines_of(page) for arguments in commands_in(line)]
FROM_SPANS = [(page.name, arguments) for page in PAGES for line in spans_of(page) for arguments in commands_in(line)]
NAMED = {(where, tuple(arguments)) for where, arguments in FROM_SPANS}
FROM_HELP = [(name, arguments) for name, verb in verbs_of(cli) for line in shown_by(verb) for arguments in commands_in(line)]
SHOWN = sorted({(where, tuple(arguments)) for where, arguments in FROM_PAGES + FROM_SPANS + FROM_HELP})


def test_commands_are_found_where_people_look_for_them() -> None:
    places = {where for where, _ in SHOWN}
    assert {"README.md", "volunteer.md", "organiser.md", "deploy.md", "simulate.md", "faults.md"} <= places
    assert {"demo", "join", "status", "top", "new", "start"} <= places
    assert ["top"] in [arguments for where, arguments in FROM_SPANS if where == "volunteer.md"]


@pytest.mark.parametrize(("where", "arguments"), SHOWN, ids=lambda value: value if isinstance(value, str) else " ".join(value))
def test_a_command_that_is_shown_exists(where: str, arguments: tuple[str, ...]) -> None:
    try:
        check(list(arguments))
    except click.exceptions.Exit as found:  # --help and --version
        assert found.exit_code == 0
    except (click.MissingParameter, click.exceptions.NoArgsIsHelpError):
        assert (where, arguments) in NAMED


@pytest.mark.parametrize(
    "arguments",
    sorted({arguments for _, arguments in SHOWN if arguments[0] in {"new", "help", *REPLIES} and "--help" not in arguments}),
    ids=" ".join,
)
def test_a_command_that_only_asks_or_writes_a_run_does_so(
    peerd: Command, short_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    if arguments[:1] == ("peers",) and len(arguments) > 1 and not arguments[1].startswith("--"):
        pytest.skip("asks a peer over the network")
    if arguments == ("new",):
        pytest.skip("is named, and not shown")
    if "--from" in arguments:
        pytest.skip("needs a run to go on from: tests/swarm/test_live_repartition.py")
    if "--model" in arguments:
        pytest.skip("takes in a model that is not peerd's own: tests/test_intake.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")  # it opens no browser, and succeeds
    folder = Path("DIR" if "DIR" in arguments else "my-run")
    with serving(Home(short_home), lambda request: {"ok": REPLIES[request["verb"]]}):
        done = peerd(*arguments)
    assert done.code == 0, done.err
    assert done.out
    if arguments[0] == "new":
        assert (tmp_path / folder / "run.toml").exists()


def test_every_verb_that_is_shown_is_run_by_some_test() -> None:
    shown = {arguments[0] for _, arguments in SHOWN if not arguments[0].startswith("--")}
    assert shown - REPLIES.keys() - {"new", "help"} == ELSEWHERE.keys()
    tests = {verb: (ROOT / "tests" / name).read_text() for verb, name in ELSEWHERE.items()}
    assert [verb for verb, text in tests.items() if not re.search(rf'["\'](peerd )?{verb}\b', text)] == []


@pytest.mark.parametrize("wrong", ["peerd stat", "peerd status --jsn", "peerd wait --step x", "peerd peers A B"])
def test_a_command_that_does_not_exist_would_be_noticed(wrong: str) -> None:
    with pytest.raises(click.UsageError):
        check(shlex.split(wrong)[1:])
