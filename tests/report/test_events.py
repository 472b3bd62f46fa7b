"""events.jsonl: whole lines, whatever happens to the process or the disk."""

from __future__ import annotations

import math
import multiprocessing
import os
from pathlib import Path

import pytest

from trigrid.report.events import NAME, EventLog, read_events


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_events(tmp_path) == []
    EventLog(tmp_path).write("launch", world=4, restart=0)
    EventLog(tmp_path).write("spike", step=3, loss=math.inf, actions={"rank 1": "F0"})
    launch, spike = read_events(tmp_path)
    assert (launch["kind"], launch["world"], launch["restart"]) == ("launch", 4, 0)
    assert spike["loss"] is None
    assert launch["time_s"] <= spike["time_s"]


def test_a_torn_line_costs_itself_only(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.write("start", step=0)
    with open(tmp_path / NAME, "ab") as file:
        file.write(b'{"kind": "checkpoint", "st')
    assert [event["kind"] for event in read_events(tmp_path)] == ["start"]
    log.write("end", step=9)
    assert [event["kind"] for event in read_events(tmp_path)] == ["start", "end"]


def test_a_disk_that_takes_nothing_costs_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.symlink("/dev/full", tmp_path / NAME)
    log = EventLog(tmp_path)
    log.write("start", step=0)
    log.write("end", step=1)
    (warning,) = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {tmp_path / NAME} cannot be written: No space left on device")


def test_two_processes_write_whole_lines(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=_write_many, args=(tmp_path, name)) for name in ("a", "b")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(read_events(tmp_path)) == 2 * 200
    assert len((tmp_path / NAME).read_bytes().splitlines()) == 2 * 200


def _write_many(folder: Path, name: str) -> None:
    log = EventLog(folder)
    for number in range(200):
        log.write("step", name=name * 100, number=number)
