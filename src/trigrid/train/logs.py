"""Logs of the ranks that torchrun, srun or Kubernetes has started, which know nothing of the run's folder.

`trigrid train` does the same for the ranks that it starts itself, from before their first line on (local.py).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from trigrid.errors import RunFailed
from trigrid.launch.place import RUN_DIR_VARIABLE
from trigrid.report.events import EventLog
from trigrid.report.failures import failures, first_left
from trigrid.train.failure import forget, record

LOGS = "logs"


@contextmanager
def own_log(run_dir: Path, rank: int) -> Iterator[None]:
    """In the body of the `with`, what any rank but the first says goes to its log in the run's folder, also what
    libraries write; a failure is left in the run's folder, and told on the console by the rank that failed first,
    whereas those that fail after it, for want of it, only say so."""
    if RUN_DIR_VARIABLE in os.environ:
        yield
        return
    try:
        with _redirected(run_dir / LOGS / f"rank-{rank}.log") if rank else nullcontext():
            yield
    except Exception as error:
        with suppress(OSError):
            record(run_dir, rank, error)
            first = first_left(run_dir)
            if first and first.rank != rank:
                what = first.message.splitlines()[0]
                raise RunFailed(f"ended after rank {first.rank} on {first.host} had failed: {what}") from None
        raise


@contextmanager
def _redirected(log: Path) -> Iterator[None]:
    """Standard output and error to the end of `log`; `sys.__stderr__` stays where it was."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError:
        # The console takes it as well.
        yield
        return
    before = {number: os.dup(number) for number in (1, 2)}
    console, usual = os.fdopen(os.dup(2), "w", buffering=1, errors="backslashreplace"), sys.__stderr__
    for number in before:
        os.dup2(file, number)
    os.close(file)
    sys.__stderr__ = console  # type: ignore[misc]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.__stderr__ = usual  # type: ignore[misc]
        for number, kept in before.items():
            os.dup2(kept, number)
            os.close(kept)
        console.close()


def tell_earlier(run_dir: Path) -> None:
    """Note in the run's events why its ranks have ended before they were started again: nobody else saw it."""
    for failure in failures(run_dir)[:1]:
        reason = f"rank {failure.rank} on {failure.host} failed: {failure.message.splitlines()[0]}"
        where = {"rank": failure.rank, "host": failure.host, "time_s": failure.when_s}
        EventLog(run_dir).write("failed", **where, reason=reason, signal=None, detected_s=None)
    forget(run_dir)
