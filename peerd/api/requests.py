"""Requests in OpenAI's form: what is asked, or an error that says what is wrong. Pure."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_STOPS, MAX_STOP_CHARS = 4, 256
COMPLETION_TOKENS = 16
"""As many come where a request for a completion does not say how many, as with OpenAI."""
USER, ASSISTANT = "User:", "Assistant:"
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
}
"""Parameters of OpenAI's that would change the answer -> the values with which they do not."""


_OTHER_TYPE = ("string_type", "list_type")
"""Pydantic's words for a value of another type."""


class ApiError(Exception):
    """An answer in OpenAI's form for errors."""

    def __init__(self, status: HTTPStatus, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    def document(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRequest:
    """What a request wants."""

    model: str
    prompt: str
    is_chat: bool
    max_tokens: int | None
    """None: as many as the model's context has room for."""
    temperature: float
    top_p: float
    seed: int
    stops: tuple[str, ...]
    """The text ends before the first of these."""
    streams: bool
    tells_usage: bool
    """A stream ends with the numbers of tokens."""


class _StreamOptions(BaseModel):
    include_usage: bool | None = None


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class Message(BaseModel):
    """A part of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class _Body(BaseModel):
    """The fields of both kinds of request. Others are ignored, but for those that would change the answer."""

    model_config = ConfigDict(extra="allow", strict=True)
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None

    def asked(self, prompt: str, *, is_chat: bool, max_tokens: int | None, more_stops: tuple[str, ...] = ()) -> TextRequest:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return TextRequest(
            model=self.model,
            prompt=prompt,
            is_chat=is_chat,
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=secrets.randbits(31) if self.seed is None else self.seed,
            stops=stops + more_stops,
            streams=bool(self.stream),
            tells_usage=self.stream_options is not None and bool(self.stream_options.include_usage),
        )


Body = TypeVar("Body", bound=_Body)


class _Completion(_Body):
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]


class _Chat(_Body):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


def parse_completion(body: bytes) -> TextRequest:
    """A request for /v1/completions. Raises ApiError."""
    found = _parsed(_Completion, body)
    prompt = found.prompt if isinstance(found.prompt, str) else found.prompt[0]
    return found.asked(prompt, is_chat=False, max_tokens=found.max_tokens or COMPLETION_TOKENS)


def parse_chat(body: bytes) -> TextRequest:
    """A request for /v1/chat/completions. Raises ApiError."""
    found = _parsed(_Chat, body)
    most = found.max_completion_tokens or found.max_tokens
    return found.asked(transcript(found.messages), is_chat=True, max_tokens=most, more_stops=stops_of_chat())


def stops_of_chat() -> tuple[str, ...]:
    """The texts at which the answer in a conversation ends."""
    return (f"\n{USER}",)


def transcript(messages: list[Message]) -> str:
    """A conversation as a plain text for a model that only goes on from a text. The answer ends where the user's next words would begin."""
    names = {"user": f"{USER} ", "assistant": f"{ASSISTANT} "}
    return "".join(f"{names.get(each.role, '')}{each.text}\n" for each in messages) + ASSISTANT


def _refusal(error: ValidationError) -> ApiError:
    """What is wrong with the first field that is. Where a field may be of two types, what is wrong within the type that it has."""
    first, *others = error.errors()
    param = first["loc"][:1]
    if first["type"] in _OTHER_TYPE:
        first = next((each for each in others if each["loc"][:1] == param and each["type"] not in _OTHER_TYPE), first)
    place = ".".join(str(part) for part in first["loc"] if isinstance(part, int) or (part.isidentifier() and part != "str"))
    said = f"{place}: {first['msg']}" if place else first["msg"]
    return ApiError(HTTPStatus.BAD_REQUEST, said, param=str(param[0]) if param else None)


def _parsed(kind: type[Body], body: bytes) -> Body:
    try:
        found = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None
    for name, value in (found.model_extra or {}).items():
        if value is not None and name in _NOT_SUPPORTED and value not in _NOT_SUPPORTED[name]:
            raise ApiError(HTTPStatus.BAD_REQUEST, f"{name} is not supported", code="unsupported_parameter", param=name)
    return found
