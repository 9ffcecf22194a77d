"""The verbs status, peers, top, dashboard and wait. They change nothing, except that top has keys to pause and to leave."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import click

from peerd.cli.devices import all_clients, ask_each, further_clients, status_of_all
from peerd.cli.options import STEPS, TIMEOUT_S, ask, chosen_home, daemon_command, daemon_of, home_option, is_printed
from peerd.errors import NoDaemonError, PeerdError, UsageError

if TYPE_CHECKING:
    from peerd.control.client import ControlClient
    from peerd.control.protocol import PeersReply

VISIT_SILENCE_S = 90.0
SWARM_SILENCE_S = 5.0
"""How long the short status waits for what it can do without."""
DAEMON_APPEARS_WITHIN_S = 15.0
_RETRY_S = 0.2


@click.command()
@click.option("--long", "is_long", is_flag=True, help="All that this daemon knows of itself, one row for each matter.")
@daemon_command
def status(context: click.Context, is_long: bool, as_json: bool) -> None:
    """Show what this home's daemon does, or those of all its devices.

    In a few lines: what it does now, how far the run is, what you gave, who takes part, what is wrong and what to do.

    \b
    Examples:
      peerd status
      peerd status --long
      peerd status --json | jq .peer.step
    """
    reply: Any = status_of_all(ask_each(chosen_home(context), "status"))
    if is_printed(reply, as_json):
        return
    if not is_long:
        from peerd.cli.render_short import print_short

        print_short(reply, _swarm_of(context))
        return
    from peerd.cli.render_devices import print_devices
    from peerd.cli.render_status import print_status

    if "devices" in reply:
        print_devices(reply)
    else:
        print_status(reply)


def _swarm_of(context: click.Context) -> PeersReply | None:
    """The whole swarm as this home's daemon sees it; None where it does not answer in time."""
    try:
        return cast("PeersReply", ask(context, "peers", silence_s=SWARM_SILENCE_S))
    except PeerdError:
        return None


@click.command()
@click.argument("address", required=False)
@daemon_command
def peers(context: click.Context, address: str | None, as_json: bool) -> None:
    """Show the whole swarm: stages, peers, queues, steps, throughput, and how this daemon sends each peer tensors (path).

    Without ADDRESS it asks this home's daemon. With ADDRESS it asks the peer there; no daemon is needed.

    \b
    Examples:
      peerd peers
      peerd peers /ip4/203.0.113.7/tcp/31337/p2p/12D3KooW...
    """
    if address is None:
        reply = ask(context, "peers")
    else:
        from peerd.cli.launch import run_child

        reply = run_child("peerd.daemon.visit", address, what="asking that peer", silence_s=VISIT_SILENCE_S)
    if is_printed(reply, as_json):
        return
    from peerd.cli.render import print_peers

    print_peers(reply)


@click.command()
@home_option
@click.pass_context
def top(context: click.Context) -> int:
    """Watch the swarm live on the whole terminal.

    Stages and peers with their queues, steps and phases, the loss, the speed, what your machine gives, its health, and
    who comes and goes. The keys are on the last line: arrows choose, enter shows a peer, l leaves (it asks first),
    q quits. NO_COLOR turns colours off.

    \b
    Example:
      peerd top
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        raise UsageError("top needs a terminal that it can draw on", "for scripts: peerd status --json, peerd peers --json")
    client = daemon_of(context)
    client.request("status")  # fails early, before the drawing libraries are loaded
    from peerd.cli.top.app import run
    from peerd.cli.top.feed import Feed

    return run(Feed(client, further_clients(chosen_home(context), client)))


@click.command()
@click.option("--open/--no-open", "opens", default=None, help="Open it in the browser, or not.  [default: from a desktop's terminal]")
@daemon_command
def dashboard(context: click.Context, opens: bool | None, as_json: bool) -> None:
    """Open this daemon's dashboard, a page to watch the swarm in, and print its address.

    The address holds a token: whoever has it may let this daemon leave. Looking needs none on this machine.

    \b
    Examples:
      peerd dashboard
      ssh -L 8642:127.0.0.1:8642 HOST    (with --dashboard-port 8642 there)
    """
    wanted = sys.stdout.isatty() and not as_json and is_on_a_desktop(sys.platform, os.environ) if opens is None else opens
    reply = ask(context, "dashboard", open=wanted)
    if not is_printed(reply, as_json):
        click.echo(reply["address"])
    if wanted:
        import webbrowser

        # All users of this machine can read a browser's command line, so it never gets the token. An older daemon gives no code; then the
        # page opens without rights.
        if not webbrowser.open(reply.get("open") or reply["address"].partition("?")[0]) and opens:
            raise UsageError("no browser can be opened here", "open the address yourself")


def is_on_a_desktop(platform: str, environment: Mapping[str, str]) -> bool:
    """True if a browser opened by this process appears on the screen of the user who ran the command."""
    shows = platform == "darwin" or any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return shows and "SSH_CONNECTION" not in environment


@click.command()
@click.option("--serving", is_flag=True, help="Until this daemon, or each device's, serves a stage.")
@click.option("--step", type=STEPS, help="Until this daemon has reached step N.", metavar="N")
@click.option("--timeout", "timeout_s", type=TIMEOUT_S, default=60.0, show_default=True, metavar="S", help="Seconds to wait at most.")
@daemon_command
def wait(context: click.Context, serving: bool, step: int | None, timeout_s: float, as_json: bool) -> None:
    """Wait until the daemon serves, or has reached a step. For scripts.

    Exits 0 when it has, 12 when the time is up, 11 when no daemon runs (a daemon that is only starting is waited for).

    \b
    Example:
      peerd join ADDRESS --detach && peerd wait --serving --timeout 60
    """
    if serving == (step is not None):
        raise UsageError("wait needs exactly one of --serving and --step N", "see `peerd wait --help`")
    reply = _wait(context, {"serving": True} if serving else {"step": step}, timeout_s)
    if not is_printed(reply, as_json):
        click.echo(f"step {reply['step']}, {'serving' if reply['serving'] else 'not serving'}")


def _wait(context: click.Context, arguments: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    began = time.monotonic()
    reply: dict[str, Any] = {}
    for client in all_clients(chosen_home(context)):
        reply = _wait_for(client, arguments, began, timeout_s)
    return reply


def _wait_for(client: ControlClient, arguments: dict[str, Any], began: float, timeout_s: float) -> dict[str, Any]:
    while True:
        left_s = max(0.0, timeout_s - (time.monotonic() - began))
        try:
            # The daemon measures the time; the client's limit is for a daemon that does not answer.
            return client.request("wait", timeout_s=left_s, silence_s=left_s + 5.0, **arguments)
        except NoDaemonError:
            if time.monotonic() - began >= min(timeout_s, DAEMON_APPEARS_WITHIN_S):
                raise
            time.sleep(_RETRY_S)
