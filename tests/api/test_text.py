"""Pieces of an answer are whole characters, and hold nothing of a text at which it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from peerd.api.text import TextStream


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def streamed(data: bytes, *stops: str) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(decode, stops), []
    for token in data:
        pieces.append(stream.add(token))
        if stream.has_stopped:
            break
    return [*pieces, stream.rest()], stream


def test_half_a_character_waits_for_the_other_half() -> None:
    assert streamed("\u00e4\u20ac".encode())[0] == ["", "\u00e4", "", "", "\u20ac", ""]
    assert streamed("\u00e4".encode()[:1])[0] == ["", "\N{REPLACEMENT CHARACTER}"]


def test_what_may_begin_a_stop_waits_until_it_is_none() -> None:
    assert streamed(b"a\nUsual", "\nUser:")[0] == ["a", "", "", "", "\nUsu", "a", "l", ""]
    pieces, stream = streamed(b"yes\nUser: no", "\nUser:")
    assert "".join(pieces) == "yes"
    assert stream.has_stopped
    assert stream.num_tokens == 9


@given(st.binary(max_size=30), st.lists(st.text("ab\u00e4\n", min_size=1, max_size=3), max_size=3))
def test_the_pieces_are_the_text_up_to_the_first_stop(data: bytes, stops: list[str]) -> None:
    pieces, stream = streamed(data, *stops)
    text = decode(list(data))
    found = "".join(pieces)
    assert stream.has_stopped == any(stop in text for stop in stops)
    assert text.startswith(found)
    assert not any(stop in found for stop in stops)
    if not stream.has_stopped:
        assert found == text
    else:
        assert any(text[len(found) :].startswith(stop) for stop in stops)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3))
def test_the_answer_ends_at_the_stop_that_is_complete_first(text: str, stops: list[str]) -> None:
    found = "".join(streamed(text.encode(), *stops)[0])
    complete = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    first = min((end for end, _ in complete), default=0)
    assert found == (text[: min(place for end, place in complete if end == first)] if complete else text)
