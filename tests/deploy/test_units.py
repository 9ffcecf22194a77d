"""The systemd units: they load, agree with the exit codes and the time a drain takes, and start a command that exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from peerd.errors import FOR_THE_USER_TO_MEND, ExitCode
from tests.command_line import check

ROOT = Path(__file__).resolve().parents[2]
UNITS = sorted((ROOT / "deploy").rglob("*.service"))
DAEMONS = [unit for unit in UNITS if unit.parent.name == "systemd"]


def settings_of(unit: Path) -> dict[str, list[str]]:
    """Each setting's values in order."""
    found: dict[str, list[str]] = {}
    for line in unit.read_text().splitlines():
        if line and line[0] not in "#[":
            name, equals, value = line.partition("=")
            assert equals, f"{unit.name}: {line}"
            found.setdefault(name, []).append(value)
    return found


def daemons(unit: Path) -> dict[str, str]:
    return {name: values[-1] for name, values in settings_of(unit).items()}


def number_in(path: str, name: str) -> float:
    match = re.search(rf"^{name} = ([\d.]+)$", (ROOT / path).read_text(), re.MULTILINE)
    assert match, f"{path} has no {name}"
    return float(match[1])


def test_there_are_units_for_a_volunteer_and_for_a_runs_first_peer() -> None:
    assert [unit.name for unit in DAEMONS] == ["peerd-bootstrap.service", "peerd.service"]


@pytest.mark.parametrize("unit", DAEMONS, ids=lambda unit: unit.name)
def test_a_unit_gives_up_where_a_new_start_cannot_help_and_only_there(unit: Path) -> None:
    found = daemons(unit)
    assert {int(code) for code in found["RestartPreventExitStatus"].split()} == FOR_THE_USER_TO_MEND
    assert found["SuccessExitStatus"] == str(int(ExitCode.INTERRUPTED))
    assert found["Restart"] == "on-failure"
    assert found["StartLimitIntervalSec"] == "0"


def test_the_page_on_errors_says_the_same() -> None:
    page = (ROOT / "peerd" / "docs" / "errors.md").read_text()
    told = re.search(r"After ([\d, and]+) it should not", page)
    assert told
    assert {int(code) for code in re.findall(r"\d+", told[1])} == FOR_THE_USER_TO_MEND


@pytest.mark.parametrize("unit", DAEMONS, ids=lambda unit: unit.name)
def test_a_stop_leaves_time_to_drain_and_the_networking_process_outlives_it(unit: Path) -> None:
    found = daemons(unit)
    assert found["KillMode"] == "mixed"
    assert found["KillSignal"] == "SIGTERM"
    assert float(found["TimeoutStopSec"]) > number_in("peerd/daemon/departure.py", "STANDSTILL_S") + 10


@pytest.mark.parametrize("unit", DAEMONS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_that_exists(unit: Path) -> None:
    command = daemons(unit)["ExecStart"].replace("$PEERD_ADDRESS", "/ip4/203.0.113.7/tcp/31337").replace("$PEERD_FLAGS", "--port 31337")
    program, *arguments = command.split()
    assert program == "/opt/peerd/bin/peerd"
    check(arguments)


def test_both_daemons_are_hardened_alike() -> None:
    one, other = (settings_of(unit) for unit in DAEMONS)
    apart = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    assert apart == {"Description", "ExecStart", "EnvironmentFile"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name
    copy.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], check=False, capture_output=True, text=True)
    about_ours = [line for line in done.stderr.splitlines() if unit.name in line]
    assert about_ours == []
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_calls_a_units_exposure_low(unit: Path) -> None:
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--no-pager", str(unit)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a unit offline")
    assert done.returncode == 0, done.stdout[-300:]
