"""Storages that a program makes, keeps for its backward and lets go of: what is alive, in bytes, moment by moment.

A program is written down as the engine runs it. Each operation says what its backward needs; backward goes through the
operations in reverse, as autograd does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Storage:
    """size: bytes; owners: variables of the program, operations that keep it, and those to whom it is a gradient;
    of: the storage that it is a part of, which lives as long."""

    __slots__ = ("gradient", "of", "owners", "size")

    def __init__(self, size: float, of: Storage | None = None):
        self.size, self.of, self.owners = size, of, 1
        self.gradient: Storage | None = None


Gradients = Sequence[tuple[Storage | None, Storage]]
"""What a backward gives, in order: a storage and its gradient; None stands for a weight, whose gradient goes to its
bucket when all others have been given."""
Back = Callable[[], Gradients]


class Tape:
    """now, most: bytes alive, and at the fullest moment so far. queue: gradients of weights, and what products put them
    off for, have an owner who waits."""

    def __init__(self, queue: bool = False):
        self.now = self.most = 0.0
        self.queue = queue
        self._operations: list[tuple[Back, tuple[Storage, ...]]] | None = []

    def make(self, size: float) -> Storage:
        self.now += size
        if self.now > self.most:
            self.most = self.now
        return Storage(size)

    def work(self, size: float) -> None:
        """So many bytes come and go."""
        self.most = max(self.most, self.now + size)

    def drop(self, *storages: Storage) -> None:
        """An owner of each lets go of it."""
        for storage in storages:
            storage.owners -= 1
            if not storage.owners and storage.of:
                self.drop(storage.of)
            elif not storage.owners:
                self.now -= storage.size

    def share(self, storage: Storage) -> Storage:
        """The same for one owner more."""
        storage.owners += 1
        return storage

    def part(self, storage: Storage, size: float) -> Storage:
        """So many bytes of `storage`, as a variable of their own."""
        return Storage(size, self.share(storage))

    def record(self, back: Back, *kept: Storage) -> None:
        """An operation whose backward is `back` and needs `kept`."""
        if self._operations is not None:
            self._operations.append((back, tuple(map(self.share, kept))))

    def take(self, storage: Storage) -> Storage:
        """The gradient of `storage`, which the caller owns."""
        found, storage.gradient = storage.gradient, None
        assert found is not None, "a gradient is used before it is there"
        return found

    def give(self, storage: Storage, gradient: Storage) -> None:
        """A gradient of `storage`; a second one is added to the first, into a storage of its own."""
        before, storage.gradient = storage.gradient, gradient
        if before is not None:
            storage.gradient = self.make(gradient.size)
            self.drop(before, gradient)

    def backward(self) -> None:
        """Run all operations that are recorded, the last one first."""
        while self._operations:
            back, kept = self._operations.pop()
            given = back()
            self.drop(*kept)
            for storage, gradient in given:
                if storage is not None:
                    self.give(storage, gradient)
            weights = [gradient for storage, gradient in given if storage is None]
            if not self.queue:
                self.drop(*weights)

    def apart(self, program: Callable[[], Storage], graph: bool) -> tuple[Storage, Callable[[], None]]:
        """What `program` makes, with the backward of its operations alone; without a graph it has none."""
        outer, self._operations = self._operations, [] if graph else None
        made = program()
        inner, self._operations = self._operations, outer

        def backward() -> None:
            outer, self._operations = self._operations, inner
            self.backward()
            self._operations = outer

        return made, backward
