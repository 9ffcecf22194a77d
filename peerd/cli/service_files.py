"""The files that make a daemon start by itself: a systemd user unit or a launchd agent. service.py installs them.

Exit codes, timeouts and priorities are those of deploy/systemd/peerd.service; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peerd.errors import FOR_THE_USER_TO_MEND, ExitCode

MARK = "Written by `peerd service install`"
UNIT = "peerd.service"
LABEL = "org.peerd.peerd"
STOP_TIMEOUT_S = 90
"""Longer than a drain, which takes up to a minute."""
RETRY_S = 20
MAC_RETRY_S = 60
"""Longer than RETRY_S, because launchd cannot distinguish exit codes and retries after all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A command that the service manager keeps running for this user."""

    command: tuple[str, ...]
    home: Path
    log: Path
    """The file for the daemon's output under launchd; systemd has its journal."""


def systemd_unit(service: Service) -> str:
    """A unit for the user's service manager. It cannot wait for a network target, so a failed join is retried."""
    gives_up = " ".join(str(int(code)) for code in sorted(FOR_THE_USER_TO_MEND))
    return f"""\
# {MARK}; `peerd service uninstall` removes it.
[Unit]
Description=peerd: lends this machine to a model that volunteers train together
StartLimitIntervalSec=0

[Service]
Type=exec
Environment={_quoted(f"PEERD_HOME={service.home}", is_command=False)}
ExecStart={" ".join(_quoted(word) for word in service.command)}

# SIGTERM to the daemon alone, which then drains for up to a minute: its networking process must outlive that.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={STOP_TIMEOUT_S}
SuccessExitStatus={int(ExitCode.INTERRUPTED)}
Restart=on-failure
RestartSec={RETRY_S}
# What a new start cannot mend: wrong usage, manifest, signature, address, an identity in use, an unknown or too large stage.
RestartPreventExitStatus={gives_up}

# The machine's owner comes first.
Nice=10
CPUWeight=20
IOWeight=20
OOMScoreAdjust=500

NoNewPrivileges=yes
UMask=0077

[Install]
WantedBy=default.target
"""


def launchd_agent(service: Service) -> bytes:
    """A property list for this user's launchd."""
    import plistlib

    agent = {
        "Comment": MARK,
        "Label": LABEL,
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": {"PEERD_HOME": str(service.home)},
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": MAC_RETRY_S,
        "ExitTimeOut": STOP_TIMEOUT_S,
        "ProcessType": "Background",
        "LowPriorityIO": True,
        "Nice": 10,
        "Umask": 0o077,
        "StandardOutPath": str(service.log),
        "StandardErrorPath": str(service.log),
    }
    return plistlib.dumps(agent, sort_keys=False)


def _quoted(word: str, *, is_command: bool = True) -> str:
    """Quote a word for systemd.syntax(7), with specifiers escaped, and in commands also variables (systemd.service(5))."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped.replace("$", "$$") if is_command else escaped}"'
