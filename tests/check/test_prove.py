"""The quick proof: the real program of one rank on a process group without peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.runs import run

from trigrid.schedule import make_schedule
from trigrid.schedule.files import write_schedule

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama3-405b.toml"
# One layer per stage in place of eight, and a sixteenth of the microbatches: the same program, less often.
QUICK = ("--model.layers", "16", "--batch.global_batch", "256")


@pytest.mark.parametrize(("zero", "rank"), [(0, 0), (1, 16_383), (2, 64), (3, 0), (3, 64), (3, 16_383)])
def test_one_rank_of_405b_at_16384(zero: int, rank: int) -> None:
    """First, middle and last stage (R85: a shipped job is shown to run before anyone pays for it)."""
    code, out, err = run("prove", EXAMPLE, *QUICK, "--zero", zero, "--rank", rank, "--json")
    assert code == 0, out + err
    proof = json.loads(out)
    assert proof["world"] == 16_384
    assert proof["rank"] == rank
    lines = proof["state"] + proof["calls"] + proof["payload"]
    assert all(line["predicted"] == line["traced"] for line in lines)
    traced = {line["name"]: line["traced"] for line in proof["state"]}
    assert (traced["weights"] == 0) == (zero == 3)
    assert not proof["survivors"]
    assert any(line["name"].startswith("zero ") and line["traced"] > 0 for line in proof["payload"])


def test_a_program_that_does_more_than_was_predicted_is_found(tmp_path: Path) -> None:
    """An extra all-reduce in every block: exit code 1, and the line that differs is marked."""
    planted = tmp_path / "sitecustomize.py"
    planted.write_text(
        "import sys\n"
        "if 'prove' in sys.argv:\n"
        "    from trigrid.engine.tensor import TensorParallel\n"
        "    leave = TensorParallel.leave\n"
        "    def extra(self, x):\n"
        "        return self.comm.all_reduce(leave(self, x).clone(), 'tp')\n"
        "    TensorParallel.leave = extra\n"
    )
    code, out, err = run("prove", EXAMPLE, *QUICK, PYTHONPATH=str(tmp_path))
    assert code == 1, out + err
    (line,) = [line for line in out.splitlines() if line.startswith("tp all_reduce")]
    assert line.endswith("DIFFERS")
    assert "predicted and traced DIFFER" in out


def test_a_schedule_of_a_file_is_proved(tmp_path: Path) -> None:
    path = tmp_path / "made.csv"
    write_schedule(make_schedule("zb-h1", 2, 4), path)
    job = Path(EXAMPLE).with_name("parity.toml")
    code, out, err = run("prove", job, "--pp", "2", "--global-batch", "4", "--parallel.schedule-file", str(path))
    assert code == 0, out + err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rank", "16384"), "16384"),
        (("--rank", "-1"), "-1"),
        (("--tp", "7"), "must divide model.heads = 128"),
        (("--model.name", "mixtral-8x7b"), "model.experts = 8 experts: known to the planner only so far"),
    ],
)
def test_what_cannot_be_proved_is_refused(arguments: tuple[str, ...], told: str) -> None:
    code, out, err = run("prove", EXAMPLE, *arguments)
    assert code == 2, out + err
    assert told in err
    assert "Traceback" not in err
