"""Processes that answer questions, so that none holds up the server, and each can be ended."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from typing import NamedTuple

LARGEST_REPLY = 2**26
WALL = 20
"""Times its seconds of the processor that a question may take by the clock, on a machine with other work."""


START_S = 60.0


class Overrun(Exception):
    """A question took more time than it has."""


class Busy(Exception):
    """More questions wait than should."""


class Reply(NamedTuple):
    """An HTTP status and JSON text."""

    status: int
    text: bytes


class Worker:
    """One process, started with its first question."""

    def __init__(self) -> None:
        self._process: Process | None = None

    async def ask(self, name: str, body: bytes, seconds: float) -> Reply:
        """The reply to a question. Raises Overrun; then, and where it is cancelled, the process is ended."""
        try:
            async with asyncio.timeout(WALL * seconds):
                return await self._reply(name, body, seconds)
        except (TimeoutError, asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError):
            await self.end()
            raise Overrun from None
        except BaseException:
            await self.end()
            raise

    async def _reply(self, name: str, body: bytes, seconds: float) -> Reply:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "trigrid.web.worker", stdin=PIPE, stdout=PIPE, limit=LARGEST_REPLY
            )
        process = self._process
        assert process.stdin
        assert process.stdout
        process.stdin.write(f"{name} {seconds} {len(body)}\n".encode() + body)
        await process.stdin.drain()
        head = await process.stdout.readline()
        if not head:
            raise Overrun
        status, size = map(int, head.split())
        return Reply(status, await process.stdout.readexactly(size))

    async def end(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


class Workers:
    """`count` workers that share questions, each of which has `seconds` of the processor; at most `waiting` wait."""

    def __init__(self, count: int, seconds: float, waiting: int):
        self.seconds, self._most = seconds, count + waiting
        self._all = [Worker() for _ in range(count)]
        self._idle: asyncio.LifoQueue[Worker] = asyncio.LifoQueue()
        self._asked = 0
        for worker in reversed(self._all):
            self._idle.put_nowait(worker)

    async def ask(self, name: str, body: bytes) -> Reply:
        """The reply to a question. Raises Overrun and Busy."""
        if self._asked >= self._most:
            raise Busy
        self._asked += 1
        try:
            return await self._free(name, body, self.seconds)
        finally:
            self._asked -= 1

    async def _free(self, name: str, body: bytes, seconds: float) -> Reply:
        """The reply of a worker that is free: of the one that answered last, which has most in its caches."""
        worker = await self._idle.get()
        try:
            return await worker.ask(name, body, seconds)
        finally:
            self._idle.put_nowait(worker)

    async def warm(self, name: str, body: bytes) -> None:
        """Start all, each with a question."""
        await asyncio.gather(*(self._free(name, body, START_S) for _ in self._all))

    async def end(self) -> None:
        """End all processes."""
        for worker in self._all:
            await worker.end()


class Latest:
    """Slow questions: a newer one of the same asker ends the older."""

    def __init__(self, workers: Workers):
        self._workers = workers
        self._running: dict[tuple[str, str], asyncio.Task[Reply]] = {}

    async def ask(self, asker: str, name: str, body: bytes) -> Reply | None:
        """The reply; None where a newer question came."""
        before = self._running.get((asker, name))
        if before is not None:
            before.cancel()
        task = self._running[asker, name] = asyncio.create_task(self._workers.ask(name, body))
        try:
            return await task
        except asyncio.CancelledError:
            if self._running.get((asker, name)) is task:
                # It is not this question that was ended, but who waits for it.
                task.cancel()
                raise
            return None
        finally:
            if self._running.get((asker, name)) is task:
                del self._running[asker, name]
