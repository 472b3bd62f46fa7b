"""The quick proof: the real program of ranks of a job on a process group without peers."""

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


@pytest.mark.parametrize(("zero", "ranks"), [(0, (0,)), (1, (16_383,)), (2, (64,)), (3, (0, 64, 16_383))])
def test_ranks_of_405b_at_16384(zero: int, ranks: tuple[int, ...]) -> None:
    """First, middle and last stage (R85: a shipped job is shown to run before anyone pays for it)."""
    code, out, err = run("prove", EXAMPLE, *QUICK, "--zero", zero, "--ranks", ",".join(map(str, ranks)), "--json")
    assert code == 0, out + err
    found = json.loads(out)
    assert found["world"] == 16_384
    assert [proof["rank"] for proof in found["ranks"]] == list(ranks)
    for proof in found["ranks"]:
        lines = proof["state"] + proof["calls"] + proof["payload"] + proof["flops"]
        assert all(line["predicted"] == line["traced"] for line in lines)
        traced = {line["name"]: line["traced"] for line in proof["state"]}
        assert (traced["weights"] == 0) == (zero == 3)
        assert not proof["survivors"]
        assert not proof["left_over"]
        assert any(line["name"].startswith("zero ") and line["traced"] > 0 for line in proof["payload"])
        assert sum(line["traced"] for line in proof["peak"]["memory"]) == proof["peak"]["total"]["traced"]


PLANTED = {
    "an all-reduce more": (
        "from trigrid.engine.tensor import TensorParallel\n"
        "leave = TensorParallel.leave\n"
        "def extra(self, x):\n"
        "    return self.comm.all_reduce(leave(self, x).clone(), 'tp')\n"
        "TensorParallel.leave = extra\n"
    ),
    "gradients kept": (
        "from trigrid.engine.zero import Bucket\n"
        "close, kept = Bucket.close_gradients, []\n"
        "def closing(self):\n"
        "    kept.append(self._transient)\n"
        "    close(self)\n"
        "Bucket.close_gradients = closing\n"
    ),
    "weights kept": (
        "from trigrid.engine.zero import Bucket\n"
        "weight, kept = Bucket.weight, []\n"
        "def getting(self, *span):\n"
        "    found = weight(self, *span)\n"
        "    if self.layout.name == 'layers.0' and not kept:\n"
        "        kept.append(found)\n"
        "    return found\n"
        "Bucket.weight = getting\n"
    ),
    "a product more": (
        "from trigrid.models.norms import Norm\n"
        "call = Norm.__call__\n"
        "def more(self, x, *rest):\n"
        "    x.detach().flatten(0, 1).t() @ x.detach().flatten(0, 1)\n"
        "    return call(self, x, *rest)\n"
        "Norm.__call__ = more\n"
    ),
}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("an all-reduce more", ("tp all_reduce", "DIFFERS")),
        ("gradients kept", ("still alive after the step: whole gradients", "GiB")),
        ("weights kept", ("still alive after being given up: layers.0", "")),
        ("a product more", ("products, weight gradients", "DIFFERS")),
    ],
)
def test_a_program_that_does_more_than_was_predicted_is_found(
    tmp_path: Path, fault: str, told: tuple[str, str]
) -> None:
    """Exit code 1, and the line that differs is marked."""
    body = "".join(f"    {line}\n" for line in PLANTED[fault].splitlines())
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nif 'prove' in sys.argv:\n{body}")
    code, out, err = run("prove", EXAMPLE, *QUICK, "--zero", "3", "--ranks", "0", PYTHONPATH=str(tmp_path))
    assert code == 1, out + err
    (line,) = [line for line in out.splitlines() if line.startswith(told[0])]
    assert line.endswith(told[1])
    assert "predicted and traced DIFFER" in out


def test_a_schedule_of_a_file_is_proved(tmp_path: Path) -> None:
    path = tmp_path / "made.csv"
    write_schedule(make_schedule("zb-h1", 2, 4), path)
    job = Path(EXAMPLE).with_name("parity.toml")
    snapshot = tmp_path / "memory.json"
    arguments = ("--pp", "2", "--global-batch", "4", "--parallel.schedule-file", path, "--snapshot", snapshot)
    code, out, err = run("prove", job, *arguments)
    assert code == 0, out + err
    assert "predicted = traced on every rank shown" in out
    events = json.loads(snapshot.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1}


def test_a_model_by_its_name() -> None:
    """What is left open of its layout is searched, as `trigrid plan` does."""
    layout = ("--gpus", "16", "--tp", "2", "--pp", "2")
    small = ("--model.layers", "4", "--seq", "512", "--global-batch", "32")
    code, out, err = run("prove", "llama3-8b", *layout, *small)
    assert code == 0, out + err
    assert "TP 2 × PP 2" in err
    assert "rank 0 of" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--ranks", "16384"), "16384"),
        (("--ranks", "0,-1"), "-1"),
        (("--ranks", "first"), "first"),
        (("--tp", "7"), "must divide model.heads = 128"),
        (("--model.name", "mixtral-8x7b"), "model.experts = 8 experts: known to the planner only so far"),
    ],
)
def test_what_cannot_be_proved_is_refused(arguments: tuple[str, ...], told: str) -> None:
    code, out, err = run("prove", EXAMPLE, *arguments)
    assert code == 2, out + err
    assert told in err
    assert "Traceback" not in err
