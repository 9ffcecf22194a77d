"""Receipts of work on the command line: what `contributions --receipt` writes, and the verb verify-receipt, which needs no daemon."""

from __future__ import annotations

import base64
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.options import ask, daemon_command, is_printed
from peerd.errors import DiskError, PeerdError, SignatureError

if TYPE_CHECKING:
    from peerd.config.receipt_file import ReadReceipt
    from peerd.policy.step.work_receipts import Proven

DAY_S = 86_400
HEX_DIGITS = frozenset("0123456789abcdef")


def write_receipt(context: click.Context, file: str, days: float | None, as_json: bool) -> None:
    """Ask this home's daemon for a receipt, and write it."""
    from peerd.config.atomic import replace_file

    reply = ask(context, "receipt", last_s=int(days * DAY_S) if days else 0)
    raw = base64.b64decode(reply["receipt"])
    replace_file(Path(file), raw)
    if not is_printed({"schema": reply["schema"], "file": file, "bytes": len(raw)}, as_json):
        click.echo(f"{file}: {len(raw):,} bytes; anybody can check it with `peerd verify-receipt {shlex.quote(file)}`")


@click.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--run", "run", metavar="RUN-ID", help="The run that they have to be of.  [default: that of the first]")
@click.option("--anchor", "anchors", metavar="ID", multiple=True, help="An account that you know counts; may be given several times.")
@daemon_command
def verify_receipt(context: click.Context, /, files: tuple[str, ...], run: str | None, anchors: tuple[str, ...], as_json: bool) -> None:
    """Check receipts of work, and say what they prove.

    A receipt has the run's manifest, which its organiser has signed, and accounts that the members of a stage have signed. It needs
    no daemon. Keys cost nothing: that the signers are peers of the run it shows where the chain of accounts leads through one
    that the organiser has signed, or that you know. You know those of your own daemon of that run, and any --anchor. Which
    organiser that is, the id of the run says: name it with --run. Work of several receipts is added up, and none is counted twice.

    \b
    Examples:
      peerd verify-receipt FILE
      peerd verify-receipt FILE --json
    """
    from peerd.config.receipt_file import read_receipt
    from peerd.policy.step.work_receipts import proven, why_not_added
    from peerd.table.record import RunId

    found: dict[str, ReadReceipt] = {}
    for file in files:
        first = next(iter(found.values()), None)
        wanted = run or (first.receipt.run if first is not None else None)
        try:
            found[file] = read_receipt(_bytes_of(file), RunId(wanted) if wanted else None)
        except SignatureError as error:
            raise SignatureError(f"{file}: {error.message}", error.remedy) from None
    if len(found) < len(files):
        raise SignatureError("a receipt is given twice: work counts once", "name each file once")
    if why := why_not_added({file: read.receipt for file, read in found.items()}):
        raise SignatureError(why, "leave one of them out")
    known = {*map(_id_of, anchors), *_known_here(context, next(iter(found.values())).receipt.run)}
    told = {file: proven(read.receipt, known) for file, read in found.items()}
    if not is_printed({"schema": 1, "receipts": [_info(file, read, told[file]) for file, read in found.items()]}, as_json):
        _print(found, told)


def _bytes_of(file: str) -> bytes:
    from peerd.policy.step.work_receipts import MOST_BYTES

    try:
        with Path(file).open("rb") as source:
            return source.read(MOST_BYTES + 1)
    except OSError as error:
        raise DiskError(f"{file}: {error.strerror or error}", "name a file that `peerd contributions --receipt` wrote") from None


def _id_of(anchor: str) -> bytes:
    if len(anchor) != 64 or not HEX_DIGITS.issuperset(anchor):
        raise click.BadParameter("the id of an account has 64 hex digits", param_hint="--anchor")
    return bytes.fromhex(anchor)


def _known_here(context: click.Context, run: str) -> Sequence[bytes]:
    """The accounts that this home's daemon keeps of the run; none without a daemon."""
    with contextlib.suppress(PeerdError):
        reply = ask(context, "accounts")
        if reply["run"] == run:
            return [bytes.fromhex(each["id"]) for each in reply["accounts"]]
    return ()


def _info(file: str, read: ReadReceipt, told: Sequence[Proven]) -> Mapping[str, Any]:
    swarm = read.manifest.swarm
    receipt = {"file": file, "run": read.receipt.run, "name": read.manifest.name, "peer": read.receipt.peer, "trust": swarm.trust}
    return {**receipt, "stages": [_stage_info(each) for each in told]}


def _stage_info(told: Proven) -> Mapping[str, Any]:
    audits = [{"auditor": each.auditor, "right": each.right, "differed": each.differed, "step": each.step} for each in told.audits]
    return {
        "stage": told.stage,
        "first_step": told.steps[0],
        "last_step": told.steps[1] - 1,
        "signed_s": told.times_s[1],
        **asdict(told.work),
        "of_microbatches": told.whole.microbatches,
        "signatures": told.num_signed,
        "signers": told.num_signers,
        "chain_from": told.chain_from,
        "known": told.is_anchored,
        "organiser": told.is_by_organiser,
        "audits": audits,
    }


def _print(found: Mapping[str, ReadReceipt], told: Mapping[str, Sequence[Proven]]) -> None:
    from peerd.cli.render import plain

    for file, read in found.items():
        click.echo(f"{plain(file, 200)}: work of {read.receipt.peer} in the run {plain(read.manifest.name, 64)} ({read.receipt.run})")
        for each in told[file]:
            for line in _lines(each):
                click.echo(line)
        if read.manifest.swarm.trust != "audits":
            click.echo("  Not audited: in this run nobody computes work again (swarm.trust).")
    whole = [each.work for parts in told.values() for each in parts]
    if len(found) > 1:
        click.echo(f"together: {sum(work.tokens for work in whole):,} tokens in {sum(work.microbatches for work in whole):,} microbatches")


def _lines(told: Proven) -> Sequence[str]:
    from peerd.cli.render_history import when

    work = told.work
    share = work.microbatches / told.whole.microbatches if told.whole.microbatches else 0.0
    lines = [
        f"  stage {told.stage}, steps {told.steps[0]} to {told.steps[1] - 1}, signed {when(told.times_s[1])}:",
        f"    {work.tokens:,} tokens in {work.microbatches:,} microbatches ({share:.1%} of the stage's), in {work.steps:,} averages",
        f"    signed by {told.num_signed} of {told.num_signers} signers, in a chain from step {told.chain_from} on",
    ]
    if told.is_by_one:
        lines.append("    Fewer than three peers could sign: nobody else can say whether they lie.")
    if told.is_by_organiser:
        lines.append("    the run's organiser has signed an account of this chain: its signers are peers of the run")
    if not told.is_anchored:
        lines.append("    None of these accounts is known here: that its signers are the run's peers is their own word.")
    if told.audits:
        right, differed = sum(each.right for each in told.audits), sum(each.differed for each in told.audits)
        lines.append(f"    {len(told.audits)} mates have computed {right + differed} of its items again: {right} right, {differed} not")
    return lines
