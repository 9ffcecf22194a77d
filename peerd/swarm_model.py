"""The model that a swarm trains, as `peerd serve-api --swarm` offers it: the daemon of a home asks the swarm for each answer."""

from __future__ import annotations

import threading
from http import HTTPStatus
from queue import SimpleQueue

from peerd.api.requests import ApiError, TextRequest
from peerd.config.paths import Home, cache_folder
from peerd.control.asking import ask_swarm
from peerd.control.client import ControlClient
from peerd.daemon.ask_verb import MOST_AT_ONCE
from peerd.data.tokenizer import coding_of
from peerd.errors import NoDaemonError, PeerdError
from peerd.policy.inference.sampling import Sampling
from peerd.swarm.identity import LocalState
from peerd.swarm.signed import unpack_manifest


def sampling_of(asked: TextRequest) -> Sampling:
    return Sampling(temperature=asked.temperature, top_p=asked.top_p, seed=asked.seed)


class SwarmModel:
    """Each answer has a thread that listens to the daemon."""

    num_threads = MOST_AT_ONCE

    def __init__(self, home: Home) -> None:
        """Raises NoDaemonError if no daemon runs from the home, UsageError if this machine does not have the run's tokenizer."""
        self._client = ControlClient(home)
        self._client.request("status")
        packed = LocalState(home).manifest
        if packed is None:
            raise NoDaemonError(f"the daemon of {home.folder} is in no run", "join one with `peerd join ADDRESS`")
        manifest = unpack_manifest(packed).manifest
        self.name, self.max_context = manifest.name, manifest.train.sequence_length
        self._encode, self._decode, ends = coding_of(manifest.data, cache_folder())
        self.ends = frozenset(ends)

    def encode(self, text: str) -> list[int]:
        return self._encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self._decode(tokens)

    def begin(self, prompt: list[int], asked: TextRequest, most: int) -> SwarmTokens:
        return SwarmTokens(self._client, prompt, sampling_of(asked), most)


class _NotWantedError(Exception):
    """The client of the interface has gone."""


class SwarmTokens:
    """The tokens of one answer, as the daemon tells them."""

    def __init__(self, client: ControlClient, prompt: list[int], sampling: Sampling, most: int) -> None:
        self._client = client
        self._asked = {
            "tokens": prompt,
            "max_tokens": most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
        }
        self._heard = SimpleQueue[int | ApiError]()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def __next__(self) -> int:
        if self._thread is None:
            self._thread = threading.Thread(target=self._listen, name="answer", daemon=True)
            self._thread.start()
        found = self._heard.get()
        if isinstance(found, ApiError):
            raise found
        return found

    def close(self) -> None:
        self._is_closed = True
        self._heard.put(ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the client has gone"))

    def _listen(self) -> None:
        try:
            ask_swarm(self._client, self._hear, **self._asked)
        except PeerdError as error:
            self._heard.put(ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="swarm_unavailable"))
        except _NotWantedError:
            return  # the connection is closed, so the daemon stops to ask
        else:
            self._heard.put(ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the swarm has no more tokens", code="swarm_unavailable"))

    def _hear(self, token: int, _text: str) -> None:
        if self._is_closed:
            raise _NotWantedError
        self._heard.put(token)
