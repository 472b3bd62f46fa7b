"""A process that answers questions, one at a time, from standard input to standard output.

Asked: a line `NAME SECONDS BYTES`, then so many bytes of JSON; answered: a line `STATUS BYTES`, then as many of JSON. A
question that takes more seconds of the processor than it has ends the process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback

from trigrid.web.questions import reply


def main() -> None:
    """Answer until the input ends."""
    # Ctrl-C is for the server, which ends this process when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, answered = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # What is printed by mistake does not mix with answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # What the imports made stays; answers leave no circles that would have to be looked for often.
    gc.freeze()
    gc.set_threshold(100_000)
    while line := asked.readline():
        name, seconds, size = line.decode().split()
        body = asked.read(int(size)).decode("utf-8", "replace")
        _limit(float(seconds))
        status, text = _reply(name, body)
        _limit(0.0)
        data = text.encode()
        answered.write(b"%d %d\n" % (status, len(data)) + data)
        answered.flush()


def _reply(name: str, body: str) -> tuple[int, str]:
    """Status and text: an error of ours is told where the server was started, and only named to who asked."""
    try:
        sound, text = reply(name, body)
    except Exception:
        traceback.print_exc()
        problem = {"key": name, "value": "", "reason": "an error of trigrid: its terminal tells", "nearest": []}
        return 500, json.dumps({"problems": [problem]})
    return 200 if sound else 422, text


def _limit(seconds: float) -> None:
    """End this process after so many seconds of the processor; 0: never."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
