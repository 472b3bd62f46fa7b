"""Watches an engine's buckets: the most that is ever alive of weights and gradients, and that what is given up really
dies."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from trigrid.engine.runtime import Engine
from trigrid.engine.zero import Bucket, same_storage
from trigrid.ledger import Ledger

# A collective's thread lets go of the array it has filled a moment after the collective is done.
PATIENCE_S = 1.0


class Census:
    """Attached to an engine for the rest of its life.

    peak: largest bytes of each category of state at any moment when a bucket was open. survivors: units whose gathered
    weights were still alive after they had been given up (something in the unit keeps a copy or a view).
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self.peak: dict[str, int] = {}
        self.survivors: set[str] = set()
        for bucket in engine.buckets.values():
            self._watch(bucket)

    def _watch(self, bucket: Bucket) -> None:
        release = bucket.release

        def checked_release() -> None:
            held = bucket.weights
            watched = _weak(held) if held is not None and not same_storage(held, bucket.master) else None
            del held
            release()
            if watched is not None and bucket.weights is None and not _expires(watched):
                self.survivors.add(bucket.layout.name)

        bucket.release = checked_release  # type: ignore[method-assign]
        bucket.open_start = self._noting(bucket.open_start)  # type: ignore[method-assign]
        bucket.open = self._noting(bucket.open)  # type: ignore[method-assign]
        bucket.open_gradients = self._noting(bucket.open_gradients)  # type: ignore[method-assign]

    def _noting(self, method: Callable[[], None]) -> Callable[[], None]:
        def noted() -> None:
            method()
            self.note(self._engine.live_bytes())

        return noted

    def note(self, ledger: Ledger) -> None:
        for category, n in ledger.bytes.items():
            self.peak[category] = max(self.peak.get(category, 0), n)


def _weak(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _expires(storage: StorageWeakRef) -> bool:
    """Whether `storage` dies within PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not storage.expired():  # type: ignore[no-untyped-call]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True
