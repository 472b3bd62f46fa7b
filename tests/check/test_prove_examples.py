"""Every job that ships is proved: the program of each of its roles does what was planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import run

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_an_example_is_proved(path: Path) -> None:
    """In its quick form, as `trigrid prove FILE --quick` runs it, which says what was cut (R85)."""
    code, out, err = run("prove", path, "--quick", "--json")
    assert code == 0, out + err
    found = json.loads(out)
    assert found["holds"]
    assert found["ranks"]
    assert "layers" in found["cut_to"] or "microbatches" in found["cut_to"]


def test_what_was_cut_is_said() -> None:
    code, out, err = run("prove", EXAMPLES / "tiny-3d.toml", "--quick", "--pp", "1", "--ranks", "3")
    assert code == 0, out + err
    assert out.endswith("quick form, cut to 1 of 4 layers, 2 of 4 microbatches\n")


def test_the_whole_job_stays_where_it_is_small_enough() -> None:
    flags = ("--model.layers", "2", "--global-batch", "8", "--ranks", "0")
    code, out, err = run("prove", EXAMPLES / "tiny-3d.toml", "--quick", *flags)
    assert code == 0, out + err
    assert "quick form" not in out
