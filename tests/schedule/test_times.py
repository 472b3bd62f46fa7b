"""Durations from a file, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trigrid.errors import Refused
from trigrid.schedule.times import read_durations

WHOLE = "stage,kind,seconds\n0,F,1\n0,B,2.5\n1,F,1.5\n1,I,1\n1,W,0.5\n0,P,0.25\n"


def test_whole_and_halved_stages(tmp_path: Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text(WHOLE)
    durations, halved = read_durations(file, 2)
    assert (durations.forward_s, durations.backward_s, durations.p2p_s) == ((1, 1.5), (2.5, 1.5), (0.25,))
    assert (durations.input_s[1], durations.weight_s[1], halved) == (1, 0.5, False)
    file.write_text("\ufeffseconds, kind, stage\n1, F, 0\n 2 ,I,0\n3,W,0\n7,B,0\n", encoding="utf-8")
    durations, halved = read_durations(file, 1)
    assert (durations.backward_s, durations.input_s, durations.weight_s, halved) == ((7,), (2,), (3,), True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stage,kind\n0,F\n", "times.csv:1: durations = .*: the first line must name the columns stage,kind,seconds"),
        ("", "the first line must name the columns"),
        (WHOLE + "0,X,1\n", "times.csv:8: kind = X: is no kind of action; nearest legal: F, B, I, W, P"),
        (WHOLE + "2,F,1\n", "times.csv:8: stage = 2: must be a whole number from 0 to 1"),
        (WHOLE + "1,P,1\n", "times.csv:8: stage = 1: must be a whole number from 0 to 0"),
        (WHOLE + "-1,F,1\n", "stage = -1: must be a whole number"),
        (WHOLE + "1,B,nan\n", "times.csv:8: seconds = nan: must be a number of seconds from 0 on"),
        (WHOLE + "1,B,-1\n", "seconds = -1: must be"),
        (WHOLE + "1,B,\n", "seconds = : must be"),
        (WHOLE + "1,B\n", "seconds = : must be"),
        (WHOLE + "0,F,1\n", "kind = F: stage 0 has a row of it already"),
        (WHOLE.replace("1,F,1.5\n", ""), "kind = F: stage 1 has no row of it"),
        (WHOLE.replace("1,W,0.5\n", ""), "kind = B: stage 1 has neither it nor both I and W"),
        (WHOLE.replace("0,B,2.5\n", ""), "kind = B: stage 0 has neither it nor both I and W"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text(text)
    with pytest.raises(Refused, match=message):
        read_durations(file, 2)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="cannot be read"):
        read_durations(tmp_path / "none.csv", 2)
