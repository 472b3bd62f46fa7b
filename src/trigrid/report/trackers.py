"""Who is told of every recorded step beside metrics.jsonl: TensorBoard, W&B, MLflow, Prometheus.

Their libraries are imported only when used, and each tracker lives in a thread of its own: one that is missing, fails
or hangs costs one warning and no training time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from queue import Full, Queue
from threading import Thread
from typing import Any, Protocol

from trigrid.report.console import Console

PROJECT = "trigrid"
EXTRA = {"tensorboard": "train", "wandb": "trackers", "mlflow": "trackers", "prometheus": "trackers"}
MOST_WAITING = 1_000
CLOSE_S = 30.0
MLFLOW_BATCH = 100
"""MLflow takes this many parameters at once."""

Value = str | int | float | bool


@dataclass(frozen=True)
class Start:
    """What a tracker is told first. facts: dotted names of the job and of `Facts`; say: tells where to look."""

    run_dir: Path
    facts: Mapping[str, Value]
    prometheus_port: int
    say: Callable[[str], None]


class Tracker(Protocol):
    """Made with the `Start`; errors of any kind may be raised."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """`values` by names such as "train/loss", of one step."""

    def close(self, failed: bool) -> None:
        """The run is over."""


class TensorBoard:
    """Event files under the run's folder.

    Written at once and in this thread: the queue and thread that tensorboardX's SummaryWriter adds would keep an error,
    such as a full disk, to themselves.
    """

    def __init__(self, start: Start) -> None:
        from tensorboardX.event_file_writer import EventsWriter  # type: ignore[import-untyped]
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboardX.summary import scalar, text  # type: ignore[import-untyped]

        folder = start.run_dir / "tensorboard"
        folder.mkdir(exist_ok=True)
        self._event, self._scalar = Event, scalar
        self._writer = EventsWriter(str(folder / "events"))
        rows = "\n".join(f"| {key} | {value} |" for key, value in start.facts.items())
        self._write(0, text("job", f"| key | value |\n|---|---|\n{rows}"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write(step, self._scalar(name, value))
        self._writer.flush()

    def _write(self, step: int, summary: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self, failed: bool) -> None:
        self._writer.close()


class WandB:
    """A run of Weights & Biases, which reads its own settings (WANDB_MODE, WANDB_PROJECT, …)."""

    def __init__(self, start: Start) -> None:
        wandb = import_module("wandb")
        online = wandb.setup().settings.mode in ("online", "shared")
        # Without a key it would ask for one on a terminal, and wait.
        if online and not wandb.login(prompt=False):
            raise RuntimeError("no API key; run `wandb login` once, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=start.run_dir.name,
            dir=str(start.run_dir),
            config=dict(start.facts),
            settings=wandb.Settings(silent=True, console="off"),
        )
        if online:
            start.say(f"wandb: {self._run.url}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in files under the run's folder."""

    def __init__(self, start: Start) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            # MLflow 3 wants a data base by default, which mlflow-skinny has no library for.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (start.run_dir / "mlruns").absolute().as_uri()
        mlflow, entities = import_module("mlflow"), import_module("mlflow.entities")
        self._metric = entities.Metric
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        self._run_id = self._client.create_run(experiment_id, run_name=start.run_dir.name).info.run_id
        parameters = [entities.Param(key, str(value)) for key, value in start.facts.items()]
        for i in range(0, len(parameters), MLFLOW_BATCH):
            self._client.log_batch(self._run_id, params=parameters[i : i + MLFLOW_BATCH])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now_ms = round(time.time() * 1000)
        self._client.log_batch(
            self._run_id, metrics=[self._metric(name, value, now_ms, step) for name, value in values.items()]
        )

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")


class Prometheus:
    """The last values at http://HOST:PORT/metrics, as gauges such as `trigrid_train_loss`, while the run lasts."""

    def __init__(self, start: Start) -> None:
        from prometheus_client import CollectorRegistry, Gauge, Info, start_http_server

        self._registry, self._gauge = CollectorRegistry(), Gauge
        self._gauges: dict[str, Gauge] = {}
        facts = {key.replace(".", "_"): str(value) for key, value in start.facts.items()}
        Info("trigrid_run", "the job", registry=self._registry).info({"run": start.run_dir.name, **facts})
        try:
            self._server, self._thread = start_http_server(start.prometheus_port, registry=self._registry)
        except OSError as error:
            raise OSError(f"run.prometheus_port = {start.prometheus_port}: {error.strerror}") from None

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in {**values, "step": step}.items():
            if name not in self._gauges:
                self._gauges[name] = self._gauge(f"trigrid_{name.replace('/', '_')}", name, registry=self._registry)
            self._gauges[name].set(value)

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


KINDS: dict[str, Callable[[Start], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "prometheus": Prometheus,
}


class Trackers:
    """All trackers of a run. Nothing here raises or waits, but `close`, which waits for at most CLOSE_S."""

    def __init__(self, names: Sequence[str], start: Start, console: Console) -> None:
        self._console = console
        self._couriers = [_Courier(name, start, console) for name in dict.fromkeys(names)]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for courier in self._couriers:
            courier.log(step, values)

    def close(self, failed: bool) -> None:
        for courier in self._couriers:
            courier.finish(failed)
        deadline_s = time.monotonic() + CLOSE_S
        for courier in self._couriers:
            courier.wait(deadline_s)


class _Courier:
    """A tracker and its thread, which ends at the tracker's first error."""

    def __init__(self, name: str, start: Start, console: Console) -> None:
        self._name, self._start, self._console = name, start, console
        # None ends the thread.
        self._queue: Queue[tuple[int, Mapping[str, float]] | None] = Queue(MOST_WAITING)
        self._failed = self._warned = False
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._put((step, values))

    def finish(self, failed: bool) -> None:
        self._failed = failed
        self._put(None)

    def wait(self, deadline_s: float) -> None:
        self._thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._thread.is_alive():
            self._warn(f"does not finish within {CLOSE_S:.0f} s; what it was not told is in metrics.jsonl")

    def _put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        if self._warned:
            return
        try:
            self._queue.put_nowait(item)
        except Full:
            self._warn(f"does not keep up: {MOST_WAITING:,} records wait; it is told no more")

    def _work(self) -> None:
        tracker: Tracker | None = None
        try:
            tracker = KINDS[self._name](self._start)
            while (item := self._queue.get()) is not None:
                tracker.log(*item)
            tracker.close(self._failed)
        except ModuleNotFoundError as error:
            self._warn(f"needs the package {error.name}: pip install 'trigrid[{EXTRA[self._name]}]'")
        except Exception as error:
            self._warn(f"failed, and is told no more: {type(error).__name__}: {error}")
            if tracker:
                with suppress(Exception):
                    tracker.close(True)

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._console.warn(f"run.trackers: {self._name} {text}")
