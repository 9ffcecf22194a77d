"""A short link stands for the addresses that its page names; nobody on the way can name others."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from peerd.cli.join_link import MAX_BYTES, addresses_behind, addresses_in, url_of
from peerd.cli.pages import read_page
from peerd.errors import AddressError, PeerdError, UnreachableError

RUN = "9f2c" * 8
ONE, TWO = (f"/ip4/203.0.113.{number}/tcp/31337/p2p/12D3KooW#{RUN}" for number in (7, 8))


@pytest.mark.parametrize(
    ("link", "url", "run"),
    [
        ("https://train.example.org", "https://train.example.org/join", ""),
        ("peerd://train.example.org#9f2c", "https://train.example.org/join", "9f2c"),
        ("https://example.org/poems?x=1#9f2c", "https://example.org/poems?x=1", "9f2c"),
        ("http://127.0.0.1:8642", "http://127.0.0.1:8642/join", ""),
        ("http://[::1]:8642/", "http://[::1]:8642/join", ""),
    ],
)
def test_a_link_is_a_secure_page(link: str, url: str, run: str) -> None:
    assert url_of(link) == (url, run)


@pytest.mark.parametrize(
    "link", ["http://example.org", "http://127.0.0.1.example.org/", "https://", "https://me:secret@example.org/", "peerd://"]
)
def test_a_link_that_others_could_change_is_refused(link: str) -> None:
    with pytest.raises(AddressError):
        url_of(link)


def test_a_page_names_addresses_of_one_run() -> None:
    assert addresses_in(f"Join us!\n\npeerd join {ONE}\r\n{TWO}\n{ONE}\n", "", "x") == (ONE, TWO)
    assert addresses_in(ONE, RUN, "x") == (ONE,)
    for page, run in (("nothing here", ""), (f"{ONE}\n/ip4/1.2.3.4/tcp/1/p2p/x#other", ""), (ONE, "0" * 32)):
        with pytest.raises(AddressError):
            addresses_in(page, run, "x")


@contextlib.contextmanager
def page_with(body: bytes, code: int = 200, **headers: str) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_told: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_addresses_and_links_may_be_mixed() -> None:
    with page_with(f"{TWO}\n".encode()) as link:
        assert addresses_behind([ONE, f"{link}#{RUN}"]) == (ONE, TWO)


@pytest.mark.parametrize(
    ("body", "code", "headers", "error", "told"),
    [
        (b"gone", 404, {}, UnreachableError, "answers 404"),
        (b"x" * (MAX_BYTES + 1), 200, {}, AddressError, "more than"),
        (b"", 302, {"location": "http://example.org/join"}, AddressError, "https://"),
    ],
)
def test_a_page_that_is_none_or_leads_elsewhere_is_told(
    body: bytes, code: int, headers: dict[str, str], error: type[Exception], told: str
) -> None:
    with page_with(body, code, **headers) as link, pytest.raises(error, match=told):
        addresses_behind([link])


def test_a_page_that_nobody_serves_is_unreachable() -> None:
    with page_with(b"") as link:
        pass
    with pytest.raises(UnreachableError, match="cannot be read"):
        addresses_behind([link])


@pytest.mark.parametrize(
    "link", ["https://[::1", "https://ex ample.org/", "https://example.org:abc/", "http://localhost:1/\x01", "peerd://[x]/#run"]
)
def test_what_is_no_link_is_told_as_such(link: str) -> None:
    with pytest.raises(PeerdError):
        addresses_behind([link])


@pytest.mark.parametrize(
    "answer", [b"\0garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", b"HTTP/1.1 " + bytes(70_000)]
)
def test_an_answer_that_is_no_page_is_told(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            with listener.accept()[0] as caller:
                caller.recv(4096)
                with contextlib.suppress(OSError):
                    caller.sendall(answer)

        served = pool.submit(serve)
        with pytest.raises(UnreachableError, match="cannot be read"):
            read_page(f"http://127.0.0.1:{listener.getsockname()[1]}/", 100)
        served.result()
