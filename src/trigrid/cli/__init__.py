"""The command line: one thin function per command, importing what it needs when it runs.

Data goes to standard output, everything said along the way to standard error.
Exit codes: 0 done, 1 the job ran and failed or a law is broken, 2 a mistake in what was asked, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

import cyclopts

# Each module adds its commands to the application.
from trigrid.cli import (  # noqa: F401
    calibrate,
    check,
    checkpoint,
    compare,
    data,
    doctor,
    generate,
    job,
    launch,
    plan,
    report,
    simulate,
    status,
    train,
    web,
)
from trigrid.cli.app import app
from trigrid.errors import Refused, RunFailed, TrigridError
from trigrid.launch.place import RUN_DIR_VARIABLE, find_place, host_of

EXTRAS = {
    **dict.fromkeys(("torch", "numpy", "tokenizers", "safetensors", "xxhash"), "train"),
    **dict.fromkeys(("chartkick", "fastapi", "uvicorn"), "web"),
}


def main() -> None:
    """Entry point of the `trigrid` command."""
    for stream in (sys.stdout, sys.stderr):
        # An arrow, or a path that is no text, must not cost the result of a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        if sys.argv[1:2] == ["train"]:
            from trigrid.train import stopping

            # Before torch is imported. Only ranks are told to stop: what starts them hands signals on.
            if find_place(os.environ) is None:
                stopping.let_through()
            else:
                stopping.install()
        app(exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        print(f"trigrid: {error}", file=sys.stderr)
        sys.exit(2)
    except TrigridError as error:
        _tell(error, f"trigrid: {error}")
        _leave(1 if isinstance(error, RunFailed) else 2)
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(f"trigrid: this command needs {error.name}: pip install 'trigrid[{EXTRAS[error.name]}]'", file=sys.stderr)
        _leave(2)
    except BrokenPipeError:
        # Whoever read our output has had enough of it.
        os._exit(1)
    except KeyboardInterrupt:
        print("trigrid: stopped", file=sys.stderr)
        _leave(130)
    except Exception as error:
        _tell(error, traceback.format_exc())
        _leave(1)


def _tell(error: Exception, text: str) -> None:
    """Say what went wrong; a rank of `trigrid train` leaves it where the process that started it finds and says it."""
    run_dir = os.environ.get(RUN_DIR_VARIABLE)
    if run_dir is None:
        # What is refused, the first rank says for all.
        place = None if isinstance(error, Refused) else find_place(os.environ)
        # RANK is the one of the grid, whatever the launcher's count.
        who = f"rank {os.environ.get('RANK', place.rank)} on {host_of(os.environ)}: " if place else ""
        print(f"{who}{text}", file=sys.stderr)
        return
    from trigrid.train.failure import record

    with suppress(OSError):
        record(Path(run_dir), int(os.environ["RANK"]), error)
        return
    # Its disk takes nothing more: the log of the rank may be elsewhere.
    print(text, file=sys.stderr)


def _leave(code: int) -> None:
    """Exit at once: threads of process groups that wait for ranks which are gone would hold up an ordinary exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
