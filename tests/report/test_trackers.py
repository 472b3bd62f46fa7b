"""Trackers: TensorBoard's and Prometheus' own libraries, stand-ins for W&B and MLflow, and everything that fails."""

from __future__ import annotations

import socket
import struct
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from trigrid.report import trackers as module
from trigrid.report.console import Console
from trigrid.report.trackers import Start, TensorBoard, Trackers

FACTS = {"model.hidden": 32, "parallel.tp": 2, "device": "cpu"}
VALUES = {"train/loss": 5.25, "train/tokens_per_s": 1234.5}


def start(run_dir: Path, say: Callable[[str], None] = print, port: int = 0) -> Start:
    return Start(run_dir, FACTS, port, say)


def track(name: str, told: Start, steps: int = 3, failed: bool = False) -> None:
    """A run of `steps` recorded steps, told to one tracker."""
    trackers = Trackers([name], told, Console())
    for step in range(1, steps + 1):
        trackers.log(step, {key: value / step for key, value in VALUES.items()})
    trackers.close(failed)


def events(folder: Path) -> Iterator[Any]:
    """The events of the only event file of a folder: length, checksum, event, checksum, and so on."""
    from tensorboardX.proto.event_pb2 import Event as Message

    (path,) = folder.glob("events.out.tfevents.*")
    rest = path.read_bytes()
    while rest:
        (length,) = struct.unpack("<Q", rest[:8])
        yield Message.FromString(rest[12 : 12 + length])
        rest = rest[16 + length :]


def test_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    track("tensorboard", start(tmp_path))
    version, job, *steps = events(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert b"| parallel.tp | 2 |" in job.summary.value[0].tensor.string_val[0]
    told = [(event.step, value.tag, value.simple_value) for event in steps for value in event.summary.value]
    assert told == [(step, tag, pytest.approx(value / step)) for step in (1, 2, 3) for tag, value in VALUES.items()]
    assert capsys.readouterr() == ("", "")


def test_tensorboard_can_be_read_while_the_run_lasts(tmp_path: Path) -> None:
    tracker = TensorBoard(start(tmp_path))
    tracker.log(1, VALUES)
    assert [event.step for event in events(tmp_path / "tensorboard")] == [0, 0, 1, 1]
    tracker.close(False)


def get(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


@pytest.fixture
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port; servers listen on loopback only."""
    monkeypatch.setattr(
        prometheus_client, "start_http_server", partial(prometheus_client.start_http_server, addr="127.0.0.1")
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_prometheus(tmp_path: Path, on_loopback: int, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = module.Prometheus(start(tmp_path, port=on_loopback))
    for step in (1, 2):
        tracker.log(step, VALUES)
    tracker.log(2, {"validation/loss": 4.5})
    told = get(on_loopback).splitlines()
    assert {"trigrid_train_loss 5.25", "trigrid_train_tokens_per_s 1234.5"} <= set(told)
    assert {"trigrid_validation_loss 4.5", "trigrid_step 2.0"} <= set(told)
    (info,) = (line for line in told if line.startswith("trigrid_run_info{"))
    assert f'run="{tmp_path.name}"' in info
    assert 'parallel_tp="2"' in info
    tracker.close(False)
    with pytest.raises(OSError, match="refused"):
        get(on_loopback)
    assert capsys.readouterr() == ("", "")


def test_a_port_in_use_is_one_warning(tmp_path: Path, on_loopback: int, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", on_loopback))
        taken.listen()
        track("prometheus", start(tmp_path, port=on_loopback))
    assert capsys.readouterr().err == (
        "warning: run.trackers: prometheus failed, and is told no more: "
        f"OSError: run.prometheus_port = {on_loopback}: Address already in use\n"
    )


class FakeWandB(ModuleType):
    """As much of wandb as is used, remembering what it was told."""

    def __init__(self, mode: str = "online", key: bool = True) -> None:
        super().__init__("wandb")
        self.mode, self.key = mode, key
        self.options: dict[str, Any] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_code: int | None = None

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(mode=self.mode))

    def login(self, *, prompt: bool) -> bool:
        assert not prompt
        assert self.mode == "online"
        return self.key

    def Settings(self, **options: Any) -> dict[str, Any]:
        return options

    def init(self, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(url="https://wandb.invalid/run", log=self._log, finish=self._finish)

    def _log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def _finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.mark.parametrize(("mode", "lines"), [("online", ["wandb: https://wandb.invalid/run"]), ("offline", [])])
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, lines: list[str]) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandB(mode))
    said: list[str] = []
    track("wandb", start(tmp_path, said.append), steps=1, failed=True)
    assert wandb.options == {
        "project": "trigrid",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "config": FACTS,
        "settings": {"silent": True, "console": "off"},
    }
    assert wandb.logged == [(1, VALUES)]
    assert wandb.exit_code == 1
    assert said == lines


def test_wandb_without_a_key_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", wandb := FakeWandB(key=False))
    track("wandb", start(tmp_path))
    assert capsys.readouterr().err == (
        "warning: run.trackers: wandb failed, and is told no more: "
        "RuntimeError: no API key; run `wandb login` once, or set WANDB_MODE=offline\n"
    )
    assert not wandb.options


class FakeMLflow:
    """As much of mlflow and its client as is used."""

    def __init__(self) -> None:
        self.uri = self.status = ""
        self.experiments: list[str] = []
        self.parameters: dict[str, str] = {}
        self.metrics: list[tuple[str, float, int]] = []

    def MlflowClient(self, tracking_uri: str) -> FakeMLflow:
        self.uri = tracking_uri
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="7") if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert experiment_id == "7"
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id of {run_name}"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100, "more are refused"
        self.parameters |= {param.key: param.value for param in params}
        self.metrics += [(metric.key, metric.value, metric.step) for metric in metrics]

    def set_terminated(self, run_id: str, status: str) -> None:
        self.status = f"{run_id}: {status}"


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    fake = FakeMLflow()
    entities = SimpleNamespace(
        Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step),
        Param=lambda key, value: SimpleNamespace(key=key, value=value),
    )
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    # The tracker sets it; this takes it back.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return fake


def test_mlflow_in_files_of_the_run(tmp_path: Path, mlflow: FakeMLflow) -> None:
    facts = {f"key.{i}": i for i in range(250)}
    track("mlflow", Start(tmp_path, facts, 0, print), steps=2)
    assert mlflow.uri == (tmp_path / "mlruns").as_uri()
    assert mlflow.experiments == ["trigrid"]
    assert mlflow.parameters == {key: str(value) for key, value in facts.items()}
    assert mlflow.metrics == [(key, value / step, step) for step in (1, 2) for key, value in VALUES.items()]
    assert mlflow.status == f"id of {tmp_path.name}: FINISHED"


def test_mlflow_at_a_server(tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    mlflow.experiments.append("mine")
    track("mlflow", start(tmp_path), failed=True)
    assert mlflow.uri == "http://127.0.0.1:5000"
    assert mlflow.experiments == ["mine"]
    assert mlflow.status == f"id of {tmp_path.name}: FAILED"


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("tensorboard", "tensorboardX", "train"),
        ("wandb", "wandb", "trackers"),
        ("mlflow", "mlflow", "trackers"),
        ("prometheus", "prometheus_client", "trackers"),
    ],
)
def test_a_missing_library_is_one_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    package: str,
    extra: str,
) -> None:
    class Hide:
        def find_spec(self, module: str, *_: object) -> None:
            if module.partition(".")[0] == package:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    for loaded in [m for m in sys.modules if m.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setattr(sys, "meta_path", [Hide(), *sys.meta_path])
    track(name, start(tmp_path))
    wanted = f"warning: run.trackers: {name} needs the package {package}: pip install 'trigrid[{extra}]'\n"
    assert capsys.readouterr() == ("", wanted)


class Failing:
    """Fails at its second step, and again when closed."""

    def __init__(self, start: Start) -> None:
        self.closed = False

    def log(self, step: int, values: object) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")

    def close(self, failed: bool) -> None:
        self.closed = True
        raise OSError("again")


def test_a_failure_later_is_one_warning_and_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = []
    monkeypatch.setitem(module.KINDS, "wandb", lambda start: made.append(Failing(start)) or made[0])
    trackers = Trackers(["wandb", "tensorboard", "tensorboard"], start(tmp_path), Console(quiet=True))
    for step in range(1, 30):
        trackers.log(step, VALUES)
    trackers.close(False)
    assert capsys.readouterr().err == (
        "warning: run.trackers: wandb failed, and is told no more: OSError: [Errno 28] No space left on device\n"
    )
    assert made[0].closed
    assert {event.step for event in events(tmp_path / "tensorboard")} == {0, *range(1, 30)}


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it is too slow for its queue or never finishes; nor does what it holds grow without end."""
    over = Event()
    monkeypatch.setitem(module.KINDS, "mlflow", lambda start: over.wait())
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    for steps, wanted in (
        (10, "does not keep up: 2 records wait; it is told no more"),
        (1, "does not finish within 0 s; what it was not told is in metrics.jsonl"),
    ):
        track("mlflow", start(tmp_path), steps=steps)
        assert capsys.readouterr().err == f"warning: run.trackers: mlflow {wanted}\n"
    over.set()
