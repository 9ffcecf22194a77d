"""Access control: programs of this machine ask with the token, and no web site that a browser has open does. Pure."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from peerd.api.requests import ApiError

MAX_BODY_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ApiAccess:
    port: int
    token: str

    @property
    def hosts(self) -> frozenset[str]:
        """Names by which a client on this machine asks. A name that a web site has made this machine's address is not among them."""
        return frozenset(f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def why_refuse(headers: Mapping[str, str], access: ApiAccess) -> ApiError | None:
    """`headers`: with names in lower case."""
    if headers.get("host", "") not in access.hosts:
        return ApiError(HTTPStatus.MISDIRECTED_REQUEST, "not by this name: use http://127.0.0.1 or http://localhost with the port")
    if headers.get("origin"):
        return ApiError(HTTPStatus.FORBIDDEN, "web sites may not ask this model; use a program on this machine", code="origin_refused")
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), access.token.encode()):
        return ApiError(
            HTTPStatus.UNAUTHORIZED, "give the token that `peerd serve-api` prints, as the API key of your client", code="invalid_api_key"
        )
    if int(length) > MAX_BODY_BYTES if (length := headers.get("content-length", "")).isdecimal() else False:
        return too_large()
    return None


def too_large() -> ApiError:
    return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request has at most {MAX_BODY_BYTES >> 20} MiB", code="request_too_large")
