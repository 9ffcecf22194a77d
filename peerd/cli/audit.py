"""The verb audit: who was audited, by whom, and what came of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from peerd.cli.options import ask, daemon_command, is_printed

if TYPE_CHECKING:
    from peerd.control.audits import AuditInfo, AuditReply, AuditsInfo, CaseInfo

LAST = 12


@click.command()
@daemon_command
def audit(context: click.Context, as_json: bool) -> None:
    """Show which work of its mates this daemon has computed again, and what came of it.

    Where the run has swarm.trust = "audits". A case is a result that some peer has found wrong; its judges are the mates that computed it
    again, each with how far it is off and how far it may be.

    \b
    Examples:
      peerd audit
      peerd audit --json | jq '.cases[] | select(.ruling == "convicted")'
    """
    reply: AuditReply = ask(context, "audit")
    if is_printed(reply, as_json):
        return
    for line in audit_lines(reply):
        click.echo(line)


def audit_lines(reply: AuditReply) -> Iterator[str]:
    """The text of the reply."""
    from peerd.cli.render import plain

    found = reply["audits"]
    if found is None:
        yield 'Peers of this run do not audit each other: its organiser has not set swarm.trust = "audits".'
        return
    yield audits_line(found)
    if found["own_fault"]:
        yield plain(found["own_fault"], 400)
    yield from (f"lost its standing: {plain(peer)}" for peer in found["lost"])
    yield from map(_case_line, reply["cases"])
    yield from map(_audit_line, reply["last"][-LAST:])


def audits_line(found: AuditsInfo) -> str:
    """All audits in one line."""
    counts = ", ".join(f"{count} {name}" for name, count in found["counts"].items()) or "none yet"
    kept = f"kept {found['kept']} of {found['offered']} own calls for others" if found["offered"] else "no own calls yet"
    return f"{counts}; drew {found['drawn']} of {found['items']} microbatches and parts of mates; {kept}"


def _case_line(case: CaseInfo) -> str:
    from peerd.cli.render import plain, short_id

    judges = ", ".join(
        f"{short_id(plain(each['peer']))} {each['deviation']:.2g} off, {each['tolerance']:.0e} allowed" for each in case["judges"]
    )
    of = f"{_work(case['index'])} of step {case['step']}, stage {case['stage']}, of {short_id(plain(case['peer']))}"
    return f"{case['ruling']}: {of}; accused by {short_id(plain(case['accuser']))}; judges: {judges}"


def _work(index: int | None) -> str:
    return "whole part" if index is None else f"microbatch {index}"


def _audit_line(note: AuditInfo) -> str:
    from peerd.cli.render import plain, short_id

    off = "" if note["deviation"] is None else f", {note['deviation']:.1e} off"
    why = f": {plain(note['reason'])}" if note["reason"] else ""
    return f"step {note['step']}, {_work(note['index'])} of {short_id(plain(note['peer']))}: {note['outcome']}{off}{why}"
