"""The page and its questions over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

import trigrid
from trigrid.errors import Refused
from trigrid.web.files import page_files
from trigrid.web.guard import LARGEST_BODY, Guard, body_of, refuse
from trigrid.web.openapi import operation, schemas
from trigrid.web.questions import QUESTIONS, Question, refusal
from trigrid.web.questions.catalogue import FIRST
from trigrid.web.workers import Busy, Latest, Overrun, Reply, Workers

if TYPE_CHECKING:
    from trigrid.web.run.view import RunView

QUICK_S, SLOW_S = 2.0, 60.0
"""Seconds of the processor that a question has. What limits.py lets through takes less than one on a machine that does
nothing else."""
QUICK_WAIT, SLOW_WAIT = 1000, 8
"""Questions that wait at most."""
SLOW_WORKERS = 2
LOOK_S = 0.25
"""How often it is looked whether who asked a slow question still waits."""
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
# Where the chart library is missing, that is told before an address is.
PAGE = page_files()
ABOUT = (
    "Every question of the planner: the same Python as `trigrid plan`. A body that makes no sense is refused with 422 "
    "and every problem of it; an illegal layout is answered with its problems and the way back."
)
ASKER = "Any word by which the page is known, whose newer slow question ends its older one."
Asker = Annotated[str, Header(alias="X-Page", max_length=64, description=ASKER)]


class Answering:
    """The workers of a server."""

    def __init__(self) -> None:
        self.quick = Workers(min(4, max(2, os.cpu_count() or 1)), QUICK_S, QUICK_WAIT)
        self.slow = Workers(SLOW_WORKERS, SLOW_S, SLOW_WAIT)
        self.latest = Latest(self.slow)

    async def ask(self, question: Question, body: bytes, asker: str, request: Request) -> Reply | None:
        """The reply; None where a newer question of the same page came. Raises Overrun and Busy."""
        if not question.slow:
            return await self.quick.ask(question.name, body)
        # Who says no name is no page, whose questions would end each other.
        task = asyncio.create_task(self.latest.ask(asker or secrets.token_hex(8), question.name, body))
        try:
            while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                if await request.is_disconnected():
                    task.cancel()
        finally:
            task.cancel()
        with suppress(asyncio.CancelledError):
            return await task
        return None


def make_app(host: str = "127.0.0.1", run: RunView | None = None) -> FastAPI:
    """The application that listens on `host`. run: a run's folder, served read-only besides."""
    answering = Answering()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        first = json.dumps({"state": asdict(FIRST)}).encode()
        warm = asyncio.create_task(answering.quick.warm("plan", first))
        yield
        warm.cancel()
        await answering.quick.end()
        await answering.slow.end()

    app = FastAPI(
        title="trigrid",
        version=trigrid.__version__,
        description=ABOUT,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    for question in QUESTIONS.values():
        _add(app, answering, question, run.name if run else None)
    if run is not None:
        from trigrid.web.run.api import run_router

        app.include_router(run_router(run))

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(_openapi(app))

    @app.get("/{path:path}", include_in_schema=False)
    def page(path: str) -> Response:
        return _file(path or "index.html")

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Refused) -> JSONResponse:
        return JSONResponse(refusal(error), 422)

    @app.exception_handler(RequestValidationError)
    async def wrong(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return refuse(422, ".".join(map(str, first["loc"])), str(first.get("input", "")), str(first["msg"]))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: HTTPException) -> JSONResponse:
        answer = refuse(error.status_code, request.method, request.url.path, str(error.detail))
        answer.headers.update(error.headers or {})
        return answer

    app.add_middleware(Guard, host=host)
    return app


def _add(app: FastAPI, answering: Answering, question: Question, run: str | None) -> None:
    """The endpoint of a question."""

    async def endpoint(request: Request, asker: Asker = "") -> Response:
        kind = request.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            return refuse(415, "Content-Type", kind, "application/json is needed")
        body = await body_of(request.receive)
        if body is None:
            return refuse(413, "body", "(the request)", f"is more than {LARGEST_BODY:,} bytes")
        try:
            reply = await answering.ask(question, body, asker, request)
        except Overrun:
            limit = SLOW_S if question.slow else QUICK_S
            reason = f"takes more than {limit:g} s; the command line has no such limit"
            return refuse(422, "question", question.name, reason)
        except Busy:
            return refuse(503, "question", question.name, "too many questions wait; try again in a moment")
        if reply is None:
            return refuse(409, "question", question.name, "a newer question of the same page came")
        status, text = reply
        if question.name == "catalogue" and status == 200:
            text = json.dumps({**json.loads(text), "run": run}).encode()
        return Response(text, status, media_type="application/json")

    app.post(
        f"/api/{question.name}",
        name=question.name,
        summary=_first_sentence(question.answer.__doc__ or ""),
        description=question.answer.__doc__,
        tags=["questions"],
        response_class=Response,
        openapi_extra=operation(question),
    )(endpoint)


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The description of the whole, made once."""
    if app.openapi_schema is None:
        found = app.openapi()
        # Every refusal has the same form, also those that FastAPI would put its own way.
        found["components"]["schemas"] = schemas(list(QUESTIONS.values()))
    assert app.openapi_schema is not None
    return app.openapi_schema


def _file(path: str) -> Response:
    """A file of the page, by its exact name."""
    if path not in PAGE:
        raise HTTPException(404, "there is no such file")
    kind = TYPES.get(os.path.splitext(path)[1], "application/octet-stream")
    return Response(PAGE[path].read_bytes(), media_type=kind)
