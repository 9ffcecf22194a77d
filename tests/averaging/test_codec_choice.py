"""The leader's terms: exact while averaging costs little of a step, smaller as it costs more, and nothing where the manifest says it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.codec_choice import AVERAGING_SHARE, RoundCodec
from peerd.config.codec import parse_allowed, parse_codec

LENGTH = 1_000_000


def round_codec(exchange_s: float, step_s: float, allowed: str = "auto") -> RoundCodec:
    found = RoundCodec(parse_allowed(allowed))
    found.exchanged(found._allowed.most_exact, exchange_s)
    found.applied(0.0)
    found.applied(step_s)
    return found


@pytest.mark.parametrize("allowed", ["none", "int8", "topk:0.1"])
def test_what_the_manifest_says_no_leader_changes(allowed: str) -> None:
    assert round_codec(5.0, 10.0, allowed).codec(LENGTH) == ""


def test_the_first_round_is_exact() -> None:
    assert RoundCodec(parse_allowed("auto")).codec(LENGTH) == "none"


@pytest.mark.parametrize(("exchange_s", "codec"), [(0.1, "none"), (1.2, "bfloat16"), (2.0, "int8"), (9.9, "topk:0.05")])
def test_a_slower_exchange_is_compressed_more(exchange_s: float, codec: str) -> None:
    assert round_codec(exchange_s, 10.0).codec(LENGTH) == codec


@given(st.floats(0.001, 10.0), st.floats(0.01, 100.0))
def test_with_what_is_proposed_averaging_takes_its_share_or_cannot_take_less(exchange_s: float, rest_s: float) -> None:
    codec = round_codec(exchange_s, exchange_s + rest_s).codec(LENGTH)
    expected_s = exchange_s * parse_codec(codec).num_bytes(LENGTH) / (4 * LENGTH)
    assert codec == "topk:0.05" or expected_s <= AVERAGING_SHARE * rest_s * 1.01
