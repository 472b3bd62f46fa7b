"""Runs that are resumed give the numbers of runs that were never interrupted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.in_process import quick, train
from helpers.runs import metrics, run, run_dir, write_job

from trigrid.checkpoint import restore, storage
from trigrid.checkpoint.folder import checkpoints
from trigrid.checkpoint.manifest import Damaged, read_manifest
from trigrid.checkpoint.reading import BoxReader
from trigrid.engine.finish import StepResult
from trigrid.engine.runtime import Engine
from trigrid.errors import Refused, RunFailed, TrigridError
from trigrid.report.events import read_events
from trigrid.train.opening import check_shared, lock

SEVEN = quick(7)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The job, in the folder of which there is a run of seven steps in fp32 on one process, never interrupted."""
    job = write_job(tmp_path_factory.mktemp("whole"))
    train(job, *SEVEN)
    return job


@pytest.fixture
def ended(whole: Path, tmp_path: Path) -> Path:
    """That run as if it had ended after the checkpoint of its fourth step, in a folder of its own."""
    folder = tmp_path / "runs" / run_dir(whole).name
    shutil.copytree(run_dir(whole), folder)
    for path in checkpoints(folder)[:2]:
        shutil.rmtree(path)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a run's newest checkpoint."""
    path = checkpoints(folder)[0]
    manifest = read_manifest(path)
    return {
        f"{kind}/{name}": BoxReader(path, manifest).read(name, kind, [0] * len(parameter.shape), parameter.shape)
        for name, kind, parameter, _ in manifest.stored()
    }


def steps(folder: Path) -> dict[int, dict[str, Any]]:
    """The last record of each step."""
    return {entry["step"]: entry for entry in metrics(folder, "step")}


def assert_alike(folder: Path, other: Path) -> None:
    """Every step's numbers and every element of the last checkpoint are equal, bit for bit."""
    for key in ("loss", "gradient_norm", "learning_rate", "tokens"):
        assert [e[key] for e in steps(folder).values()] == [e[key] for e in steps(other).values()], key
    before, after = tensors(other), tensors(folder)
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert read_manifest(checkpoints(folder)[0]).state == read_manifest(checkpoints(other)[0]).state


def test_bit_for_bit(whole: Path, ended: Path) -> None:
    """R68, R78, R80: seven steps are four, an end, and three more: losses, norms, learning rates, weights, moments."""
    summary = train(whole, *SEVEN, resume=ended)
    assert summary is not None
    assert (summary.run_dir, summary.steps) == (str(ended), 7)
    assert_alike(ended, run_dir(whole))
    starts = [event for event in read_events(ended) if event["kind"] == "start"]
    assert [(event["step"], event["resumed"]) for event in starts] == [(0, False), (4, True)]
    assert train(whole, *SEVEN, resume=ended) is None, "nothing is left to do"


def test_dropout_goes_on_with_its_masks(whole: Path, tmp_path: Path) -> None:
    """What is random is a function of seed and place: nothing of it is kept, and nothing is lost."""
    flags = (*quick(4), "--run.dropout", "0.2")
    train(whole, *flags, "--run.out", tmp_path / "a")
    (other,) = (tmp_path / "a").iterdir()
    folder = tmp_path / "b" / other.name
    shutil.copytree(other, folder)
    shutil.rmtree(checkpoints(folder)[0])
    train(whole, *flags, resume=folder)
    assert_alike(folder, other)


@pytest.mark.parametrize(
    "layout",
    [("--tp", "2", "--pp", "2", "--zero", "1"), ("--dp", "2", "--zero", "3", "--micro-batch", "2")],
    ids=["tp2pp2", "zero3dp2"],
)
def test_on_another_layout(whole: Path, ended: Path, layout: tuple[str, ...]) -> None:
    """R65, R76: the same losses to fp32 rounding, on the same samples."""
    code, _, err = run("train", whole, *SEVEN, "--run.out", ended.parent, "--resume", "latest", *layout)
    assert code == 0, err
    assert "going on after step 4, 32 samples, from " in err
    for step, entry in steps(ended).items():
        assert entry["loss"] == pytest.approx(steps(run_dir(whole))[step]["loss"], rel=1e-5)
    after = tensors(ended)
    for key, tensor in tensors(run_dir(whole)).items():
        if key.startswith("mean/"):
            assert torch.linalg.vector_norm(after[key] - tensor) <= 1e-3 * torch.linalg.vector_norm(tensor), key


def test_what_is_damaged_is_passed_over(whole: Path, ended: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R73: a half-written one is none, one with a flipped byte is told and set aside, the one before it is taken."""
    newest = checkpoints(ended)[0]
    part = newest.with_name(".step-00000006.part")
    shutil.copytree(newest, part)
    file = newest / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    train(whole, *SEVEN, resume=ended)
    assert f"warning: {file}: is damaged: its digest is another than the manifest's" in capsys.readouterr().err
    assert [event["step"] for event in read_events(ended) if event["kind"] == "start"] == [0, 2]
    assert not part.exists()
    assert (newest.parent / "set-aside-0-step-00000004").exists()
    assert_alike(ended, run_dir(whole))
    for path in checkpoints(ended):
        (path / "rank-00000.safetensors").write_bytes(b"")
    with pytest.raises(Damaged, match="has 0 bytes, and"):
        train(whole, *quick(9), resume=ended)


@pytest.mark.parametrize(
    ("flags", "error", "words"),
    [
        (("--seed", "5"), Refused, "run.seed = 5: was 0 in "),
        (("--seq", "16"), Refused, "batch.sequence = 16: was 32 in "),
        (("--model.ffn", "64"), Refused, "is of another model: layers.0.gate.weight has shape [48, 32], and the model"),
        (
            ("--precision", "fp64"),
            Refused,
            "run.precision = fp64: keeps moments in torch.float64, and ",
        ),
        (("--data.validation-fraction", "0.1"), Refused, "was trained on "),
    ],
)
def test_what_cannot_go_on_is_refused(
    whole: Path, ended: Path, flags: tuple[str, ...], error: type[TrigridError], words: str
) -> None:
    before = (ended / "job.toml").read_text()
    with pytest.raises(error) as refused:
        train(whole, *SEVEN, *flags, resume=ended)
    assert words in str(refused.value)
    assert len(checkpoints(ended)) == 2
    assert "--precision" in flags or (ended / "job.toml").read_text() == before, "nothing is written"


def test_latest_is_of_this_job(whole: Path, ended: Path) -> None:
    """Not of one whose name begins alike, and the newest by its time."""
    other = ended.with_name(f"{whole.stem}-big-20990101-000000")
    shutil.copytree(ended, other)
    later = ended.with_name(f"{whole.stem}-20980101-000000-2")
    shutil.copytree(ended, later)
    summary = train(whole, *SEVEN, "--run.out", ended.parent, resume="latest")
    assert summary is not None
    assert summary.run_dir == str(later)


def test_a_run_that_is_trained_is_left_alone(whole: Path, ended: Path) -> None:
    part = ended / "checkpoints" / ".step-00000006.part"
    part.mkdir()
    with lock(ended), pytest.raises(Refused, match="is being trained by another process"):
        train(whole, *SEVEN, resume=ended)
    assert part.exists()


def test_a_last_checkpoint_that_fails(whole: Path, tmp_path: Path) -> None:
    """The run is not told as a success whose weights are nowhere."""
    full = patch.object(storage, "write_manifest", side_effect=OSError(28, "No space left on device"))
    with (
        full,
        pytest.raises(RunFailed, match=r"all steps are done, and their weights are not kept: rank 0: .*No space"),
    ):
        train(whole, *quick(2), "--run.out", tmp_path)


def test_another_batch_goes_on_counting(whole: Path, ended: Path) -> None:
    train(whole, *SEVEN, "--global-batch", 4, resume=ended)
    assert [entry["tokens"] for entry in steps(ended).values()] == [256, 512, 768, 1024, 1152, 1280, 1408]


def test_frozen_then_and_trained_now(whole: Path, tmp_path: Path) -> None:
    train(whole, *quick(2), "--optimizer.frozen", '["layers.0.*"]', "--run.out", tmp_path)
    (folder,) = tmp_path.iterdir()
    with pytest.raises(Refused, match=r"optimizer\.frozen = \[\]: .* has no mean of layers\.0\..* frozen then and"):
        train(whole, *SEVEN, resume=folder)


def test_there_is_nothing_to_resume(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"--resume = .*nowhere: there is no such folder; nearest legal: .*job-"):
        train(whole, *SEVEN, resume=tmp_path / "nowhere")
    with pytest.raises(Refused, match="is neither a checkpoint nor the folder of a run that has one"):
        train(whole, *SEVEN, resume=tmp_path)
    with pytest.raises(Refused, match='--resume = "": is empty'):
        train(whole, *SEVEN, resume="")
    unborn = tmp_path / "unborn-20260101-000000"
    shutil.copytree(run_dir(whole), unborn, ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(Refused, match="is a run that has no checkpoint yet"):
        train(whole, *SEVEN, resume=unborn)
    summary = train(whole, *quick(2), "--run.out", tmp_path / "new", resume="latest")
    assert summary is not None, "a new run"


def broken(at: set[int], loss: float = float("nan")) -> Any:
    """Steps whose batch begins at one of these samples have no finite gradient, or `loss` where it is given."""
    step = Engine.step

    def wrapped(
        self: Engine, tokens: Any, labels: Any, lr: Any, documents: Any, consumed: int, **more: Any
    ) -> StepResult:
        if consumed in at and loss != loss:
            return StepResult(loss, loss, ("rank 0: layers.1.up.weight",))
        result = step(self, tokens, labels, lr, documents, consumed, **more)
        return StepResult(loss, 1.0) if consumed in at else result

    return patch.object(Engine, "step", wrapped)


def test_not_finite_stop_skip_and_rewind(whole: Path, tmp_path: Path) -> None:
    """R92: named and ended; passed by without an update; or gone back on without the batch, for good."""
    with broken({24}):
        with pytest.raises(RunFailed, match=r"step 4: the gradient is not finite.*rank 0: layers\.1\.up\.weight"):
            train(whole, *SEVEN, "--run.out", tmp_path / "stop")
        train(whole, *SEVEN, "--on-nan", "skip", "--run.out", tmp_path / "skip")
        train(whole, *SEVEN, "--on-nan", "rewind", "--run.out", tmp_path / "rewind")
    (skip,), (rewind,) = (tmp_path / "skip").iterdir(), (tmp_path / "rewind").iterdir()
    state = read_manifest(checkpoints(skip)[0]).state
    assert (state.step, state.updates, state.consumed, state.skipped) == (7, 6, 56, ())
    state = read_manifest(checkpoints(rewind)[0]).state
    assert (state.step, state.updates, state.consumed, state.skipped, state.rewinds) == (7, 7, 64, ((24, 32),), 1)
    (event,) = [event for event in read_events(rewind) if event["kind"] == "rewind"]
    assert (event["from_step"], event["to_step"], event["skipped"]) == (4, 2, [24, 32])
    # Those that follow are the undisturbed run's next: no sample twice, none lost but the batch.
    assert [entry["step"] for entry in metrics(rewind, "step")] == [1, 2, 3, 3, 4, 5, 6, 7]
    first, again = (entry for entry in metrics(rewind, "step") if entry["step"] == 3)
    assert first["loss"] == again["loss"]


def test_a_run_that_keeps_going_back_ends(whole: Path, tmp_path: Path) -> None:
    with broken(set(range(24, 100, 8))), pytest.raises(RunFailed, match="has gone back 2 times"):
        train(whole, *SEVEN, "--on-nan", "rewind", "--faults.max-rewinds", 2, "--run.out", tmp_path)


def test_a_spike_is_gone_back_on(whole: Path, tmp_path: Path) -> None:
    """Without its batch and the one before; a run killed after that comes to the same: what it is judged by is kept."""
    flags = (*quick(8), "--faults.on-spike", "rewind", "--faults.spike-window", 3, "--faults.spike-sigmas", 20)
    with broken({40}, loss=60.0):
        train(whole, *flags, "--run.out", tmp_path / "a")
        (folder,) = (tmp_path / "a").iterdir()
        state = read_manifest(checkpoints(folder)[0]).state
        assert (state.step, state.skipped, state.rewinds, len(state.recent)) == (8, ((32, 48),), 1, 3)
        other = tmp_path / "b" / folder.name
        shutil.copytree(folder, other)
        for path in checkpoints(other)[:2]:
            shutil.rmtree(path)
        train(whole, *flags, resume=other)
    assert_alike(other, folder)


def test_a_spike_after_a_checkpoint_goes_back_before_it(whole: Path, tmp_path: Path) -> None:
    """The batch before a spike has made the weights of the newest checkpoint: it is set aside, and made again."""
    flags = (*quick(8), "--faults.on-spike", "rewind", "--faults.spike-window", 3, "--faults.spike-sigmas", 20)
    with broken({32}, loss=60.0):
        train(whole, *flags, "--run.out", tmp_path)
    (folder,) = tmp_path.iterdir()
    (event,) = [event for event in read_events(folder) if event["kind"] == "rewind"]
    assert (event["from_step"], event["to_step"], event["skipped"]) == (5, 2, [24, 40])
    assert [event["step"] for event in read_events(folder) if event["kind"] == "checkpoint"] == [0, 2, 4, 4, 6, 8]
    assert (folder / "checkpoints" / "set-aside-0-step-00000004").exists()


def test_restarts_of_a_launcher(whole: Path, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that torchrun starts again go on with their own run, whatever other runs there are and --resume says."""
    older = ended.parent
    flags = (*SEVEN, "--run.out", older)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    imported = ended / "checkpoints" / "step-00000002"
    with broken({24}), pytest.raises(RunFailed):
        train(whole, *flags)
    (mine,) = (path for path in older.iterdir() if path != ended)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(whole, *flags, resume=imported)
    assert len(list(older.iterdir())) == 2, "no new run"
    assert [event["step"] for event in read_events(mine) if event["kind"] == "start"] == [0, 2]
    assert_alike(mine, run_dir(whole))


def test_a_file_that_changes_after_it_was_verified(whole: Path, ended: Path) -> None:
    """An error of the disk while reading ends the run with the file's name, as a failure that may be tried again."""
    verify = restore.check_file

    def then_cut(folder: Path, file: Any) -> str | None:
        found = verify(folder, file)
        (folder / file.name).write_bytes(b"no header")
        return found

    with (
        patch.object(restore, "check_file", then_cut),
        pytest.raises(RunFailed, match=r"cannot be read: rank 0: .*rank-0"),
    ):
        train(whole, *SEVEN, resume=ended)


def test_the_environment_does_not_change_what_was(whole: Path, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGRID_RUN__SEED", "77")
    with pytest.raises(Refused, match=r"run\.seed = 77: was 0"):
        train(whole, *SEVEN, resume=ended)


def test_a_signal_saves_and_ends(whole: Path, tmp_path: Path) -> None:
    """Told to stop after the third step: a checkpoint of it, the marker, no summary; then the run goes on as if nothing
    had been."""
    seen: list[int] = []

    def asked() -> str | None:
        seen.append(len(seen))
        # The first time it is asked is before the first step.
        return "SIGUSR1" if len(seen) >= 4 else None

    with patch("trigrid.train.stopping.asked", asked):
        assert train(whole, *SEVEN, "--run.out", tmp_path) is None
    (folder,) = tmp_path.iterdir()
    marker = json.loads((folder / "preempted.json").read_text())
    assert (marker["step"], marker["checkpoint"]) == (3, str(folder / "checkpoints" / "step-00000003"))
    train(whole, *SEVEN, resume=folder)
    assert not (folder / "preempted.json").exists()
    assert_alike(folder, run_dir(whole))


def test_nodes_that_share_no_disk(tmp_path: Path) -> None:
    """R81: only the first rank prepares data and makes the run's folder; a rank that does not see it says so."""
    with pytest.raises(Refused, match=r"run\.out = .*: rank 8 on .* does not see it: all nodes must share"):
        check_shared(tmp_path, 8)
