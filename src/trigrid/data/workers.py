"""Shards tokenised side by side: processes, their progress, and what happens when one of them or their parent dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
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
Answer = tuple[Problem, ...] | Exception


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_parts(task: Task, shards: Sequence[Numbered], workers: int, tick: Callable[[int], None]) -> None:
    """Tokenises shards, in the order of their numbers, each to its part. `tick` is called from this thread, about twice
    a second or more often, with the bytes done.

    One worker, or one shard, runs in this process with as many threads as `workers`. More are processes of one thread
    each, started afresh (a fork of a process with threads may hang): a script that calls this must guard its main part
    by `__name__`. They end when this process does, however it ends.
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
    context = multiprocessing.get_context("spawn")
    done_bytes = context.Value("q", 0)
    processes: dict[Connection, SpawnProcess] = {}
    todo, busy, failed = deque(shards), dict[Connection, int](), dict[int, tuple[Problem, ...]]()
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(task, theirs, done_bytes))
            process.start()
            theirs.close()
            processes[ours] = process
        while todo or any(number < min(failed, default=sys.maxsize) for number in busy.values()):
            for connection in processes.keys() - busy.keys():
                if todo:
                    busy[connection] = todo[0][0]
                    connection.send(todo.popleft())
            tick(done_bytes.value)
            for readable in wait(list(busy), TICK_S):
                assert isinstance(readable, Connection)
                answer: Answer = readable.recv()
                number = busy.pop(readable)
                if isinstance(answer, Exception):
                    raise answer
                if answer:
                    # The error told is that of the first shard, as with one worker: earlier ones go on.
                    failed[number] = answer
                    todo.clear()
        tick(done_bytes.value)
    except (EOFError, ConnectionError):
        reason = "a process that tokenises has died, perhaps for lack of memory; the same call goes on from here"
        raise RunFailed(reason) from None
    finally:
        for connection, process in processes.items():
            process.kill()
            process.join()
            connection.close()
    if failed:
        raise Refused(failed[min(failed)])


def _work(task: Task, connection: Connection, done_bytes: Synchronized[int]) -> None:
    """A worker's life: a shard comes, an answer goes, until it is killed."""
    # Ctrl-C reaches all processes of a terminal; this one is ended by its parent.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_die_with_parent, daemon=True).start()
    # Keeps the library tokenizers from starting threads that would have nothing to do.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def advance(size_bytes: int) -> None:
        with done_bytes.get_lock():
            done_bytes.value += size_bytes

    tokenizer: Tokenizer | None = None
    while True:
        shard: Numbered = connection.recv()
        answer: Answer = ()
        try:
            tokenizer = tokenizer or load_tokenizer(task.tokenizer, threads=1)
            _write(task, shard, tokenizer, 1, advance)
        except Refused as refused:
            answer = refused.problems
        except Exception as error:
            error.add_note(f"in a process that tokenises:\n{traceback.format_exc()}")
            answer = error
        connection.send(answer)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
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
