"""The questions over HTTP: who may ask, how much, and that nothing but the page is served."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from helpers.asking import JSON, LARGE, STATE, ask

from trigrid.web.guard import BURST, LARGEST_BODY, RATE, Guard, Rate
from trigrid.web.questions import QUESTIONS
from trigrid.web.server import make_app
from trigrid.web.workers import Busy, Overrun, Workers


def test_an_answer_over_http(server: str) -> None:
    status, found, headers = ask(server, "/api/plan", {"state": STATE})
    assert status == 200
    assert (found["dp"], found["microbatches"]) == (2, 35)
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers


@pytest.mark.parametrize(
    ("headers", "status", "key"),
    [
        ({"Host": "evil.example"}, 421, "Host"),
        ({"Host": "127.0.0.1.evil.example:80"}, 421, "Host"),
        ({"Host": "localhost.evil.example"}, 421, "Host"),
        ({"Host": ""}, 421, "Host"),
        ({"Host": "10.0.0.1"}, 421, "Host"),
        ({"Origin": "http://evil.example"}, 403, "Origin"),
        ({"Origin": "null"}, 403, "Origin"),
        ({"Sec_Fetch_Site": "cross-site"}, 403, "Sec-Fetch-Site"),
        ({"Content_Type": "text/plain"}, 415, "Content-Type"),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
    ],
)
def test_pages_of_others_may_not_ask(server: str, headers: dict[str, str], status: int, key: str) -> None:
    """DNS rebinding by the Host, foreign pages by the Origin, forms by the type."""
    found = ask(server, "/api/plan", {"state": STATE}, **headers)
    assert found[0] == status
    assert found[1]["problems"][0]["key"] == key


def test_own_names_may_ask(server: str) -> None:
    """By an address of this machine, and through a tunnel that has another port."""
    port = urlsplit(server).port
    for host in (f"localhost:{port}", "localhost:9999", "127.0.0.1", "[::1]:80"):
        origin = f"http://{host}"
        assert ask(server, "/api/link", {"query": ""}, Host=host, Origin=origin)[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"x" * (LARGEST_BODY + 1), 413),
        (b"{", 422),
        (b"\xff\xfe", 422),
        (b"null", 422),
        (b"[" * 50_000, 422),
        (b'{"state": {"gpus": 1e999}}', 422),
        (b"", 422),
    ],
)
def test_bodies_that_make_no_sense_are_refused(server: str, body: bytes, status: int) -> None:
    found = ask(server, "/api/plan", body)
    assert found[0] == status
    assert found[1]["problems"]


def test_a_body_is_bounded_while_it_comes(server: str) -> None:
    """Also where its length is not told."""
    place = urlsplit(server)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
    chunks = (b"x" * 65_536 for _ in range(8))
    connection.request("POST", "/api/plan", chunks, {**JSON, "Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert connection.getresponse().status == 413
    connection.close()


@pytest.mark.parametrize(
    "path",
    [
        *("/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "/....//server.py", "//etc/passwd", "/page/"),
        *("/index.html/", "/INDEX.HTML", "/.", "/%00", "/nothing.js", "/api/", "/api/run", "/docs", "/redoc"),
    ],
)
def test_nothing_but_the_page_is_served(server: str, path: str) -> None:
    status, found, _ = ask(server, path, method="GET")
    assert status == 404
    assert found["problems"]


def test_the_page_is_served(server: str) -> None:
    status, text, headers = ask(server, "/", method="GET")
    assert status == 200
    assert text.lstrip().lower().startswith("<!doctype html>")
    assert headers["content-type"].startswith("text/html")
    assert ask(server, "/main.js", method="GET")[2]["content-type"].startswith("text/javascript")
    assert ask(server, "/main.js", {})[0] == 405


def test_openapi_describes_every_question(server: str) -> None:
    status, found, _ = ask(server, "/openapi.json", method="GET")
    assert status == 200
    assert {f"/api/{name}" for name in QUESTIONS} <= found["paths"].keys()
    for name, question in QUESTIONS.items():
        operation = found["paths"][f"/api/{name}"]["post"]
        assert operation["summary"]
        reference = operation["responses"]["200"]["content"]["application/json"]["schema"]["$ref"]
        schema = found["components"]["schemas"][reference.rpartition("/")[2]]
        assert reference.endswith(f"/{question.output.__name__}")
        assert all(field["description"] for field in schema["properties"].values())


def test_fifty_users_at_once(server: str) -> None:
    """Each with a state of its own, several turns of a dial: no error."""

    def user(number: int) -> list[int]:
        values = {**STATE["values"], "batch.global_batch": 2 * (number + 1)}  # type: ignore[dict-item]
        return [
            ask(server, f"/api/{name}", {"state": {**STATE, "values": values}})[0]
            for name in ("plan", "timeline", "plan")
        ]

    with ThreadPoolExecutor(50) as pool:
        assert {status for found in pool.map(user, range(50)) for status in found} == {200}


def test_a_newer_search_ends_the_older(server: str) -> None:
    """Of the same page; that of another page goes on."""
    older: list[int] = []
    first = threading.Thread(target=lambda: older.append(ask(server, "/api/best", {"state": LARGE}, X_Page="a")[0]))
    first.start()
    # A search of so many GPUs takes seconds, the start of its process less.
    first.join(0.8)
    status, found, _ = ask(server, "/api/best", {"state": STATE}, X_Page="a")
    first.join(60)
    assert older == [409]
    assert status == 200
    assert found["state"]


def test_who_tells_no_page_ends_nobody(server: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, "/api/sensitivity", {"state": STATE}) for _ in range(4)]
        assert [one.result()[0] for one in asked] == [200] * 4


def test_key_presses_are_answered_beside_a_search(server: str) -> None:
    searching = threading.Thread(target=lambda: ask(server, "/api/best", {"state": LARGE}, X_Page="b"))
    searching.start()
    searching.join(0.5)
    assert ask(server, "/api/plan", {"state": STATE})[0] == 200
    assert searching.is_alive()
    # Who leaves ends what was searched for him.
    ask(server, "/api/best", {"state": STATE}, X_Page="b")
    searching.join(60)
    assert not searching.is_alive()


# Parts of the server


def told(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run `story` in a thread of its own: where a browser is open, this one has an event loop already."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, story()).result()


def test_a_question_that_overruns_is_ended_and_the_next_is_answered() -> None:
    async def story() -> None:
        workers = Workers(1, 0.2, 1)
        try:
            await workers.warm("plan", json.dumps({"state": STATE}).encode())
            with pytest.raises(Overrun):
                await workers.ask("best", json.dumps({"state": LARGE}).encode())
            reply = await workers.ask("link", b'{"query": "gpus=8"}')
            assert reply.status == 200
            assert json.loads(reply.text)["state"]["gpus"] == 8
        finally:
            await workers.end()

    told(story)


def test_no_more_questions_wait_than_should() -> None:
    async def story() -> None:
        workers = Workers(1, 5.0, 1)
        try:
            asked = [asyncio.create_task(workers.ask("link", b'{"query": ""}')) for _ in range(4)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert sum(isinstance(one, Busy) for one in found) == 2
        finally:
            await workers.end()

    told(story)


def test_who_no_longer_waits_ends_the_work() -> None:
    """A reply that nobody reads is never taken for that of the next question."""

    async def story() -> None:
        workers = Workers(1, 60.0, 1)
        try:
            task = asyncio.create_task(workers.ask("best", json.dumps({"state": LARGE}).encode()))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            reply = await workers.ask("link", b'{"query": "gpus=8"}')
            assert json.loads(reply.text)["state"]["gpus"] == 8
        finally:
            await workers.end()

    told(story)


def test_the_rate_is_bounded() -> None:
    now = [0.0]
    rate = Rate(lambda: now[0])
    assert sum(rate.allows("a") for _ in range(int(BURST) + 50)) == int(BURST)
    assert rate.allows("b")
    now[0] += 10 / RATE
    assert sum(rate.allows("a") for _ in range(50)) == 10


@pytest.mark.parametrize(
    ("host", "name", "own"),
    [
        ("127.0.0.1", "localhost:1", True),
        ("127.0.0.1", "[::1]:1", True),
        ("127.0.0.1", "192.168.1.5:1", False),
        ("192.168.1.5", "192.168.1.5:1", True),
        ("0.0.0.0", "192.168.1.5:1", True),
        ("0.0.0.0", "evil.example", False),
        ("gpu-box.lan", "gpu-box.lan:8330", True),
        ("gpu-box.lan", "evil.example", False),
        ("0.0.0.0", socket.gethostname(), True),
    ],
)
def test_which_hosts_are_its_own(host: str, name: str, own: bool) -> None:
    assert Guard(make_app(host), host).owns(name) is own
