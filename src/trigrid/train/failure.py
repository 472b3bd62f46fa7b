"""What a rank leaves behind when it fails, and who failed first."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trigrid.errors import RunFailed, TrigridError


@dataclass(frozen=True)
class Failure:
    """rank: who; when_s: Unix time; message: for a person; refused: a mistake of the user, found after the start."""

    rank: int
    when_s: float
    message: str
    refused: bool
    trace: str


def record(run_dir: Path, rank: int, error: BaseException) -> None:
    """Leave the failure of `rank` in its run directory, whole or not at all."""
    refused = isinstance(error, TrigridError) and not isinstance(error, RunFailed)
    message = str(error) if isinstance(error, TrigridError) else f"{type(error).__name__}: {error}"
    trace = "".join(traceback.format_exception(error))
    failure = Failure(rank, time.time(), message, refused, trace)
    folder = run_dir / "errors"
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".rank-{rank}"
    aside.write_text(json.dumps(asdict(failure), indent=1))
    os.replace(aside, folder / f"rank-{rank}.json")


def first_failure(run_dir: Path, exit_codes: Mapping[int, int]) -> TrigridError:
    """What to tell: the rank that a signal ended, else the one that raised first.

    Ranks that were waiting for the first one fail too, moments later, with errors of their connections; a rank ended by
    a signal leaves no record, and its neighbours' records may be older than the moment its end was noticed.
    """
    # SIGTERM is what the launcher ends the others with.
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM}
    if killed:
        rank, number = min(killed.items())
        return RunFailed(f"rank {rank} was ended by {signal.Signals(number).name}; its log is in {run_dir / 'logs'}")
    records = [json.loads(path.read_text()) for path in sorted((run_dir / "errors").glob("rank-*.json"))]
    if not records:
        codes = ", ".join(f"rank {rank}: exit code {code}" for rank, code in sorted(exit_codes.items()))
        return RunFailed(f"ranks ended without a word ({codes}); their logs are in {run_dir / 'logs'}")
    first = min((Failure(**item) for item in records), key=lambda failure: failure.when_s)
    if first.refused:
        return TrigridError(first.message)
    return RunFailed(f"rank {first.rank} failed: {first.message}\n{first.trace}".rstrip())
