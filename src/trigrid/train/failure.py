"""What a rank leaves behind when it fails, and who failed first."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from trigrid.errors import RunFailed, TrigridError
from trigrid.launch.place import RUN_DIR_VARIABLE, host_of
from trigrid.report.failures import ERRORS, FIRST, STALLS, Failure, first_record


def record(run_dir: Path, rank: int, error: BaseException) -> None:
    """Leave the failure of `rank` in its run directory, whole or not at all."""
    refused = isinstance(error, TrigridError) and not isinstance(error, RunFailed)
    message = str(error) if isinstance(error, TrigridError) else f"{type(error).__name__}: {error}"
    # What another thread has seen has no trace of its own.
    trace = "".join(traceback.format_exception(error)) if error.__traceback__ else ""
    failure = Failure(rank, time.time(), message, refused, trace, host_of(os.environ))
    left = run_dir / ERRORS / f"rank-{rank}.json"
    replace(left, json.dumps(asdict(failure), indent=1))
    # Of thousands of ranks that fail at once none should have to read what all others left. Not every disk knows links.
    with suppress(OSError):
        os.link(left, left.with_name(FIRST))


def replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def give_up(rank: int, message: str, run_dir: Path | None) -> NoReturn:
    """End this process from any of its threads, and leave word where its launcher finds it, or on the console."""
    given = os.environ.get(RUN_DIR_VARIABLE)
    folder = run_dir or (Path(given) if given else None)
    # A disk that takes nothing must not keep this process alive.
    with suppress(OSError):
        if folder is not None:
            record(folder, rank, RunFailed(message))
    if given is None:
        # The console, also where this rank has a log of its own.
        with suppress(OSError):
            print(f"trigrid: rank {rank} on {host_of(os.environ)}: {message}", file=sys.__stderr__, flush=True)
    os._exit(1)


def forget(run_dir: Path) -> None:
    """Remove what an earlier attempt has left, which would be taken for this one's."""
    for name in (ERRORS, STALLS):
        shutil.rmtree(run_dir / name, ignore_errors=True)


def first_failure(run_dir: Path, exit_codes: Mapping[int, int]) -> TrigridError:
    """What to tell of an attempt whose ranks ended with those codes, before anybody ended the others: the rank that a
    signal ended, else the one that failed first.

    Ranks that were waiting for the first one fail too, moments later, with errors of their connections; a rank ended by
    a signal leaves no record, and its neighbours' records may be older than the moment its end was noticed.
    """
    rank, number = culprit(run_dir, exit_codes)
    if number is not None:
        return RunFailed(f"rank {rank} was ended by {signal.Signals(number).name}; its log is in {run_dir / 'logs'}")
    first = first_record(run_dir)
    if first is None:
        codes = ", ".join(f"rank {rank}: exit code {code}" for rank, code in sorted(exit_codes.items()))
        return RunFailed(f"ranks ended without a word ({codes}); their logs are in {run_dir / 'logs'}")
    if first.refused:
        return TrigridError(first.message)
    where = f" on {first.host}" if first.host not in ("", host_of(os.environ)) else ""
    return RunFailed(f"rank {first.rank}{where} failed: {first.message}\n{first.trace}".rstrip())


def culprit(run_dir: Path, exit_codes: Mapping[int, int]) -> tuple[int | None, int | None]:
    """The rank that failed first, and the number of the signal that ended it, where one did."""
    first = first_record(run_dir)
    # NCCL aborts healthy ranks whose peer has gone; a peer that left word comes before them.
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and not (first and -code == signal.SIGABRT)}
    if killed:
        return min(killed.items())
    return (first.rank, None) if first else (min(exit_codes, default=None), None)
