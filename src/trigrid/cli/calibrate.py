"""`trigrid calibrate`."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trigrid.plan.measured import Measured
    from trigrid.report.console import Console
    from trigrid.spec.job import Job
    from trigrid.spec.layout import Layout


@app.command(
    help_epilogue=examples(
        "trigrid calibrate --out cluster.toml",
        "trigrid calibrate examples/tiny-3d.toml --processes 2 --seconds 30",
        "torchrun --nproc-per-node 8 -m trigrid calibrate --layouts tp8,tp4dp2",
        "trigrid calibrate --nccl-tests all_reduce.txt all_gather.txt",
        "trigrid calibrate --gemms gemms.csv --onto cluster.toml",
    )
)
def calibrate(
    job: Annotated[
        Path | None, Parameter(help="A job whose shapes, number format and layout are measured besides usual ones.")
    ] = None,
    *overrides: Overrides,
    out: Annotated[Path, Parameter(help="The file to write.")] = Path("cluster.toml"),
    processes: Annotated[int, Parameter(help="Local processes that measure at once, joined by gloo.")] = 1,
    seconds: Annotated[float, Parameter(help="What to take, about.")] = 60.0,
    dtypes: Annotated[
        str | None,
        Parameter(help="Number formats that are measured: fp32,bf16,fp16. By default the job's, else fp32,bf16."),
    ] = None,
    layouts: Annotated[
        str | None,
        Parameter(help="Layouts whose groups are measured: `tp2dp2,tp4`. By default the job's, else each node as one."),
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where to measure.")] = "auto",
    nodes_per_leaf: Annotated[int, Parameter(help="Nodes under one leaf switch: what is farther is the spine.")] = 32,
    nccl_tests: Annotated[
        list[Path] | None,
        Parameter(consume_multiple=True, negative="", help="Tables of nccl-tests to read; nothing is measured then."),
    ] = None,
    gemms: Annotated[
        Path | None, Parameter(help="A CSV of products: m, n, k, dtype, seconds or tflops; nothing is measured then.")
    ] = None,
    onto: Annotated[Path | None, Parameter(help="A calibration of which what is read replaces a part.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure this machine or cluster, or read others' measurements, into a file that plans are made with.

    Products by shape, attention by sequence, memory, launches, on CPUs norms and activations; with several ranks
    (torchrun, or --processes) also every collective by size and group, messages, and compute beside them. Then:
    trigrid plan JOB --cluster cluster.toml
    """
    from trigrid.plan.measured_file import load_measured
    from trigrid.plan.measured_text import measured_text
    from trigrid.report.console import Console

    console = Console(quiet)
    command = shlex.join(["trigrid", *sys.argv[1:]])
    _check(seconds, processes, nodes_per_leaf, out)
    if nccl_tests or gemms or onto:
        measured = _imported(nccl_tests or [], gemms, onto, command)
    else:
        found = _measured(job, overrides, processes, seconds, dtypes, layouts, device, nodes_per_leaf, command, console)
        if found is None:
            return
        measured = found
    _write(out, measured_text(measured))
    measured = load_measured(str(out))
    console.say(f"{out} is written; next:  trigrid plan {job or 'JOB'} --cluster {out}")
    if as_json:
        print_json(_as_json(measured))
    else:
        from trigrid.check.calibrate_text import calibration_text

        print(calibration_text(measured))


def _check(seconds: float, processes: int, nodes_per_leaf: int, out: Path) -> None:
    from trigrid.errors import Problem, Refused

    problems = []
    if not 0 < seconds <= 86400:
        problems.append(Problem("--seconds", seconds, "must be above 0, and at most a day", (60,)))
    for flag, value in (("--processes", processes), ("--nodes-per-leaf", nodes_per_leaf)):
        if value < 1:
            problems.append(Problem(flag, value, "must be at least 1", (1,)))
    if out.is_dir():
        problems.append(Problem("--out", out, "is a folder, not a file", (out / "cluster.toml",)))
    elif not out.parent.is_dir():
        # Before minutes of measuring, not after them.
        problems.append(Problem("--out", out, "its folder does not exist", (out.name,)))
    if problems:
        raise Refused(problems)


def _measured(
    job: Path | None,
    overrides: Sequence[str],
    processes: int,
    seconds: float,
    dtypes: str | None,
    layouts: str | None,
    device: Literal["auto", "cpu", "cuda"],
    nodes_per_leaf: int,
    command: str,
    console: Console,
) -> Measured | None:
    """What was measured; None on ranks that have nothing to say."""
    from trigrid.job import load_job
    from trigrid.launch.place import find_place

    loaded = load_job(job, overrides) if job else None
    place = find_place(os.environ)
    world = place.world if place else processes
    # Before torch is loaded.
    formats, chosen = _formats(dtypes, loaded), _layouts(layouts, loaded, world)

    from trigrid.check.calibrate import Order, calibrate_local, calibrate_rank, pick_device

    kind = pick_device(device, processes)
    order = Order(seconds, formats, kind, loaded, chosen, nodes_per_leaf, command)
    if place is None:
        if kind == "cpu":
            console.say(f"measuring {processes} process{'es' if processes > 1 else ''} for about {seconds:g} s")
        return calibrate_local(order, processes, console)

    from trigrid.check.calibrate import joined

    with joined(order, place, console) as (rank_device, progress):
        found = calibrate_rank(order, place.rank, place.world, place.local_world, rank_device, progress)
    return found if place.rank == 0 else None


def _formats(dtypes: str | None, job: Job | None) -> tuple[str, ...]:
    from trigrid.errors import Problem, Refused

    legal = ("fp32", "bf16", "fp16")
    if dtypes is None:
        # fp64 is planned as fp32.
        return (("bf16",) if job.run.precision == "bf16" else ("fp32",)) if job else ("fp32", "bf16")
    names = tuple(dict.fromkeys(name.strip() for name in dtypes.split(",")))
    if wrong := [name for name in names if name not in legal]:
        raise Refused([Problem("--dtypes", wrong[0], "is no number format of products", legal)])
    return names


def _layouts(names: str | None, job: Job | None, world: int) -> tuple[Layout, ...]:
    """The layouts that are named, else the job's if it is as large as the world."""
    import re

    from trigrid.errors import Problem, Refused
    from trigrid.spec.layout import Layout

    if names is None:
        return (job.parallel,) if job and job.parallel.world == world else ()
    found = []
    for name in names.split(","):
        if not re.fullmatch(r"(?:(?:tp|pp|dp)\d+)+", name.strip()):
            raise Refused([Problem("--layouts", name, "is no layout", ("tp2dp2", f"tp{world}"))])
        layout = Layout(**{axis: int(degree) for axis, degree in re.findall(r"(tp|pp|dp)(\d+)", name)})  # type: ignore[arg-type]
        if layout.world != world:
            reason = f"has {layout.world} ranks, but {world} measure"
            raise Refused([Problem("--layouts", name, reason, (f"tp{world}", f"dp{world}"))])
        found.append(layout)
    return tuple(found)


def _imported(tables: Sequence[Path], gemms: Path | None, onto: Path | None, command: str) -> Measured:
    """What others measured, on top of the calibration `onto`, if there is one."""
    import time
    from dataclasses import replace

    from trigrid.check.calibrate_import import read_gemms, read_nccl_tests, read_text, wire_of
    from trigrid.plan.measured import Measured
    from trigrid.plan.measured_file import load_measured

    base = load_measured(str(onto)) if onto else Measured()
    wires = {(w.kind, w.tier, w.ranks, w.inside): w for w in base.wires}
    for path in tables:
        wire = wire_of(read_nccl_tests(read_text(path, "--nccl-tests"), str(path)))
        wires[wire.kind, wire.tier, wire.ranks, wire.inside] = wire
    products = {**base.products, **(read_gemms(read_text(gemms, "--gemms"), str(gemms)) if gemms else {})}
    read = ", ".join(str(path) for path in (*tables, *([gemms] if gemms else [])))
    about: dict[str, str | int | float] = {
        **base.about,
        "imported": time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime()),
        "sources": read,
        "import_command": command,
    }
    return replace(base, about=about, wires=tuple(wires.values()), products=products)


def _write(path: Path, text: str) -> None:
    from trigrid.errors import Problem, Refused

    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise Refused([Problem("--out", path, f"cannot be written: {error.strerror}")]) from None


def _as_json(measured: Measured) -> dict[str, object]:
    """The file's tables by their names in it."""
    import tomllib

    return tomllib.loads(Path(measured.path).read_text(encoding="utf-8"))
