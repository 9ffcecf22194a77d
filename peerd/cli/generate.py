"""The verb generate: lets a trained model, or the model that the swarm trains, continue a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from peerd.cli.ask import draw_options, harmless, print_served, said_by_swarm
from peerd.cli.options import daemon_command, is_printed
from peerd.errors import UsageError


@click.command()
@click.argument("words", metavar="[DIR... | PROMPT]", nargs=-1)
@click.option("--swarm", is_flag=True, help="Ask the swarm of this home's daemon, while it trains, in place of a DIR.")
@click.option("--prompt", metavar="TEXT", help="What the text begins with.")
@click.option("--tokens", "max_tokens", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How many to add.")
@draw_options(0.0)
@click.option("--device", default="cpu", show_default=True, help="auto, cpu, cuda, cuda:N or mps. A daemon may hold a GPU's memory.")
@click.option("--verbose", is_flag=True, help="With --swarm: say how fast the text came, and who computed it.")
@daemon_command
def generate(
    context: click.Context, words: tuple[str, ...], swarm: bool, as_json: bool, verbose: bool, device: str, **request: Any
) -> None:
    """Let a model go on from a prompt.

    DIR is what `peerd export` wrote, in either format; or, repeated, the homes of peers that hold every stage between them. With --swarm
    the prompt may stand there in place of --prompt.

    \b
    Examples:
      peerd generate trained --prompt "def "
      peerd generate trained --prompt "def " --temperature 0.8 --seed 1
      peerd generate --swarm "def "
    """
    if swarm and len(words) == 1 and request["prompt"] is None:
        request["prompt"], words = words[0], ()
    if swarm == bool(words):
        raise UsageError("a model to ask is needed: either a DIR or --swarm", "name what `peerd export` wrote, or add --swarm")
    if request["prompt"] is None:
        raise UsageError("there is no prompt", "add --prompt TEXT")
    if swarm:
        if not as_json:
            click.echo(request["prompt"], nl=False)
        told = said_by_swarm(context, shows=not as_json, **request)
        if not is_printed({**told, "prompt": request["prompt"]}, as_json) and verbose:
            print_served(told)
        return
    from peerd.cli.launch import run_child

    request["sources"] = [str(Path(folder).expanduser().absolute()) for folder in words]
    reply = run_child("peerd.generate", {**request, "device": device}, what="generating text")
    if not is_printed(reply, as_json):
        click.echo(f"{reply['prompt']}{harmless(reply['text'])}")
