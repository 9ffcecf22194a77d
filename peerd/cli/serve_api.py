"""The verb serve-api: lets programs on this machine ask a model in the form of OpenAI's interface."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from peerd.cli.options import chosen_home, daemon_command, daemon_of
from peerd.errors import UsageError

DEFAULT_PORT = 8411


@click.command(name="serve-api")
@click.argument("folders", metavar="[DIR]...", nargs=-1)
@click.option("--swarm", is_flag=True, help="Ask the swarm of this home's daemon, while it trains, in place of a DIR.")
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="On this machine alone. 0: any.")
@click.option("--device", default="cpu", show_default=True, help="auto, cpu, cuda, cuda:N or mps. A daemon may hold a GPU's memory.")
@daemon_command
def serve_api(context: click.Context, folders: tuple[str, ...], swarm: bool, port: int, device: str, as_json: bool) -> None:
    """Let programs on this machine ask a model, in the form of OpenAI's interface.

    DIR is what `peerd export` wrote, in either format; or, repeated, the homes of peers that hold every stage between them.
    Serves until Ctrl-C. Prints the address and the token, which stays the same: give them to your client.

    \b
    Examples:
      peerd serve-api trained
      peerd serve-api --swarm
    """
    if swarm == bool(folders):
        raise UsageError("a model to ask is needed: either a DIR or --swarm", "name what `peerd export` wrote, or add --swarm")
    from peerd.cli.launch import module_command

    home = chosen_home(context)
    request = {
        "home": str(_daemon_home(context)) if swarm else "",
        "sources": [str(Path(folder).expanduser().absolute()) for folder in folders],
        "token_file": str(home.api_token),
        "port": port,
        "device": device,
        "as_json": as_json,
    }
    command = module_command("peerd.serve_api", json.dumps(request))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 - the server is this very interpreter


def _daemon_home(context: click.Context) -> Path:
    """The home whose daemon asks its swarm. Raises NoDaemonError at once if none runs."""
    daemon = daemon_of(context)
    daemon.request("status")
    return daemon.home.folder
