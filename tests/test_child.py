"""What a command's child process prints, and its exit code."""

import json
from dataclasses import dataclass
from typing import NoReturn

import pytest

from peerd.child import answer, parse_request
from peerd.errors import DiskError, ExitCode, UsageError


@dataclass(frozen=True)
class Sum:
    numbers: list[int]


def add(text: str) -> dict[str, int]:
    return {"sum": sum(parse_request(Sum, text).numbers)}


def test_the_answer_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(add, ['{"numbers": [1, 2]}']) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "sum": 3}


@pytest.mark.parametrize("arguments", [(), ("{}", "{}"), ("{",), ('{"numbers": "many"}',), ("[]",)])
def test_what_is_not_a_request_is_the_askers_fault(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(add, arguments) == ExitCode.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("peerd: error: ")
    assert told.err.count("\n") == 1


def test_an_error_gives_its_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: str) -> NoReturn:
        raise DiskError("the disk is full", "free some")

    assert answer(fail, [""]) == ExitCode.DISK
    assert capsys.readouterr().err == "peerd: error: the disk is full; free some\n"


@pytest.mark.parametrize("line", ["", "the same command continues from here"])
def test_an_interrupt_is_no_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    def wait(_: str) -> NoReturn:
        raise KeyboardInterrupt

    assert answer(wait, [""], interrupted=line) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == (f"peerd: {line}\n" if line else "")


def test_the_place_of_the_mistake_is_named() -> None:
    with pytest.raises(UsageError, match=r"numbers\.1"):
        parse_request(Sum, '{"numbers": [1, "x"]}')
