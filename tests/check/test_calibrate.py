"""Calibration: what is measured, what is read of others', how a plan uses it and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trigrid.blueprint.claims import claims
from trigrid.blueprint.decoder import decoder
from trigrid.check import calibrate
from trigrid.check.calibrate import Order, calibrate_local
from trigrid.check.calibrate_combine import Sweep, combined
from trigrid.check.calibrate_fit import fit_attention, fit_products, fit_wire, least_squares
from trigrid.check.calibrate_import import Table, read_gemms, read_nccl_tests, wire_of
from trigrid.check.calibrate_kernels import FORMS, SMALL, Far, Form, _product, measure_launch, products_of
from trigrid.check.calibrate_meter import Meter
from trigrid.check.calibrate_operations import measure_operations
from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.job import load_job
from trigrid.plan.backend import backend_of
from trigrid.plan.machine import UNMEASURED, make_machine
from trigrid.plan.measured import (
    OPERATIONS,
    Attention,
    Launch,
    Measured,
    Operation,
    Passes,
    Products,
    Wire,
    WireKind,
)
from trigrid.plan.measured_file import load_measured, parse_measured
from trigrid.plan.measured_text import measured_text
from trigrid.plan.network import Group, Network
from trigrid.plan.plan import as_json, make_plan
from trigrid.plan.software import choose_software, engine_software
from trigrid.report.console import Console
from trigrid.spec.cluster import Tier
from trigrid.spec.gpu import load_gpu
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.models import load_model

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-3d.toml"


def wire(kind: WireKind, tier: Tier, ranks: int, inside: int, hop_s: float, link_Bps: float) -> Wire:
    return Wire(kind, tier, ranks, inside, hop_s, link_Bps, 0.0)


MADE = Measured(
    about={"date": "2026-01-02 03:04:05Z", "host": "somewhere", "accelerator": "made up", "ranks": 8},
    gpus_per_node=4,
    accelerator=replace(load_gpu("h100"), name="made up", peak_flops={"fp32": 2e12}, sustained={}, aliases=()),
    presumed=("power_w",),
    products={"fp32": Products(1e12, 0.0, 10.0, 20.0, 0.05, ((8.0, 16.0, 32.0, 0.5),))},
    attention={"fp32": Attention(5e11, 64.0, 3.0, 0.1)},
    passes=Passes(1e11, 0.01, ((1e6, 1e-5),)),
    operations={"fp32": {"norm": Operation(((1e3, 0.25),), ((2e3, 0.375), (4e6, 0.5)))}},
    launch=Launch(0.0, True),
    wires=(
        wire("all_reduce", Tier.NVLINK, 2, 1, 1e-3, 1e9),
        wire("all_gather", Tier.LEAF, 8, 4, 2e-3, 1e8),
        wire("message", Tier.NVLINK, 2, 1, 3e-3, 2e9),
    ),
    values={"step.eager": 0.0, "jitter.share": 0.0},
)


def job(*overrides: str) -> Job:
    return load_job(TINY, ["--precision", "fp32", *overrides])


def planned_with(measured: Measured, path: Path, *overrides: str) -> dict[str, object]:
    path.write_text(measured_text(measured))
    return as_json(make_plan(job("--cluster.calibration", str(path), *overrides)))


# ---------------------------------------------------------------------------------------------- fits


def test_fits_find_the_parameters_that_made_the_points() -> None:
    made = Products(3e11, 0.0, 17.0, 90.0, 0.0)
    sides = (64.0, 300.0, 2000.0)
    fitted = fit_products(tuple((m, n, k, made.form(m, n, k)) for m in sides for n in sides for k in sides))
    assert (fitted.flops, fitted.half_n, fitted.half_k) == pytest.approx((3e11, 17.0, 90.0), rel=1e-6)
    assert fitted.half_m == pytest.approx(0.0, abs=1e-6)
    assert fitted.error < 1e-9

    link = wire("all_reduce", Tier.LEAF, 8, 4, 5e-5, 1.2e10)
    points = tuple((float(2**n), link.seconds("all_reduce", 2**n, 8, 4)) for n in range(10, 28, 3))
    found = fit_wire("all_reduce", Tier.LEAF, 8, 4, points)
    assert (found.hop_s, found.link_Bps) == pytest.approx((5e-5, 1.2e10), rel=1e-6)
    # Between its points a wire takes what was measured; how far the form is from them is told nevertheless.
    slower = fit_wire("all_reduce", Tier.LEAF, 8, 4, (*points[:-1], (points[-1][0], 9 * points[-1][1])))
    assert slower.error > 0.01

    def spent(s: int) -> float:
        return 2 * 3 * 4 * s * s * 128 / 1e12 * (1 + 200 / s)

    attention = fit_attention(tuple((3.0, 4.0, float(s), 128.0, spent(s), 2.0 * spent(s)) for s in (128, 512, 4096)))
    assert (attention.flops, attention.half_sequence, attention.backward) == pytest.approx((1e12, 200.0, 2.0))


def test_no_parameter_is_negative_and_few_points_are_enough() -> None:
    # A latency that would have to be negative.
    assert least_squares([[1.0, 10.0], [4.0, 10.0], [16.0, 0.1]])[1] >= 0
    assert least_squares([[2.0, 3.0]]) == pytest.approx([0.5, 0.0])
    # Rows that do not tell the two apart.
    assert least_squares([[1.0, 1.0], [1.0, 1.0]]) == pytest.approx([1.0, 0.0])


def test_memory_is_as_fast_as_for_as_many_bytes() -> None:
    passes = Passes(1e9, 0.0, ((1e3, 1e-7), (1e5, 1e-4), (1e6, 1e-3)))
    rates = [passes.rate(size) for size in (1.0, 1e3, 1e4, 1e5, 1e6, 1e9)]
    assert rates == pytest.approx([1e10, 1e10, 1e10**0.5 * 1e9**0.5, 1e9, 1e9, 1e9])
    assert Passes(5.0, 0.0).rate(3.0) == 5.0


def test_an_operation_takes_what_its_start_does_and_more_with_its_size() -> None:
    points = ((1e3, 1e-6), (1e5, 1e-4), (1e6, 1e-2))
    found = Operation(points, ((1e3, 7.0),))
    spent = [found.seconds(size, backward=False) for size in (0.0, 1e3, 1e4, 1e5, 1e6, 3e6)]
    assert spent == pytest.approx([1e-6, 1e-6, 1e-5, 1e-4, 1e-2, 3e-2])
    assert [found.seconds(size, backward=True) for size in (1.0, 1e4)] == pytest.approx([7.0, 70.0])


# ---------------------------------------------------------------------------------------------- file


def test_a_file_says_what_it_was_written_from(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(measured_text(MADE))
    assert load_measured(str(path)) == replace(MADE, path=str(path))


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        ("flops = 1e+12", "flops = -1", "products.fp32.flops = -1: a number above 0 is needed"),
        ("flops = 1e+12", "", "products.fp32.flops = not given: a number above 0 is needed"),
        ('kind = "all_gather"', 'kind = "gather"', "wires.1.kind = gather: no such choice; nearest legal: all_reduce"),
        ("ranks = 8\ninside", "ranks = 1\ninside", "wires.1.ranks = 1: a whole number from 2 is needed"),
        ("[products.fp32]", "[products.fp33]", "products.fp33 = { }: is no number format of the planner"),
        ("[8, 16, 32, 0.5]", "[8, 16, 0.5]", "products.fp32.points = [ ]: an array of arrays of 4 numbers above 0"),
        ('"jitter.share"', '"jitter"', "values.jitter = 0.0: the planner has no constant of this name"),
        ("blocking = true", "blocking = 1", "launch.blocking = 1: true or false is needed"),
        ("[passes]", "[pases]", "pases = { }: there is no such table"),
        ("[operations.fp32.norm]", "[operations.fp32.nrm]", "operations.fp32.nrm = { }: is no operation of the engine"),
        ("[1000, 0.25]", "[1000]", "operations.fp32.norm.forward = [ ]: an array of arrays of 2 numbers above 0"),
        ("[\n  [2000, 0.375],\n  [4000000, 0.5],\n]", "[]", "norm.backward = [ ]: at least one point is needed"),
        ('format = "trigrid cluster 1"', 'format = "trigrid cluster 9"', "is no calibration that this version reads"),
        ("gpus_per_node = 4", "gpus_per_node = 0", "cluster.gpus_per_node = 0: a whole number from 1 is needed"),
        ("[launch]", "[launch", "not TOML"),
    ],
)
def test_mistakes_in_a_file_are_told_with_their_line(line: str, wrong: str, message: str) -> None:
    text = measured_text(MADE)
    assert text.count(line) == 1
    with pytest.raises(Refused) as refused:
        parse_measured(text.replace(line, wrong), "c.toml")
    (problem,) = refused.value.problems
    assert message in str(problem)
    at = text[: text.index(line)].count("\n") + 1
    # A value that is missing is told at its table; in the middle of an array, at the array's line.
    assert problem.where in {f"c.toml:{at}", f"c.toml:{at - 1}"}


def test_a_plan_without_the_file_or_its_number_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"cluster.calibration = no.toml: cannot be read: No such file"):
        make_plan(job("--cluster.calibration", "no.toml"))
    path = tmp_path / "c.toml"
    path.write_text(measured_text(MADE))
    with pytest.raises(Refused, match=r"run.precision = bf16: .*c.toml has no rate of products in bf16.*fp32"):
        make_plan(job("--cluster.calibration", str(path), "--precision", "bf16"))


# ---------------------------------------------------------------------------------------------- plan


def test_groups_cost_what_their_wires_say() -> None:
    network = Network(make_machine(load_gpu("h100"), gpus_per_node=4, measured=MADE))
    pair, four, eight = (Group(n, min(n, 4), -(-n // 4), Tier.LEAF if n > 4 else Tier.NVLINK) for n in (2, 4, 8))
    size = 1e6
    assert network.reduce_s(size, pair) == pytest.approx(2 * (1e-3 + size / 2 / 1e9))
    # An all-reduce of other ranks, and a ring of another kind, over the only wire of the tier.
    assert network.reduce_s(size, four) == pytest.approx(2 * (3 * 1e-3 + size * 3 / 4 / 1e9))
    assert network.gather_s(size, four) == pytest.approx(3 * 1e-3 + size * 3 / 4 / 1e9)
    # Between nodes of four each rank has a NIC of its own.
    assert network.gather_s(size, eight) == network.scatter_s(size, eight)
    assert network.gather_s(size, eight) == pytest.approx(7 * 2e-3 + size * 7 / 8 / 4 / 1e8)
    assert network.message_s(size, Tier.NVLINK) == pytest.approx(3e-3 + size / 2e9)
    # What was not measured is as before.
    plain = Network(make_machine(load_gpu("h100"), gpus_per_node=4))
    spine = Group(64, 4, 16, Tier.SPINE)
    assert network.gather_s(size, spine) == plain.gather_s(size, spine)
    assert network.exchange_s(size, four) == plain.exchange_s(size, four)
    assert network.message_s(size, Tier.LEAF) == plain.message_s(size, Tier.LEAF)


def test_between_its_points_a_wire_takes_what_was_measured() -> None:
    made = Wire("all_reduce", Tier.NVLINK, 2, 1, 1e-3, 1e9, 0.0, ((1e3, 5e-3), (1e5, 5e-1), (1e7, 7.0)))
    assert [made.seconds("all_reduce", size, 2, 1) for size in (1e3, 1e4, 1e5)] == pytest.approx([5e-3, 5e-2, 5e-1])
    form = 2 * (1e-3 + 1e7 / 2 / 1e9)
    # Smaller, larger, of other ranks and of another kind than was measured.
    assert made.seconds("all_reduce", 1.0, 2, 1) == pytest.approx(2e-3 + 1e-9)
    assert made.seconds("all_reduce", 1e7, 2, 1) == pytest.approx(form)
    assert made.seconds("all_reduce", 1e4, 4, 1) == pytest.approx(2 * (3e-3 + 1e4 * 3 / 4 / 1e9))
    assert made.seconds("all_gather", 1e4, 2, 1) == pytest.approx(1e-3 + 1e4 / 2 / 1e9)


def test_a_plan_changes_as_the_closed_forms_say(tmp_path: Path) -> None:
    layout = ("--tp", "2", "--pp", "1", "--dp", "1", "--parallel.sequence-parallel", "false")
    free = replace(MADE, products={"fp32": Products(1e30, 0, 0, 0, 0)}, passes=Passes(1e30, 0))
    free = replace(free, attention={"fp32": Attention(1e30, 0, 1, 0)}, operations={})
    only_wires = planned_with(free, tmp_path / "wires.toml", *layout)
    whole = job(*layout)
    model, m = whole.model, whole.batch.microbatches(whole.parallel)
    size = whole.batch.micro_batch * whole.batch.sequence * model.hidden * 4
    # Two sums forward and two backward for each block, one for the embedding, one for the head.
    sums = m * (4 * model.layers + 2) * 2 * (1e-3 + size / 2 / 1e9)
    assert only_wires["time"]["step_s"]["best"] == pytest.approx(sums, rel=1e-6)  # type: ignore[index]

    # Twice as fast products take half of what is left.
    still = replace(free, wires=(wire("all_reduce", Tier.NVLINK, 2, 1, 0.0, 1e30),))
    steps = []
    for name, flops in (("one", 1e9), ("two", 2e9)):
        made = replace(still, products={"fp32": Products(flops, 0, 10.0, 20.0, 0)}, values=MADE.values)
        steps.append(planned_with(made, tmp_path / f"{name}.toml", *layout)["time"]["step_s"]["best"])  # type: ignore[index]
    assert steps[0] == pytest.approx(2 * steps[1], rel=1e-6)
    # Launches add where nothing else is done meanwhile.
    slow = planned_with(replace(still, launch=Launch(1e-3, True)), tmp_path / "l.toml", *layout)
    assert slow["time"]["step_s"]["best"] > m * model.layers * 3 * 10e-3  # type: ignore[index]


def test_operations_of_the_engine_cost_what_was_measured_of_them(tmp_path: Path) -> None:
    """Their start is in it: a launch comes on top of the others alone. Other trainers' operations are others."""
    layout = ("--tp", "1", "--pp", "1", "--dp", "1", "--parallel.sequence-parallel", "false")
    gated = Operation(((1.0, 2.0),), ((1.0, 3.0),))
    whole = job(*layout)
    m, layers = whole.batch.microbatches(whole.parallel), whole.model.layers
    tokens = whole.batch.micro_batch * whole.batch.sequence

    def step(launch_s: float, operations: dict[str, Operation]) -> float:
        free = Measured(
            accelerator=MADE.accelerator,
            products={"fp32": Products(1e30, 0, 0, 0, 0)},
            attention={"fp32": Attention(1e30, 0, 1, 0)},
            passes=Passes(1e30, 0),
            operations={"fp32": operations},
            launch=Launch(launch_s, True),
            values=MADE.values,
        )
        found = planned_with(free, tmp_path / f"{launch_s}-{len(operations)}.toml", *layout)
        return float(found["time"]["step_s"]["best"])  # type: ignore[index]

    # Five passes forward and eleven backward over what is ffn wide, of four bytes.
    each = m * layers * tokens * 4 * whole.model.ffn * (5 * 2.0 + 11 * 3.0)
    assert step(0.0, {"gated": gated}) == pytest.approx(each, rel=1e-6)
    # Another trainer's are not priced by it.
    path = tmp_path / "other.toml"
    path.write_text(measured_text(replace(MADE, operations={"fp32": {"gated": gated}})))
    there = job("--cluster.calibration", str(path), *layout)
    assert make_plan(there).step_s.best > each > make_plan(there, choose_software(there, "megatron")).step_s.best
    # Its two kernels, once forward and twice backward, are no launches then.
    fewer = step(1e3, {}) - (step(1e3, {"gated": gated}) - each)
    assert fewer == pytest.approx(m * layers * 3 * 2 * 1e3, rel=1e-6)


def test_a_plan_says_that_it_is_calibrated_and_from_when(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    found = planned_with(MADE, path)
    assert found["calibration"]["date"] == "2026-01-02 03:04:05Z"  # type: ignore[index]
    assert f"calibrated by {path}: 2026-01-02 03:04:05Z, somewhere, made up, 8 ranks" in found["assumptions"]  # type: ignore[operator]
    assert "not measured but presumed: power_w" in found["assumptions"]  # type: ignore[operator]
    assert as_json(make_plan(job()))["calibration"] is None
    # The file stands for a cluster file, and leaves what the job says of its cluster as it is.
    with pytest.raises(SystemExit):
        app(["plan", str(TINY), "--precision", "fp32", "--cluster", str(path), "--price", "2", "--json", "--quiet"])
    told = json.loads(capsys.readouterr().out)
    assert told["calibration"]["path"] == str(path)
    assert told["training"]["cost"] > 0


def test_a_calibration_of_cpus_is_planned_with_gloo(tmp_path: Path) -> None:
    """Where the job does not say where it will run."""
    path = tmp_path / "c.toml"
    path.write_text(measured_text(replace(MADE, about={**MADE.about, "device": "cpu"})))
    there = ("--cluster.calibration", str(path))
    found = {device: backend_of(job("--device", device, *there)) for device in ("auto", "cpu", "cuda")}
    assert found == {"auto": "gloo", "cpu": "gloo", "cuda": "nccl"}
    assert backend_of(job("--device", "auto")) == "nccl"


def test_a_machine_without_a_calibration_is_as_before() -> None:
    assert make_machine(load_gpu("h100")).measured is UNMEASURED
    assert Measured().seconds("all_reduce", 1e6, 8, 1, Tier.NVLINK) is None


# ---------------------------------------------------------------------------------------------- nccl-tests, CSV

HEAD = """\
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
"""
RANKS = "".join(
    f"#  Rank {rank:2} Group  0 Pid {90 + rank} on  node-{rank // 4} device  {rank % 4} [0x0f] Made Up\n"
    for rank in range(8)
)
COLUMNS = """\
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
"""
ROWS = """\
     1048576        262144     float     sum      -1    200.0    5.24    9.18      0    190.0    5.52    9.66      0
     2097152        524288     float     sum      -1    300.0    6.99   12.23      0    300.0    6.99   12.23      0
     4194304       1048576     float     sum      -1    500.0    8.39   14.68      0    500.0    8.39   14.68    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 12.03
"""


def test_a_table_of_nccl_tests_is_read() -> None:
    table = read_nccl_tests(HEAD + RANKS + COLUMNS + ROWS, "all_reduce.txt")
    assert table == Table("all_reduce", 8, 2, ((1048576.0, 200e-6), (2097152.0, 300e-6), (4194304.0, 500e-6)))
    found = wire_of(table)
    assert (found.tier, found.ranks, found.inside) == (Tier.LEAF, 8, 4)
    # 100 µs for 14 hops; 2²⁰ bytes in another 100 µs, of which each NIC carries 2 · 7 ÷ 8 ÷ 4.
    assert found.hop_s == pytest.approx(100e-6 / 14)
    assert found.link_Bps == pytest.approx(1048576 / 100e-6 * 2 * 7 / 8 / 4)


def test_older_tables_and_other_collectives_are_read() -> None:
    old = (
        "# nThread 1 nGpus 4 minBytes 8\n#   size  count  type  time  algbw  busbw  error  time  algbw  busbw  error\n"
    )
    rows = "8 2 float 10.0 0.00 0.00 0e+00 9.0 0.00 0.00 N/A\n4000000 1000000 float 1000.0 4.00 3.00 0e+00 9 9 9 9\n"
    table = read_nccl_tests(old + rows, "runs/alltoall_perf.log")
    assert (table.kind, table.ranks, table.nodes) == ("all_to_all", 4, 1)
    assert table.points == ((8.0, 10e-6), (4e6, 1e-3))
    named = "# Collective test starting: sendrecv_perf\n"
    assert wire_of(read_nccl_tests(named + old + rows.replace("3.00", "4.00"), "x.txt")).ranks == 2


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (HEAD + RANKS + COLUMNS + ROWS, "some.txt", "some.txt: calibrate = some.txt: neither the output nor the name"),
        (HEAD + COLUMNS + ROWS, "all_reduce.txt", "all_reduce.txt: calibrate = 1: `# Rank N … on HOST device`"),
        (HEAD + RANKS + COLUMNS, "all_reduce.txt", "calibrate = 0: a table of at least 2 sizes is needed"),
        (
            HEAD + RANKS + COLUMNS + ROWS,
            "all_gather.txt",
            "all_gather.txt:16: calibrate = 9.18: busbw ÷ algbw is 1.752",
        ),
        (HEAD + RANKS + COLUMNS + "  1024  256 float\n", "all_reduce.txt", "all_reduce.txt:16: calibrate = 1024  256"),
    ],
)
def test_what_is_no_such_table_is_refused(text: str, name: str, message: str) -> None:
    with pytest.raises(Refused) as refused:
        read_nccl_tests(text, name)
    assert message in str(refused.value)


def test_a_csv_of_products_is_read() -> None:
    text = "M, N, K, dtype, tflops, seconds\n1000,1000,1000,bfloat16,2,\n2000,1000,1000,bf16,,0.002\n10,10,10,fp32,1,\n"
    found = read_gemms(text, "g.csv")
    first, second = found["bf16"].points
    assert first == pytest.approx((1000.0, 1000.0, 1000.0, 1e-3))
    assert second == (2000.0, 1000.0, 1000.0, 2e-3)
    assert found["bf16"].flops == pytest.approx(2e12)
    assert set(found) == {"bf16", "fp32"}
    with pytest.raises(Refused) as refused:
        read_gemms("m,n,k,dtype,seconds\n1,2,3,fp32,x\n1,2,3,fp99,1\n", "g.csv")
    assert [problem.where for problem in refused.value.problems] == ["g.csv:2", "g.csv:3"]
    with pytest.raises(Refused, match="columns m, n, k, dtype and seconds or tflops are needed; dtype, seconds"):
        read_gemms("m,n,k\n1,2,3\n", "g.csv")


def test_imports_are_laid_onto_a_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """P24: a CSV of products and a table of nccl-tests become a file that says what it was made from."""
    (tmp_path / "made.toml").write_text(measured_text(MADE))
    (tmp_path / "all_gather.txt").write_text(
        HEAD + RANKS + COLUMNS + ROWS.replace("9.18", "4.59").replace("12.23", "6.12").replace("14.68", "7.34")
    )
    (tmp_path / "g.csv").write_text("m,n,k,dtype,tflops\n512,512,512,bf16,1\n")
    words = [
        *("calibrate", "--nccl-tests", str(tmp_path / "all_gather.txt"), "--gemms", str(tmp_path / "g.csv")),
        *("--onto", str(tmp_path / "made.toml"), "--out", str(tmp_path / "c.toml"), "--json", "--quiet"),
    ]
    with pytest.raises(SystemExit) as ended:
        app(words)
    assert ended.value.code in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert set(told["products"]) == {"bf16", "fp32"}
    gathers = [w for w in told["wires"] if w["kind"] == "all_gather"]
    assert len(told["wires"]) == len(MADE.wires)
    assert gathers[0]["hop_s"] == pytest.approx(100e-6 / 7, rel=1e-4)
    assert told["provenance"]["sources"].endswith("g.csv")


# ---------------------------------------------------------------------------------------------- measuring


def test_two_processes_measure_everything_and_a_plan_uses_it(tmp_path: Path) -> None:
    """Within a tiny budget every table is there, with points, and the plan of the same job takes them."""
    small = job("--tp", "2", "--pp", "1", "--dp", "1", "--run.matmul_precision", "medium")
    order = Order(1.0, ("fp32",), job=small, layouts=(Layout(tp=2), Layout(dp=2)), command="test")
    measured = calibrate_local(order, 2, Console(quiet=True))
    assert {w.kind for w in measured.wires} == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "message"}
    # Groups of two ranks of a node are alike, whichever axis they are of.
    assert len(measured.wires) == 5
    assert all(w.tier is Tier.NVLINK and w.ranks == 2 and len(w.points) >= 3 for w in measured.wires)
    tokens = small.batch.micro_batch * small.batch.sequence
    assert any(point[0] == tokens for point in measured.products["fp32"].points)
    assert set(measured.operations["fp32"]) == {"norm", "rotary", "gated", "loss"}
    for operation in measured.operations["fp32"].values():
        for points in (operation.forward, operation.backward):
            assert len(points) >= 3
            assert sorted(points) == list(points)
    assert measured.launch is not None
    assert measured.launch.blocking
    assert measured.launch.seconds > 0
    assert 1 <= measured.values["overlap.slowdown"] <= 2
    assert [measured.about[key] for key in ("ranks", "backend", "threads")] == [2, "gloo", 1]
    found = planned_with(measured, tmp_path / "c.toml", "--tp", "2", "--pp", "1", "--dp", "1")
    assert found["calibration"]["host"] == measured.about["host"]  # type: ignore[index]
    assert found["time"]["step_s"]["best"] > 0  # type: ignore[index]
    told = "products are measured with matmul_precision = medium: highest may be faster or slower"
    assert told in found["assumptions"]  # type: ignore[operator]


@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_measured_in_the_form_that_has_its_shape(form: Form) -> None:
    call = _product((6, 10, 4), form, Far(torch.float32, torch.device("cpu")))
    with FlopCounterMode(display=False) as counted:
        assert call().shape == (6, 10)
    assert counted.get_total_flops() == 2 * 6 * 10 * 4


def test_matrices_that_were_not_used_are_others_each_time_and_of_any_size() -> None:
    far = Far(torch.bfloat16, torch.device("cpu"))
    for make in (far.read, far.written):
        small = make(1000, 1000)
        first, second = next(small), next(small)
        assert first.shape == (1000, 1000)
        assert first.data_ptr() != second.data_ptr()
        assert next(make(6000, 3000)).shape == (6000, 3000)
    assert next(far.read(6000, 3000)).count_nonzero() > 0


def test_shapes_of_a_job_are_measured_in_their_own_forms_and_a_grid_in_all() -> None:
    small = job("--tp", "1", "--pp", "1", "--dp", "1")
    model, tokens = small.model, small.batch.micro_batch * small.batch.sequence
    found = products_of(small, (), "cpu")
    assert found[tokens, model.vocab, model.hidden] == ("forward",)
    assert found[tokens, model.hidden, model.vocab] == ("input",)
    assert found[model.vocab, model.hidden, tokens] == ("weight",)
    assert found[64, 256, 1024] == FORMS


def test_launches_are_without_the_operations_that_are_measured_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Had these taken all of the time but a share, that would be what is left for the others' kernels."""
    meter = Meter(torch.device("cpu"), None, lambda *_: None)
    monkeypatch.setattr(meter, "seconds", lambda *_: 8e-3)
    found = []
    for each in (0.0, 1e-6):
        monkeypatch.setattr(meter, "both_ways", lambda *_, each=each: (each, 2 * each))
        found.append(measure_launch(meter, 1.0).seconds)
    claimed = [claims(SMALL.model, unit.kind, engine_software(SMALL).kernels) for unit in decoder(SMALL.model).units]
    own = sum(bool(item.operation) for unit in claimed for item in unit.passes)
    kernels = sum(len(unit.gemms) + 2 * len(unit.attends) for unit in claimed)
    kernels += sum(item.kernels for unit in claimed for item in unit.passes if not item.operation)
    # Eight microbatches.
    assert found == pytest.approx([1e-3 / 3 / kernels, (1e-3 - own * 3e-6) / 3 / kernels])


def test_every_operation_that_a_claim_names_can_be_measured() -> None:
    """Those that have the same name but are others, of experts and of what is latent, are not taken for them."""
    kernels, named = engine_software(SMALL).kernels, set()
    for key in ("llama3-8b", "qwen3-8b", "gpt3-175b", "mixtral-8x7b", "deepseek-v3"):
        spec = load_model(key)
        for kind in {unit.kind for unit in decoder(spec).units}:
            found = {item.role: item.operation for item in claims(spec, kind, kernels).passes}
            assert not any(found.get(role) for role in ("expert_gated", "shared_gated", "latent_norms"))
            assert not (spec.latent and found.get("rotary"))
            named |= set(found.values())
    assert named - {""} == set(OPERATIONS)


@pytest.mark.parametrize(("takes_s", "expected"), [(10.0, 3), (19.0, 3), (21.0, 2), (29.0, 2), (31.0, 1), (500.0, 1)])
def test_there_are_as_many_sweeps_as_there_is_time_for(
    takes_s: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, done = [0.0], []

    def sweep(*_: object) -> None:
        now[0] += takes_s
        done.append(now[0])

    def stop(_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(calibrate, "_sweep", sweep)
    monkeypatch.setattr(calibrate, "combined", stop)
    with pytest.raises(InterruptedError):
        calibrate_local(Order(40.0, ("fp32",)), 1, Console(quiet=True))
    assert len(done) == expected


def test_sweeps_become_one_by_the_median_of_each_point() -> None:
    def sweep(scale: float, *sides: float) -> Sweep:
        points = tuple((side, side, side, scale * side**3) for side in sides)
        sizes = tuple((size, scale * size) for size in (1e3, 1e6))
        link = Wire("message", Tier.NVLINK, 2, 1, 0.0, 1.0, 0.0, sizes)
        return Sweep(
            products={"fp32": fit_products(points)},
            attention={"fp32": fit_attention(((1.0, 2.0, 64.0, 128.0, scale, 3 * scale),))},
            operations={"fp32": {"norm": Operation(sizes, sizes)}},
            passes=Passes(1.0, 0.0, sizes),
            launch=Launch(scale, True),
            wires=(link,),
            slowdown=scale,
        )

    one = combined([sweep(1.0, 2.0, 3.0), sweep(9.0, 2.0, 3.0, 4.0), sweep(2.0, 2.0)])
    assert set(one.products["fp32"].points) == {(2, 2, 2, 16.0), (3, 3, 3, 5 * 27.0), (4, 4, 4, 9 * 64.0)}
    assert one.products["fp32"].flops == pytest.approx(fit_products(one.products["fp32"].points).flops)
    assert one.attention["fp32"].points == ((1.0, 2.0, 64.0, 128.0, 2.0, 6.0),)
    assert one.operations["fp32"]["norm"] == Operation(((1e3, 2e3), (1e6, 2e6)), ((1e3, 2e3), (1e6, 2e6)))
    assert one.passes.points == one.wires[0].points == ((1e3, 2e3), (1e6, 2e6))
    assert one.wires[0].link_Bps == pytest.approx(0.5)
    assert (one.launch, one.slowdown) == (Launch(2.0, True), 2.0)


def test_operations_of_a_model_are_its_own_kind_of_block() -> None:
    gpt = replace(SMALL, model=replace(SMALL.model, block="gpt"))
    meter = Meter(torch.device("cpu"), None, lambda *_: None)
    assert set(measure_operations(meter, gpt, torch.float32, 0.01)) == {"norm", "gelu", "loss"}


@pytest.mark.parametrize(
    ("small", "expected"), [(job("--run.matmul_precision", "medium"), "medium"), (None, "highest")]
)
def test_products_are_measured_as_the_job_computes_them(
    small: Job | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: object) -> Products:
        raise InterruptedError(torch.get_float32_matmul_precision())

    monkeypatch.setattr(calibrate, "measure_products", measure)
    with pytest.raises(InterruptedError, match=expected):
        calibrate_local(Order(0.1, ("fp32",), job=small), 1, Console(quiet=True))


def test_a_plan_says_whose_rate_its_products_have() -> None:
    def told(*overrides: str) -> list[str]:
        return [line for line in make_plan(job(*overrides)).assumptions if "matmul_precision" in line]

    assert told() == told("--precision", "bf16", "--run.matmul_precision", "high") == []
    planned = "products are planned with matmul_precision = highest: high may be faster or slower"
    assert told("--run.matmul_precision", "high") == [planned]


def test_a_meter_takes_the_median_and_stays_within_its_budget() -> None:
    meter = Meter(torch.device("cpu"), None, lambda *_: None)
    spent = iter([0.5, 0.001, 0.002, 9.0, 0.003, 0.002, 0.002])
    meter._run = lambda call, calls: next(spent) * calls  # type: ignore[method-assign]
    # 0.5 s to warm up are more than there is for a point: a few single calls must do.
    assert meter.seconds(lambda: None, 0.1) == pytest.approx(0.0015)
    assert len([*meter.within("nothing", range(10), 0.0)]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--seconds", "0"), "--seconds = 0.0: must be above 0"),
        (("--processes", "0"), "--processes = 0: must be at least 1"),
        (("--out", "no/folder/c.toml"), "--out = no/folder/c.toml: its folder does not exist"),
        (("--dtypes", "fp7"), "--dtypes = fp7: is no number format of products; nearest legal: fp32, bf16, fp16"),
        (("--layouts", "tp3", "--processes", "2"), "--layouts = tp3: has 3 ranks, but 2 measure; nearest legal: tp2"),
        (("--layouts", "xx", "--processes", "2"), "--layouts = xx: is no layout"),
        (("--nccl-tests", "no.txt"), "--nccl-tests = no.txt: cannot be read: No such file"),
    ],
)
def test_mistakes_are_refused_before_anything_is_measured(
    words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refused) as refused:
        app(["calibrate", *words], exit_on_error=False)
    assert message in str(refused.value)
    assert list(tmp_path.iterdir()) == []
