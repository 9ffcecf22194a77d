"""The client's side of the verb `ask`: one request, each token as it comes, and the end. Stdlib only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

from peerd.control.client import ControlClient
from peerd.control.texts import TextReply

SILENCE_S = 30.0
"""A daemon that asks says each second that it still does."""


def ask_swarm(client: ControlClient, on_token: Callable[[int, str], None], **asked: Any) -> TextReply:
    """Let the swarm go on with a text. `on_token` gets each token with the text that may be shown now. Raises as `ControlClient.request`.

    `asked`: the arguments of `ask` in protocol.py.
    """

    def hear(line: str) -> None:
        if line:
            told = json.loads(line)
            on_token(int(told["token"]), str(told["text"]))

    return cast("TextReply", client.request("ask", silence_s=SILENCE_S, on_progress=hear, **asked))
