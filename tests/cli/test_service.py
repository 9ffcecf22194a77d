"""The service: its unit agrees with the server's, repeats exactly the arguments of join, and is installed, replaced and removed."""

from __future__ import annotations

import json
import os
import plistlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.cli.service_files import LABEL, Service, launchd_agent, systemd_unit
from peerd.config.paths import Home
from peerd.errors import FOR_THE_USER_TO_MEND
from tests.cli.conftest import Command
from tests.cli.replies import status_reply
from tests.command_line import check
from tests.control.fake_daemon import serving
from tests.deploy.test_units import DAEMONS, settings_of

ADDRESS = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooWEXTUXiqjRrCJRZ1AJuwYtJ7E1hENCwDBAFpVVjKpVHJd#" + "a" * 32
SERVICE = Service(command=("/opt/peerd/bin/peerd", "join", ADDRESS), home=Path("/home/me/home"), log=Path("/home/me/home/daemon.log"))
PRETEND = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *show*) printf 'LoadState=loaded\\nActiveState={active}\\nSubState=x\\nUnitFileState=enabled\\nExecMainStatus={code}\\nMainPID={pid}\\n';;
esac
exit {exit}
"""


class Systemctl:
    """A systemctl that records its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "systemctl"
        self.log = folder / "told"
        self.behave()

    def behave(self, active: str = "active", code: int = 0, pid: int = 4711, exit_code: int = 0) -> None:
        self.path.write_text(PRETEND.format(log=shlex.quote(str(self.log)), active=active, code=code, pid=pid, exit=exit_code))
        self.path.chmod(0o755)

    @property
    def told(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def unit(self) -> Path:
        return self.folder / "config" / "systemd" / "user" / "peerd.service"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemctl:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "platform", "linux")
    return Systemctl(tmp_path)


def of_unit(text: str, folder: Path) -> dict[str, list[str]]:
    path = folder / "peerd.service"
    path.write_text(text)
    return settings_of(path)


# The files


def test_the_users_unit_agrees_with_the_servers_in_all_that_is_not_about_the_place(tmp_path: Path) -> None:
    (servers,) = (settings_of(unit) for unit in DAEMONS if unit.name == "peerd.service")
    users = of_unit(systemd_unit(SERVICE), tmp_path)
    assert {int(code) for code in users["RestartPreventExitStatus"][0].split()} == FOR_THE_USER_TO_MEND
    of_the_place = {"Environment", "ExecStart", "WantedBy"}
    assert {name: users[name] for name in users.keys() - of_the_place} == {name: servers[name] for name in users.keys() - of_the_place}
    of_a_server = {"Wants", "After", "User", "EnvironmentFile", "StateDirectory", "StateDirectoryMode", "CacheDirectory"}
    hardening = {name for name in servers if name.startswith(("Protect", "Private", "Restrict", "System", "Capability", "Lock", "Remove"))}
    assert servers.keys() - users.keys() == of_a_server | hardening


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_whatever_the_words(tmp_path: Path) -> None:
    odd = Service(command=("/bin/true", ADDRESS, "--data", '/a b/"c"\\d%e$HOME;#'), home=tmp_path / "ho me%h$x", log=tmp_path / "log")
    unit = tmp_path / "peerd.service"
    unit.write_text(systemd_unit(odd))
    command = ["systemd-analyze", "verify", "--user", "--man=no", str(unit)]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}  # it asks for one also where nobody is logged in
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
    assert done.returncode == 0, done.stderr


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" "), min_size=1), min_size=1))
def test_words_reach_the_command_as_they_are(words: list[str]) -> None:
    """Parse as systemd does: remove quotes, then resolve escapes, specifiers and variables."""
    text = systemd_unit(Service(command=tuple(words), home=Path("/h"), log=Path("/l")))
    (line,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    read = shlex.split(line.removeprefix("ExecStart="))
    assert [word.replace("%%", "%").replace("$$", "$") for word in read] == words


def test_launchds_agent_runs_the_same_command_and_waits_as_long_for_the_drain() -> None:
    agent = plistlib.loads(launchd_agent(SERVICE))
    assert agent["ProgramArguments"] == list(SERVICE.command)
    assert agent["EnvironmentVariables"] == {"PEERD_HOME": "/home/me/home"}
    assert (agent["RunAtLoad"], agent["KeepAlive"]) == (True, {"SuccessfulExit": False})
    assert f"TimeoutStopSec={agent['ExitTimeOut']}" in systemd_unit(SERVICE)
    assert agent["Label"] == LABEL


# The verbs


def test_a_service_may_have_a_daemon_for_each_device(peerd: Command, systemctl: Systemctl) -> None:
    done = peerd("service", "install", "--print", ADDRESS, "--device", "all")
    assert done.code == 0, done.err
    assert '"--device" "all"' in done.out
    assert peerd("service", "install", "--print", ADDRESS, "--device", "cuda:0,cuda:0").code == 2


def test_print_shows_the_unit_and_installs_nothing(peerd: Command, systemctl: Systemctl, short_home: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("x")
    done = peerd("service", "install", "--print", ADDRESS, "--port", 31337, "--device", "cpu", "--data", text, "--no-dashboard")
    assert (done.code, done.err) == (0, "")
    found = of_unit(done.out, tmp_path)
    program, *arguments = shlex.split(found["ExecStart"][0])
    assert Path(program).name == "peerd"
    assert arguments == ["join", ADDRESS, "--device", "cpu", "--data", str(text), "--port", "31337", "--no-dashboard"]
    check(arguments)
    assert found["Environment"] == [f'"PEERD_HOME={short_home}"']
    assert systemctl.told == []
    assert not systemctl.unit.exists()


def test_it_is_installed_replaced_and_removed(peerd: Command, systemctl: Systemctl) -> None:
    for port in ("4001", "4002"):
        done = peerd("service", "install", ADDRESS, "--port", port)
        assert done.code == 0, done.err
        assert port in systemctl.unit.read_text()
    assert systemctl.told == [f"--user {each}" for each in ("daemon-reload", "enable peerd.service", "restart peerd.service")] * 2
    done = peerd("service", "status")
    assert (done.code, done.out) == (0, f"active (x), enabled, process 4711 ({systemctl.unit})\n")
    assert peerd("service", "uninstall").code == 0
    assert systemctl.told[-2:] == ["--user disable --now peerd.service", "--user daemon-reload"]
    assert not systemctl.unit.exists()
    assert peerd("service", "uninstall").code == 2


def test_status_tells_how_it_ended_and_scripts_get_it_as_json(peerd: Command, systemctl: Systemctl) -> None:
    reply = json.loads(peerd("service", "status", "--json").out)
    assert (reply["installed"], reply["runs"], reply["state"]) == (False, False, "not installed")
    assert peerd("service", "install", ADDRESS).code == 0
    systemctl.behave(active="failed", code=5, pid=0)
    assert "exit code 5" in peerd("service", "status").out
    reply = json.loads(peerd("service", "status", "--json").out)
    assert (reply["schema"], reply["installed"], reply["runs"], reply["last_exit_code"]) == (1, True, False, 5)


def test_what_join_would_refuse_is_refused_before_anything_is_written(peerd: Command, systemctl: Systemctl) -> None:
    for wrong, words in (
        ([ADDRESS, "--port", "x"], "--port"),
        ([ADDRESS, "--bogus"], "--bogus"),
        ([ADDRESS, "--device", "tpu"], "--device"),
        ([ADDRESS, "--detach"], "--detach"),
        ([], "ADDRESS"),
    ):
        done = peerd("service", "install", *wrong)
        assert done.code == 2
        assert words in done.err
        assert done.err.count("\n") == 1
    assert not systemctl.unit.exists()
    assert systemctl.told == []


def test_a_file_of_somebody_elses_and_a_daemon_started_by_hand_are_left_alone(
    peerd: Command, systemctl: Systemctl, short_home: Path
) -> None:
    systemctl.unit.parent.mkdir(parents=True)
    systemctl.unit.write_text("[Service]\n")
    assert "was not written by peerd" in peerd("service", "install", ADDRESS).err
    systemctl.unit.unlink()
    with serving(Home(short_home), lambda _request: {"ok": status_reply(pid=77)}):
        done = peerd("service", "install", ADDRESS)
        assert (done.code, "peerd leave" in done.err) == (8, True)
        systemctl.unit.write_text(systemd_unit(SERVICE))
        systemctl.behave(pid=77)  # it is the service's own: replaced
        assert peerd("service", "install", ADDRESS).code == 0


def test_without_a_session_one_line_says_what_to_do(peerd: Command, systemctl: Systemctl) -> None:
    systemctl.behave(exit_code=1)
    done = peerd("service", "install", ADDRESS)
    assert (done.code, done.err.count("\n"), "enable-linger" in done.err) == (2, 1, True)


def test_where_there_is_neither_manager_one_line_says_so(
    peerd: Command, systemctl: Systemctl, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for verb in (["install", ADDRESS], ["status"], ["uninstall"]):
        done = peerd("service", *verb)
        assert (done.code, done.err.count("\n"), "systemd or launchd" in done.err) == (2, 1, True)
    assert systemctl.told == []
