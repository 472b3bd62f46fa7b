"""Schedules as text: what is written is read again, and what is wrong is told with its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.errors import Refused
from trigrid.schedule import NAMES, make_schedule, read_schedule, write_schedule

HEADER = "rank,kind,stage,microbatch\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("schedules")


@given(
    st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 7), st.integers(1, 3), st.sampled_from(["csv", "json"])
)
@settings(max_examples=60, deadline=None)
def test_a_schedule_written_and_read_is_the_same(
    folder: Path, name: str, pp: int, microbatches: int, v: int, form: str
) -> None:
    schedule = make_schedule(name, pp, microbatches, v if name == "interleaved" else None)
    path = folder / f"{name}.{form}"
    write_schedule(schedule, path)
    assert read_schedule(path) == schedule
    assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_the_text_is_a_row_per_action(tmp_path: Path) -> None:
    schedule = make_schedule("zb-h1", 1, 1)
    write_schedule(schedule, tmp_path / "own.csv")
    assert (tmp_path / "own.csv").read_text() == HEADER + "0,F,0,0\n0,I,0,0\n0,W,0,0\n"
    write_schedule(schedule, tmp_path / "own.json")
    content = json.loads((tmp_path / "own.json").read_text())
    assert content["name"] == "zb-h1"
    assert content["actions"][1] == {"rank": 0, "kind": "I", "stage": 0, "microbatch": 0}
    assert read_schedule(tmp_path / "own.csv").name == "own"


def test_rows_of_ranks_may_be_mixed_columns_swapped_and_lines_empty(tmp_path: Path) -> None:
    path = tmp_path / "own.CSV"
    path.write_text("\ufeffkind, rank,microbatch,stage\r\nF,0,0,0\r\n\r\nF,1,0,1\r\nB, 1,0,1\r\nB,0,0,0\r\n", "utf-8")
    assert read_schedule(path).ranks == make_schedule("gpipe", 2, 1).ranks


ROWS = HEADER + "0,F,0,0\n0,B,0,0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "PATH:1: schedule = PATH: the first line must name the columns rank,kind,stage,microbatch"),
        (
            "rank,kind\n0,F\n",
            "PATH:1: schedule = PATH: the first line must name the columns rank,kind,stage,microbatch",
        ),
        (HEADER, "schedule = PATH: has no action"),
        (ROWS + "0,F,0\n", "PATH:4: schedule = PATH: 3 cells, not 4"),
        (ROWS + "0,X,0,1\n", "PATH:4: kind = X: is no kind of action; nearest legal: F, B, I, W"),
        (ROWS + "0,F,-1,1\n", "PATH:4: stage = -1: must be a whole number from 0 to 2"),
        (ROWS + "x,F,0,1\n", "PATH:4: rank = x: must be a whole number from 0 to 2"),
        (ROWS + "0,F,0,³\n", "PATH:4: microbatch = ³: must be a whole number from 0 to 2"),
        (ROWS + "0,F,0,1000000000000\n", "PATH:4: microbatch = 1000000000000: must be a whole number from 0 to 2"),
        (
            ROWS + "1,F,0,1\n0,Q,0,9\n",
            "PATH:4: rank = 1: stage 0 is on another rank; nearest legal: 0\n"
            "PATH:5: microbatch = 9: must be a whole number from 0 to 3\n"
            "PATH:5: kind = Q: is no kind of action; nearest legal: F, B, I, W",
        ),
        (ROWS + "0,F,2,0\n0,B,2,0\n", "PATH: stage = 1: has no action, stage 2 has"),
        (ROWS + "2,F,1,0\n2,B,1,0\n", "PATH: rank = 1: has no action, rank 2 has"),
        (ROWS + "0,F,0,1\n", "schedule = PATH: cannot run: schedule own: missing B0.1"),
        (
            HEADER + "0,B,0,0\n0,F,0,0\n",
            "schedule = PATH: cannot run: schedule own: B0.0 comes before its forward on rank 0",
        ),
        (ROWS + '0,F,0,"1\n', "PATH:4: schedule = PATH: is no CSV: unexpected end of data"),
    ],
)
def test_what_is_wrong_in_a_csv_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text, "utf-8")
    with pytest.raises(Refused) as refused:
        read_schedule(path)
    assert str(refused.value) == message.replace("PATH", str(path))


ROW = '{"rank": 0, "kind": "F", "stage": 0, "microbatch": 0}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"name": "x",\n "actions": [}', "PATH:2: schedule = PATH: is no JSON: Expecting value"),
        ("[" * 100_000, "schedule = PATH: is no JSON of a schedule: maximum recursion depth exceeded"),
        ("9" * 5_000, "schedule = PATH: is no JSON of a schedule: Exceeds the limit"),
        ("[]", 'PATH:1: schedule = PATH: must be {"name": …, "actions": […]}'),
        ('{"name": "x", "actions": [], "more": 1}', 'PATH:1: schedule = PATH: must be {"name": …, "actions": […]}'),
        ('{"name": "x", "actions": []}', "schedule = PATH: has no action"),
        (
            f'{{"name": "x", "actions": [{ROW}, {{}}]}}',
            "PATH: schedule = PATH: actions[1] must have the keys rank, kind, stage, microbatch",
        ),
        (
            f'{{"name": "x", "actions": [{ROW.replace("0}", "true}")}, {ROW.replace(chr(34) + "F" + chr(34), "[]")}]}}',
            "PATH: actions[0]: microbatch = True: must be a whole number from 0 to 1\n"
            "PATH: actions[1]: kind = []: is no kind of action; nearest legal: F, B, I, W",
        ),
        (f'{{"name": "x", "actions": [{ROW}]}}', "schedule = PATH: cannot run: schedule x: missing B0.0"),
    ],
)
def test_what_is_wrong_in_a_json_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(text, "utf-8")
    with pytest.raises(Refused) as refused:
        read_schedule(path)
    assert str(refused.value).startswith(message.replace("PATH", str(path)))


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"^parallel.schedule_file = .*none.csv: cannot be read: No such file"):
        read_schedule(tmp_path / "none.csv", "parallel.schedule_file")
    with pytest.raises(Refused, match=r"^save-schedule = .*own.csv: cannot be written: No such file"):
        write_schedule(make_schedule("1f1b", 1, 1), tmp_path / "none" / "own.csv", "save-schedule")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(Refused, match=r"cannot be read: is no text in UTF-8"):
        read_schedule(tmp_path / "bytes.csv")
    for use in (read_schedule, lambda path: write_schedule(make_schedule("1f1b", 1, 1), path)):
        with pytest.raises(
            Refused, match=r"not a kind of file that schedules are kept in; nearest legal: \.csv, \.json"
        ):
            use(tmp_path / "own.toml")
