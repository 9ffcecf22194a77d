"""The verb dashboard, and the flags for the dashboard's address."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path

import pytest

from peerd.cli.organise import settings_of, start
from peerd.cli.watch import is_on_a_desktop
from peerd.config.paths import Home
from peerd.config.settings import Settings
from tests.cli.conftest import Command
from tests.control.fake_daemon import answering, line

ADDRESS = "http://127.0.0.1:8642/?token=" + "5" * 48


def settings_from(*arguments: str) -> Settings:
    context = start.make_context("start", ["RUN.toml", *arguments])
    flags = {name: value for name, value in context.params.items() if name not in ("run_file", "detach", "as_json")}
    return settings_of(context, flags, run_file="RUN.toml")


def test_it_prints_the_address_and_nothing_else(peerd: Command, short_home: Path) -> None:
    with answering(Home(short_home), line({"ok": {"schema": 1, "address": ADDRESS}})):
        assert peerd("dashboard").out == ADDRESS + "\n"
    with answering(Home(short_home), line({"ok": {"schema": 1, "address": ADDRESS}})):
        assert json.loads(peerd("dashboard", "--json").out)["address"] == ADDRESS


@pytest.mark.parametrize(
    ("told", "opened"),
    [({"open": "http://127.0.0.1:8642/open/once"}, "http://127.0.0.1:8642/open/once"), ({}, "http://127.0.0.1:8642/")],
)
def test_the_token_is_not_on_the_browsers_command_line(
    peerd: Command, short_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: dict[str, str], opened: str
) -> None:
    """A browser that records its command line. A daemon of an earlier version gives no code."""
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(f'#!/bin/sh\necho "$@" > {seen}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # it is read once a process
    with answering(Home(short_home), line({"ok": {"schema": 1, "address": ADDRESS, **told}})) as requests:
        assert peerd("dashboard", "--open").out == ADDRESS + "\n"
    assert requests[0]["open"] is True
    assert seen.read_text() == opened + "\n"


@pytest.mark.parametrize(
    ("platform", "environment", "opens"),
    [
        ("linux", {"DISPLAY": ":0"}, True),
        ("linux", {"WAYLAND_DISPLAY": "wayland-0"}, True),
        ("linux", {}, False),
        ("linux", {"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "198.51.100.7 1 192.0.2.1 22"}, False),
        ("darwin", {}, True),
        ("darwin", {"SSH_CONNECTION": "198.51.100.7 1 192.0.2.1 22"}, False),
    ],
)
def test_it_opens_by_itself_where_its_user_sits_before_a_desktop(platform: str, environment: dict[str, str], opens: bool) -> None:
    assert is_on_a_desktop(platform, environment) is opens


def test_a_daemon_without_one_says_so(peerd: Command, short_home: Path) -> None:
    refusal = {"exit_code": 2, "message": "this daemon was started with --no-dashboard", "remedy": "start it without that flag"}
    with answering(Home(short_home), line({"error": refusal})):
        done = peerd("dashboard")
    assert done.code == 2
    assert done.err.count("\n") == 1


def test_it_is_on_and_on_this_machine_only_unless_told_otherwise(short_home: Path) -> None:
    usual = settings_from()
    assert (usual.dashboard, usual.dashboard_host, usual.dashboard_port, usual.dashboard_public) == (True, "127.0.0.1", 0, False)
    assert not settings_from("--no-dashboard").dashboard
    told = settings_from("--dashboard-host", "localhost", "--dashboard-port", "9464", "--dashboard-public")
    assert (told.dashboard_host, told.dashboard_port, told.dashboard_public) == ("127.0.0.1", 9464, True)
    assert settings_from("--public") == settings_from("--dashboard-public")


@pytest.mark.parametrize("flags", [("--dashboard-host", "example.org"), ("--dashboard-host", "1.2.3"), ("--dashboard-port", "99999")])
def test_what_cannot_be_is_one_clear_error(peerd: Command, flags: tuple[str, str]) -> None:
    done = peerd("join", "/ip4/127.0.0.1/tcp/1/p2p/x", *flags)
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert flags[0] in done.err


def test_settings_travel_to_the_daemon_whole(short_home: Path) -> None:
    told = settings_from("--dashboard-port", "9464")
    assert Settings.from_json(told.to_json()) == told
