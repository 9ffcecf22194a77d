"""The verb chat, and what it shares with `generate --swarm`: the swarm of this home's daemon goes on with a text."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from peerd.cli.options import SEED, Decorated, FiniteRange, daemon_of, home_option
from peerd.errors import PeerdError, UsageError

if TYPE_CHECKING:
    from peerd.control.texts import TextHop, TextReply


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def draw_options(temperature: float) -> Callable[[Decorated], Decorated]:
    """Add --temperature, with this default, --top-p and --seed to a verb."""
    options = (
        click.option(
            "--temperature", type=FiniteRange(0, 100), default=temperature, show_default=True, help="0: always the likeliest token."
        ),
        click.option(
            "--top-p",
            type=FiniteRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="Draw from the likeliest only.",
        ),
        click.option("--seed", type=SEED, default=0, show_default=True, help="Of the draws at a temperature above 0."),
    )

    def decorate(command: Decorated) -> Decorated:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def said_by_swarm(context: click.Context, *, shows: bool, **asked: Any) -> TextReply:
    """The swarm's answer. With `shows` its text is printed as it comes."""
    from peerd.control.asking import ask_swarm

    shown = ""

    def show(_token: int, text: str) -> None:
        nonlocal shown
        if shows and text:
            click.echo(harmless(text), nl=False)
            sys.stdout.flush()
            shown += text

    reply = ask_swarm(daemon_of(context), show, **asked)
    if shows:
        click.echo(harmless(reply["text"][len(shown) :]))
    return reply


def harmless(text: str) -> str:
    """What a model says, without the characters that a terminal obeys: the peer that chooses the tokens may choose those."""
    return _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def print_served(reply: TextReply) -> None:
    """Say on standard error how fast the text came, and who computed it."""
    from peerd.peer_names import short_id

    steps = reply["steps"]
    told = f"step {steps[0]}" if len(steps) == 1 else f"steps {', '.join(map(str, steps))}"
    speed = reply["tokens"] / reply["took_s"] if reply["took_s"] else 0.0
    again = f", another path {reply['rerouted']} times" if reply["rerouted"] else ""
    guessed = f"; {reply.get('right', 0)} of {reply['guessed']} guessed tokens were right" if reply.get("guessed") else ""
    click.echo(
        f"{reply['tokens']} tokens, {speed:.1f} tokens/s, the first after {reply['first_s']:.2f} s; {told}{again}{guessed}", err=True
    )
    hops = reply.get("hops") or []
    for stage, peers in enumerate(reply["peers"]):
        took = f"; {hop_line(hops[stage])}" if stage < len(hops) and hops[stage]["calls"] else ""
        click.echo(f"stage {stage}: {', '.join(map(short_id, peers))}{took}", err=True)


def hop_line(hop: TextHop) -> str:
    """What a call to one stage took on average."""
    took_ms, waited_ms, computed_ms = (1000 * each / hop["calls"] for each in (hop["took_s"], hop["waited_s"], hop["computed_s"]))
    way_ms = took_ms - waited_ms - computed_ms
    return f"{took_ms:.0f} ms a call: {way_ms:.0f} on the way, {waited_ms:.0f} until its turn, {computed_ms:.0f} computing"


@click.command()
@click.option("--tokens", "max_tokens", type=click.IntRange(1, 100_000), default=200, show_default=True, help="Most of one answer.")
@draw_options(0.8)
@click.option("--verbose", is_flag=True, help="Say how fast each answer came, and who computed it.")
@home_option
@click.pass_context
def chat(context: click.Context, /, max_tokens: int, verbose: bool, **draws: Any) -> None:
    """Talk to the model that this home's swarm trains, while it trains.

    Each line that you type gets an answer, which the peers of all stages compute. Ctrl-D or an empty line ends the conversation. Where it
    is longer than the model's context, its beginning is forgotten.

    \b
    Example:
      peerd chat --temperature 0.8
    """
    daemon_of(context).request("status")  # says at once if there is no daemon
    messages: list[dict[str, str]] = []
    while said := _next_line():
        messages.append({"role": "user", "content": said})
        try:
            reply = said_by_swarm(context, shows=True, messages=messages, max_tokens=max_tokens, ends=True, **draws)
        except PeerdError as error:
            if isinstance(error, UsageError) and not sys.stdin.isatty():
                raise
            messages.pop()
            click.echo(f"no answer: {error}", err=True)
            continue
        messages.append({"role": "assistant", "content": reply["text"].strip()})
        if verbose:
            print_served(reply)


def _next_line() -> str:
    """What the user types; empty at the end."""
    try:
        if sys.stdin.isatty():
            return str(click.prompt("you", default="", show_default=False)).strip()
        return sys.stdin.readline().strip()
    except click.Abort:
        return ""
