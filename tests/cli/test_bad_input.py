"""Every mistake of a user gives one line that says what to do, and its exit code, and never a traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from peerd.cli import watch
from peerd.config.paths import Home
from tests.cli.conftest import Command, Outcome
from tests.control.fake_daemon import answering, line


def assert_one_clear_line(done: Outcome, code: int, *words: str) -> None:
    assert done.code == code, done.err
    assert done.out == ""
    assert done.err.startswith("peerd: error: ")
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bogus"], ["bogus", "--help"]),
        (["status", "--bogus"], ["--bogus", "peerd status --help"]),
        (["status", "extra"], ["extra"]),
        (["join", "a", "--port", "-1"], ["--port"]),
        (["join", "a", "--port", "65536"], ["--port"]),
        (["join", "a", "--port", "x"], ["--port"]),
        (["join", "a", "--stage", "-2"], ["--stage"]),
        (["join", "a", "--device", "tpu"], ["--device", "mps"]),
        (["join", "a", "--host", "example"], ["--host", "IPv4"]),
        (["join", "a", "--relay-rate", "20Mbit"], ["--relay-rate", "add --relay"]),
        (["join", "a", "--relay", "--relay-rate", "fast"], ["--relay-rate", "20Mbit"]),
        (["join", "a", "--relay", "--relay-daily", "-5GB"], ["--relay-daily", "6GB"]),
        (["join", "a", "--slow", "nan"], ["--slow"]),
        (["join", "a", "--slow", "0.5"], ["--slow"]),
        (["join", "a", "--compute-stand-in", "inf"], ["--compute-stand-in"]),
        (["join", "a", "--data", "/nowhere/at/all"], ["--data", "no such file"]),
        (["join", ""], ["ADDRESS"]),
        (["join"], ["ADDRESS"]),
        (["start", "x", "--home", ""], ["--home"]),
        (["join", "a", "--nickname", "\x1b[2J"], ["nickname", "use letters, digits"]),
        (["join", "a", "--team", "x" * 25], ["team", "25 characters; 24 at most"]),
        (["limits", "--power", "5kW"], ["--power", "at most 2000W"]),
        (["limits", "--upload", "2Tbit"], ["--upload", "at most 400Gbit"]),
        (["limits", "--duty", "150%"], ["duty must be between 1% and 100%"]),
        (["top"], ["needs a terminal", "peerd status --json"]),
        (["wait"], ["--serving", "--step"]),
        (["wait", "--serving", "--step", "3"], ["exactly one"]),
        (["wait", "--step", "0"], ["--step"]),
        (["wait", "--serving", "--timeout", "nan"], ["--timeout"]),
        (["wait", "--serving", "--timeout", "-1"], ["--timeout"]),
        (["new", "x", "--stages", "0"], ["--stages"]),
        (["new", "x", "--learning-rate", "nan"], ["--learning-rate"]),
        (["new", "x", "--seed", str(2**64)], ["--seed"]),
        (["new", "x", "--d-model", "100", "--heads", "3"], ["d_model", "num_heads"]),
        (["new", "x", "--stages", "8", "--layers", "4"], ["num_stages", "num_layers"]),
        (["new", "x", "--name", "../etc"], ["name"]),
        (["new", "x", "--data", "/nowhere/at/all"], ["--data"]),
        (["new", "/dev/null/x"], ["a file is in the way"]),
        (["new", "x", "--from", "y", "--d-model", "64"], ["--d-model cannot go with --from"]),
        (["new", "x", "--sequence-length", str(1 << 20), "--microbatch-size", "65536"], ["activations"]),
        (["reference", "x"], ["--steps"]),
        (["reference", "x", "--steps", "0", "--out", "y"], ["--steps"]),
        (["help", "nonsense"], ["nonsense", "volunteer"]),
        (["demo", "--peers", "0"], ["--peers"]),
        (["demo", "--peers", "2", "--stages", "3"], ["2 peers cannot serve 3 stages"]),
        (["demo", "--steps", "-1"], ["--steps"]),
        (["demo", "--accumulate", "float16"], ["float64"]),
        (["demo", "--slow", "1"], ["PEER=FACTOR"]),
        (["demo", "--slow", "9=2"], ["peer 9 does not exist"]),
        (["demo", "--slow", "1=nan"], ["between 1 and 1000"]),
        (["demo", "--slow", "1=2", "--slow", "1=3"], ["already"]),
        (["demo", "--kill", "1=2"], ["PEER@STEP"]),
        (["demo", "--kill", "1@99"], ["steps 0 to 29"]),
        (["demo", "--compute-stand-in", "nan"], ["--compute-stand-in"]),
        (["demo", "--out", "/dev/null"], ["is a file"]),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    peerd: Command, monkeypatch: pytest.MonkeyPatch, short_home: Path, arguments: list[str], words: list[str]
) -> None:
    monkeypatch.chdir(short_home)
    assert_one_clear_line(peerd(*arguments), 2, *words)
    assert list(short_home.iterdir()) == []


@pytest.mark.parametrize("verb", [["start"], ["reference", "--steps", "1", "--out", "o"], ["demo", "--run"]])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, ["no such file", "peerd new"]),
        ("not toml at all", ["not TOML"]),
        ("[train]\nnum_stages = -1\n", ["train.num_stages"]),
        ("[train]\nnum_stages = 'two'\n", ["train.num_stages"]),
        ("[train]\nlearning_rate = nan\n", ["train.learning_rate"]),
        ("[train]\nnum_stagse = 2\n", ["num_stagse"]),
        ("surprise = 1\n", ["surprise"]),
    ],
)
def test_a_bad_run_file_is_one_line_and_exit_code_3(
    peerd: Command, short_home: Path, monkeypatch: pytest.MonkeyPatch, verb: list[str], text: str | None, words: list[str]
) -> None:
    monkeypatch.chdir(short_home)
    run_file = short_home / "run.toml"
    if text is not None:
        run_file.write_text(text)
    assert_one_clear_line(peerd(*verb, run_file), 3, *words)


def test_a_run_file_of_bytes_that_are_no_text_is_one_line(peerd: Command, short_home: Path) -> None:
    (short_home / "run.toml").write_bytes(b"\xff\xfe\0\1")
    assert_one_clear_line(peerd("start", short_home), 3, "not TOML")


def test_start_needs_the_organisers_key(peerd: Command, short_home: Path) -> None:
    assert peerd("new", short_home / "r").code == 0
    key = short_home / "r" / "organiser.key"
    key.write_text("not a key")
    assert_one_clear_line(peerd("start", short_home / "r"), 4, "organiser.key")
    key.unlink()
    assert_one_clear_line(peerd("start", short_home / "r"), 4, "organiser.key", "no such file")


def test_start_knows_its_runs_stages(peerd: Command, short_home: Path) -> None:
    assert peerd("new", short_home / "r").code == 0
    assert_one_clear_line(peerd("start", short_home / "r", "--stage", 2), 2, "stages 0 to 1")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_run_file_is_one_line(peerd: Command, short_home: Path) -> None:
    run_file = short_home / "run.toml"
    run_file.touch(mode=0o000)
    assert_one_clear_line(peerd("start", run_file), 10, "Permission denied")


@pytest.mark.parametrize("arguments", [["status"], ["peers"], ["leave"], ["export", "out"], ["wait", "--serving"]])
def test_without_a_daemon_every_verb_says_what_to_run(
    peerd: Command, short_home: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.chdir(short_home)
    monkeypatch.setattr(watch, "DAEMON_APPEARS_WITHIN_S", 0.3)
    assert_one_clear_line(peerd(*arguments), 11, "no peerd daemon runs from", "peerd start", "--home")


def test_a_home_that_is_a_file_is_told(peerd: Command, short_home: Path) -> None:
    file = short_home / "f"
    file.touch()
    assert_one_clear_line(peerd("status", "--home", file), 2, "is a file")
    assert_one_clear_line(peerd("start", "--home", file / "x", "nowhere.toml"), 3)


def test_an_export_never_writes_among_other_files(peerd: Command, short_home: Path) -> None:
    (short_home / "precious.txt").touch()
    assert_one_clear_line(peerd("export", short_home), 2, "precious.txt")


def test_the_daemons_error_becomes_the_commands(peerd: Command, short_home: Path) -> None:
    with answering(Home(short_home), line({"error": {"exit_code": 12, "message": "step 9 not reached", "remedy": "wait longer"}})):
        assert_one_clear_line(peerd("wait", "--step", 9), 12, "step 9 not reached; wait longer")


def test_a_bug_is_one_line_that_says_so(peerd: Command, short_home: Path) -> None:
    with answering(Home(short_home), line({"ok": {"schema": 1}})):
        assert_one_clear_line(peerd("status"), 1, "this is a bug in peerd", "PEERD_DEBUG=1")


def test_a_command_in_a_hint_can_be_pasted_where_a_path_has_a_space(peerd: Command, tmp_path: Path) -> None:
    folder = tmp_path / "my run"
    assert f"peerd start '{folder}/run.toml'" in peerd("new", folder).out
    assert f"`peerd new '{tmp_path}/an other'`" in peerd("start", tmp_path / "an other").err
