"""Attempts that share one store, as under torchrun: who is there is told from what others have left."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.hosts import ended
from helpers.runs import wait_for

from trigrid.errors import RunFailed
from trigrid.train import attempt
from trigrid.train.attempt import Attempt, gather

WAIT_S = 20.0
LATE = re.compile(r"still waiting for 1 of 3 ranks after \d+ s: 2")


class Counted(dist.HashStore):
    """A store that counts what one rank asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[str]] = {}

    def set(self, key: str, value: str) -> None:
        self.calls.setdefault(threading.current_thread().name, []).append("set")
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self.calls.setdefault(threading.current_thread().name, []).append("get")
        return super().get(key)


def gathered(store: dist.Store, world: int, words: str) -> list[Attempt]:
    """All ranks, each in a thread of its own, with a letter each."""
    with ThreadPoolExecutor(world) as threads:
        started = [threads.submit(gather, store, rank, world, words[rank], WAIT_S, print) for rank in range(world)]
        return [future.result(WAIT_S) for future in started]


def test_the_first_rank_hears_all_and_each_attempt_has_a_part_of_the_store() -> None:
    store = dist.HashStore()
    for number, words in ((1, "abcd"), (2, "efgh")):
        found = gathered(store, 4, words)
        assert {one.number for one in found} == {number}
        assert [one.words for one in found] == [tuple(words), (), (), ()]
        assert not found[0].store.check(["left"])
        found[1].store.set("left", "by an attempt")
        assert found[0].store.get("left") == b"by an attempt"


def test_a_rank_alone_is_an_attempt() -> None:
    assert gather(dist.HashStore(), 0, 1, "a", WAIT_S, print).words == ("a",)


def test_who_is_started_before_the_first_rank_has_ended_waits_for_the_next() -> None:
    """Its node has seen a failure that the first rank's has not seen yet."""
    store = dist.HashStore()
    gathered(store, 2, "ab")
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(gather, store, 1, 2, "d", WAIT_S, print)
        time.sleep(0.1)
        assert not early.done()
        first = gather(store, 0, 2, "c", WAIT_S, print)
    assert (first.number, first.words) == (2, ("c", "d"))
    assert early.result(WAIT_S).number == 2


def test_a_process_that_ended_while_others_were_waited_for_is_called_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has come, answered and ended; another process has its rank when rank 2 comes."""
    monkeypatch.setattr(attempt, "POLL_S", 0.05)
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as threads:
        # Of an attempt before: the first rank finds all names, and nobody at two of them.
        store.set("rank 2", "gone")
        first: Future[Attempt] = threads.submit(gather, store, 0, 3, "a", WAIT_S, print)
        assert threads.submit(gather, store, 1, 3, "ended", WAIT_S, print).result(WAIT_S).number == 1
        again = threads.submit(gather, store, 1, 3, "b", WAIT_S, print)
        late = threads.submit(gather, store, 2, 3, "c", WAIT_S, print)
        assert first.result(WAIT_S).words == ("a", "b", "c")
        assert again.result(WAIT_S).number == late.result(WAIT_S).number == 1


def test_who_does_not_answer_is_named_though_it_has_left_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "TOLD_S", 0.1)
    monkeypatch.setattr(attempt, "POLL_S", 0.05)
    store = dist.HashStore()
    store.set("rank 2", "gone")
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(lambda: attempt.answer_to(gather(store, 1, 3, "b", WAIT_S, print), 1))
        with pytest.raises(RunFailed, match=r"1 of 3 ranks have not come within 0\.3 s .*: 2; they"):
            gather(store, 0, 3, "a", 0.3, print)
        with pytest.raises(SystemExit):
            other.result(WAIT_S)


def test_who_is_late_is_named_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has all of its time: an import of torch from a busy disk takes minutes."""
    monkeypatch.setattr(attempt, "TELL_S", 0.1)
    store, said = dist.HashStore(), list[str]()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(gather, store, 0, 3, "a", WAIT_S, said.append)
        prompt = threads.submit(gather, store, 1, 3, "b", WAIT_S, print)
        wait_for(lambda: any(LATE.fullmatch(line) for line in said), WAIT_S)
        assert gather(store, 2, 3, "c", WAIT_S, print).number == prompt.result(WAIT_S).number == 1
        assert first.result(WAIT_S).words == ("a", "b", "c")


def test_a_rank_writes_two_keys_and_reads_one() -> None:
    store = Counted()
    calls = store.calls
    with ThreadPoolExecutor(1, "first") as one, ThreadPoolExecutor(1, "other") as other:
        there = other.submit(gather, store, 1, 2, "b", WAIT_S, print)
        one.submit(gather, store, 0, 2, "a", WAIT_S, print).result(WAIT_S)
        there.result(WAIT_S)
    # What goes through the part of the attempt is not counted here.
    assert calls["other_0"] == ["set", "get"]


RANK = """
import os, signal, sys, torch
from pathlib import Path
from trigrid.launch.place import find_place
from trigrid.spec.job import Faults
from trigrid.train.attempt import gather
from trigrid.train.processes import join, open_store
place, faults = find_place(os.environ), Faults()
attempt = gather(open_store(place, faults), place.rank, place.world, "", faults.start_s, print)
join(place, torch.device("cpu"), faults, attempt.store)
if (attempt.number, place.rank) == (1, 1):
    os.kill(os.getpid(), signal.SIGKILL)
both = torch.ones(1)
torch.distributed.all_reduce(both)
torch.distributed.destroy_process_group()
Path(sys.argv[1], f"rank {place.rank}").write_text(f"attempt {attempt.number}: {int(both)} ranks")
"""


def test_ranks_of_two_agents_start_again(tmp_path: Path) -> None:
    """torchrun on two nodes with --max-restarts: gloo's addresses of the first attempt are of dead processes."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    nodes = (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=1")
    nodes += ("--master-addr=127.0.0.1", f"--master-port={port}")
    started = [
        subprocess.Popen((*nodes, f"--node-rank={node}", program, tmp_path), stderr=subprocess.PIPE, text=True)
        for node in range(2)
    ]
    told = [err for _, _, err in ended(started, 300)]
    assert [process.returncode for process in started] == [0, 0], "\n".join(told)
    assert [(tmp_path / f"rank {rank}").read_text() for rank in range(2)] == ["attempt 2: 2 ranks"] * 2
