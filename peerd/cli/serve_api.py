"""The verb serve-api: lets programs on this machine ask a model in the form of OpenAI's interface."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click

from peerd.cli.options import chosen_home, daemon_command

DEFAULT_PORT = 8411


@click.command(name="serve-api")
@click.argument("folders", metavar="DIR...", nargs=-1, required=True)
@click.option("--port", type=click.IntRange(0, 65535), default=DEFAULT_PORT, show_default=True, help="On this machine alone. 0: any.")
@click.option("--device", default="cpu", show_default=True, help="auto, cpu, cuda, cuda:N or mps. A daemon may hold a GPU's memory.")
@daemon_command
def serve_api(context: click.Context, folders: tuple[str, ...], port: int, device: str, as_json: bool) -> None:
    """Let programs on this machine ask a model, in the form of OpenAI's interface.

    DIR is what `peerd export` wrote, in either format; or, repeated, the homes of peers that hold every stage between them.
    Serves until Ctrl-C. Prints the address and the token, which stays the same: give them to your client.

    \b
    Example:
      peerd serve-api trained
    """
    from peerd.cli.launch import module_command

    request = {
        "sources": [str(Path(folder).expanduser().absolute()) for folder in folders],
        "token_file": str(chosen_home(context).api_token),
        "port": port,
        "device": device,
        "as_json": as_json,
    }
    command = module_command("peerd.serve_api", json.dumps(request))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 - the server is this very interpreter
