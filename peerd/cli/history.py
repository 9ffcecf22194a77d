"""The verbs history and contributions, which ask this home's daemon about past steps."""

from __future__ import annotations

import click

from peerd.cli.options import ask, daemon_command, is_printed
from peerd.errors import UsageError

SHOWN_STEPS = 20
ASK_SILENCE_S = 30.0


@click.command()
@click.option("--since", type=click.IntRange(0, 10**9), metavar="STEP", help=f"From this step on.  [default: the last {SHOWN_STEPS}]")
@click.option("--events", is_flag=True, help="Also who came and went, what moved, what was wrong.")
@daemon_command
def history(context: click.Context, since: int | None, events: bool, as_json: bool) -> None:
    """Show finished steps, and with --events what happened in the swarm.

    The daemon keeps them in its home, so they survive its end. What happened before it joined it knows only in part.

    \b
    Examples:
      peerd history --events
      peerd history --since 100 --json | jq .steps[].loss
    """
    reply = ask(context, "history", since=since or 0, events=events)
    if is_printed(reply, as_json):
        return
    from peerd.cli.render_history import print_history

    print_history(reply, most_steps=SHOWN_STEPS if since is None else None, with_events=events)


@click.command()
@click.option("--share", is_flag=True, help="Print a few lines to paste elsewhere (Markdown).")
@click.option("--receipt", metavar="FILE", help="Write a signed receipt of this machine's own work, which anybody can check.")
@click.option("--days", type=click.FloatRange(min=0, min_open=True), metavar="N", help="With --receipt: of the last days.  [default: all]")
@daemon_command
def contributions(context: click.Context, share: bool, receipt: str | None, days: float | None, as_json: bool) -> None:
    """Show who computed what: steps and tokens of each peer.

    Counted from the rosters that all members of an average agreed on, not from what a peer says of itself. Your daemon
    knows its own stage and asks peers of the others.

    \b
    Examples:
      peerd contributions
      peerd contributions --share
      peerd contributions --receipt FILE --days 1
    """
    if (share and receipt) or (days and not receipt):
        raise UsageError("--receipt goes without --share, and --days with --receipt only")
    if receipt:
        from peerd.cli.receipts import write_receipt

        return write_receipt(context, receipt, days, as_json)
    reply = ask(context, "contributions", silence_s=ASK_SILENCE_S)
    if is_printed(reply, as_json):
        return None
    from peerd.cli.render_history import print_contributions, shared_text

    if share:
        click.echo(shared_text(reply))
    else:
        print_contributions(reply)
    return None
