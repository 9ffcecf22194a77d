"""`python -m peerd.serve_api REQUEST`: what `peerd serve-api` runs. An export or the swarm answers in the form of OpenAI's interface."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peerd import SCHEMA
from peerd.api.guard import ApiAccess
from peerd.api.requests import TextRequest
from peerd.api.server import server_of
from peerd.child import exit_code_of, parse_request
from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.daemon.device import choose_device
from peerd.errors import ExitCode, PortTakenError, UsageError
from peerd.generate import TextModel, generate_tokens, open_text_model
from peerd.swarm_model import SwarmModel, sampling_of

HOST = "127.0.0.1"
BACKLOG = 64
TOKEN_CHARS = 48


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    sources: list[str]
    token_file: str
    port: int
    device: str = "cpu"
    as_json: bool = False
    home: str = ""
    """Of the daemon whose swarm is asked; empty: the sources are."""


class ExportedModel:
    """A TextModel under a name. One thread computes all answers in turn."""

    num_threads = 1

    def __init__(self, model: TextModel, name: str) -> None:
        self._model = model
        self.name, self.max_context, self.ends = name, model.max_context, model.ends

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)

    def begin(self, prompt: list[int], asked: TextRequest, most: int) -> ComputedTokens:
        return ComputedTokens(generate_tokens(self._model, prompt, most, sampling_of(asked)))


class ComputedTokens:
    """Tokens that this process computes."""

    def __init__(self, tokens: Iterator[int]) -> None:
        self._tokens = tokens

    def __next__(self) -> int:
        return next(self._tokens)

    def close(self) -> None: ...


def main(arguments: list[str]) -> int:
    """Serve until a signal comes. Returns an ExitCode."""
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise UsageError(f"{len(arguments)} arguments given", "use `peerd serve-api`")
    request: ApiRequest = parse_request(ApiRequest, arguments[0])
    with _bind(request.port) as listener:
        model = _model_of(request)
        access = ApiAccess(listener.getsockname()[1], token_in(Path(request.token_file)))
        _tell(model, access, as_json=request.as_json)
        with server_of(model, access) as server:
            server.run(sockets=[listener])
    return ExitCode.OK


def _model_of(request: ApiRequest) -> ExportedModel | SwarmModel:
    if request.home:
        return SwarmModel(Home(Path(request.home)))
    sources = [Path(source) for source in request.sources]
    return ExportedModel(open_text_model(sources, choose_device(request.device)), sources[0].name)


def token_in(file: Path) -> str:
    """The token of last time, so that clients need not be told anew; a new one if there is none."""
    try:
        known = file.read_text().strip()
    except (OSError, ValueError):
        known = ""
    if len(known) == TOKEN_CHARS and known.isalnum():
        return known
    token = secrets.token_hex(TOKEN_CHARS // 2)
    replace_file(file, token, mode=0o600)
    return token


def _bind(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((HOST, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise PortTakenError(f"cannot listen on {HOST} port {port}: {error.strerror}", "choose another --port, or 0 for any") from None
    return listener


def _tell(model: ExportedModel | SwarmModel, access: ApiAccess, *, as_json: bool) -> None:
    """Say on standard output how clients reach the model, once they can."""
    address = f"http://{HOST}:{access.port}/v1"
    if as_json:
        told = {"schema": SCHEMA, "address": address, "token": access.token, "model": model.name, "context": model.max_context}
        print(json.dumps(told), flush=True)
        return
    print(f"address  {address}\ntoken    {access.token}\nmodel    {model.name}, {model.max_context} tokens of context", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
