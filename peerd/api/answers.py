"""Answers in OpenAI's form. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    prompt: int
    answer: int

    def document(self) -> dict[str, int]:
        return {"prompt_tokens": self.prompt, "completion_tokens": self.answer, "total_tokens": self.prompt + self.answer}


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiAnswer:
    """The names and the form of one answer."""

    number: str
    """Different for each answer."""
    created_s: int
    """Wall clock."""
    model: str
    is_chat: bool

    def whole(self, text: str, reason: str, usage: TokenCounts) -> dict[str, Any]:
        content = {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return self._document("chat.completion", [_choice(content, reason)]) | {"usage": usage.document()}

    def piece(self, text: str | None, reason: str | None = None, *, is_first: bool = False) -> dict[str, Any]:
        """A part of a stream. `reason`: why the text ends here: "stop" or "length"."""
        if not self.is_chat:
            return self._document("chat.completion.chunk", [_choice({"text": text or ""}, reason)])
        delta = ({"role": "assistant"} if is_first else {}) | ({} if text is None else {"content": text})
        return self._document("chat.completion.chunk", [_choice({"delta": delta}, reason)])

    def usage(self, usage: TokenCounts) -> dict[str, Any]:
        """The last part of a stream that ends with the numbers of tokens."""
        return self._document("chat.completion.chunk", []) | {"usage": usage.document()}

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        form = kind if self.is_chat else "text_completion"
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.number}"
        return {"id": name, "object": form, "created": self.created_s, "model": self.model, "choices": choices}


def _choice(content: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, **content, "logprobs": None, "finish_reason": reason}


def event(document: dict[str, Any]) -> str:
    """One event of a stream."""
    return f"data: {json.dumps(document)}\n\n"


def models(name: str, created_s: int) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": name, "object": "model", "created": created_s, "owned_by": "peerd"}]}
