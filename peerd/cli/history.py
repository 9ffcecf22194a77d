"""The verbs history and contributions, which ask this home's daemon about past steps."""

from __future__ import annotations

import json
from typing import cast

import click

from peerd.cli.options import daemon_of, home_option, json_option

SHOWN_STEPS = 20
ASK_SILENCE_S = 30.0


@click.command()
@click.option("--since", type=click.IntRange(0, 10**9), metavar="STEP", help=f"From this step on.  [default: the last {SHOWN_STEPS}]")
@click.option("--events", is_flag=True, help="Also who came and went, what moved, what was wrong.")
@home_option
@json_option
@click.pass_context
def history(context: click.Context, since: int | None, events: bool, as_json: bool) -> None:
    """Show finished steps, and with --events what happened in the swarm.

    The daemon keeps them in its home, so they survive its end. What happened before it joined it knows only in part.

    \b
    Examples:
      peerd history --events
      peerd history --since 100 --json | jq .steps[].loss
    """
    reply = daemon_of(context).request("history", since=since or 0, events=events)
    if as_json:
        click.echo(json.dumps(reply))
        return
    from peerd.cli.render_history import print_history
    from peerd.control.protocol import HistoryReply

    print_history(cast("HistoryReply", reply), most_steps=SHOWN_STEPS if since is None else None, with_events=events)


@click.command()
@click.option("--share", is_flag=True, help="Print a few lines to paste elsewhere (Markdown).")
@home_option
@json_option
@click.pass_context
def contributions(context: click.Context, share: bool, as_json: bool) -> None:
    """Show who computed what: steps and tokens of each peer.

    Counted from the rosters that all members of an average agreed on, not from what a peer says of itself. Your daemon
    knows its own stage and asks peers of the others.

    \b
    Examples:
      peerd contributions
      peerd contributions --share
    """
    reply = daemon_of(context).request("contributions", silence_s=ASK_SILENCE_S)
    if as_json:
        click.echo(json.dumps(reply))
        return
    from peerd.cli.render_history import print_contributions, shared_text
    from peerd.control.protocol import ContributionsReply

    told = cast("ContributionsReply", reply)
    if share:
        click.echo(shared_text(told))
    else:
        print_contributions(told)
