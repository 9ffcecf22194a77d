"""The guard's decisions, for any request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.observe.web.guard import CODE_LIFE_S, MAX_CODES, Access, Asked, Codes, RateLimit, who_asks, why_refuse

TOKEN = "t" * 48
NAMES = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=30)
REQUESTS = st.builds(
    Asked,
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"]),
    path=st.sampled_from(["/", "/open/guess", "/api/leave", "/api/live", "/metrics", "/assets/app.js"]),
    host=st.sampled_from(["localhost:5", "127.0.0.1", "evil.example", "[::1]:5"]) | NAMES,
    origin=st.sampled_from(["", "http://localhost:5", "https://evil.example", "null"]),
    tokens=st.sampled_from([(), ("guess",), (TOKEN,), ("guess", TOKEN)]),
)


def access(host: str = "127.0.0.1", *, public: bool = False) -> Access:
    return Access(host=host, port=5, token=TOKEN, public=public)


@given(REQUESTS, st.sampled_from(["127.0.0.1", "192.0.2.7", "::1"]), st.booleans())
def test_nobody_acts_without_token_and_own_origin_nor_on_a_public_page(asked: Asked, host: str, public: bool) -> None:
    if asked.method in ("GET", "HEAD") or why_refuse(asked, access(host, public=public)) is not None:
        return
    assert not public
    assert TOKEN in asked.tokens
    assert asked.origin in (f"http://{asked.host}", f"https://{asked.host}")


@given(REQUESTS)
def test_on_loopback_a_foreign_name_gets_nothing(asked: Asked) -> None:
    if why_refuse(asked, access()) is None:
        name = asked.host.rpartition(":")[0] if asked.host.count(":") == 1 else asked.host
        assert name == "localhost" or name.startswith(("127.", "[::1]")) or name in ("::1", "[::1]"), asked.host


def test_a_public_page_is_served_by_any_name_and_still_obeys_nobody() -> None:
    for host in ("run.example.org", "run.example.org:8642", "127.0.0.1:5", ""):
        asked = Asked(method="GET", path="/", host=host)
        assert why_refuse(asked, access("0.0.0.0", public=True)) is None  # noqa: S104 - what is tested
        assert why_refuse(asked, access(public=True)) is None  # behind a proxy
        assert why_refuse(Asked(method="POST", path="/api/leave", host=host, tokens=(TOKEN,)), access(public=True)) is not None


@pytest.mark.parametrize(
    ("client", "forwarded", "public", "counts_for"),
    [
        ("127.0.0.1", "198.51.100.7", True, "198.51.100.7"),
        ("::1", "192.0.2.1, 2001:db8::7", True, "2001:db8::7"),  # what the visitor claimed stands before what the proxy saw
        ("203.0.113.9", "198.51.100.7", True, "203.0.113.9"),  # no proxy of this machine
        ("127.0.0.1", "198.51.100.7", False, "127.0.0.1"),
        ("127.0.0.1", "", True, "127.0.0.1"),
        ("127.0.0.1", "198.51.100.7, unknown", True, "127.0.0.1"),
        ("", "198.51.100.7", True, ""),
    ],
)
def test_a_visitor_behind_a_proxy_counts_for_himself(client: str, forwarded: str, public: bool, counts_for: str) -> None:
    assert who_asks(client, forwarded, access(public=public)) == counts_for


def test_a_burst_is_allowed_and_then_so_many_a_second() -> None:
    limit = RateLimit(per_s=2, burst=5)
    assert [limit.allows("a", 0.0) for _ in range(7)] == [True] * 5 + [False] * 2
    assert limit.allows("b", 0.0)
    assert limit.allows("a", 0.6)
    assert not limit.allows("a", 0.6)


def test_the_rate_limit_forgets_the_oldest_and_stays_small() -> None:
    limit = RateLimit()
    for number in range(10_000):
        limit.allows(str(number), 0.0)
    assert len(limit._left) <= 4096


TIMES = st.integers(0, 3 * int(CODE_LIFE_S))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abc"), TIMES), max_size=20))
def test_a_code_holds_once_and_for_a_minute(moves: list[tuple[bool, str, int]]) -> None:
    codes, given_s = Codes(), dict[str, int]()
    for gives, code, at_s in sorted(moves, key=lambda move: move[2]):
        if gives:
            codes.add(code, at_s)
            given_s[code] = at_s
        else:
            assert codes.take(code, at_s) is (at_s < given_s.pop(code, -1_000) + CODE_LIFE_S)


def test_there_are_never_many_codes() -> None:
    codes = Codes()
    for number in range(MAX_CODES + 1):
        codes.add(str(number), 0.0)
    assert [codes.take(str(number), 1.0) for number in (0, 1, MAX_CODES)] == [False, True, True]
