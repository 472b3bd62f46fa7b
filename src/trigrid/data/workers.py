"""Shards tokenised side by side: processes, their progress, and what happens when one of them or their parent dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from trigrid.data.progress import TICK_S, Stopped, watch
from trigrid.data.shards import Shard
from trigrid.data.tokenise import write_part
from trigrid.data.tokenizer import Tokenizer, load_tokenizer
from trigrid.errors import Problem, Refused, RunFailed


@dataclass(frozen=True, kw_only=True)
class Task:
    """What all shards have in common."""

    parts: Path
    tokenizer: Path
    text_key: str
    validation_fraction: float


Numbered = tuple[int, Shard]
Process = subprocess.Popen[bytes]
Answer = int | tuple[Problem, ...] | Exception
"""Bytes done since the last one, or the end of a shard: what is wrong with its documents, or with the program."""


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_parts(task: Task, shards: Sequence[Numbered], workers: int, tick: Callable[[int], None]) -> None:
    """Tokenises shards, in the order of their numbers, each to its part. `tick` is called from this thread, about twice
    a second or more often, with the bytes done.

    One worker, or one shard, runs in this process with as many threads as `workers`. More are processes of one thread
    each, which end when this process does, however it ends. They are started afresh, as a fork of a process with
    threads may hang; and not by multiprocessing, which would run the caller's script again in each of them.
    Raises Refused as the shards do (where several do, for the first of them), RunFailed where a worker dies.
    """
    if workers == 1 or len(shards) <= 1:
        _write_here(task, shards, workers, tick)
    else:
        _write_aside(task, shards, min(workers, len(shards)), tick)


def _write_here(task: Task, shards: Sequence[Numbered], threads: int, tick: Callable[[int], None]) -> None:
    tokenizer = load_tokenizer(task.tokenizer, threads)
    done_bytes = 0
    stop = Event()

    def advance(size_bytes: int) -> None:
        nonlocal done_bytes
        done_bytes += size_bytes
        if stop.is_set():
            raise Stopped

    def work() -> None:
        for shard in shards:
            _write(task, shard, tokenizer, threads, advance)

    tick(0)
    watch(work, lambda: tick(done_bytes), stop)
    tick(done_bytes)


def _write_aside(task: Task, shards: Sequence[Numbered], workers: int, tick: Callable[[int], None]) -> None:
    processes: dict[Connection, Process] = {}
    todo, busy, failed = deque(shards), dict[Connection, int](), dict[int, tuple[Problem, ...]]()
    done_bytes = 0
    try:
        for _ in range(workers):
            connection, process = _start()
            processes[connection] = process
            _send(task, connection, process)
        while todo or any(number < min(failed, default=sys.maxsize) for number in busy.values()):
            for connection in processes.keys() - busy.keys():
                if todo:
                    busy[connection] = todo[0][0]
                    _send(todo.popleft(), connection, processes[connection])
            tick(done_bytes)
            for readable in wait(list(busy), TICK_S):
                assert isinstance(readable, Connection)
                answer = _receive(readable, processes[readable])
                if isinstance(answer, int):
                    done_bytes += answer
                    continue
                number = busy.pop(readable)
                if isinstance(answer, Exception):
                    raise answer
                if answer:
                    # The error told is that of the first shard, as with one worker: earlier ones go on.
                    failed[number] = answer
                    todo.clear()
        tick(done_bytes)
    finally:
        for connection, process in processes.items():
            process.kill()
            process.wait()
            connection.close()
    if failed:
        raise Refused(failed[min(failed)])


def _start() -> tuple[Connection, Process]:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        # -P: a module of the user's folder must not stand in for one of the library's.
        # No threads for the library tokenizers, which would have nothing to do.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"}
        command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({theirs.fileno()})"]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)


def _send(what: Task | Numbered, connection: Connection, process: Process) -> None:
    try:
        connection.send(what)
    except ConnectionError:
        raise _death(process) from None


def _receive(connection: Connection, process: Process) -> Answer:
    try:
        answer: Answer = connection.recv()
    except (EOFError, ConnectionError):
        raise _death(process) from None
    return answer


def _death(process: Process) -> RunFailed:
    code = process.wait()
    cause = f"ended with status {code}, and said why above"
    if code < 0:
        cause = f"was ended by {signal.Signals(-code).name}, perhaps for lack of memory"
    return RunFailed(f"a process that tokenises {cause}; the same call goes on from here")


def serve(descriptor: int) -> None:
    """A worker's life: the task comes, then shards, each answered when it is done, until it is killed."""
    # Ctrl-C reaches all processes of a terminal; this one is ended by its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    task: Task = connection.recv()
    shards: SimpleQueue[Numbered] = SimpleQueue()
    Thread(target=_listen, args=(connection, shards), daemon=True).start()
    tokenizer: Tokenizer | None = None
    unsaid_bytes, said_s = 0, time.monotonic()

    def advance(size_bytes: int) -> None:
        nonlocal unsaid_bytes, said_s
        unsaid_bytes += size_bytes
        if time.monotonic() - said_s > TICK_S / 2:
            connection.send(unsaid_bytes)
            unsaid_bytes, said_s = 0, time.monotonic()

    while True:
        shard = shards.get()
        answer: Answer = ()
        try:
            tokenizer = tokenizer or load_tokenizer(task.tokenizer, threads=1)
            _write(task, shard, tokenizer, 1, advance)
        except Refused as refused:
            answer = refused.problems
        except Exception as error:
            error.add_note(f"in a process that tokenises:\n{traceback.format_exc()}")
            answer = error
        connection.send(unsaid_bytes)
        unsaid_bytes = 0
        connection.send(answer)


def _listen(connection: Connection, shards: SimpleQueue[Numbered]) -> None:
    """Takes shards as they come, so that the end of the parent is noticed in the middle of one."""
    while True:
        try:
            shards.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)


def _write(task: Task, shard: Numbered, tokenizer: Tokenizer, threads: int, advance: Callable[[int], None]) -> None:
    number, work = shard
    write_part(
        work,
        number,
        task.parts,
        tokenizer=tokenizer,
        text_key=task.text_key,
        validation_fraction=task.validation_fraction,
        threads=threads,
        advance=advance,
    )
