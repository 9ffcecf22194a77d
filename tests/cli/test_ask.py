"""`peerd chat` and `peerd generate --swarm`: what the daemon says of each token is printed as it comes, and who computed it on demand."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from peerd.config.paths import Home
from peerd.errors import ExitCode
from tests.cli.conftest import Command
from tests.cli.replies import status_reply, text_reply
from tests.control.fake_daemon import Lines, serving


@contextmanager
def daemon(home: Path, *answers: object) -> Iterator[list[dict[str, Any]]]:
    """A daemon that gives these answers to `ask`, one after another."""
    asked, left = list[dict[str, Any]](), list(answers)

    def answer(request: dict[str, Any]) -> object:
        if request["verb"] == "status":
            return {"ok": dict(status_reply())}
        asked.append(request)
        return left.pop(0)

    with serving(Home(home), answer):
        yield asked


def said(*pieces: str, **changes: Any) -> Lines:
    told = [json.dumps({"number": number, "token": number, "text": piece}) for number, piece in enumerate(pieces)]
    reply = text_reply(**{"text": "".join(pieces), **changes})
    return Lines([*({"progress": each} for each in ["", *told, *told[-1:]]), {"ok": dict(reply)}])


def test_the_text_of_the_swarm_is_printed_as_it_comes(peerd: Command, short_home: Path) -> None:
    with daemon(short_home, said("one", " two"), said("one", " two", steps=[4, 6], rerouted=2)) as asked:
        done = peerd("generate", "--swarm", "--prompt", "zero ", "--tokens", "7")
        assert (done.code, done.out) == (0, "zero one two\n")
        assert asked[0]["prompt"] == "zero "
        assert (asked[0]["max_tokens"], asked[0]["temperature"]) == (7, 0.0)
        verbose = peerd("generate", "--swarm", "--prompt", "zero ", "--verbose")
    assert "3 tokens, 2.0 tokens/s, the first after 0.50 s; steps 4, 6, another path 2 times" in verbose.err
    assert "1 of 4 guessed tokens were right" in verbose.err
    [line] = [line for line in verbose.err.splitlines() if line.startswith("stage 0: ")]
    assert line.endswith("; 100 ms a call: 70 on the way, 10 until its turn, 20 computing")


def test_the_prompt_may_stand_in_place_of_a_folder(peerd: Command, short_home: Path) -> None:
    with daemon(short_home, said("one")) as asked:
        assert peerd("generate", "--swarm", "zero ").out == "zero one\n"
    assert asked[0]["prompt"] == "zero "


@pytest.mark.parametrize("arguments", [("trained",), ("--swarm",)])
def test_without_a_prompt_nothing_is_asked(peerd: Command, arguments: tuple[str, ...]) -> None:
    done = peerd("generate", *arguments)
    assert done.code == ExitCode.USAGE
    assert "there is no prompt" in done.err


def test_what_was_held_back_comes_at_the_end(peerd: Command, short_home: Path) -> None:
    with daemon(short_home, said("one", text="one\N{REPLACEMENT CHARACTER}")):
        assert peerd("generate", "--swarm", "--prompt", ">").out == ">one\N{REPLACEMENT CHARACTER}\n"


def test_a_terminal_obeys_nothing_that_a_peer_says(peerd: Command, short_home: Path) -> None:
    """The peer of the last stage chooses the tokens: here those that write into the clipboard, and a line that hides another."""
    told = said("a\n\t", "\x1b]52;c;cm0=\x07", "b\rc\x9b", text="a\n\t\x1b]52;c;cm0=\x07b\rc\x9b\x08")
    with daemon(short_home, told):
        done = peerd("generate", "--swarm", "--prompt", ">")
    assert done.out.replace("\N{REPLACEMENT CHARACTER}", "?") == ">a\n\t?]52;c;cm0=?b?c??\n"


def test_json_is_the_answer_alone(peerd: Command, short_home: Path) -> None:
    with daemon(short_home, said("one")):
        assert json.loads(peerd("generate", "--swarm", "--prompt", "zero ", "--json").out) == {**text_reply(text="one"), "prompt": "zero "}


@pytest.mark.parametrize("arguments", [("generate", "--prompt", "a"), ("generate", "trained", "--swarm", "--prompt", "a"), ("serve-api",)])
def test_one_model_has_to_be_named(peerd: Command, arguments: tuple[str, ...]) -> None:
    done = peerd(*arguments)
    assert done.code == ExitCode.USAGE
    assert "either a DIR or --swarm" in done.err


def test_without_a_daemon_there_is_no_swarm_to_ask(peerd: Command) -> None:
    for arguments in (("generate", "--swarm", "--prompt", "a"), ("chat",), ("serve-api", "--swarm")):
        assert peerd(*arguments).code == ExitCode.NO_DAEMON


def test_a_conversation_goes_on_after_an_answer_that_failed(peerd: Command, short_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked in vain is not part of it."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\nbye\n"))
    error = {"error": {"exit_code": int(ExitCode.UNREACHABLE), "message": "no peer of stage 1 goes on", "remedy": "try again"}}
    with daemon(short_home, said(" hi", "!"), error, said(" so")) as asked:
        done = peerd("chat", "--verbose")
    assert done.code == 0, done.err
    assert done.out == " hi!\n so\n"
    assert "no answer: no peer of stage 1 goes on" in done.err
    assert "tokens/s" in done.err
    assert [each["content"] for each in asked[2]["messages"]] == ["hello", "hi!", "bye"]
    assert asked[0]["ends"]


class Terminal(io.StringIO):
    """Lines that somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "code", "told"), [(Terminal, 0, " hi\n"), (io.StringIO, ExitCode.USAGE, "")])
def test_a_line_that_is_too_long_ends_no_conversation_of_somebody_who_types(
    typed: type[io.StringIO], code: int, told: str, peerd: Command, short_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that pipes its lines in gets the exit code."""
    monkeypatch.setattr(sys, "stdin", typed("x" * 200 + "\nhello\n"))
    message = "the prompt has 212 tokens, and the model's context 128"
    error = {"error": {"exit_code": int(ExitCode.USAGE), "message": message, "remedy": "give a shorter one"}}
    with daemon(short_home, error, said(" hi")):
        done = peerd("chat")
    assert done.code == code
    assert "context 128" in done.err
    assert told in done.out
