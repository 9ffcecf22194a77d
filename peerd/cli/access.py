"""The organiser's verbs invite and ban: who may take part in a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.devices import ask_each
from peerd.cli.options import chosen_home, daemon_command, is_printed
from peerd.errors import NoDaemonError, SignatureError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from peerd.config.access import AccessList, RawList
    from peerd.config.paths import Home

DAY_S = 86400
DEFAULT_DAYS = 90
_run_option = click.option(
    "--run", "run_file", metavar="RUN.toml", help="The run; organiser.key lies beside it.  [default: here, or that of this home's daemon]"
)


@click.command()
@click.argument("peers", metavar="PEER...", nargs=-1, required=True)
@click.option(
    "--days",
    type=click.IntRange(0, 36500),
    default=DEFAULT_DAYS,
    show_default=True,
    help="How long it holds, from now on; 0: without an end.",
)
@click.option("--list", "on_list", is_flag=True, help="Put the peers on the run's list in place of invitations: nothing needs to be sent.")
@_run_option
@daemon_command
def invite(context: click.Context, /, peers: tuple[str, ...], days: int, on_list: bool, run_file: str | None, as_json: bool) -> None:
    """Invite peers into a run whose swarm.access is "invited".

    PEER is the id of a volunteer's daemon: `peerd join ADDRESS` of such a run tells it, and what to do with the answer. It prints an
    invitation for each, one a line, which is of use to that very peer alone, so it may be sent by any way.

    \b
    Examples:
      peerd invite 12D3KooW... --run my-run
      peerd invite 12D3KooW... --run my-run --list
    """
    from peerd.config.access import NO_END, allowing, invitation_text, sign_invitation
    from peerd.control.protocol import SCHEMA

    _check_peers(peers)
    office = _office(chosen_home(context), run_file)
    if on_list:
        return _change(context, office, lambda listed: allowing(listed, peers), as_json)
    until_s = int(time.time()) + days * DAY_S if days else NO_END
    told = {peer: invitation_text(sign_invitation(peer, until_s, office.run, office.key)) for peer in peers}
    reply = {
        "schema": SCHEMA,
        "run": office.run,
        "until": until_s,
        "invitations": [{"peer": peer, "invitation": text} for peer, text in told.items()],
    }
    if is_printed(reply, as_json):
        return None
    for text in told.values():
        click.echo(text)
    if not office.by_invitation:
        click.echo(
            'peerd: warning: this run is open to everybody; swarm.access = "invited" in run.toml makes it one by invitation', err=True
        )
    return None


@click.command()
@click.argument("peers", metavar="[PEER]...", nargs=-1)
@click.option("--reason", metavar="TEXT", default="", help="Why; its owner and everybody else read it.")
@click.option("--lift", is_flag=True, help="Take the ban of these peers back, and whatever else the list says of them.")
@_run_option
@daemon_command
def ban(context: click.Context, /, peers: tuple[str, ...], reason: str, lift: bool, run_file: str | None, as_json: bool) -> None:
    """Shut peers out of a run: all daemons drop them from their tables and refuse their calls, within seconds.

    It signs the run's next list with organiser.key, keeps it beside the key, and hands it to this home's daemon, which tells all
    others. The newest list counts, and each daemon keeps it on disk. A banned peer's own daemon says why, and ends. Without PEER
    it shows the list.

    \b
    Examples:
      peerd ban 12D3KooW... --run my-run --reason "sends noise"
      peerd ban --lift 12D3KooW... --run my-run
    """
    from peerd.config.access import banning, lifting

    if (lift and (reason or not peers)) or (reason and not peers):
        raise UsageError("--lift takes peers and no --reason" if lift else "--reason is for the peers that are banned", "name them")
    _check_peers(peers)
    office = _office(chosen_home(context), run_file)
    if not peers:
        return _show(office, as_json)
    if lift:
        return _change(context, office, lambda listed: lifting(listed, peers), as_json)
    return _change(context, office, lambda listed: banning(listed, peers, reason), as_json)


@dataclass(frozen=True, slots=True)
class Office:
    """What an organiser signs with, and the newest list that is known here."""

    folder: Path
    key: Ed25519PrivateKey
    run: str
    by_invitation: bool
    listed: AccessList
    peers_here: tuple[str, ...]
    """The peers of this home's daemons that are in the run."""


def _check_peers(peers: Sequence[str]) -> None:
    from peerd.config.access import is_peer_id

    for peer in peers:
        if not is_peer_id(peer):
            raise UsageError(f"{peer}: not a peer id", "paste all of it; `peerd peers --json` and the log show whole ids, 12D3KooW...")


def _office(home: Home, run_file: str | None) -> Office:
    """The organiser's key and run, and the newest list, of the file beside the key and of this home's daemons."""
    from peerd.cli.organise import run_file_path
    from peerd.config import manifest
    from peerd.config.access import LIST_FILE, NO_LIST, list_on_disk
    from peerd.config.organiser import KEY_FILE, load_key, public_bytes
    from peerd.errors import BadMessageError

    daemons = _daemons(home)
    path = run_file_path(run_file or _folder(daemons))
    run, key = manifest.load(path), load_key(path.parent / KEY_FILE)
    run_id = manifest.run_id(public_bytes(key), run.name)
    mine = [reply for reply in daemons if reply["run"] == run_id]
    listed = NO_LIST
    try:
        found = list_on_disk(path.parent / LIST_FILE, run_id, public_bytes(key))
    except BadMessageError as error:
        raise SignatureError(f"{path.parent / LIST_FILE}: {error.message}", "bring back a copy of it, or remove it") from None
    if found is not None:
        listed = found[1]
    for reply in mine:
        told = _list_told(reply, run_id, public_bytes(key))
        listed = told if told is not None and told.number > listed.number else listed
    return Office(path.parent, key, run_id, run.swarm.access == "invited", listed, tuple(reply["peer"] for reply in mine))


def _daemons(home: Home, **arguments: Any) -> list[dict[str, Any]]:
    """What this home's daemons say of the list; nothing where none runs."""
    try:
        answers = ask_each(home, "access", **arguments)
    except NoDaemonError:
        return []
    for answer in answers:
        if answer.error is not None and not isinstance(answer.error, NoDaemonError):
            raise answer.error
    return [answer.reply for answer in answers if answer.reply is not None]


def _folder(daemons: Sequence[dict[str, Any]]) -> str:
    """The folder of the run where none was named: this one, or that of the run which a daemon of this home has started."""
    here = Path.cwd()
    if (here / "run.toml").exists():
        return str(here)
    known = next((reply["organiser"] for reply in daemons if reply["organiser"]), "")
    if not known:
        raise UsageError("no run is named, and there is no run.toml here", "name the run's folder with --run")
    return str(known)


def _list_told(reply: dict[str, Any], run_id: str, organiser_key: bytes) -> AccessList | None:
    from peerd.config.access import read_list, unpacked

    told = bytes.fromhex(reply["list"])
    return read_list(unpacked(told), run_id, organiser_key) if told else None


def _change(context: click.Context, office: Office, change: Callable[[AccessList], AccessList], as_json: bool) -> None:
    """Sign the next list, keep it beside the key, and hand it to this home's daemons."""
    from peerd.config.access import LIST_FILE, packed, sign_list, write_list

    try:
        listed = change(office.listed)
        raw: RawList = sign_list(listed, office.run, office.key)
    except ValueError as error:
        raise UsageError(str(error), "shorten the reason, or lift bans that are of no use any more") from None
    if own := sorted(set(office.peers_here) & listed.banned.keys()):
        raise UsageError(f"{own[0]} is the daemon of this home, which hands the list to the others", "end it with `peerd leave` first")
    write_list(office.folder / LIST_FILE, raw)
    handed = _daemons(chosen_home(context), list=packed(raw).hex()) if office.peers_here else []
    _tell(office, listed, len(handed), as_json)


def _show(office: Office, as_json: bool) -> None:
    _tell(office, office.listed, len(office.peers_here), as_json)


def _tell(office: Office, listed: AccessList, num_daemons: int, as_json: bool) -> None:
    from peerd.config.access import describe_list
    from peerd.control.protocol import SCHEMA

    if is_printed({"schema": SCHEMA, "run": office.run, **describe_list(listed), "daemons": num_daemons}, as_json):
        return
    click.echo(
        f"list {listed.number}: {len(listed.allowed)} allowed, {len(listed.banned)} banned" if listed.number else "there is no list yet"
    )
    for peer in sorted(listed.allowed):
        click.echo(f"  allowed  {peer}")
    for peer, why in sorted(listed.banned.items()):
        click.echo(f"  banned   {peer}{'  ' + why if why else ''}")
    if listed.number and not num_daemons:
        click.echo("peerd: warning: no daemon of this home is in the run, so nobody hears of it until one is", err=True)
