"""The interface over HTTP, with a model that counts: each answer, piece by piece or whole, and each refusal."""

from __future__ import annotations

import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import pytest

from peerd.api.guard import ApiAccess
from peerd.api.requests import ApiError, TextRequest
from peerd.api.server import Model, server_of

TOKEN = "t" * 48


class Letters:
    def __init__(self, next_token: Callable[[], int]) -> None:
        self._next = next_token
        self.is_closed = False

    def __next__(self) -> int:
        return self._next()

    def close(self) -> None:
        self.is_closed = True


class Counting:
    """Goes on with the letters after the prompt's last one; z ends a text."""

    name, num_threads, max_context, ends = "abc", 1, 64, frozenset({ord("z")})

    def encode(self, text: str) -> list[int]:
        return [*text.encode()]

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def begin(self, prompt: list[int], asked: TextRequest, most: int) -> Letters:
        letters = iter(range(prompt[-1] + 1, 256)) if prompt[-1] != ord(":") else iter(b"hi\nUser: you")
        return Letters(lambda: next(letters))


@contextmanager
def served(model: Model) -> Iterator[int]:
    """The port on which the model is served."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with server_of(model, ApiAccess(port, TOKEN)) as server:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
            thread.start()
            try:
                yield port  # the socket listens already, so that requests wait until the server takes them
            finally:
                server.should_exit = True
                thread.join()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(Counting()) as found:
        yield found


def ask(port: int, path: str, body: object = None, **headers: str) -> tuple[int, str]:
    """Status and text of an answer."""
    sent = {"authorization": f"Bearer {TOKEN}", **headers}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, sent)
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:  # noqa: S310
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def events(text: str) -> list[Any]:
    *told, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in told]


def test_the_model_is_listed(port: int) -> None:
    status, text = ask(port, "/v1/models")
    assert status == 200
    assert [each["id"] for each in json.loads(text)["data"]] == ["abc"]


def test_a_completion_comes_whole(port: int) -> None:
    status, text = ask(port, "/v1/completions", {"model": "abc", "prompt": "abc", "max_tokens": 4})
    answer = json.loads(text)
    assert (status, answer["object"]) == (200, "text_completion")
    assert answer["choices"] == [{"index": 0, "text": "defg", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


@pytest.mark.parametrize(("stop", "due"), [(None, "wxy"), ("y", "wx"), (["q", "x"], "w")])
def test_it_ends_where_the_text_does_or_at_a_stop(port: int, stop: object, due: str) -> None:
    choice = json.loads(ask(port, "/v1/completions", {"model": "abc", "prompt": "v", "max_tokens": 9, "stop": stop})[1])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (due, "stop")


def test_a_completion_comes_piece_by_piece(port: int) -> None:
    body = {"model": "abc", "prompt": "a", "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    told = events(ask(port, "/v1/completions", body)[1])
    assert [each["choices"][0]["text"] for each in told[:-1]] == ["b", "c", "d", ""]
    assert told[-2]["choices"][0]["finish_reason"] == "length"
    assert (told[-1]["choices"], told[-1]["usage"]["total_tokens"]) == ([], 4)
    assert len({each["id"] for each in told}) == 1


def test_a_chat_answers_and_ends_before_the_users_next_words(port: int) -> None:
    body = {"model": "abc", "messages": [{"role": "user", "content": "x"}]}
    choice = json.loads(ask(port, "/v1/chat/completions", body)[1])["choices"][0]
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "hi"}, "stop")
    told = events(ask(port, "/v1/chat/completions", {**body, "stream": True})[1])
    deltas = [each["choices"][0]["delta"] for each in told]
    assert deltas[0]["role"] == "assistant"
    assert "".join(delta.get("content", "") for delta in deltas) == "hi"


@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "code"),
    [
        ("/v1/models", None, {"authorization": "Bearer no"}, 401, "invalid_api_key"),
        ("/v1/models", None, {"origin": "http://evil.example"}, 403, "origin_refused"),
        ("/v1/models", None, {"host": "evil.example"}, 421, None),
        ("/v1/completions", {"model": "gpt", "prompt": "a"}, {}, 404, "model_not_found"),
        ("/v1/completions", {"model": "abc", "prompt": "a" * 80}, {}, 400, "context_length_exceeded"),
        ("/v1/completions", {"model": "abc", "prompt": "a" * (2 << 20)}, {}, 413, "request_too_large"),
        ("/v1/completions", {"model": "abc", "prompt": ""}, {}, 400, None),
        ("/v1/completions", {"model": "abc", "prompt": "a", "n": 3}, {}, 400, "unsupported_parameter"),
        ("/v1/embeddings", {"model": "abc"}, {}, 404, None),
        ("/v1/completions", None, {}, 405, None),
    ],
)
def test_refusals_say_what_is_wrong(port: int, path: str, body: object, headers: dict[str, str], status: int, code: str | None) -> None:
    found, text = ask(port, path, body, **headers)
    error = json.loads(text)["error"]
    assert (found, error["code"]) == (status, code)
    assert error["message"]


def test_answers_take_turns_and_too_many_are_refused() -> None:
    """The first answer waits for the last request: they are made side by side, on one thread."""
    from peerd.api.server import MOST_AT_ONCE

    begun, go_on = threading.Semaphore(0), threading.Event()

    class Waiting(Counting):
        def begin(self, prompt: list[int], asked: TextRequest, most: int) -> Letters:
            begun.release()
            counted = super().begin(prompt, asked, most)

            def next_token() -> int:
                go_on.wait(20)
                return next(counted)

            return Letters(next_token)

    with served(Waiting()) as port:
        found: list[tuple[int, str]] = []
        body = {"model": "abc", "prompt": "a", "max_tokens": 2}
        threads = [threading.Thread(target=lambda: found.append(ask(port, "/v1/completions", body))) for _ in range(MOST_AT_ONCE)]
        for thread in threads:
            thread.start()
        for _ in threads:
            begun.acquire(timeout=20)
        assert ask(port, "/v1/completions", body)[0] == 429
        go_on.set()
        for thread in threads:
            thread.join()
    assert [status for status, _ in found] == [200] * MOST_AT_ONCE


@pytest.mark.parametrize("streams", [False, True])
def test_a_model_that_fails_in_the_middle_says_why(streams: bool) -> None:
    """A whole answer becomes an error with its status; a stream, whose status has been sent, ends with the error."""
    given: list[Letters] = []

    class Failing(Counting):
        def begin(self, prompt: list[int], asked: TextRequest, most: int) -> Letters:
            letters = iter([ord("b")])

            def next_token() -> int:
                for letter in letters:
                    return letter
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the swarm does not go on", code="swarm_unavailable")

            given.append(Letters(next_token))
            return given[-1]

    with served(Failing()) as port:
        status, text = ask(port, "/v1/completions", {"model": "abc", "prompt": "a", "max_tokens": 5, "stream": streams})
    assert status == (200 if streams else 503)
    assert '"code": "swarm_unavailable"' in text or '"code":"swarm_unavailable"' in text
    assert given[0].is_closed
