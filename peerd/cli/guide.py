"""The verb help: shows the pages in peerd/docs. The use of a verb is in its --help."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from peerd.cli.options import home_option
from peerd.errors import UsageError

_DOCS = Path(__file__).resolve().parent.parent / "docs"


def topics() -> dict[str, str]:
    """The title of each page, by topic."""
    pages = sorted(_DOCS.glob("*.md"))
    return {page.stem: page.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for page in pages}


@click.command(name="help")
@click.argument("topic", required=False)
@home_option
def show_help(topic: str | None) -> None:
    """Read about peerd: without TOPIC, lists the pages.

    \b
    Example:
      peerd help volunteer
    """
    known = topics()
    if topic is None:
        for name, title in known.items():
            click.echo(f"  {name:<14}{title}")
        click.echo("\npeerd help TOPIC shows a page; peerd VERB --help says how a verb is used")
        return
    if topic not in known:
        raise UsageError(f"no page about {topic!r}", f"there are {', '.join(known)}; for a verb: peerd VERB --help")
    text = (_DOCS / f"{topic}.md").read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        click.echo(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console(width=min(100, Console().width)).print(Markdown(text))
