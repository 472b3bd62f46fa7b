"""The loss curve: text of the right size, a picture that depends on nothing but the losses."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from math import exp
from pathlib import Path

import pytest

from trigrid.report.curve import Curve, as_text, save_svg, thinned

CURVE = Curve([7 * exp(-step / 60) + 1 for step in range(200)], [(50, 4.5), (200, 1.5)])


@pytest.mark.parametrize("width", [50, 80])
def test_text(width: int) -> None:
    text = as_text(CURVE, width, colour=False)
    lines = text.splitlines()
    assert max(map(len, lines)) == width
    assert lines[0].strip() == "training loss and validation loss (●)"
    assert lines[-1].strip() == "step"
    assert {"1", "200"} <= set(lines[-2].split())
    assert text.count("●") == 3
    assert "\x1b" not in text
    assert not any(line != line.rstrip() for line in lines)


def test_text_again_is_the_same_and_has_colour_where_asked() -> None:
    """plotext keeps one figure for all."""
    assert as_text(CURVE, 60, colour=False) == as_text(CURVE, 60, colour=False)
    assert "\x1b[38;5;" in as_text(CURVE, 60, colour=True)
    assert "●" not in as_text(Curve(CURVE.training, []), 60, colour=False)


def test_svg(tmp_path: Path) -> None:
    """Equal losses, equal files; no time, no chance."""
    save_svg(CURVE, tmp_path / "a.svg", "a run")
    save_svg(CURVE, tmp_path / "b.svg", "a run")
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text()
    texts = {element.text for element in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")}
    assert {"step", "loss (nats per token)", "a run", "training", "validation"} <= texts
    assert "<dc:date>" not in picture
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.svg", "b.svg"]


def test_svg_needs_no_home(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from trigrid.report.curve import Curve, save_svg\n"
        f"save_svg(Curve([3.0, 2.0, 1.0], []), Path({str(tmp_path / 'loss.svg')!r}), 'a run')"
    )
    given = {k: v for k, v in os.environ.items() if not k.startswith("XDG_") and k != "MPLCONFIGDIR"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**given, "HOME": "/dev/null/none"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "loss.svg").exists()


def test_many_steps_become_means_of_neighbours() -> None:
    assert thinned([4.0, 2.0, 3.0], 3) == ([1, 2, 3], [4, 2, 3])
    assert thinned([4.0, 2.0, 3.0, 1.0, 9.0], 3) == ([1.5, 3.5, 5], [3, 2, 9])
    steps, losses = thinned([1.0] * 100_003, 2_000)
    assert len(steps) == len(losses) <= 2_000
    assert set(losses) == {1.0}
