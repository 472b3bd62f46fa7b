"""Pictures of timelines."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trigrid.errors import Refused
from trigrid.report.timeline import timeline_text, write_svg
from trigrid.schedule import NAMES, Durations, Timeline, make_schedule, order_of, replay

SVG = "{http://www.w3.org/2000/svg}"


def played(name: str, pp: int, microbatches: int) -> Timeline:
    schedule = make_schedule(name, pp, microbatches)
    return replay(order_of(schedule), Durations.equal(schedule.stages, 1, 1, 1))


def test_one_forward_one_backward_drawn_to_scale() -> None:
    """3 ranks, 3 microbatches: a step of 15 s in 15 columns: F is one wide, B two."""
    text = timeline_text(played("1f1b", 3, 3), width=len("rank 0 ") + 15 + len(" |100.0% idle"))
    rows = [line.partition("|")[2].partition("|")[0] for line in text.splitlines()[:3]]
    assert rows == ["FFF    BB BB BB", " FF  BBFBB BB  ", "  FBBFBBFBB    "]
    assert text.splitlines()[0].endswith("| 40.0% idle")
    assert "15.0 s" in text.splitlines()[3]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("microbatches", [1, 8, 300])
def test_it_fits_the_terminal_and_shows_every_rank(name: str, width: int, microbatches: int) -> None:
    timeline = played(name, 4, microbatches)
    text = timeline_text(timeline, width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert [line.split("|")[0].strip() for line in lines[:4]] == [f"rank {rank}" for rank in range(4)]
    marks = set("".join(line.split("|")[1] for line in lines[:4]))
    assert marks <= set(" FBIWfbiw")
    several = timeline.order.schedule.stages > 4
    assert bool(marks & set("fbiw")) == several
    assert ("lower case" in " ".join(lines)) == several


def test_what_is_done_most_in_a_column_is_its_mark() -> None:
    """Many microbatches: a column holds several actions, backwards are twice as long as forwards."""
    rows = timeline_text(played("1f1b", 2, 500), 60).splitlines()
    middle = rows[1].split("|")[1][10:-10]
    assert set(middle) == {"B"}


def test_a_step_without_work_is_drawn() -> None:
    schedule = make_schedule("1f1b", 2, 1)
    assert "idle" in timeline_text(replay(order_of(schedule), Durations.equal(2, 0, 0, 0)), 60)


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_svg_has_every_action_once_and_is_the_same_each_time(name: str, tmp_path: Path) -> None:
    timeline = played(name, 3, 6)
    for file in ("a.svg", "b.svg"):
        write_svg(timeline, tmp_path / file, "Llama <3> & friends")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert "Llama <3> & friends" in texts
    assert {"rank 0", "rank 1", "rank 2", "forward"} <= set(texts)
    shapes = "".join(element.get("d", "") for element in root.iter(f"{SVG}path"))
    boxes = re.findall(r"M([\d.]+) \d+h([\d.]+)v16h", shapes)
    assert len(boxes) == len(timeline.spans)
    assert {"backward"} <= set(texts) if name == "1f1b" else {"input backward", "weight backward"} <= set(texts)
    _, _, width, _ = map(float, root.get("viewBox", "").split())
    assert all(float(x) + float(w) <= width for x, w in boxes)


def test_svg_where_it_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"svg = .*: cannot be written"):
        write_svg(played("1f1b", 2, 2), tmp_path / "none" / "a.svg", "")
