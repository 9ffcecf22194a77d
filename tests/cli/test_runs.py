"""`peerd runs`: what it prints of a list, what it refuses, and how an organiser's line comes into one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from peerd.config.manifest import load, run_id
from peerd.config.organiser import KEY_FILE, load_key, public_bytes
from peerd.config.paths import Home
from peerd.config.run_list import HEAD, MAX_LIST_BYTES
from peerd.errors import ExitCode
from peerd.link.peer_keys import peer_id_of
from tests.cli.conftest import Command
from tests.cli.replies import run_info, status_reply
from tests.cli.test_join_link import page_with
from tests.control.fake_daemon import serving

PLACE = f"/ip4/203.0.113.7/tcp/31337/p2p/{peer_id_of(bytes(32))}"
PURPOSE = "A small model of poems, open to all, that shows how a purpose of more than one line is broken."


@pytest.fixture
def run(peerd: Command, tmp_path: Path) -> Path:
    done = peerd("new", tmp_path / "poems", "--purpose", PURPOSE, "--licence", "Apache-2.0", "--contact", "anna@example.org")
    assert done.code == 0, done.err
    return tmp_path / "poems"


@pytest.fixture
def run_list(peerd: Command, run: Path, tmp_path: Path) -> Path:
    """A list with this run alone."""
    done = peerd("runs", tmp_path / "runs.txt", "--add", run, "--at", PLACE)
    assert done.code == 0, done.err
    return tmp_path / "runs.txt"


def answer(reply: dict[str, Any], _request: object) -> dict[str, Any]:
    return reply


def id_of(folder: Path) -> str:
    return run_id(public_bytes(load_key(folder / KEY_FILE)), load(folder / "run.toml").name)


def test_a_list_says_what_each_run_is_and_how_to_join_it(peerd: Command, run: Path, run_list: Path) -> None:
    with page_with(run_list.read_bytes()) as link:
        for source in (str(run_list), f"{link}/runs.txt"):
            done = peerd("runs", source)
            assert (done.code, done.err) == (0, "")
            lines = done.out.splitlines()
            assert lines[0] == "poems"
            assert " ".join(done.out.split()).startswith(
                f"poems {PURPOSE} licence: Apache-2.0 contact: anna@example.org signed by its organiser"
            )
            assert f"  peerd join {PLACE}#{id_of(run)}" in lines
            found = json.loads(peerd("runs", source, "--json").out)
            assert [(each["name"], each["run"]) for each in found["runs"]] == [("poems", id_of(run))]


def test_a_forged_line_is_left_out_and_a_list_of_nothing_else_is_refused(peerd: Command, run: Path, run_list: Path) -> None:
    good = run_list.read_text()
    forged = good.replace("203.0.113.7", "203.0.113.8")
    run_list.write_text(good + forged.splitlines()[1])
    done = peerd("runs", run_list)
    assert (done.code, done.out.count("peerd join"), "203.0.113.8" in done.out) == (0, 1, False)
    assert "line 3: it is not signed by the key that it names; this line is left out" in done.err
    run_list.write_text(forged)
    done = peerd("runs", run_list)
    assert (done.code, done.out) == (ExitCode.SIGNATURE, "")


@pytest.mark.parametrize(
    ("page", "told"),
    [(b"<html>", "no list of runs"), (HEAD.encode() + b"\n" * MAX_LIST_BYTES, "more than"), (b"", "no list of runs")],
)
def test_what_is_no_list_is_told(peerd: Command, tmp_path: Path, page: bytes, told: str) -> None:
    (tmp_path / "page").write_bytes(page)
    with page_with(page) as link:
        for source in (tmp_path / "page", link):
            done = peerd("runs", source)
            assert (done.code, told in done.err) == (ExitCode.USAGE, True)


def test_a_list_that_cannot_be_had_is_told(peerd: Command, tmp_path: Path) -> None:
    with page_with(b"gone", 404) as link:
        assert peerd("runs", link).code == ExitCode.UNREACHABLE
    assert peerd("runs", link).code == ExitCode.UNREACHABLE
    assert peerd("runs", "http://example.org/runs.txt").code == ExitCode.ADDRESS
    assert peerd("runs", tmp_path / "none").code == ExitCode.USAGE
    (tmp_path / "empty").write_text(HEAD)
    assert "lists no run" in peerd("runs", tmp_path / "empty").out


def test_a_line_is_signed_again_and_stands_once(peerd: Command, run: Path, run_list: Path) -> None:
    done = peerd("runs", run_list, "--add", run, "--at", "https://train.example.org", "--at", PLACE)
    assert f"  peerd join https://train.example.org#{id_of(run)} {PLACE}#{id_of(run)}" in done.out.splitlines()
    assert len(run_list.read_text().splitlines()) == 2


def test_the_address_is_that_of_this_homes_daemon(peerd: Command, run: Path, tmp_path: Path, short_home: Path) -> None:
    path, mine = tmp_path / "runs.txt", run_info(id=id_of(run))
    assert "no daemon of this home" in peerd("runs", path, "--add", run).err
    here = f"/ip4/127.0.0.1/tcp/1/p2p/{peer_id_of(bytes(32))}"
    for place, code in ((PLACE, ExitCode.OK), (here, ExitCode.USAGE)):
        reply = {"ok": dict(status_reply(run=mine, join=f"{place}#{id_of(run)}"))}
        with serving(Home(short_home), partial(answer, reply)):
            assert peerd("runs", path, "--add", run).code == code
    assert PLACE in path.read_text()


@pytest.mark.parametrize(
    "flags", [("--at", PLACE), ("--add", "RUN", "--at", f"{PLACE}#{'0' * 32}"), ("--add", "RUN", "--at", "example.org")]
)
def test_what_cannot_be_listed_is_refused(peerd: Command, run: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = peerd("runs", tmp_path / "runs.txt", *(run if flag == "RUN" else flag for flag in flags))
    assert (done.code, (tmp_path / "runs.txt").exists()) == (ExitCode.USAGE, False)
    assert peerd("runs", "https://example.org/", "--add", run, "--at", PLACE).code == ExitCode.USAGE
