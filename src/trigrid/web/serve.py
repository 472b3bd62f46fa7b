"""A server on a port of this machine, until it is stopped."""

from __future__ import annotations

import errno
import socket
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from trigrid.errors import Problem, Refused
from trigrid.web.guard import is_loopback
from trigrid.web.server import make_app

if TYPE_CHECKING:
    from trigrid.web.run.view import RunView

LARGEST_PORT = 2**16 - 1
WAITING = 256
"""Connections that the machine holds until they are taken."""
MOST_CONNECTIONS = 2000
LONGEST_HEADER = 16 * 1024
GOODBYE_S = 1
BROWSER_S = 0.3


@dataclass(frozen=True)
class Listening:
    """A socket that listens on `host`."""

    socket: socket.socket
    host: str

    @property
    def url(self) -> str:
        """Where the page is."""
        port = self.socket.getsockname()[1]
        name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        return f"http://{f'[{name}]' if ':' in name and '[' not in name else name}:{port}"

    @property
    def exposed(self) -> str:
        """What is told where others than this machine may ask; empty where they may not."""
        if is_loopback(self.host):
            return ""
        return (
            f"listening on {self.host}: whoever reaches this machine's port {self.socket.getsockname()[1]} can use the "
            "planner, its processors for searches, and read the run's folder that is given; there is no password and "
            "no encryption"
        )


@contextmanager
def listen(host: str, port: int) -> Iterator[Listening]:
    """A socket on `port` of `host`. Raises Refused where there is none to be had."""
    if not 0 <= port <= LARGEST_PORT:
        raise Refused([Problem("port", port, f"must be from 0 to {LARGEST_PORT}", (min(max(port, 0), LARGEST_PORT),))])
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        reason = "is no address of this machine"
        raise Refused([Problem("host", host, reason, ("127.0.0.1",))]) from error
    with socket.socket(family, kind, protocol) as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
            found.listen(WAITING)
        except OSError as error:
            raise Refused([_taken(host, port, error)]) from error
        yield Listening(found, host)


def _taken(host: str, port: int, error: OSError) -> Problem:
    if error.errno == errno.EADDRINUSE:
        return Problem("port", port, "another program listens on it; 0 takes any that is free", (0,))
    if error.errno == errno.EACCES:
        return Problem("port", port, "only the administrator may listen on it", (0,))
    return Problem("host", host, f"cannot be listened on: {error.strerror}", ("127.0.0.1",))


def serve(listening: Listening, run: RunView | None = None, *, open_browser: bool = False) -> None:
    """Answer until the process is told to stop. Raises KeyboardInterrupt after Ctrl-C."""
    config = uvicorn.Config(
        make_app(listening.host, run),
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        ws="none",
        # The one that knows `h11_max_incomplete_event_size`.
        http="h11",
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LONGEST_HEADER,
        timeout_graceful_shutdown=GOODBYE_S,
    )
    if open_browser:
        # The socket listens already: what comes too early waits.
        opening = threading.Timer(BROWSER_S, webbrowser.open, [listening.url])
        opening.daemon = True
        opening.start()
    uvicorn.Server(config).run(sockets=[listening.socket])
