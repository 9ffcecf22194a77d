"""The verb generate: lets a trained model continue a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from peerd.cli.options import SEED, FiniteRange, is_printed, reply_options


@click.command()
@click.argument("folders", metavar="DIR...", nargs=-1, required=True)
@click.option("--prompt", required=True, metavar="TEXT", help="What the text begins with.")
@click.option("--tokens", "max_tokens", type=click.IntRange(1, 100_000), default=100, show_default=True, help="How many to add.")
@click.option("--temperature", type=FiniteRange(0, 100), default=0.0, show_default=True, help="0: always the likeliest token.")
@click.option(
    "--top-p",
    type=FiniteRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw from the likeliest only.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Of the draws at a temperature above 0.")
@click.option("--device", default="cpu", show_default=True, help="auto, cpu, cuda, cuda:N or mps. A daemon may hold a GPU's memory.")
@reply_options
def generate(folders: tuple[str, ...], as_json: bool, **request: Any) -> None:
    """Let a model go on from a prompt.

    DIR is what `peerd export` wrote, in either format; or, repeated, the homes of peers that hold every stage between them.

    \b
    Examples:
      peerd generate trained --prompt "def "
      peerd generate trained --prompt "def " --temperature 0.8 --seed 1
    """
    from peerd.cli.launch import run_child

    request["sources"] = [str(Path(folder).expanduser().absolute()) for folder in folders]
    reply = run_child("peerd.generate", request, what="generating text")
    if not is_printed(reply, as_json):
        click.echo(f"{reply['prompt']}{reply['text']}")
