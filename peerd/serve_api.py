"""`python -m peerd.serve_api REQUEST`: what `peerd serve-api` runs. A model of an export answers in the form of OpenAI's interface."""

from __future__ import annotations

import json
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from peerd import SCHEMA
from peerd.api.guard import ApiAccess
from peerd.api.requests import TextRequest
from peerd.api.server import server_of
from peerd.child import exit_code_of, parse_request
from peerd.config.atomic import replace_file
from peerd.daemon.device import choose_device
from peerd.errors import ExitCode, PortTakenError, UsageError
from peerd.generate import TextModel, generate_tokens, open_text_model
from peerd.models.sampling import Sampling

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


class ExportedModel:
    """A TextModel under a name."""

    def __init__(self, model: TextModel, name: str) -> None:
        self._model = model
        self.name, self.max_context, self.ends = name, model.max_context, model.ends

    def encode(self, text: str) -> list[int]:
        return self._model.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._model.decode(tokens)

    def begin(self, prompt: list[int], asked: TextRequest) -> Callable[[], int]:
        sampling = Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed)
        tokens: Iterator[int] = generate_tokens(self._model, prompt, self.max_context, sampling)
        return lambda: next(tokens)


def main(arguments: list[str]) -> int:
    """Serve until a signal comes. Returns an ExitCode."""
    return exit_code_of(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    if len(arguments) != 1:
        raise UsageError(f"{len(arguments)} arguments given", "use `peerd serve-api`")
    request: ApiRequest = parse_request(ApiRequest, arguments[0])
    with _bind(request.port) as listener:
        sources = [Path(source) for source in request.sources]
        model = ExportedModel(open_text_model(sources, choose_device(request.device)), sources[0].name)
        access = ApiAccess(listener.getsockname()[1], token_in(Path(request.token_file)))
        _tell(model, access, as_json=request.as_json)
        with server_of(model, access) as server:
            server.run(sockets=[listener])
    return ExitCode.OK


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


def _tell(model: ExportedModel, access: ApiAccess, *, as_json: bool) -> None:
    """Say on standard output how clients reach the model, once they can."""
    address = f"http://{HOST}:{access.port}/v1"
    if as_json:
        told = {"schema": SCHEMA, "address": address, "token": access.token, "model": model.name, "context": model.max_context}
        print(json.dumps(told), flush=True)
        return
    print(f"address  {address}\ntoken    {access.token}\nmodel    {model.name}, {model.max_context} tokens of context", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
