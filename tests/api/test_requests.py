"""Requests in OpenAI's form are understood, or refused with what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.api.guard import MAX_BODY_BYTES, ApiAccess, why_refuse
from peerd.api.requests import ApiError, parse_chat, parse_completion

ACCESS = ApiAccess(8411, "secret")
OURS = {"host": "127.0.0.1:8411", "authorization": "Bearer secret"}


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "def ", **fields}).encode()


def chat(*messages: tuple[str, Any], **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **fields}).encode()


def refusal(body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_completion(body)
    return caught.value


def test_a_completion_has_the_defaults_of_openai() -> None:
    asked = parse_completion(completion(seed=4))
    assert (asked.prompt, asked.max_tokens, asked.temperature, asked.top_p, asked.seed) == ("def ", 16, 1.0, 1.0, 4)
    assert not asked.streams
    assert parse_completion(completion(prompt=["one"], temperature=0, stop="\n")).stops == ("\n",)
    assert parse_completion(completion(seed=None)).seed != parse_completion(completion(seed=None)).seed


def test_a_conversation_becomes_a_text_that_the_model_goes_on_from() -> None:
    parts = [{"type": "text", "text": "Hello"}]
    asked = parse_chat(chat(("system", "Be brief."), ("user", parts), ("assistant", "Yes?"), ("user", "Who are you?"), stop=["."]))
    assert asked.prompt == "Be brief.\nUser: Hello\nAssistant: Yes?\nUser: Who are you?\nAssistant:"
    assert asked.stops == (".", "\nUser:")
    assert asked.max_tokens is None
    assert parse_chat(chat(("user", "x"), max_completion_tokens=3)).max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"n": 2}, "n", "not supported"),
        ({"tools": [{}]}, "tools", "not supported"),
        ({"logprobs": 1}, "logprobs", "not supported"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": "9"}, "max_tokens", "integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"stop": ["a"] * 5}, "stop", "at most 4"),
        ({"stop": ""}, "stop", "at least 1"),
        ({"prompt": ["a", "b"]}, "prompt", "at most 1"),
        ({"model": None}, "model", "string"),
    ],
)
def test_what_cannot_be_done_is_said(fields: dict[str, Any], param: str, said: str) -> None:
    error = refusal(completion(**fields)).document()["error"]
    assert error["param"] == param
    assert said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_parameters_that_change_nothing_are_taken() -> None:
    parse_completion(completion(n=1, user="me", presence_penalty=0, logit_bias={}, tools=None, made_up=3))


@given(
    st.one_of(st.binary(max_size=60), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(lambda it: json.dumps(it).encode()))
)
def test_any_bytes_are_refused_or_understood(body: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        with pytest.raises(ApiError):
            parse(body)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({}, None),
        ({"host": "localhost:8411"}, None),
        ({"host": "[::1]:8411"}, None),
        ({"host": "evil.example:8411"}, 421),
        ({"host": "127.0.0.1"}, 421),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8411"}, 403),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "secret"}, 401),
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer g\u00e4"}, 401),
        ({"content-length": str(MAX_BODY_BYTES + 1)}, 413),
        ({"content-length": "x"}, None),
    ],
)
def test_only_programs_of_this_machine_with_the_token_may_ask(changes: dict[str, str], status: int | None) -> None:
    refused = why_refuse({**OURS, **changes}, ACCESS)
    assert (None if refused is None else int(refused.status)) == status
