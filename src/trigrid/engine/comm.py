"""Every collective and point-to-point call of the engine, counted by axis and kind.

The only file that knows a backend. A group of one rank moves nothing and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from trigrid.engine.activity import Activity, Waiting
from trigrid.engine.recorder import WAIT, Recorder
from trigrid.grid import Grid
from trigrid.plan.backend import EXCHANGE_BYTES
from trigrid.plan.traffic import TransferKind

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """The ranks of one axis around this process; `index` is this process's place among them."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)


class Transfer(NamedTuple):
    """What is counted: the axis a message crossed and the kind of call."""

    axis: str
    kind: TransferKind


@dataclass
class Traffic:
    """Calls and payload bytes by transfer. The payload is the whole array: what an all-gather yields, what a
    reduce-scatter takes. An all-reduce moves its payload twice, the others once (ring algorithms, factor (n − 1)/n
    left out)."""

    calls: dict[Transfer, int] = field(default_factory=dict)
    payload_bytes: dict[Transfer, int] = field(default_factory=dict)

    def add(self, transfer: Transfer, tensor: Tensor) -> None:
        self.calls[transfer] = self.calls.get(transfer, 0) + 1
        self.payload_bytes[transfer] = self.payload_bytes.get(transfer, 0) + tensor.numel() * tensor.element_size()

    def volume_bytes(self, axis: str) -> int:
        """Bytes moved along `axis`, all-reduces counted twice."""
        return sum(
            n * (2 if transfer.kind == "all_reduce" else 1)
            for transfer, n in self.payload_bytes.items()
            if transfer.axis == axis
        )

    def clear(self) -> None:
        self.calls.clear()
        self.payload_bytes.clear()


class Pending:
    """A collective or a receive under way, whose result `wait` returns.

    arriving: what it writes to, not to be read before that; until: waits for `works`, if there are any; sent: what it
    reads, which lives until it is over, as backends keep it; finish: from `arriving` to the result.
    """

    def __init__(
        self,
        works: Sequence[dist.Work],
        arriving: Tensor,
        until: Callable[[Sequence[dist.Work]], None] | None = None,
        sent: Tensor | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
    ):
        self._works = works
        self.arriving = arriving
        self._until = until
        self._sent = sent
        self._finish = finish or _as_it_came

    def wait(self) -> Tensor:
        if self._works and self._until is not None:
            self._until(self._works)
        self.arriving = self._finish(self.arriving)
        # What was read is given up, whoever may still hold this.
        self._works, self._sent, self._finish = (), None, _as_it_came
        return self.arriving


def _as_it_came(arrived: Tensor) -> Tensor:
    return arrived


class Collectives(Protocol):
    """What tensor parallelism asks of others, as `Comm` says."""

    def group(self, axis: str) -> Group: ...

    def all_reduce(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Tensor: ...

    def summed(self, tensor: Tensor, axis: str) -> Tensor: ...

    def all_gather(self, shard: Tensor, axis: str) -> Tensor: ...

    def reduce_scatter(self, full: Tensor, axis: str) -> Tensor: ...


class Comm:
    """The communication of one rank of a grid, over the default process group, which must be the grid's world.

    A world of one rank needs no process group at all. `device` is where the tensors live that will be sent.

    recorder: who is told of every transfer and every wait, if anyone. waited_s: seconds in which this process has
    waited for others or for the network; on CUDA waiting is the device's, and this is next to nothing. activity: what
    this rank does now.
    timeout: after which a call that waits for other ranks fails, torch's own if None; above the limits of a watchdog,
    which has more to say.
    """

    AXES = ("tp", "kv", "pp", "zero", "replicate", "tied")

    def __init__(self, grid: Grid, rank: int, device: torch.device = CPU, timeout: timedelta | None = None):
        self.grid = grid
        self.rank = rank
        self.coord = grid.coord(rank)
        self.traffic = Traffic()
        self.recorder: Recorder | None = None
        self.waited_s = 0.0
        self.activity = Activity()
        self._timeout = timeout
        joined = grid.world > 1
        self._gloo = joined and self.backend() == "gloo"
        everyone = tuple(range(grid.world))
        self._groups = {axis: self._make_group(axis) for axis in self.AXES}
        # Without context parallelism and replicas the ranks that see other tokens are those that share shards.
        same = self._groups["zero"].ranks == grid.group("batch", rank)
        self._groups["batch"] = replace(self._groups["zero"], axis="batch") if same else self._make_group("batch")
        self._groups["world"] = Group("world", everyone, rank, dist.group.WORLD if joined else None)
        self._channels = self._open_channels()
        if joined and not self._gloo:
            self._connect(device)

    def backend(self) -> str:
        """Whose calls are made."""
        return str(dist.get_backend())

    def _make_group(self, axis: str) -> Group:
        ranks = self.grid.group(axis, self.rank)
        handle = self._new_group(ranks, axis) if self.grid.largest(axis) > 1 else None
        return Group(axis, ranks, ranks.index(self.rank), handle)

    def _new_group(self, ranks: tuple[int, ...], purpose: str) -> dist.ProcessGroup:
        """A group that only its members make. torch names it by its ranks and by how many groups this process has made
        before, so every rank must make equally many in the same order, if need be one of itself alone."""
        made = dist.new_group(
            list(ranks), self._timeout, use_local_synchronization=True, group_desc=purpose, sort_ranks=False
        )
        assert isinstance(made, dist.ProcessGroup), ranks
        return made

    def group(self, axis: str) -> Group:
        return self._groups[axis]

    def all_reduce(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Tensor:
        """Reduce `tensor` (contiguous) in place over `axis` and return it."""
        return self.all_reduce_start(tensor, axis, op).wait()

    def all_reduce_start(self, tensor: Tensor, axis: str, op: Literal["sum", "max"] = "sum") -> Pending:
        group = self._groups[axis]
        if group.size == 1 or tensor.numel() == 0:
            return Pending((), tensor)
        if self._reduces_by_exchange(tensor, group):
            combine = tensor.add_ if op == "sum" else partial(torch.maximum, tensor, out=tensor)
            return self._exchanged(tensor, group, combine)
        self.traffic.add(Transfer(axis, "all_reduce"), tensor)
        until = self._begin(group, "all_reduce")
        reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        return Pending([dist.all_reduce(tensor, reduce_op, group=group.handle, async_op=True)], tensor, until)

    def summed(self, tensor: Tensor, axis: str) -> Tensor:
        """The sum of `tensor` over `axis`, in an array of its own."""
        return self.summed_start(tensor, axis).wait()

    def summed_start(self, tensor: Tensor, axis: str) -> Pending:
        group = self._groups[axis]
        tensor = tensor.contiguous()
        if not self._reduces_by_exchange(tensor, group):
            return self.all_reduce_start(tensor.clone(), axis)
        return self._exchanged(tensor, group, lambda arrived: arrived.add_(tensor))

    def _reduces_by_exchange(self, tensor: Tensor, group: Group) -> bool:
        return self._exchanges(group) and 0 < tensor.nbytes <= EXCHANGE_BYTES

    def _exchanged(self, tensor: Tensor, group: Group, combine: Callable[[Tensor], Tensor]) -> Pending:
        """An all-reduce between two: `combine` takes the other's tensor, whole."""
        self.traffic.add(Transfer(group.axis, "all_reduce"), tensor)
        until = self._begin(group, "all_reduce")
        theirs = torch.empty_like(tensor)
        return Pending(_exchange(tensor, theirs, group), theirs, until, tensor, combine)

    def _begin(self, group: Group, kind: TransferKind) -> Callable[[Sequence[dist.Work]], None]:
        """A transfer begins; what is returned waits for its end."""
        recorded = self.recorder.begin(group.axis, kind) if self.recorder else None

        def until(works: Sequence[dist.Work]) -> None:
            with self.waiting(Waiting(kind, group.axis, group.ranks)):
                for work in works:
                    work.wait()
            if recorded:
                recorded()

        return until

    @contextmanager
    def waiting(self, waiting: Waiting) -> Iterator[None]:
        """This rank waits for others while the body of the `with` runs."""
        self.activity.wait(waiting)
        recorded = self.recorder.begin(WAIT, waiting.axis or "pp") if self.recorder else None
        begun_s = time.perf_counter()
        yield
        if recorded:
            recorded()
        self.waited_s += time.perf_counter() - begun_s
        self.activity.wait(None)

    def all_gather(self, shard: Tensor, axis: str) -> Tensor:
        """Concatenate the `shard` of each rank of `axis` along dimension 0."""
        return self.all_gather_start(shard, axis).wait()

    def all_gather_start(self, shard: Tensor, axis: str) -> Pending:
        group = self._groups[axis]
        if group.size == 1:
            return Pending((), shard)
        full = shard.new_empty((shard.shape[0] * group.size, *shard.shape[1:]))
        shard = shard.contiguous()
        self.traffic.add(Transfer(axis, "all_gather"), full)
        until = self._begin(group, "all_gather")
        if self._exchanges(group):
            mine, theirs = _mine_and_theirs(full, group)
            mine.copy_(shard)
            return Pending(_exchange(shard, theirs, group), full, until, shard)
        work = dist.all_gather_single(full, shard, group=group.handle, async_op=True)
        return Pending([work], full, until, shard)

    def reduce_scatter(self, full: Tensor, axis: str) -> Tensor:
        """Sum `full` over `axis` and return this rank's part of dimension 0."""
        return self.reduce_scatter_start(full, axis).wait()

    def reduce_scatter_start(self, full: Tensor, axis: str) -> Pending:
        group = self._groups[axis]
        if group.size == 1:
            return Pending((), full)
        full = full.contiguous()
        self.traffic.add(Transfer(axis, "reduce_scatter"), full)
        until = self._begin(group, "reduce_scatter")
        shape = (full.shape[0] // group.size, *full.shape[1:])
        if self._exchanges(group):
            mine, theirs = _mine_and_theirs(full, group)
            part = full.new_empty(shape)
            return Pending(_exchange(theirs, part, group), part, until, full, lambda arrived: arrived.add_(mine))
        if self._gloo:
            # Gloo's own reduce-scatter is several times slower than an exchange and a local sum.
            parts = full.new_empty((group.size, *shape))
            work = dist.all_to_all_single(parts, full, group=group.handle, async_op=True)
            return Pending([work], parts, until, full, lambda arrived: arrived.sum(0))
        shard = full.new_empty(shape)
        work = dist.reduce_scatter_single(shard, full, group=group.handle, async_op=True)
        return Pending([work], shard, until, full)

    def _exchanges(self, group: Group) -> bool:
        """Whether two ranks send each other what gloo's own collectives move with more work."""
        return self._gloo and group.size == 2

    def _open_channels(self) -> dict[tuple[int, int], Channel]:
        """A channel in each direction between pipeline ranks whose stages follow each other."""
        group, placement = self._groups["pp"], self.grid.layout.placement
        channels = {}
        neighbours = {(a, b) for a, b in pairwise(placement) if a != b}
        for src, dst in sorted(neighbours | {(b, a) for a, b in neighbours}):
            handle = group.handle
            mine = group.index in (src, dst)
            if not self._gloo:
                # On NCCL a communicator serialises its calls: each direction of each pair needs its own.
                ends = tuple(sorted((group.ranks[src], group.ranks[dst])))
                handle = self._new_group(ends if mine else (self.rank,), f"channel {src}>{dst}")
            if mine:
                channels[src, dst] = Channel(self, group.ranks[src], group.ranks[dst], handle)
        return channels

    def _connect(self, device: torch.device) -> None:
        """Use every group and channel once, in the same order on every rank.

        NCCL connects at first use and blocks the host meanwhile: two ranks that first post a receive from each other
        would wait for ever, and a communicator cannot connect while a kernel of another one spins.
        """
        token = torch.zeros(1, device=device)
        for group in self._groups.values():
            if group.handle is not None:
                dist.all_reduce(token, group=group.handle)
        for channel in self._channels.values():
            channel.connect(token)

    def host_group(self) -> dist.ProcessGroup | None:
        """A new group of all ranks for tensors and objects in host memory, in which another thread may speak; None in
        a world of one. Every rank must call it at the same point."""
        if self.grid.world == 1:
            return None
        made = dist.new_group(timeout=self._timeout, backend="gloo", group_desc="host")
        assert isinstance(made, dist.ProcessGroup)
        return made

    def channel(self, src: int, dst: int) -> Channel:
        """The channel from pipeline rank `src` to `dst`, one of which is this rank's."""
        return self._channels[src, dst]

    def read(self, tensor: Tensor) -> list[float]:
        """The values of a small tensor on the host."""
        if tensor.device.type == "cpu":
            return [float(x) for x in tensor.tolist()]
        # The host, which has run ahead, waits here for the device, and it for the other ranks.
        self.activity.wait(Waiting("device", "world", self._groups["world"].ranks))
        values = [float(x) for x in tensor.tolist()]
        self.activity.wait(None)
        return values

    def gather_objects(self, item: object) -> list[object]:
        """`item` of every rank of the world; for reports, not for data."""
        group = self._groups["world"]
        if group.size == 1:
            return [item]
        items: list[object] = [None] * group.size
        with self.waiting(Waiting("gather_objects", "world", group.ranks)):
            dist.all_gather_object(items, item, group=group.handle)
        return items


def _mine_and_theirs(whole: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """This rank's half of `whole`, cut along dimension 0, and the other rank's."""
    halves = whole.chunk(2)
    return halves[group.index], halves[1 - group.index]


def _exchange(sent: Tensor, into: Tensor, group: Group) -> list[dist.Work]:
    """Send the other of two ranks `sent` and receive `into`, both contiguous."""
    other = group.ranks[1 - group.index]
    works = [dist.irecv(into, other, group=group.handle), dist.isend(sent, other, group=group.handle)]
    return [work for work in works if work is not None]


class Channel:
    """Messages from one rank to another, in order, with at most one unfinished send.

    A finished send is known by waiting for it, never by polling: polling would keep one activation alive per send.
    """

    def __init__(self, comm: Comm, src: int, dst: int, handle: dist.ProcessGroup | None):
        self._comm = comm
        self._src = src
        self._dst = dst
        self._handle = handle
        self._sending: tuple[dist.Work, Tensor, Callable[[], None] | None] | None = None
        self._sends, self._receiving = Waiting("send to", "", (dst,)), Waiting("receive from", "", (src,))

    def send(self, tensor: Tensor, done: Callable[[], None] | None = None) -> None:
        """Send `tensor`; `done` is called once it is known to have been received."""
        self.drain()
        tensor = tensor.contiguous()
        self._comm.traffic.add(Transfer("pp", "send"), tensor)
        work = dist.isend(tensor, self._dst, group=self._handle)
        assert work is not None
        self._sending = (work, tensor, done)

    def drain(self) -> None:
        """Wait for the unfinished send, if there is one."""
        if self._sending is not None:
            work, _, done = self._sending
            with self._comm.waiting(self._sends):
                work.wait()
            if done is not None:
                done()
            self._sending = None

    def connect(self, token: Tensor) -> None:
        """Pass `token` once, and wait until it has passed."""
        here = self._comm.rank == self._src
        work = (
            dist.isend(token, self._dst, group=self._handle)
            if here
            else dist.irecv(token, self._src, group=self._handle)
        )
        assert work is not None
        work.wait()

    def receive_start(self, tensor: Tensor) -> Pending:
        """Post a receive into `tensor`."""
        self._comm.traffic.add(Transfer("pp", "receive"), tensor)
        work = dist.irecv(tensor, self._src, group=self._handle)
        assert work is not None
        return Pending([work], tensor, self._receive)

    def _receive(self, works: Sequence[dist.Work]) -> None:
        with self._comm.waiting(self._receiving):
            for work in works:
                work.wait()
