"""What a user can get wrong, said with the key, the value and the way out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TrigridError(Exception):
    """A mistake of the user, or a state of the machine that the user can mend; the command line exits with 2."""


class RunFailed(TrigridError):
    """A job that started and failed; the command line exits with 1."""


@dataclass(frozen=True)
class Problem:
    """One reason why something is refused.

    `key` is the dotted name a user would write (`parallel.tp`), `where` a `file:line` when it is known.
    """

    key: str
    value: object
    reason: str
    legal: tuple[object, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        nearest = f"; nearest legal: {', '.join(map(str, self.legal))}" if self.legal else ""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.key} = {self.value}: {self.reason}{nearest}"


class Refused(TrigridError):
    """Every problem of one description, told at once."""

    def __init__(self, problems: Sequence[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))
