"""What a command's child process prints, and its exit code."""

import json
from dataclasses import dataclass

import pytest

from peerd.child import main, parse_request
from peerd.errors import DiskError, ExitCode, UsageError


@dataclass(frozen=True)
class Sum:
    numbers: list[int]


def run(request: Sum) -> dict[str, int]:
    """The work of this module, which is run as a child."""
    if len(request.numbers) > 3:
        raise DiskError("the disk is full", "free some")
    if not request.numbers:
        raise KeyboardInterrupt
    return {"sum": sum(request.numbers)}


def test_the_answer_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([__name__, '{"numbers": [1, 2]}']) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "sum": 3}


@pytest.mark.parametrize("arguments", [(), ("{}", "{}"), ("{",), ('{"numbers": "many"}',), ("[]",)])
def test_what_is_not_a_request_is_the_askers_fault(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([__name__, *arguments]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("peerd: error: ")
    assert told.err.count("\n") == 1


def test_an_error_gives_its_line_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([__name__, '{"numbers": [1, 2, 3, 4]}']) == ExitCode.DISK
    assert capsys.readouterr().err == "peerd: error: the disk is full; free some\n"


def test_an_interrupt_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([__name__, '{"numbers": []}']) == ExitCode.INTERRUPTED
    assert capsys.readouterr().err == ""


def test_the_place_of_the_mistake_is_named() -> None:
    with pytest.raises(UsageError, match=r"numbers\.1"):
        parse_request(Sum, '{"numbers": [1, "x"]}')
