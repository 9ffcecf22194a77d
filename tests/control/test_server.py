"""Replies are encoded in pieces that, joined, equal the JSON of the whole; a verb that talks hears that nobody listens."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from peerd.control.server import PIECE, Say, control_server, pieces_of

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(values)
def test_pieces_make_the_json_of_the_whole(value: Any) -> None:
    assert "".join(pieces_of(value)) == json.dumps(value)


def test_a_long_list_is_cut_wherever_it_is() -> None:
    steps = [{"step": step, "loss": 1.5} for step in range(3 * PIECE + 1)]
    reply = {"ok": {"schema": 1, "steps": steps, "peers": [{"spans": [[1, 2]] * (2 * PIECE)}]}}
    pieces = list(pieces_of(reply))
    assert json.loads("".join(pieces)) == reply
    assert max(map(len, pieces)) <= len(json.dumps(steps[-PIECE:]))


async def test_what_is_said_to_a_client_that_is_gone_is_an_error() -> None:
    heard, gone = asyncio.Event(), asyncio.Event()

    async def talk(_request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        try:
            while True:
                say("still at it")
                heard.set()
                await asyncio.sleep(0)
        except OSError:
            gone.set()
            raise

    with tempfile.TemporaryDirectory(prefix="peerd-t-") as folder:
        async with asyncio.timeout(20), control_server(Path(folder) / "s", {"talk": talk}):
            _, writer = await asyncio.open_unix_connection(Path(folder) / "s")
            writer.write(b'{"verb": "talk"}\n')
            await heard.wait()
            writer.close()
            await gone.wait()
