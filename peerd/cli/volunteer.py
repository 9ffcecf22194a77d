"""The verbs join and leave, for volunteers."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.devices import ask_each, first_of
from peerd.cli.options import chosen_home, daemon_command, daemon_options, is_printed
from peerd.cli.organise import launch, settings_of
from peerd.errors import TimedOutError, UsageError

if TYPE_CHECKING:
    from peerd.config.paths import Home

LEAVE_SILENCE_S = 120.0
MAX_INVITATION_CHARS = 1 << 16


def invitation_told(told: str) -> str:
    """The value of --invitation, read from the file that it names if there is one. UsageError if there is no invitation in it."""
    from pathlib import Path

    from peerd.config.access import invitation_text, invitations_in

    if not told:
        return ""
    found = invitations_in(told)
    with contextlib.suppress(OSError, RuntimeError):  # there is no such file, or no such user
        found = found or invitations_in(Path(told).expanduser().read_text(errors="replace")[:MAX_INVITATION_CHARS])
    if not found:
        raise UsageError("--invitation: neither a file with an invitation nor one itself", "paste the whole line that the organiser sent")
    return " ".join(map(invitation_text, found))


@click.command()
@click.argument("addresses", metavar="[ADDRESS]...", nargs=-1)
@daemon_options(
    data="The run's text, if you have it; or swarm: fetch it from a peer.",
    host="",
    host_help="IPv4 address to listen on.  [default: all, or loopback if ADDRESS is on it]",
    detach="Return once the daemon can be reached; it goes on in the background.",
)
@click.option("--invitation", metavar="FILE|TEXT", default="", help="The organiser's invitation for this peer. This home remembers it.")
@click.pass_context
def join(context: click.Context, /, addresses: tuple[str, ...], invitation: str, detach: bool, as_json: bool, **flags: Any) -> int:
    """Join a run: ADDRESS is the line its organiser gave you, or that of any peer; of several the first that answers counts.
    A link to the run's page will do: https://HOST or peerd://HOST.

    The daemon checks the organiser's signature, measures this machine, takes the stage that needs help most and
    trains with the others until you leave. Runs in the foreground unless --detach: Ctrl-C leaves gracefully, a second
    Ctrl-C leaves at once. Nothing is lost either way. Without ADDRESS it goes back into the run this home was last in,
    among the peers it met there, as it does where nobody answers at the addresses of that run; after a blackout the run
    resumes from the checkpoints of those who come back.

    A peer that launches work needs the run's text: --data names it if you have it, and --data swarm fetches it from a peer that
    does. Without it your machine serves its stage all the same.

    Some runs take invited peers only. Then it prints this peer's id, which you send to the organiser, and --invitation takes the answer.

    With --device all a daemon for each GPU takes part, with one set of limits; the other verbs are told to all of them.

    \b
    Examples:
      peerd join
      peerd join /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...#9f2c...
      peerd join https://train.example.org
      peerd join ADDRESS --device all
    """
    from peerd.cli.join_link import addresses_behind

    join = " ".join(addresses_behind([each.strip() for each in addresses])).strip()
    if not join:
        check_was_in_a_run(chosen_home(context))
    settings = replace(settings_of(context, flags, join=join), invitation=invitation_told(invitation))
    return launch(context, settings, detach=detach, as_json=as_json)


def check_was_in_a_run(home: Home) -> None:
    """Raise a UsageError if this home has no last run to rejoin."""
    import json

    try:
        last = json.loads(home.state.read_text())["last"]["run"]
    except (OSError, ValueError, KeyError, TypeError):
        last = ""
    if not last:
        raise UsageError("this home has not been in a run yet", "give the ADDRESS to join")


@click.command()
@click.option("--now", is_flag=True, help="Do not finish what is queued.")
@daemon_command
def leave(context: click.Context, now: bool, as_json: bool) -> None:
    """Let this home's daemon, or those of all its devices, leave the swarm and end.

    It finishes what it holds and hands on its share of the step first; with --now it goes at once, and the others do
    its share again.
    """
    shown = (lambda text: click.echo(text, err=True)) if sys.stderr.isatty() else None
    from peerd.control.client import ControlClient

    answers = ask_each(chosen_home(context), "leave", shown, now=now, silence_s=LEAVE_SILENCE_S)
    reply = first_of(answers)
    for answer in answers:
        if not ControlClient(answer.home).wait_for_end(LEAVE_SILENCE_S):
            raise TimedOutError(
                f"the daemon of {answer.home.folder} has left the swarm, and has not ended within {LEAVE_SILENCE_S:g} s",
                f"read its log: {answer.home.log}",
            )
    if not is_printed(reply, as_json):
        click.echo(f"the daemon of {chosen_home(context).folder} left the swarm")
