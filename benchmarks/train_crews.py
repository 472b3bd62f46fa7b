"""Who trains side by side, and the processes of one of them: started once, they wait for turns."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from peers.common import LAYOUTS, WORKLOAD, Cut

DRIVERS = Path(__file__).parent / "peers"
START_S, TURN_S, END_S = 1800.0, 1800.0, 60.0
"""How long ranks may take: a peer compiles its extension at its first start."""
LOSS_LIMIT = 1e-5
LOG_LINES = 4


@dataclass(frozen=True)
class Contestant:
    """driver: a file of `peers`; layouts: those in which it stands beside others; cut: what it runs there, if not the
    same; own: whether it runs in this environment, not in the peers'; needs: a variable of the environment without
    which it cannot."""

    name: str
    driver: str
    layouts: tuple[str, ...]
    cut: str = ""
    own: bool = False
    needs: str = ""

    def cut_of(self, layout: str) -> Cut:
        return LAYOUTS[self.cut or layout]

    def loss_limit(self, layout: str) -> float:
        # picotron's pipeline does not divide the loss by the number of microbatches; AdamW hides that but for its eps.
        return 1e-4 if self.name == "picotron" and LAYOUTS[layout].pp > 1 else LOSS_LIMIT


OURS = "trigrid"
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant("plain", "plain.py", tuple(LAYOUTS), cut="single", own=True),
        Contestant("plain-ddp", "plain.py", ("ddp2",), own=True),
        Contestant(
            "torchtitan", "drive_torchtitan.py", ("single", "ddp2", "zero3", "tp2", "pp2", "pp2dp2", "3d", "3dz")
        ),
        Contestant("megatron", "drive_megatron.py", ("single", "ddp2", "tp2", "pp2", "pp2dp2", "3d")),
        Contestant(
            "deepspeed", "drive_deepspeed.py", ("single", "ddp2", "zero1", "zero2", "zero3", "tp2", "pp2", "pp2dp2")
        ),
        Contestant("accelerate", "drive_accelerate.py", ("single", "ddp2", "zero3", "tp2")),
        Contestant("picotron", "drive_picotron.py", ("single", "ddp2", "tp2", "pp2", "3d"), needs="PICOTRON"),
        Contestant(OURS, "drive_trigrid.py", tuple(LAYOUTS), own=True),
    )
}


class Failed(Exception):
    """A contestant ended before it was told to, or does not answer."""


@dataclass(frozen=True)
class Means:
    """peers: the Python of the peers' environment; matmul: the precision of fp32 products."""

    peers: Path | None
    matmul: str


@dataclass(frozen=True)
class Turn:
    """Some steps of a contestant: CPU seconds of all its ranks, wall seconds of the slowest in each step."""

    steps: int
    cpu_s: float
    wall_s: float

    @property
    def per_cpu_s(self) -> float:
        return self.steps * WORKLOAD.tokens / self.cpu_s

    @property
    def per_s(self) -> float:
        return self.steps * WORKLOAD.tokens / self.wall_s


class Crew:
    """The ranks of one contestant in one layout. To be closed.

    losses: of all steps so far; peak_bytes: the most that each rank was resident; live_bytes: the most that torch's
    allocator gave out at a time in the last step, where that is `watched`, which makes steps slow.
    """

    def __init__(self, contestant: Contestant, layout: str, means: Means, folder: Path, watched: bool = False):
        self.contestant, self._cut = contestant, contestant.cut_of(layout)
        self._folder = folder
        self.losses: list[float] = []
        self.peak_bytes: list[int] = []
        self.live_bytes: list[int] = []
        folder.mkdir(parents=True)
        python = Path(sys.executable) if contestant.own else means.peers
        assert python is not None, contestant.name
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(self._cut.world),
            "LOCAL_WORLD_SIZE": str(self._cut.world),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCH_EXTENSIONS_DIR": str(python.parent.parent / "torch_extensions"),
            "BENCH_MATMUL": means.matmul,
            "BENCH_WATCH": "1" if watched else "",
        }
        command = [str(python), str(DRIVERS / contestant.driver), "--layout", self._cut.name]
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._lines: list[socket.socket] = []
        for rank in range(self._cut.world):
            here, there = socket.socketpair()
            own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "BENCH_FD": str(there.fileno())}
            with there, open(self._log(rank), "wb") as log:
                self._ranks.append(
                    subprocess.Popen(
                        command,
                        env=own,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        pass_fds=[there.fileno()],
                        start_new_session=True,
                    )
                )
            self._lines.append(here)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> list[dict[str, Any]]:
        """What each rank says once model and optimizer are there."""
        return self._answers(START_S)

    def turn(self, steps: int) -> Turn:
        """Run `steps` steps."""
        for line in self._lines:
            line.sendall(f"{steps}\n".encode())
        told = self._answers(TURN_S)
        losses = next((rank["loss"] for rank in told if None not in rank["loss"]), None)
        if losses is None:
            self._fail("no rank knows the loss")
        self.losses += losses
        self.peak_bytes = [rank["peak_bytes"] for rank in told]
        self.live_bytes = [rank["live_bytes"] for rank in told]
        wall_s = sum(map(max, zip(*(rank["wall_s"] for rank in told), strict=True)))
        return Turn(steps, sum(sum(rank["cpu_s"]) for rank in told), wall_s)

    def close(self) -> None:
        """Tell the ranks to end, and end those that do not."""
        for line in self._lines:
            line.close()
        deadline = time.monotonic() + END_S
        for rank in self._ranks:
            try:
                rank.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(rank.pid, signal.SIGKILL)
                rank.wait()

    def _answers(self, limit_s: float) -> list[dict[str, Any]]:
        """One line of each rank, as JSON."""
        found: dict[int, bytes] = dict.fromkeys(range(len(self._lines)), b"")
        deadline = time.monotonic() + limit_s
        waiting = set(found)
        while waiting:
            readable, _, _ = select.select([self._lines[rank] for rank in waiting], [], [], 1.0)
            for rank in [rank for rank in waiting if self._lines[rank] in readable]:
                part = self._lines[rank].recv(1 << 16)
                found[rank] += part
                if not part:
                    self._fail(f"rank {rank} has ended")
                if part.endswith(b"\n"):
                    waiting.discard(rank)
            if time.monotonic() > deadline:
                self._fail(f"rank {min(waiting)} has said nothing for {limit_s:.0f} s")
        return [json.loads(found[rank]) for rank in sorted(found)]

    def _fail(self, what: str) -> NoReturn:
        for rank in self._ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
        numbers = range(len(self._ranks))
        # Of the ranks, the first to fail says why; the others often only that it has gone.
        first = min(numbers, key=lambda rank: self._log(rank).stat().st_mtime)
        lines = self._log(first).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LOG_LINES:]
        raise Failed(f"{self.contestant.name}, {self._cut.name}: {what}; rank {first} wrote last: {' / '.join(lines)}")

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
