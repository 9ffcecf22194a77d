"""The benchmark of texts: somebody asks in some stretches and not at all in the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from peerd.control.client import ControlClient
from peerd.errors import UnreachableError
from scripts.benchmarks import texts


def test_nothing_is_asked_in_a_pause_and_the_end_waits_for_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def ask(_client: ControlClient, on_token: Callable[[int, str], None], **_request: Any) -> None:
        asked.append(0)
        if len(asked) == 2:
            raise UnreachableError("no peer of stage 0 goes on with texts now", "try again")
        while True:  # an answer without end
            time.sleep(0.001)
            on_token(0, "")

    monkeypatch.setattr(texts, "ask_swarm", ask)
    asking = texts.Asking(cast(ControlClient, None))
    with asking.on():
        asking.pause()  # nobody has begun
        assert asked == []
        for _ in range(2):
            before = asking.tokens
            asking.go_on()
            while asking.tokens < before + 3:
                time.sleep(0.001)
            asking.pause()
            tokens = asking.tokens
            time.sleep(0.01)
            assert asking.tokens == tokens
    with texts.Asking(cast(ControlClient, None)).on():  # the end in the middle of an answer
        pass
    assert asking.failed == 1
    assert len(asked) == 3
