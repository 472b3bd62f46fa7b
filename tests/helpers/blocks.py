"""The code blocks of the documents, and what comments above them tell the tests.

<!-- not run: WHY -->          nothing of the block is run
<!-- run by: FILE::TEST -->    that test runs it
<!-- output of: COMMAND -->    its lines are among those that the command prints, in this order

With words in parentheses, `<!-- not run (torchrun): WHY -->`, only the lines that hold one of them are meant; words are
kept apart by commas.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^((?:<!--(?:(?!-->).)*-->\n)*)```(\w*)\n(.*?)^```$", re.M | re.S)
NOTE = re.compile(r"<!-- (not run|run by|output of)(?: \(([^)]+)\))?: (.+?) -->", re.S)


@dataclass(frozen=True)
class Note:
    """what is said of the lines that hold one of `words`, or of all."""

    what: str
    words: tuple[str, ...]
    said: str

    def means(self, line: str) -> bool:
        return not self.words or any(word in line for word in self.words)


@dataclass(frozen=True)
class Block:
    """line: of its fence in the document."""

    document: Path
    line: int
    language: str
    text: str
    comments: str

    @property
    def where(self) -> str:
        return f"{self.document.name}:{self.line}"

    @property
    def notes(self) -> tuple[Note, ...]:
        return tuple(
            Note(what, tuple(word.strip() for word in words.split(",")) if words else (), " ".join(said.split()))
            for what, words, said in NOTE.findall(self.comments)
        )

    @property
    def commands(self) -> tuple[str, ...]:
        """Of a block of shell: its lines, joined where they go on, without comments."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return tuple(command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip()))

    def note_of(self, command: str) -> Note | None:
        return next((note for note in self.notes if note.means(command)), None)


def blocks(document: Path) -> Iterator[Block]:
    text = document.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.end(1)) + 1
        yield Block(document, line, found[2], found[3], found[1])


def words_of(command: str) -> list[str]:
    """Of `trigrid WORDS`."""
    words = shlex.split(command)
    return words[words.index("trigrid") + 1 :]
