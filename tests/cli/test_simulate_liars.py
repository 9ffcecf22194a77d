"""The verb simulate liars: its table, its JSON, and one clear line for every error."""

from __future__ import annotations

import json

import pytest

from peerd.cli.simulate import LIES
from peerd.sim.liars import Lie
from tests.cli.conftest import Command

FIELDS = {
    *("lie", "peers", "liars", "share", "unit", "p50", "p95", "p99", "expected_p50", "expected_p95", "expected_p99", "most"),
    *("within_limit", "honest_lost"),
}


def test_the_command_knows_all_lies() -> None:
    assert list(LIES) == [str(lie) for lie in Lie]


def test_the_json_has_one_row_for_each_stage_lie_and_share(peerd: Command) -> None:
    done = peerd("simulate", "liars", "--runs", 2, "--lie", "framing", "--lie", "part x -1", "--share", 1, "--share", 0.5, "--json")
    assert done.code == 0, done.err
    assert done.err == ""
    reply = json.loads(done.out)
    assert reply["schema"] == 1
    one_stage = [("framing", 1), ("part x -1", 1), ("part x -1", 0.5)]
    expected = [(peers, liars, *row) for peers, liars in ((4, 1), (9, 3)) for row in one_stage]
    assert [(row["peers"], row["liars"], row["lie"], row["share"]) for row in reply["rows"]] == expected
    for row in reply["rows"]:
        assert set(row) == FIELDS
        assert row["honest_lost"] == 0
        assert row["unit"] == "steps"


def test_the_table_fits_a_terminal_and_says_what_it_shows(peerd: Command) -> None:
    done = peerd("simulate", "liars", "--runs", 2, "--lie", "noise as activations", "--peers", 5, "--liars", 1, "--protect")
    lines = done.out.splitlines()
    assert "falsified" in lines[0]
    assert len(lines) == 2 + 2 + 2
    assert max(map(len, lines)) <= 110
    assert len({len(line) for line in lines[1:4]}) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--peers", "4"], ["give both --peers and --liars"]),
        (["--peers", "4", "--liars", "4"], ["4 liars of 4 peers", "--liars"]),
        (["--lie", "white lies"], ["white lies"]),
        (["--share", "0"], ["--share"]),
        (["--rate", "2"], ["--rate"]),
        (["--runs", "0"], ["--runs"]),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(peerd: Command, arguments: list[str], words: list[str]) -> None:
    done = peerd("simulate", "liars", *arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("peerd: error: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err
