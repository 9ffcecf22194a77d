"""The log of a daemon in the background: its last lines, new lines, and never a secret."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.logs import lines_of, readable, text_of
from peerd.config.paths import Home
from peerd.config.secret import HIDDEN, NAMES, redacted, redacted_field
from peerd.daemon.rotation import RotatingStream
from tests.cli.conftest import Command


def test_the_last_lines_come_as_they_are_where_the_output_is_no_terminal(peerd: Command, short_home: Path) -> None:
    (short_home / "daemon.log").write_text("".join(json.dumps({"event": "step finished", "step": n}) + "\n" for n in range(100)))
    done = peerd("logs", "-n", 3)
    assert done.code == 0
    assert [json.loads(line)["step"] for line in done.out.splitlines()] == [97, 98, 99]


def test_without_a_log_it_says_so(peerd: Command) -> None:
    done = peerd("logs")
    assert done.code == 11
    assert done.err.count("\n") == 1
    assert "in the background" in done.err


def test_following_goes_on_over_a_line_in_two_parts_and_a_log_that_is_replaced(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.write_text("old\nlast\n")
    lines = lines_of(Home(tmp_path), 1, follow=True)
    assert next(lines) == "last"
    with log.open("a") as stream:
        stream.write("in two ")
        stream.flush()
        found: list[str] = []
        waiting = threading.Thread(target=lambda: found.append(next(lines)))
        waiting.start()
        stream.write("parts\n")
    waiting.join(10)
    assert found == ["in two parts"]
    log.unlink()
    log.write_text("a new one\n")
    assert next(lines) == "a new one"
    log.write_text("cut\n")
    assert next(lines) == "cut"


def test_following_goes_on_over_a_rotation_and_misses_no_line(tmp_path: Path) -> None:
    """The daemon's own writer fills its log again and again, and the reader gets every line once."""
    home = Home(tmp_path)
    with home.log.open("a") as log:
        writer = RotatingStream(log, home, max_bytes=1000)
        writer.write("line 0\n")
        lines = lines_of(home, 10, follow=True)
        found = [next(lines)]
        for number in range(1, 200):
            writer.write(f"line {number} {'x' * 60}\n")
            found.append(next(lines).split(" x")[0])
        writer.write("line 200 " + "x" * 1000 + "\n")  # the last words of a full log
        writer.write("line 201\n")
        found += [next(lines).split(" x")[0], next(lines)]
    assert found == [f"line {number}" for number in range(202)]


def test_the_last_lines_reach_back_into_the_log_that_was_full(peerd: Command, short_home: Path) -> None:
    for name, numbers in (("daemon.log.2", range(5)), ("daemon.log.1", range(5, 10)), ("daemon.log", range(10, 12))):
        (short_home / name).write_text("".join(f"{number}\n" for number in numbers))
    for most in (0, 1, 2, 4, 7, 9, 12):
        assert peerd("logs", "-n", most).out.split() == [str(number) for number in range(12 - most, 12)]
    assert len(peerd("logs", "-n", 50).out.split()) == 12


@given(
    st.sampled_from(sorted(NAMES)),
    st.text("abcdef0123456789", min_size=8),
    st.sampled_from(["{}={}", "{}: {}", '"{}": "{}"', "?{}={}&x=1"]),
)
def test_no_named_secret_is_ever_shown(name: str, secret: str, form: str) -> None:
    line = f"http://127.0.0.1/ {form.format(name, secret)} and more"
    assert secret not in redacted(line)
    assert secret not in text_of(line.encode())
    assert redacted_field(name, secret) == HIDDEN


@given(st.text())
def test_a_line_without_secrets_stays_and_never_moves_the_cursor(text: str) -> None:
    shown = text_of(text.encode(errors="replace"))
    assert all(character.isprintable() for character in shown)
    assert "".join(part for part, _ in readable("no json: " + shown)) == "no json: " + shown


@pytest.mark.parametrize(("zone", "told"), [("UTC0", "10:20:30"), ("EST5", "05:20:30")])
def test_a_line_is_readable_on_a_terminal_with_the_time_of_its_reader(zone: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        _reads_as(told)
    finally:
        monkeypatch.undo()
        time.tzset()


def _reads_as(told: str) -> None:
    line = json.dumps({"event": "step finished", "level": "info", "timestamp": "2026-01-02T10:20:30Z", "step": 7, "loss": 2.5})
    assert "".join(part for part, _ in readable(line)) == f"{told} info    step finished  step=7 loss=2.5"


def test_json_that_is_no_log_line_is_shown_as_it_is() -> None:
    for line in ("[1]", "7", '{"a": 1}', '"x"', ""):
        assert readable(line) == [(line, "")]
