"""The `trigrid` command, also as `python -m trigrid`."""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["train"]:
        # A scheduler may tell a rank to stop while it imports, which takes minutes from a busy file system: what is
        # sent waits until there are handlers, and does not end the process.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2))
    from trigrid.cli import main as run

    run()


if __name__ == "__main__":
    main()
