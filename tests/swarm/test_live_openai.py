"""`peerd serve-api --swarm`: usual clients ask a swarm that trains, and hear clearly why something is refused."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from peerd.cli.launch import module_command
from tests.swarm.daemons import Daemon, Swarm, until
from tests.swarm.runs import swarm_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(240)]

PACE_MS, TOKENS, PROMPT = 100, 12, "def "
"""A microbatch takes so long, so that the run goes on beside the clients."""


class Api(NamedTuple):
    """What `serve-api` has printed, and the daemons behind it, one of each stage."""

    address: str
    port: int
    token: str
    model: str
    context: int
    daemons: list[Daemon]


@pytest.fixture(scope="module")
def api() -> Iterator[Api]:
    with Swarm(swarm_manifest(evaluation_fraction=0.1, evaluate_every_steps=1000, evaluation_microbatches=1)) as swarm:
        daemons = [swarm.start(stage=0, compute_stand_in_ms=PACE_MS), swarm.join(1, compute_stand_in_ms=PACE_MS)]
        for daemon in daemons:
            daemon.wait_until_serving()
        until(lambda: all(daemon.status["texts"]["copy_bytes"] for daemon in daemons))  # the first step is evaluated: texts stay at it
        asked = {"sources": [], "token_file": str(swarm.folder / "token"), "port": 0, "as_json": True, "home": str(daemons[0].home.folder)}
        command = module_command("peerd.serve_api", json.dumps(asked))
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=swarm.environment) as process:
            try:
                assert process.stdout is not None
                told = json.loads(process.stdout.readline())
                port = urllib.parse.urlsplit(told["address"]).port or 0
                yield Api(told["address"], port, told["token"], told["model"], told["context"], daemons)
            finally:
                process.terminate()
        for daemon in daemons:
            daemon.wait_for_step(3)
        swarm.assert_exact()


def ask(api: Api, path: str, body: object = None, **headers: str) -> tuple[int, Any]:
    """Status and document of an answer; of a stream, its events."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{api.port}/v1{path}", data)
    for name, value in {"authorization": f"Bearer {api.token}", **headers}.items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    if text.startswith("data: "):
        *told, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert done == "[DONE]"
        return status, [json.loads(each) for each in told]
    return status, json.loads(text)


def test_a_completion_and_a_chat_come_whole_and_streamed(api: Api) -> None:
    """Greedy text is the same in each form, and the daemon's own."""
    body = {"model": api.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    whole = ask(api, "/completions", body)[1]
    said = whole["choices"][0]["text"]
    streamed = ask(api, "/completions", {**body, "stream": True})[1]
    assert "".join(each["choices"][0]["text"] for each in streamed) == said
    assert whole["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": TOKENS, "total_tokens": len(PROMPT) + TOKENS}
    assert said == api.daemons[0].request("ask", prompt=PROMPT, max_tokens=TOKENS)["text"]
    chat = {"model": api.model, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "seed": 3}
    told = ask(api, "/chat/completions", chat)[1]["choices"][0]["message"]["content"]
    pieces = ask(api, "/chat/completions", {**chat, "stream": True})[1]
    assert "".join(each["choices"][0]["delta"].get("content") or "" for each in pieces) == told


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], int, str]] = {
    "wrong token": ({"authorization": "Bearer wrong"}, {}, 401, "invalid_api_key"),
    "other origin": ({"origin": "https://example.org"}, {}, 403, "origin_refused"),
    "unknown model": ({}, {"model": "gpt-4"}, 404, "model_not_found"),
    "longer than the context": ({}, {"prompt": "x" * 1000}, 400, "context_length_exceeded"),
    "huge prompt": ({}, {"prompt": "x" * (2 << 20)}, 413, "request_too_large"),
    "what would change the answer": ({}, {"n": 2}, 400, "unsupported_parameter"),
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("refused", REFUSED)
def test_refusals_are_clear(api: Api, refused: str, streams: bool) -> None:
    headers, changes, status, code = REFUSED[refused]
    found = ask(api, "/completions", {"model": api.model, "prompt": PROMPT, "stream": streams, **changes}, **headers)
    assert (found[0], found[1]["error"]["code"]) == (status, code)
    assert len(found[1]["error"]["message"]) > 10


def test_the_openai_package_streams_and_hears_why(api: Api) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=api.address, api_key=api.token, max_retries=0, timeout=60)
    assert [each.id for each in client.models.list()] == [api.model]
    pieces = client.completions.create(model=api.model, prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True)
    said = "".join(piece.choices[0].text for piece in pieces)
    assert said == api.daemons[0].request("ask", prompt=PROMPT, max_tokens=TOKENS)["text"]
    chat = client.chat.completions.create(model=api.model, messages=[{"role": "user", "content": "a"}], max_tokens=4, stream=True)
    assert [piece.choices[0].finish_reason for piece in chat][-1] in ("length", "stop")
    with pytest.raises(openai.AuthenticationError, match="give the token"):
        openai.OpenAI(base_url=api.address, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.PermissionDeniedError, match="web sites"):
        client.with_options(default_headers={"Origin": "https://example.org"}).models.list()
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4' here"):
        client.completions.create(model="gpt-4", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match=f"context has {api.context} tokens"):
        client.completions.create(model=api.model, prompt="x" * 1000)
    with pytest.raises(openai.APIStatusError, match="at most 1 MiB"):
        client.completions.create(model=api.model, prompt="x" * (2 << 20))


def test_where_an_owner_lets_nobody_ask_the_client_hears_so_at_once(api: Api) -> None:
    """Of the only peer of a stage. Silence for as long as an asker's patience would be an answer, too."""
    last = api.daemons[1]
    last.request("limits", change={"inference": 0.0})
    try:
        status, told = ask(api, "/completions", {"model": api.model, "prompt": PROMPT, "max_tokens": 2})
    finally:
        last.request("limits", change={"inference": 0.02})
    assert (status, told["error"]["code"]) == (503, "swarm_unavailable")
    assert "stage 1 let nobody ask" in told["error"]["message"]
    assert ask(api, "/completions", {"model": api.model, "prompt": PROMPT, "max_tokens": 2})[0] == 200
