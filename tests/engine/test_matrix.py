"""`trigrid parity` as a user runs it."""

from __future__ import annotations

from pathlib import Path

from helpers.runs import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "parity.toml"


def test_the_table_names_what_differs_from_the_first_choice() -> None:
    options = ("--options", "pairs", "--world", "1", "--zero", "0", "--dtype", "fp64", "--quiet")
    code, out, err = run("parity", EXAMPLE, "--layouts", "all", *options)
    assert code == 0, err
    *rows, count = out.splitlines()
    assert rows[0].split() == ["layout", "gradient", "worst", "parameter", "weights", "loss", "norm"]
    assert any("recompute=selective" in row and " ok " in row for row in rows)
    assert count == f"{len(rows) - 1} of {len(rows) - 1} jobs agree with one process (fp64)"
