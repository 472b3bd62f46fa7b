"""Who may ask, how often, and what goes back with every answer.

A page of another site must not ask a server that listens on a person's own machine, neither by its address nor by a
name that leads there (DNS rebinding): the Host must be this machine's, and an Origin must be that Host.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, MutableMapping
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LARGEST_BODY = 256 * 1024
RATE, BURST = 500.0, 1000.0
"""Requests a second of one address, and as many more at once."""
MOST_ADDRESSES = 10_000
Clock = Callable[[], float]


def refuse(status: int, key: str, value: str, reason: str) -> JSONResponse:
    """An answer that refuses, in the form of all refusals."""
    problem = {"key": key, "value": value[:200], "reason": reason, "nearest": []}
    return JSONResponse({"problems": [problem]}, status)


class Guard:
    """An application behind which only requests of this machine's own pages come."""

    def __init__(self, app: ASGIApp, host: str, clock: Clock = time.monotonic):
        self.app, self.rate = app, Rate(clock)
        self.everywhere = not is_loopback(host)
        # Once, since a name may have to be asked of another machine.
        self.names = {host.lower()}
        if self.everywhere:
            self.names |= {socket.gethostname().lower(), socket.getfqdn().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # There are no websockets, and the start and end of the application are its own.
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refused(scope)
        if refused is not None:
            await refused(scope, receive, sending)
            return
        await self.app(scope, receive, sending)

    def _refused(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.owns(host):
            return refuse(421, "Host", host, "is no name of this server; open the address that it has printed")
        if origin is not None and origin.partition("://")[2] != host:
            return refuse(403, "Origin", origin, "a page of another site may not ask")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return refuse(403, "Sec-Fetch-Site", headers["sec-fetch-site"], "a page of another site may not ask")
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdigit() and len(length) < 12):
            return refuse(400, "Content-Length", length, "is no length")
        if int(length) > LARGEST_BODY:
            return refuse(413, "Content-Length", length, f"is more than {LARGEST_BODY:,} bytes")
        client = scope.get("client")
        if not self.rate.allows(client[0] if client else ""):
            return refuse(429, "rate", f"{RATE:g}/s", "so many requests a second are too many; wait a moment")
        return None

    def owns(self, header: str) -> bool:
        """Whether the Host names this machine. Where it listens on all addresses, any address is its own, since only
        names can be led elsewhere; so is its own name."""
        name = _name(header)
        return is_loopback(name) or name in self.names or (self.everywhere and _is_address(name))


class Rate:
    """A bucket of requests for each address, which fills again at RATE (Turner 1986, leaky bucket)."""

    def __init__(self, clock: Clock):
        self._clock = clock
        self._left: MutableMapping[str, tuple[float, float]] = {}

    def allows(self, address: str) -> bool:
        """Whether one more request is allowed; it then counts."""
        now = self._clock()
        left, since = self._left.get(address, (BURST, now))
        left = min(BURST, left + (now - since) * RATE)
        if len(self._left) >= MOST_ADDRESSES:
            self._left.clear()
        self._left[address] = (left - 1 if left >= 1 else left, now)
        return left >= 1


def _name(header: str) -> str:
    """The host without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether only this machine reaches `name`."""
    return name == "localhost" or (_is_address(name) and ip_address(name).is_loopback)


async def body_of(receive: Receive) -> bytes | None:
    """The body of a request; None where it is longer than it may be."""
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message: dict[str, Any] = dict(await receive())
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = bool(message.get("more_body")) and message["type"] == "http.request"
        if size > LARGEST_BODY:
            return None
    return b"".join(parts)
