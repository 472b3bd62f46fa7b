"""A run killed at any moment comes to the same weights: `pytest tests/chaos --kills 50 -s` for many, with figures."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import torch
from helpers.chaos import ended_run, killed_until_done
from helpers.runs import metrics, run, write_job

from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import read_manifest
from trigrid.checkpoint.reading import BoxReader

STEPS_PER_KILL = 3


@pytest.mark.timeout(7200)
def test_killed_at_any_moment(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """R73, R96: of one rank or of the whole tree, at the start, in a step or in a checkpoint; then resumed: the loss of
    every step and every element of weights and moments are those of a run that nobody disturbed."""
    kills, seed = pytestconfig.getoption("kills", 5), pytestconfig.getoption("chaos_seed", 1)
    job = write_job(tmp_path)
    flags = ("--dp", "2", "--zero", "1", "--steps", STEPS_PER_KILL * kills + 5, "--checkpoint.every", "2")
    flags = (*flags, "--run.trackers", "[]", "--run.validate-every", "0", "--run.dropout", "0.1")
    code, _, err = run("train", job, *flags, "--run.out", tmp_path / "undisturbed", "--quiet")
    assert code == 0, err
    undisturbed = ended_run(tmp_path / "undisturbed")

    seen = []
    for kill in killed_until_done(job, flags, tmp_path / "killed", kills, seed):
        print(kill)
        seen.append(kill)
    lost = [kill.lost for kill in seen]
    detected = [kill.gone_s for kill in seen if kill.what != "tree"] or [0.0]
    print(
        f"{len(seen)} kills, as many resumes; steps lost: {mean(lost):.1f} on average, {max(lost)} at most; seconds "
        f"from the death of a rank to the end of all: {mean(detected):.1f} on average, {max(detected):.1f} at most"
    )
    survivor = ended_run(tmp_path / "killed")
    losses = {entry["step"]: entry["loss"] for entry in metrics(undisturbed, "step")}
    assert {entry["step"]: entry["loss"] for entry in metrics(survivor, "step")} == losses
    before, after = checkpoints(undisturbed)[0], checkpoints(survivor)[0]
    manifest = read_manifest(after)
    assert manifest.state == read_manifest(before).state
    for name, kind, parameter, _ in manifest.stored():
        box = (name, kind, [0] * len(parameter.shape), parameter.shape)
        assert torch.equal(
            BoxReader(before, read_manifest(before)).read(*box), BoxReader(after, manifest).read(*box)
        ), (name, kind)
