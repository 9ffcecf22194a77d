"""The dashboard over real HTTP, without a browser: access rights, and the content of the stream."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from peerd.cli.join_link import addresses_behind
from peerd.observe.web import pages
from tests.observe.paper_source import ME, TOKEN, PaperSource, served

TIMEOUT_S = 20.0
EVERYWHERE = "0.0.0.0"  # noqa: S104 - what is tested


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(port: int, path: str = "/", method: str = "GET", **headers: str) -> Answer:
    """One request, which may be malformed."""
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sent = {"host": f"127.0.0.1:{port}", "connection": "close", **{name.replace("_", "-"): value for name, value in headers.items()}}
        writer.write(f"{method} {path} HTTP/1.1\r\n".encode() + "".join(f"{k}: {v}\r\n" for k, v in sent.items()).encode() + b"\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    first, *rest = head.decode().split("\r\n")
    return Answer(int(first.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in rest)}, body)


async def messages(port: int, count: int, asked: str = "") -> list[tuple[str, Any]]:
    """The first messages of the live stream."""
    found: list[tuple[str, Any]] = []
    async with asyncio.timeout(TIMEOUT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 22)
        writer.write(f"GET /api/live{asked} HTTP/1.1\r\nhost: localhost:{port}\r\n\r\n".encode())
        kind = ""
        while len(found) < count:
            line = (await reader.readline()).decode().strip()
            assert line or not reader.at_eof()
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((kind, json.loads(line.removeprefix("data: "))))
        writer.close()
    return found


async def test_the_page_and_all_it_names_are_served_from_here_alone() -> None:
    async with served(PaperSource()) as port:
        page = await ask(port)
        assert page.status == 200
        named = set(re.findall(r'(?:src|href)="([^"]+)"', page.body.decode()))
        assert named
        for path in named:
            assert path.startswith("/assets/")
            assert (await ask(port, path)).status == 200
    for script in pages.ASSETS.glob("*.js"):
        imported = re.findall(r'from "([^"]+)"', script.read_text())
        assert [name for name in imported if not (pages.ASSETS / Path(name).name).exists() or not name.startswith("/assets/")] == []
    everything = b"".join(path.read_bytes() for path in pages.ASSETS.iterdir())
    assert set(re.findall(rb"https?://[^\"' )]+", everything)) <= {b"http://www.w3.org/2000/svg"}


async def test_every_answer_carries_the_security_headers_and_no_inline_script_is_allowed() -> None:
    async with served(PaperSource()) as port:
        for path in ("/", "/assets/app.js", "/metrics", "/nowhere", "/api/session"):
            answer = await ask(port, path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"
        assert b"<script>" not in (await ask(port)).body
        assert b" style=" not in (await ask(port)).body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil", "", "10.0.0.9"])
async def test_another_name_for_this_machine_is_refused(host: str) -> None:
    """DNS rebinding: the name of a foreign site resolves to 127.0.0.1, so its scripts send requests to this dashboard."""
    async with served(PaperSource()) as port:
        for path in ("/", "/api/live", "/api/contributions", "/metrics"):
            assert (await ask(port, path, host=host)).status in (400, 421)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:9", "localhost:8080", "[::1]", "[::1]:8642"])
async def test_this_machines_own_names_are_served_through_any_tunnel(host: str) -> None:
    async with served(PaperSource()) as port:
        assert (await ask(port, host=host)).status == 200


@pytest.mark.parametrize("verb", ["leave", "pause", "resume"])
async def test_acting_needs_the_token_and_our_own_page(verb: str) -> None:
    source = PaperSource()
    async with served(source) as port:
        ours, cookie = f"http://127.0.0.1:{port}", f"peerd-token-{port}={TOKEN}"
        for headers in (
            {},
            {"origin": ours},
            {"cookie": cookie},
            {"origin": "https://evil.example", "cookie": cookie},
            {"origin": ours, "cookie": f"peerd-token-{port}={'6' * 48}"},
        ):
            assert (await ask(port, f"/api/{verb}", "POST", **headers)).status == 403
        assert source.acts == []
        assert (await ask(port, f"/api/{verb}", "GET", origin=ours, cookie=cookie)).status == 405
        assert (await ask(port, f"/api/{verb}", "POST", origin=ours, cookie=cookie)).status == 200
        assert source.acts == [verb]


async def test_the_token_goes_from_the_address_into_a_cookie_that_scripts_cannot_read() -> None:
    async with served(PaperSource()) as port:
        right, wrong = await ask(port, f"/?token={TOKEN}"), await ask(port, "/?token=guess")
        assert (right.status, right.headers["location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=strict"} <= set(right.headers["set-cookie"].split("; "))
        assert wrong.status == 303
        assert "set-cookie" not in wrong.headers
        session = await ask(port, "/api/session", cookie=f"peerd-token-{port}={TOKEN}")
        assert json.loads(session.body) == {"may_act": True, "public": False}
        assert json.loads((await ask(port, "/api/session")).body)["may_act"] is False


@pytest.mark.parametrize("host", ["127.0.0.1", EVERYWHERE])
async def test_a_code_gets_the_cookie_once_and_only_by_being_opened(host: str) -> None:
    source = PaperSource()
    source.codes.add("one-time")
    async with served(source, host=host) as port:
        for path, method in (("/open/guess", "GET"), ("/open/one-time", "HEAD")):
            answer = await ask(port, path, method)
            assert (answer.status, answer.headers["location"]) == (303, "/")
            assert "set-cookie" not in answer.headers
        assert (await ask(port, "/open/one-time", host="evil.example")).status == 421
        right, again = await ask(port, "/open/one-time"), await ask(port, "/open/one-time")
        assert (right.status, right.headers["location"]) == (303, "/")
        assert right.headers["set-cookie"].startswith(f"peerd-token-{port}={TOKEN};")
        assert {"HttpOnly", "SameSite=strict"} <= set(right.headers["set-cookie"].split("; "))
        assert (again.status, "set-cookie" in again.headers) == (303, False)


async def test_a_public_dashboard_shows_everybody_and_obeys_nobody() -> None:
    source = PaperSource()
    async with served(source, host=EVERYWHERE, public=True) as port:
        assert (await ask(port)).status == 200
        headers = {"origin": f"http://127.0.0.1:{port}", "cookie": f"peerd-token-{port}={TOKEN}"}
        for verb in ("leave", "pause", "resume"):
            assert (await ask(port, f"/api/{verb}", "POST", **headers)).status == 403
        assert json.loads((await ask(port, "/api/session", **headers)).body) == {"may_act": False, "public": True}
        answers = await asyncio.gather(*(ask(port, "/api/session") for _ in range(150)))  # at once, or a slow machine stays below the limit
        assert 429 in {answer.status for answer in answers}
    assert source.acts == []


async def test_behind_a_proxy_a_public_page_is_known_by_its_name_and_one_busy_visitor_shuts_out_nobody() -> None:
    async with served(PaperSource(), public=True) as port:
        passed_on = {"host": "run.example.org", "x_forwarded_for": "198.51.100.7"}
        answers = await asyncio.gather(*(ask(port, "/api/session", **passed_on) for _ in range(150)))
        assert 429 in {answer.status for answer in answers}
        assert (await ask(port, host="run.example.org", x_forwarded_for="198.51.100.7, 198.51.100.8")).status == 200


async def test_on_other_interfaces_looking_needs_the_token_and_scraping_does_not() -> None:
    async with served(PaperSource(), host=EVERYWHERE) as port:
        for path in ("/", "/assets/app.js", "/api/live", "/api/contributions"):
            assert (await ask(port, path)).status == 401
        assert (await ask(port, "/", cookie=f"peerd-token-{port}={TOKEN}")).status == 200
        assert b"peerd_step 20.0" in (await ask(port, "/metrics", host="peer-1:9464")).body


async def test_the_stream_begins_with_the_past_and_goes_on_with_the_present() -> None:
    async with served(PaperSource()) as port:
        (first, past), (second, now), (third, _) = await messages(port, 3)
    assert (first, second, third) == ("past", "now", "now")
    assert (past["me"], past["run"]["name"], len(past["steps"])) == (ME, "paper", 20)
    assert [len(stage["peers"]) for stage in now["stages"]] == [2, 1]


@pytest.mark.parametrize(
    ("asked", "reach_s"), [("", 86400), ("?range=1h", 3600), ("?range=7d", 604800), ("?range=all", float("inf")), ("?range=x", 86400)]
)
async def test_the_past_reaches_as_far_back_as_was_asked(asked: str, reach_s: float) -> None:
    source = PaperSource()
    async with served(source) as port:
        await messages(port, 1, asked)
    assert source.reaches_s == [reach_s]


async def test_nothing_is_computed_while_nobody_looks() -> None:
    source = PaperSource()
    async with served(source) as port:
        assert (await ask(port)).status == 200
        assert source.looks == 0
        await messages(port, 2)
        seen = source.looks
        async with asyncio.timeout(TIMEOUT_S):
            await asyncio.gather(*(task for task in asyncio.all_tasks() if "_tick" in str(task.get_coro())))
        assert source.looks <= seen + 2


async def test_a_viewer_that_looks_on_does_not_keep_the_server_from_ending() -> None:
    async with asyncio.timeout(TIMEOUT_S):
        async with served(PaperSource()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"GET /api/live HTTP/1.1\r\nhost: localhost:{port}\r\n\r\n".encode())
            assert b"200" in await reader.readline()
        await reader.read()
        writer.close()


async def test_a_short_link_leads_to_the_address_at_which_others_join() -> None:
    source = PaperSource()
    async with served(source, EVERYWHERE, public=True) as port:
        answer = await ask(port, "/join")
        assert (answer.status, answer.body.decode()) == (200, source.join + "\n")
        assert answer.headers["content-type"].startswith("text/plain")
        found = await asyncio.to_thread(addresses_behind, [f"http://127.0.0.1:{port}"])
    assert found == (source.join,)
