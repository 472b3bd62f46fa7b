"""Memory of one rank from the storages that are alive, action by action of its schedule.

Every storage that an operation makes is seen, and so is its death, by a weak reference; what is allocated is known at
each birth. When an action is over, what was alive at its fullest moment is sorted into categories by what became of it:
what outlives the action that made it is kept for a later one, what does not was work.

Fake tensors have storages without data whose sizes are right. What a kernel allocates inside itself is not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trigrid.ledger import STATE, Ledger
from trigrid.schedule import Action, Kind

ACTIVATIONS, QUEUE, LOGITS, MESSAGES, INPUTS = "activations", "weight queue", "logits", "messages", "inputs"
GATHERED, WHOLE, REDUCED = "gathered weights", "whole gradients", "reduced gradients"
COLLECTIVES, WORKING = "collectives", "working"
TRANSIENT = (GATHERED, WHOLE, REDUCED, COLLECTIVES, WORKING)
CATEGORIES = (*STATE, ACTIVATIONS, QUEUE, LOGITS, MESSAGES, INPUTS, *TRANSIENT)
"""logits: what the head keeps and works with; messages: between stages; inputs: tokens, labels, tables; collectives:
what they give, where nobody keeps it."""
HEAD = "head"


@dataclass(slots=True, eq=False)
class _Storage:
    """born, died: at which count of births and deaths, died 0 while it lives; action: that made it; unit: whose work
    made it, or takes it; label: what is known of it otherwise; taken: whether a unit started from it; made_by: an
    operation."""

    nbytes: int
    born: int
    died: int
    action: Action | str
    unit: str
    label: str
    made_by: object
    taken: bool = False


class Holding(NamedTuple):
    """Storages alike that were alive at the peak."""

    category: str
    unit: str
    made_by: str
    number: int
    bytes: int


@dataclass(frozen=True)
class Sample:
    """One action. peak: by category when most was alive, in the work of `unit` if in any; left: when it was over."""

    action: Action | str
    unit: str
    peak: Ledger
    left: Ledger


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees storages from the moment when it is entered. samples: of each action that is over; holdings: what was alive
    at the fullest moment of all of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.samples: list[Sample] = []
        self.holdings: tuple[Holding, ...] = ()
        self._alive: dict[int, _Storage] = {}
        self._references: dict[int, object] = {}
        self._dead: list[_Storage] = []
        self._count = self._bytes = 0
        self._action: Action | str = "begin"
        self._unit = self._label = ""
        self._fullest, self._fullest_at, self._fullest_unit = 0, 0, ""
        self._most = 0
        # The thread of a collective may be the last to let go of a storage.
        self._lock = RLock()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(tensor, Tensor):
                with self._lock:
                    self._see(tensor, func)
        return found

    def _see(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        size = storage.nbytes()
        self._count += 1
        self._bytes += size
        born = _Storage(size, self._count, 0, self._action, self._unit, self._label, func)
        self._alive[key] = born
        # A reference tells of a death only while it lives itself.
        self._references[key] = ref(storage, self._burial(key))
        if self._bytes > self._fullest:
            self._fullest, self._fullest_at, self._fullest_unit = self._bytes, self._count, self._unit

    def _burial(self, key: int) -> Callable[[object], None]:
        def bury(_: object) -> None:
            with self._lock:
                dead = self._alive.pop(key)
                del self._references[key]
                self._count += 1
                dead.died = self._count
                self._bytes -= dead.nbytes
                self._dead.append(dead)

        return bury

    # What is known of storages

    def label(self, tensor: Tensor | None, label: str) -> None:
        """What `tensor` is. What is state stays state."""
        found = self._alive.get(tensor.untyped_storage()._cdata) if tensor is not None else None
        if found is not None and found.label not in STATE:
            found.label = label

    def taken(self, tensor: Tensor, unit: str) -> None:
        """`unit` starts from `tensor`."""
        found = self._alive.get(tensor.untyped_storage()._cdata)
        if found is not None:
            found.unit, found.taken = unit, True

    @contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """What is made meanwhile is called so."""
        before, self._label = self._label, label
        yield
        self._label = before

    @contextmanager
    def within(self, unit: str) -> Iterator[None]:
        """`unit` works meanwhile."""
        before, self._unit = self._unit, unit
        yield
        self._unit = before

    # Actions

    def restart(self) -> None:
        """Forget all samples; what is alive and no state is an input from now on."""
        self.samples, self.holdings, self._most = [], (), 0
        for storage in self._alive.values():
            if storage.label not in STATE:
                storage.label = INPUTS
        self._next("begin")

    def act(self, action: Action | str) -> None:
        """The action before is over, this one begins."""
        with self._lock:
            self._finish()
            self._next(action)

    def finish(self) -> None:
        """The last action is over."""
        self.act("end")

    def _next(self, action: Action | str) -> None:
        self._dead.clear()
        self._action = action
        self._fullest, self._fullest_at, self._fullest_unit = self._bytes, self._count, self._unit

    def _finish(self) -> None:
        at, alive = self._fullest_at, list(self._alive.values())
        for storage in alive:
            if storage.label == MESSAGES and storage.taken and _runs(self._action, Kind.FORWARD):
                # It has become what the unit keeps.
                storage.label, storage.action = "", self._action
        then = [s for s in (*alive, *self._dead) if s.born <= at and (not s.died or s.died > at)]
        sizes: Counter[str] = Counter()
        for storage in then:
            sizes[self._category(storage)] += storage.nbytes
        left: Counter[str] = Counter()
        for storage in alive:
            left[self._category(storage)] += storage.nbytes
        assert sum(sizes.values()) == self._fullest, "bytes at the fullest moment are counted twice or not at all"
        self.samples.append(Sample(self._action, self._fullest_unit, Ledger(dict(sizes)), Ledger(dict(left))))
        if self._fullest > self._most:
            self._most = self._fullest
            self.holdings = self._held(then)

    def _category(self, storage: _Storage) -> str:
        """What a storage is, when the action is over in which it is looked at."""
        kept, action = not storage.died, storage.action
        if storage.label and storage.label != COLLECTIVES:
            return storage.label
        if kept or action != self._action:
            if _runs(action, Kind.FORWARD):
                return _kept_by(storage.unit)
            if _runs(action, Kind.INPUT):
                return QUEUE
            if isinstance(action, Action):
                return MESSAGES
            return INPUTS if action == "begin" else COLLECTIVES
        if storage.label:
            return storage.label
        return LOGITS if storage.unit == HEAD else WORKING

    def _held(self, storages: Sequence[_Storage]) -> tuple[Holding, ...]:
        counts: Counter[tuple[str, str, str]] = Counter()
        sizes: Counter[tuple[str, str, str]] = Counter()
        for storage in storages:
            key = (self._category(storage), storage.unit, str(storage.made_by))
            counts[key] += 1
            sizes[key] += storage.nbytes
        return tuple(Holding(*key, counts[key], size) for key, size in sizes.most_common())


def _runs(action: Action | str, kind: Kind) -> bool:
    return isinstance(action, Action) and action.kind is kind


def _kept_by(unit: str) -> str:
    return LOGITS if unit == HEAD else ACTIVATIONS
