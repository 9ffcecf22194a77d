"""The contract with users' scripts: verbs, flags, JSON fields and exit codes. A commit that changes it must say so."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from peerd.cli.main import cli, run
from peerd.cli.verbs import SECTIONS
from peerd.config.paths import Home
from peerd.errors import ExitCode
from tests.cli.conftest import Command
from tests.cli.replies import contributions_reply, history_reply, peers_reply, status_reply
from tests.control.fake_daemon import answering, line

_DAEMON_FLAGS = {
    *("--stage", "--stay", "--device", "--data", "--host", "--port", "--detach", "--compute-stand-in", "--slow", "--home", "--json"),
    *(
        "--dashboard-port",
        "--dashboard-host",
        "--dashboard-public",
        "--public",
        "--sample",
        "--no-dashboard",
        "--otel",
        "--tensorboard",
        "--wandb",
        "--moves",
    ),
    *(
        "--no-port-mapping",
        "--direct-port",
        "--no-direct",
        "--no-quic",
        "--quic-port",
        "--no-local",
        "--nice",
        "--nickname",
        "--team",
        "--unlisted",
        "--relay",
        "--relay-rate",
        "--relay-daily",
    ),
}

VERBS = {
    "demo": {
        *(
            "--stages",
            "--peers",
            "--steps",
            "--run",
            "--seed",
            "--accumulate",
            "--slow",
            "--kill",
            "--chaos",
            "--compute-stand-in",
            "--out",
        ),
        *("--home", "--json"),
    },
    "join": {*_DAEMON_FLAGS, "--invitation"},
    "start": {*_DAEMON_FLAGS, "--placement"},
    "runs": {"--add", "--at", "--home", "--json"},
    "status": {"--long", "--home", "--json"},
    "peers": {"--home", "--json"},
    "top": {"--home"},
    "doctor": {"--device", "--host", "--port", "--direct-port", "--home", "--json"},
    "wait": {"--serving", "--step", "--timeout", "--home", "--json"},
    "dashboard": {"--open", "--home", "--json"},
    "logs": {"--follow", "-f", "--lines", "-n", "--json", "--home"},
    "history": {"--since", "--events", "--home", "--json"},
    "contributions": {"--share", "--receipt", "--days", "--home", "--json"},
    "verify-receipt": {"--run", "--anchor", "--home", "--json"},
    "trace": {"--steps", "--out", "-o", "--timeout", "--home", "--json"},
    "leave": {"--now", "--home", "--json"},
    "pause": {"--for", "--home", "--json"},
    "resume": {"--home", "--json"},
    "limits": {
        *("--upload", "--download", "--daily", "--monthly", "--memory", "--disk", "--duty", "--inference", "--power", "--hours"),
        *("--max-temperature", "--while-used", "--on-battery", "--metered", "--home", "--json"),
    },
    "service": {"--home"},
    "service install": {"--print", "--home"},
    "service uninstall": {"--home"},
    "service status": {"--home", "--json"},
    "new": {
        *("--name", "--stages", "--layers", "--d-model", "--heads", "--d-ff", "--sequence-length", "--microbatch-size", "--microbatches"),
        *("--data", "--steps", "--learning-rate", "--seed", "--accumulate", "--from", "--device-memory", "--force", "--home", "--json"),
        *("--tie-word-embeddings", "--boundary", "--boundary-rank", "--before", "--optimizer", "--optimizer-bits"),
        *("--model", "--config", "--set", "--purpose", "--licence", "--contact"),
        *("--link", "--rtt", "--tflops", "--trust"),
        *("--field", "--tokenizer", "--evaluation-fraction", "--evaluate-every", "--evaluation-microbatches"),
    },
    "plan": {"--network", "--swarm", "--dtfm", "--method", "--seed", "--sweep", "--write", "--home", "--json"},
    "data": {"--data", "--home", "--json"},
    "invite": {"--days", "--list", "--run", "--home", "--json"},
    "ban": {"--reason", "--lift", "--run", "--home", "--json"},
    "audit": {"--home", "--json"},
    "export": {"--format", "--timeout", "--home", "--json"},
    "chat": {"--tokens", "--temperature", "--top-p", "--seed", "--verbose", "--home"},
    "generate": {"--swarm", "--prompt", "--tokens", "--temperature", "--top-p", "--seed", "--device", "--verbose", "--home", "--json"},
    "serve-api": {"--swarm", "--port", "--device", "--home", "--json"},
    "reference": {"--steps", "--out", "--data", "--replicas", "--replay", "--home", "--json"},
    "help": {"--home"},
    "simulate": set(),
    "simulate run": {
        *("-o", "--network", "--peers", "--method", "--steps", "--noise", "--unreliable", "--departures", "--seed", "--out"),
        *("--home", "--json"),
    },
    "simulate rebalance": {
        *("--trace", "--stages", "--peers", "--download", "--unlike", "--view-delay", "--noise", "--seed", "--runs", "--plot"),
        *("--home", "--json"),
    },
    "simulate liars": {
        *("--lie", "--peers", "--liars", "--share", "--microbatches", "--begins", "--rate", "--settled", "--protect", "--runs", "--seed"),
        *("--home", "--json"),
    },
}

DEMO_FIELDS = {
    *("schema", "loss_first", "loss_last", "steps", "peers", "stages", "tokens_per_second", "duration_s", "duplicate_microbatches"),
    *("lost_microbatches", "replayed_microbatches", "suppressed_microbatches", "inexact_steps", "faults", "bytes_per_boundary_crossing"),
    *("boundary_tensor_bytes", "transfers_per_boundary", "microbatches_by_peer", "stage_of_peer", "compute_stand_in_ms", "slow"),
    *("seed", "accumulate", "losses"),
}

EXIT_CODES = {
    "OK": 0,
    "FAILURE": 1,
    "USAGE": 2,
    "MANIFEST": 3,
    "SIGNATURE": 4,
    "ADDRESS": 5,
    "UNREACHABLE": 6,
    "PORT_TAKEN": 7,
    "IDENTITY_IN_USE": 8,
    "CLOCK": 9,
    "DISK": 10,
    "NO_DAEMON": 11,
    "TIMED_OUT": 12,
    "STAGE": 13,
    "LIMIT": 14,
    "DIVERGED": 15,
    "SHUT_OUT": 16,
    "INTERRUPTED": 130,
}


def flags_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params if isinstance(parameter, click.Option) for name in parameter.opts}


def verbs_of(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    """All verbs by their full names, including verbs of groups."""
    for name, command in group.commands.items():
        yield before + name, command
        if isinstance(command, click.Group):
            yield from verbs_of(command, f"{before}{name} ")


def test_the_shell_completes_verbs_and_flags(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for words, number, expected in (("peerd jo", "1", "join"), ("peerd join --nick", "2", "--nickname")):
        for name, value in (("_PEERD_COMPLETE", "bash_complete"), ("COMP_WORDS", words), ("COMP_CWORD", number)):
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            run([])
        assert (ended.value.code, capfd.readouterr().out) == (0, f"plain,{expected}\n")


def test_verbs_and_flags_are_those_that_scripts_rely_on() -> None:
    assert {name: flags_of(command) for name, command in verbs_of(cli)} == VERBS


def test_exit_codes_are_those_that_scripts_rely_on() -> None:
    assert {code.name: code.value for code in ExitCode} == EXIT_CODES


def test_every_exit_code_is_explained_in_help_and_on_its_page(peerd: Command) -> None:
    overview, page = peerd("--help").out, peerd("help", "errors").out
    for code in EXIT_CODES.values():
        assert f"{code} " in overview
        assert f"| {code} |" in page


def test_reading_verbs_print_one_json_object_with_the_schema(peerd: Command, short_home: Path) -> None:
    past = (("history", history_reply()), ("contributions", contributions_reply()))
    for verb, reply in (("status", status_reply()), ("peers", peers_reply()), *past):
        with answering(Home(short_home), line({"ok": reply})):
            done = peerd(verb, "--json")
        assert done.code == 0
        assert done.err == ""
        assert json.loads(done.out) == reply
        assert json.loads(done.out)["schema"] == 1


def test_the_demo_prints_one_json_object_with_all_its_fields(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 2, "--steps", 3, "--json")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    assert set(json.loads(done.out)) == DEMO_FIELDS


def test_home_is_taken_before_and_after_the_verb_and_wins_over_the_environment(peerd: Command, short_home: Path) -> None:
    other = short_home / "o"
    for arguments in (("--home", other, "status", "--json"), ("status", "--home", other, "--json")):
        with answering(Home(other), line({"ok": status_reply(pid=77)})):
            assert json.loads(peerd(*arguments).out)["pid"] == 77


def test_help_lists_its_pages_and_shows_each(peerd: Command) -> None:
    listed = peerd("help").out
    for topic in ("volunteer", "organiser", "architecture", "protocol", "extending", "glossary", "errors", "simulate"):
        assert topic in listed
        assert peerd("help", topic).out.startswith("# ")


def test_the_help_lists_every_verb_once_with_a_whole_line_of_its_own(peerd: Command) -> None:
    verbs = [command.name for section in SECTIONS.values() for command in section]
    assert sorted(map(str, verbs)) == sorted(cli.commands)
    shown = peerd("--help").out.splitlines()
    assert max(map(len, shown)) <= 80
    for section in SECTIONS.values():
        for command, line_told in section.items():
            assert [line.split(maxsplit=1)[1] for line in shown if line.startswith(f"  {command.name} ")] == [line_told]


def test_a_verb_that_is_misspelt_is_met_with_one_that_is_meant(peerd: Command) -> None:
    found = peerd("staus")
    assert (found.code, "Did you mean" in found.err, "'status'" in found.err) == (2, True, True)
