"""Questions to a server of the page, over HTTP."""

from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

JSON = {"Content-Type": "application/json"}
STATE = {
    "model": "llama3-8b",
    "gpus": 64,
    "values": {"parallel.tp": 8, "parallel.pp": 4, "batch.global_batch": 70, "batch.sequence": 4096},
}
LARGE = {"model": "llama3-405b", "gpus": 16_384, "values": {"batch.global_batch": 2048, "batch.sequence": 8192}}


def ask(
    server: str, path: str, body: object = None, method: str = "POST", **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of a request; a body that is no text is sent as JSON."""
    place = urlsplit(server)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=120)
    sent = body if isinstance(body, str | bytes) or body is None else json.dumps(body)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method, path, sent, {**JSON, **named})
        response = connection.getresponse()
        text = response.read()
    finally:
        connection.close()
    kind = response.getheader("content-type", "")
    found = json.loads(text) if "json" in kind else text.decode()
    return response.status, found, {name.lower(): value for name, value in response.getheaders()}
