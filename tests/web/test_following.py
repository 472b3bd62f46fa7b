"""A run's files as they grow: whole lines once, in the order of the steps, whatever happens to the files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from trigrid.errors import Refused
from trigrid.web.run.folder import NAMES, check_folder
from trigrid.web.run.following import Following, Slow
from trigrid.web.run.view import MOST_ROWS, _thinned


def line(kind: str, **values: Any) -> str:
    return json.dumps({"kind": kind, **values}) + "\n"


def step(number: int, loss: float | None = 1.0, **values: Any) -> str:
    return line("step", step=number, loss=loss, step_s=1.0, time_s=1e9 + number, **values)


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job.toml").write_text("")
    return tmp_path.resolve()


def test_each_line_is_read_once_and_whole(folder: Path) -> None:
    metrics, follow = folder / "metrics.jsonl", Following(folder)
    follow.read()
    assert (follow.lines, follow.steps.rows) == (0, [])
    add(metrics, step(1) + step(2)[:20])
    follow.read()
    assert follow.steps.steps == [1]
    add(metrics, step(2)[20:] + '{"kind": "step", "st\n' + step(3))
    follow.read()
    assert (follow.steps.steps, follow.lines) == ([1, 2, 3], 3)
    follow.read()
    assert follow.lines == 3


def test_lines_longer_than_a_piece(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trigrid.web.run.following.PIECE", 7)
    add(folder / "metrics.jsonl", "".join(map(step, range(1, 40))))
    follow = Following(folder)
    follow.read()
    assert follow.steps.steps == list(range(1, 40))


def test_steps_that_are_done_again_take_the_place_of_the_old_ones(folder: Path) -> None:
    metrics, follow = folder / "metrics.jsonl", Following(folder)
    add(metrics, "".join(step(n, loss=n) for n in range(1, 6)) + line("validation", step=4, loss=9.0))
    follow.read()
    known = follow.lines
    assert follow.steps.since(known) == []
    add(metrics, step(3, loss=30.0) + step(4, loss=40.0) + line("validation", step=4, loss=8.0))
    follow.read()
    assert [row[:2] for row in follow.steps.rows] == [(1, 1), (2, 2), (3, 30.0), (4, 40.0)]
    # Whoever knows the first five drops theirs from step 3 on.
    assert [row[0] for row in follow.steps.since(known)] == [3, 4]
    assert follow.validation.since(known) == [(4, 8.0)]


def test_a_file_that_begins_anew_is_read_anew(folder: Path) -> None:
    metrics, events, follow = folder / "metrics.jsonl", folder / "events.jsonl", Following(folder)
    add(metrics, step(1) + step(2))
    add(events, line("start", time_s=1e9))
    follow.read()
    begin = follow.begin
    metrics.write_text(step(1, loss=7.0))
    follow.read()
    assert [row[:2] for row in follow.steps.rows] == [(1, 7.0)]
    assert len(follow.events) == 1
    assert follow.begin > begin
    other = folder / "other"
    other.write_text(step(1, loss=5.0) + step(2, loss=6.0))
    os.replace(other, metrics)
    follow.read()
    assert [row[1] for row in follow.steps.rows] == [5.0, 6.0]


def test_who_is_slow_is_counted(folder: Path) -> None:
    slow = {"slowest_rank": 3, "usual_busy_s": 1.0}
    add(folder / "metrics.jsonl", step(1, slowest_busy_s=2.0, **slow) + step(2, slowest_busy_s=1.5, **slow) + step(3))
    follow = Following(folder)
    follow.read()
    assert follow.slow == {3: Slow(records=2, worst=2.0, last=1.5)}


def test_many_rows_are_thinned_and_the_last_is_kept() -> None:
    for count in (0, 1, MOST_ROWS, MOST_ROWS + 1, 10 * MOST_ROWS + 3):
        rows = [(number,) for number in range(count)]
        told, every = _thinned(rows)
        assert len(told) <= MOST_ROWS + 1
        assert told[-1:] == rows[-1:]
        assert told[:1] == rows[:1]
        assert every == 1 or count > MOST_ROWS


@pytest.mark.parametrize("name", NAMES)
def test_a_link_out_of_the_folder_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_text("{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(Refused, match=f"{name}: leads out of the run's folder, and is not read".replace(".", r"\.")):
        check_folder(folder)


def test_a_file_that_becomes_a_link_later_is_not_read(folder: Path) -> None:
    follow = Following(folder)
    (folder / "metrics.jsonl").symlink_to("/etc/hostname")
    with pytest.raises(Refused, match="leads out"):
        follow.read()


def test_what_is_no_run_is_refused(folder: Path) -> None:
    (folder / "job.toml").unlink()
    with pytest.raises(Refused, match=r"it has no job\.toml"):
        check_folder(folder)
    (folder / "job.toml").mkdir()
    with pytest.raises(Refused, match="is no file"):
        check_folder(folder)
    with pytest.raises(Refused, match="there is no such folder"):
        check_folder(folder / "nowhere")


def test_a_link_within_the_folder_is_read(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs" / "m").write_text(step(1))
    (folder / "metrics.jsonl").symlink_to("logs/m")
    follow = Following(check_folder(folder))
    follow.read()
    assert follow.steps.steps == [1]
