"""Runs that are resumed give the numbers of runs that were never interrupted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import metrics, run, run_dir, write_job

from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import read_manifest
from trigrid.checkpoint.storage import read_box
from trigrid.report.events import read_events

STEPS = ("--steps", "7", "--checkpoint.every", "2", "--checkpoint.keep", "9", "--run.validate-every", "0")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The job, in the folder of which there is a run of seven steps in fp32 on one process, never interrupted."""
    job = write_job(tmp_path_factory.mktemp("whole"))
    code, _, err = run("train", job, *STEPS, "--precision", "fp32", "--quiet", OMP_NUM_THREADS="1")
    assert code == 0, err
    yield job


def interrupted(whole: Path, to: Path, after: int = 4) -> Path:
    """The run as if it had ended after the checkpoint of step `after`, in a folder of its own; its folder."""
    folder = to / "runs" / run_dir(whole).name
    shutil.copytree(run_dir(whole), folder)
    for path in checkpoints(folder):
        if int(path.name.removeprefix("step-")) > after:
            shutil.rmtree(path)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run's newest checkpoint."""
    path = checkpoints(folder)[0]
    manifest = read_manifest(path)
    return {
        f"{kind}/{name}": read_box(path, manifest, name, kind, [0] * len(parameter.shape), parameter.shape)
        for name, kind, parameter, _ in manifest.stored()
    }


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """The last record of each step."""
    return {entry["step"]: entry for entry in metrics(folder, "step")}


def test_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    """R68, R78, R80: seven steps are four, an end, and three more: losses, norms, learning rates, weights, moments."""
    folder = interrupted(whole, tmp_path)
    code, out, err = run("train", whole, *STEPS, "--precision", "fp32", "--resume", folder, "--json", "--quiet")
    assert code == 0, err
    assert json.loads(out)["run_dir"] == str(folder)
    for key in ("loss", "gradient_norm", "learning_rate"):
        assert [e[key] for e in steps(folder).values()] == [e[key] for e in steps(run_dir(whole)).values()], key
    before, after = tensors(run_dir(whole)), tensors(folder)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert read_manifest(checkpoints(folder)[0]).state == read_manifest(checkpoints(run_dir(whole))[0]).state
    starts = [event for event in read_events(folder) if event["kind"] == "start"]
    assert [(event["step"], event["resumed"]) for event in starts] == [(0, False), (4, True)]


@pytest.mark.parametrize(
    "layout",
    [("--tp", "2", "--pp", "2", "--zero", "1"), ("--dp", "2", "--zero", "3", "--micro-batch", "2")],
    ids=["tp2pp2", "zero3dp2"],
)
def test_on_another_layout(whole: Path, tmp_path: Path, layout: tuple[str, ...]) -> None:
    """R65, R76: the same losses to fp32 rounding, on the same samples."""
    folder = interrupted(whole, tmp_path)
    code, _, err = run(
        "train", whole, *STEPS, "--precision", "fp32", "--run.out", tmp_path / "runs", "--resume", "latest", *layout
    )
    assert code == 0, err
    assert "going on after step 4, 32 samples, from " in err
    for step, entry in steps(folder).items():
        assert entry["loss"] == pytest.approx(steps(run_dir(whole))[step]["loss"], rel=1e-5)
    before, after = tensors(run_dir(whole)), tensors(folder)
    for key, tensor in before.items():
        if key.startswith("mean/"):
            assert torch.linalg.vector_norm(after[key] - tensor) <= 1e-3 * torch.linalg.vector_norm(tensor), key


def test_latest_passes_over_what_is_damaged(whole: Path, tmp_path: Path) -> None:
    """R73: a half-written one is none, one with a flipped byte is told and set aside, the one before it is taken."""
    folder = interrupted(whole, tmp_path)
    newest, (shutil_target, *_) = checkpoints(folder)[0], checkpoints(folder)
    assert newest == shutil_target
    part = newest.with_name(".step-00000006.part")
    shutil.copytree(newest, part)
    file = newest / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    code, _, err = run("train", whole, *STEPS, "--precision", "fp32", "--resume", folder)
    assert code == 0, err
    assert f"warning: {file}: is damaged: its digest is another than the manifest's" in err
    assert "going on after step 2, 16 samples" in err
    assert not part.exists()
    assert (newest.parent / "set-aside-0-step-00000004").exists()
    assert steps(folder)[7]["loss"] == steps(run_dir(whole))[7]["loss"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--seed", "5"), "run.seed = 5: was 0 in "),
        (("--seq", "16"), "batch.sequence = 16: was 32 in "),
        (("--model.ffn", "64"), "is of another model than the job's: layers.0.gate.weight has shape [48, 32], and"),
        (("--precision", "fp64"), "stores weight of embedding.weight in F32, and run.precision = fp64 keeps it in"),
        (("--data.validation-fraction", "0.1"), "was trained on "),
        (("--optimizer.frozen", '["layers.0.*"]', "--resume", "nowhere"), "--resume = nowhere: there is no such folder"),
    ],
)
def test_what_cannot_go_on_is_refused(whole: Path, tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    folder = interrupted(whole, tmp_path)
    resume = () if "--resume" in flags else ("--resume", folder)
    code, _, err = run("train", whole, *STEPS, "--precision", "fp32", *resume, *flags)
    assert code == 2, err
    assert words in err
    assert len(checkpoints(folder)) == 2
