"""The verb service: lets a daemon start by itself with this user's session (or, with lingering, with the machine)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from peerd import SCHEMA
from peerd.cli.calling import pasteable
from peerd.cli.options import ask, chosen_home, home_option, is_printed, reply_options
from peerd.cli.service_files import LABEL, MARK, UNIT, Service, launchd_agent, systemd_unit
from peerd.errors import IdentityInUseError, PeerdError, TimedOutError, UsageError, disk_error

COMMAND_TIMEOUT_S = 120.0
"""Long enough for a restart, which drains the daemon first."""
_SHOWN = "LoadState,ActiveState,SubState,UnitFileState,ExecMainStatus,MainPID"


@click.group(subcommand_metavar="VERB [ARGS]...")
@home_option
def service() -> None:
    """Let the daemon start by itself: systemd's user units on Linux, launchd on macOS.

    \b
    Examples:
      peerd service install ADDRESS --port 31337
      peerd service status
      peerd service uninstall
    """


@service.command(context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENTS OF JOIN]...")
@click.option("--print", "only_print", is_flag=True, help="Show the unit and install nothing.")
@home_option
@click.pass_context
def install(context: click.Context, arguments: tuple[str, ...], only_print: bool) -> None:
    """Install the service and start it; what is installed already is replaced.

    Takes what `peerd join` takes. The daemon drains and leaves in order when it is stopped, starts again after failures
    that can pass by themselves, and gives way to whatever else the machine does. Updating peerd: install the new
    version, then the service again; the daemon drains, restarts and rejoins.

    \b
    Examples:
      peerd service install ADDRESS --port 31337
      peerd service install --print
    """
    wanted = _service(context, arguments)
    manager = _manager()
    content = launchd_agent(wanted) if manager == "launchd" else systemd_unit(wanted).encode()
    if only_print:
        click.echo(content.decode(), nl=False)
        return
    from peerd.config.atomic import replace_file

    path = _path(manager)
    if path.exists() and MARK.encode() not in path.read_bytes():
        raise UsageError(f"{path} was not written by peerd", "move it away first")
    _check_home_is_free(context, manager)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        wanted.log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, content)
    except OSError as error:
        raise disk_error(path, error) from None
    if manager == "launchd":
        _run(["launchctl", "bootout", f"{_domain()}/{LABEL}"], may_fail=True)
        _run(["launchctl", "bootstrap", _domain(), str(path)])
        click.echo(f"installed {path}; its log: {wanted.log}")
        return
    _run(["systemctl", "--user", "daemon-reload"])
    _run(["systemctl", "--user", "enable", path.name])
    _run(["systemctl", "--user", "restart", path.name])
    click.echo(pasteable(f"installed {path}; look on with `peerd status`, its log: journalctl --user -u {path.name} -f"))
    if not _lingers():
        click.echo("it runs while you are logged in; to run it from boot on: loginctl enable-linger", err=True)


@service.command()
@home_option
def uninstall() -> None:
    """Stop the service, which drains first, and remove it. The home with its identity stays."""
    manager = _manager()
    path = _path(manager)
    if not path.exists():
        raise UsageError("the service is not installed", "nothing to do")
    if manager == "launchd":
        _run(["launchctl", "bootout", f"{_domain()}/{LABEL}"], may_fail=True)
    else:
        _run(["systemctl", "--user", "disable", "--now", path.name])
    try:
        path.unlink()
    except OSError as error:
        raise disk_error(path, error) from None
    if manager != "launchd":
        _run(["systemctl", "--user", "daemon-reload"])
    click.echo(f"removed {path}")


@service.command()
@reply_options
def status(as_json: bool) -> None:
    """Say whether the service is installed and whether it runs. What the daemon does, `peerd status` says."""
    manager = _manager()
    path = _path(manager)
    reply: dict[str, Any] = {"schema": SCHEMA, "manager": manager, "path": str(path), "installed": path.exists()}
    reply |= {"runs": False, "state": "not installed", "pid": 0, "last_exit_code": None}
    if reply["installed"]:
        reply |= _launchd_state() if manager == "launchd" else _systemd_state(path.name)
    if is_printed(reply, as_json):
        return
    told = f", process {reply['pid']}" if reply["pid"] else ""
    last = reply["last_exit_code"]
    ended = pasteable(f"; it last ended with exit code {last} (`peerd help errors`)") if last and not reply["runs"] else ""
    click.echo(f"{reply['state']}{told}{ended}" + (f" ({path})" if reply["installed"] else ""))


def _service(context: click.Context, arguments: tuple[str, ...]) -> Service:
    """The service that runs `peerd join ARGUMENTS`, with absolute paths and checked values."""
    from peerd.cli.organise import settings_of
    from peerd.cli.volunteer import check_was_in_a_run, invitation_told, join

    joining = join.make_context("join", list(arguments), parent=context)
    params = dict(joining.params)
    if params["detach"] or params["as_json"]:
        raise UsageError("--detach and --json do not go with a service", "leave them out")
    home = chosen_home(context)
    addresses = " ".join(params["addresses"]).split()
    if not addresses:
        check_was_in_a_run(home)
    flags = {name: value for name, value in params.items() if name not in ("addresses", "detach", "as_json")}
    settings = settings_of(context, flags, join=" ".join(addresses))
    if params["data"]:
        params["data"] = settings.data
    params["invitation"] = invitation_told(params["invitation"])
    return Service(command=(str(_executable()), "join", *addresses, *_flags_of(joining, params)), home=home.folder, log=home.log)


def _flags_of(joining: click.Context, params: dict[str, Any]) -> list[str]:
    """The flags given on the command line, with their values."""
    words: list[str] = []
    for option in joining.command.params:
        name = option.name or ""
        if isinstance(option, click.Option) and name in params and joining.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            words += [option.opts[0]] if option.is_flag else [option.opts[0], str(params[name])]
    return words


def _executable() -> Path:
    """Path of the command peerd: beside this interpreter, else on the PATH."""
    beside = Path(sys.executable).with_name("peerd")
    found = str(beside) if beside.exists() else shutil.which("peerd")
    if not found:
        raise UsageError("no command peerd is installed that a service could start", "run pip install -c scripts/constraints.txt .")
    return Path(found).absolute()


def _manager() -> str:
    """The service manager: systemd or launchd. UsageError if there is neither."""
    if sys.platform == "darwin":
        return "launchd"
    if sys.platform == "linux" and shutil.which("systemctl"):
        return "systemd"
    raise UsageError("a service needs systemd or launchd, and this machine has neither", "start `peerd join --detach` yourself at login")


def _path(manager: str) -> Path:
    if manager == "launchd":
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(base) / "systemd" / "user" / UNIT


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _check_home_is_free(context: click.Context, manager: str) -> None:
    """Refuse to start the service while a daemon that was started by hand uses the home."""
    try:
        process = ask(context, "status")["pid"]
    except PeerdError:
        return
    if manager == "systemd" and _path(manager).exists() and _systemd_state(_path(manager).name)["pid"] in (process, _parent_of(process)):
        return
    if manager == "launchd" and _path(manager).exists():
        return
    raise IdentityInUseError(f"a daemon runs from this home already (process {process})", "end it first: peerd leave")


def _parent_of(process: int) -> int:
    """The process that minds the daemons of several devices, if this daemon is one of those; 0 if it has ended."""
    import psutil

    try:
        return psutil.Process(process).ppid()
    except psutil.Error:
        return 0


def _systemd_state(unit: str) -> dict[str, Any]:
    output = _run(["systemctl", "--user", "show", unit, f"--property={_SHOWN}"])
    found = dict(line.partition("=")[::2] for line in output.splitlines())
    active = found.get("ActiveState", "unknown")
    return {
        "runs": active == "active",
        "state": f"{active} ({found.get('SubState', '')}), {found.get('UnitFileState') or 'not enabled'}",
        "pid": int(found.get("MainPID") or 0),
        "last_exit_code": int(found.get("ExecMainStatus") or 0),
    }


def _launchd_state() -> dict[str, Any]:
    output = _run(["launchctl", "print", f"{_domain()}/{LABEL}"], may_fail=True)
    found = {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in output.splitlines()) if value}
    pid, last = found.get("pid", ""), found.get("last exit code", "")
    return {
        "runs": pid.isdigit(),
        "state": found.get("state", "not loaded"),
        "pid": int(pid) if pid.isdigit() else 0,
        "last_exit_code": int(last) if last.isdigit() else None,
    }


def _lingers() -> bool:
    import getpass

    return (Path("/var/lib/systemd/linger") / getpass.getuser()).exists()


def _run(command: list[str], *, may_fail: bool = False) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except FileNotFoundError:
        raise UsageError(f"the command {command[0]} is not found", "check this user's PATH") from None
    except subprocess.TimeoutExpired:
        raise TimedOutError(f"`{' '.join(command)}` took longer than {COMMAND_TIMEOUT_S:g} s", "see `peerd service status`") from None
    if done.returncode and not may_fail:
        said = (done.stderr or done.stdout).strip().partition("\n")[0][:200]
        remedy = "a user's services need a login session: log in on the machine itself, or run loginctl enable-linger"
        raise UsageError(f"`{' '.join(command)}` failed: {said}", remedy if command[0] == "systemctl" else "see its manual")
    return done.stdout
