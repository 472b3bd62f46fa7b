"""Rows of evidence: what is read from them, what is left open, and how results are summed up."""

from __future__ import annotations

from pathlib import Path

import pytest

from trigrid.errors import Refused
from trigrid.plan.facts import Unplannable
from trigrid.plan.rows import read_case
from trigrid.plan.validate import Planner, evidence, judge, read_rows, summarise, validate

ROWS = {row["id"]: row for row in evidence()}
KORTHIKANTI = ROWS["kor22-004"]


def test_every_shipped_row_has_its_source() -> None:
    assert len(ROWS) == len(evidence()) > 400
    assert all(len(row["source"]) > 10 for row in ROWS.values())


def test_a_row_is_planned_as_stated() -> None:
    case = read_case(KORTHIKANTI)
    setup = case.setup
    assert (setup.tp, setup.pp, setup.virtual, setup.microbatches, setup.recompute) == (8, 8, 3, 64, "selective")
    assert case.software.name == "megatron-2022"
    assert not case.software.kernels.fused_attention
    assert case.measured_step_s == 13.75
    assert case.nic_Bps == 25e9
    assert case.family == "dense multi-node"


@pytest.mark.parametrize(
    ("row", "bytes_per_s"),
    [("ttp-004", 50e9), ("intE-002", 6.25e9), ("bs22-062", 6.25e9), ("vtm-001", 12.5e9), ("dlp-003", 1.5625e9)],
)
def test_the_rate_of_a_nic_is_read_from_the_notes(row: str, bytes_per_s: float) -> None:
    """400 Gb/s per GPU, 4 x 100 Gb per node of 8, 800 Gb/s between nodes, 100 Gb for a node."""
    assert read_case(ROWS[row]).nic_Bps == bytes_per_s


def test_what_the_evidence_itself_doubts_is_not_scored() -> None:
    """bs22-034: memory far above its neighbour with twice the micro-batch; bs22-040: columns swapped."""
    memory, time = (judge(ROWS[name], Planner()) for name in ("bs22-034", "bs22-040"))
    assert memory.time_used
    assert not memory.memory_used
    assert time.memory_used
    assert not time.time_used
    packed = judge(ROWS["tune-003"], Planner())
    assert packed.memory_used
    assert not packed.time_used
    assert "share of the blocks" in judge(ROWS["fms-007"], Planner()).skipped_because
    assert judge({**ROWS["fms-007"], "recompute_fraction": "0.5"}, Planner()).time_used
    untimed = {name: "" for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu")}
    doubted = judge({**ROWS["bs22-034"], **untimed}, Planner())
    assert "the evidence doubts its memory: memory (about 45 expected" in doubted.skipped_because


def test_what_a_source_says_of_its_runs_is_read() -> None:
    """BigScience: launches waited for, nodes before and after NUMA binding, and DeepSpeed's bf16 optimizer."""
    early, late, single = (read_case(ROWS[name]) for name in ("bs22-027", "bs22-065", "bs22-135"))
    assert early.setup == late.setup
    assert (early.fabric, late.fabric) == ("opa_far", "opa")
    assert early.software.blocking
    assert late.software.blocking
    assert not single.software.blocking
    assert single.software.policy.name == "deepspeed-half"
    assert read_case(ROWS["bs22-127"]).software.policy.name == "deepspeed-bf16"
    assert not read_case(ROWS["mci-019"]).software.kernels.fused_attention
    assert read_case({**ROWS["bs22-027"], "notes": "CUDA_LAUNCH_BLOCKING=1", "source": "a user"}).software.blocking
    assert read_case(ROWS["bs22-138"]).spec.vocab == 250880


def test_deepspeed_fills_stages_in_turn() -> None:
    """78 layers on 12 stages are seven each and one at the end, as the source says; 72 are six each."""
    assert read_case(ROWS["bs22-087"]).setup.stage_layers == (*[7] * 11, 1)
    assert read_case(ROWS["bs22-065"]).setup.stage_layers == ()
    odd = read_case({**ROWS["bs22-065"], "layers": "25", "pp": "12", "dp": "4"})
    assert odd.setup.stage_layers == (*[3] * 6, 2, *[1] * 5)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"recompute": ""}, "recomputation is open"),
        ({"precision": ""}, "precision is open"),
        ({"zero_stage": "", "gpus": "512", "dp": "8", "gbs": "512"}, None),
        ({"mbs": ""}, "the micro-batch is open"),
        ({"recompute": "other:mlp"}, "recomputation of mlp is not modelled"),
    ],
)
def test_what_is_open_and_matters_is_not_scored(changes: dict[str, str], why: str | None) -> None:
    """modelling.md: never assumed. ZeRO 0 or 1 of a Megatron row moves the same bytes, so it does not matter."""
    result = judge({**KORTHIKANTI, **changes}, Planner())
    assert result.time_used is (why is None)
    assert why is None or why in result.skipped_because
    assert result.predicted_step_s


def test_an_open_nic_matters_only_between_nodes() -> None:
    wide = {**ROWS["fms-001"], "notes": ""}
    small = judge({**wide, "zero_stage": "3", "mbs": "1", "gbs": "128"}, Planner())
    assert "the NIC's rate is open" in small.skipped_because
    single = {**wide, "gpus": "8", "dp": "8", "gbs": "16"}
    assert judge(single, Planner()).time_used


def test_a_stated_nic_settles_it() -> None:
    wide = {**ROWS["fms-001"], "notes": "", "mbs": "1", "gbs": "128", "nic_gbit_per_gpu": "200"}
    result = judge(wide, Planner())
    assert result.time_used
    assert read_case(wide).nic_Bps == 25e9


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"hidden": ""}, "hidden is not given"),
        ({"gpu": "TPU v5p"}, "not in the catalogue"),
        ({"gpu": "GB200 or B200"}, "one of several"),
        ({"precision": "nvfp4"}, "precision nvfp4 is not modelled"),
        ({"tp": "7"}, "does not divide"),
        ({"layers": "many"}, "layers is no number: many"),
        ({"schedule": "zb-2p"}, "schedule zb-2p is not modelled"),
        ({"vpp": "13"}, "104 stages for 96 layers"),
    ],
)
def test_what_cannot_be_planned_says_why(changes: dict[str, str], why: str) -> None:
    with pytest.raises(Unplannable, match=why):
        read_case({**KORTHIKANTI, **changes})
    result = judge({**KORTHIKANTI, **changes}, Planner())
    assert not result.used
    assert why in result.skipped_because


def test_optional_columns_are_read() -> None:
    changed = {
        **KORTHIKANTI,
        "attention_impl": "flash",
        "loss_impl": "chunked",
        "tp_overlap": "async",
        "dp_overlap": "0",
        "vocab_padded": "51264",
        "tied": "0",
        "recompute_fraction": "0.5",
        "recompute": "full",
        "nvlink_domain": "72",
        "framework": "megatron",
    }
    case = read_case(changed)
    assert case.software.kernels.fused_attention
    assert case.software.kernels.loss == "chunked"
    assert case.software.overlap_tp == "async"
    assert not case.software.overlap_dp
    assert (case.spec.vocab, case.spec.tied) == (51264, False)
    assert case.setup.recomputed == 0.5
    assert case.gpus_per_node == 72


def test_assumptions_are_listed() -> None:
    case = read_case(ROWS["vtm-001"])
    assert any(text.startswith("vocab = 51200") for text in case.assumptions)
    assert any(text.startswith("zero_stage = 1") for text in case.assumptions)


def test_meters_follow_what_the_row_says() -> None:
    """P6: allocated, reserved and nvidia-smi are compared with three different figures."""
    meters = {name: read_case(ROWS[name]).meter for name in ("smx-001", "ttp-001", "bs22-062", "zb-004")}
    assert meters == {"smx-001": "allocated", "ttp-001": "reserved", "bs22-062": "device", "zb-004": "unstated"}
    planner = Planner()
    results = {name: judge(ROWS[name], planner) for name in meters}
    assert results["smx-001"].memory_used
    assert not results["zb-004"].memory_used


def test_the_last_ranks_memory_is_compared_with_the_last_stage() -> None:
    row = {**ROWS["smx-001"], "mem_kind": "torch max allocated GiB, last rank"}
    assert read_case(row).rank == 1
    assert judge(row, Planner()).predicted_memory_bytes < judge(ROWS["smx-001"], Planner()).predicted_memory_bytes  # type: ignore[operator]


def test_allocated_memory_of_the_most_precise_set() -> None:
    """R84: within 3 % on the median of SimuMax's rows, which were allocated on real hardware."""
    report = validate([row for name, row in ROWS.items() if name.startswith("smx")])
    (summary,) = [s for s in report.summary if s.group == "smx" and s.kind == "memory"]
    assert summary.rows >= 20
    assert summary.median < 0.03


def test_summaries_count_what_was_used() -> None:
    planner = Planner()
    rows = [judge(ROWS[name], planner) for name in ("kor22-001", "kor22-002", "zb-004")]
    summary = {(s.kind, s.group): s for s in summarise(rows)}
    assert summary["time", "kor22"].rows == 2
    assert ("time", "zb") not in summary
    errors = sorted(abs(row.time_error or 0) for row in rows[:2])
    assert summary["time", "kor22"].mean == pytest.approx(sum(errors) / 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [("", "lacks the columns"), ("a,b\n1,2\n", "lacks the columns"), (None, "cannot be read")],
)
def test_what_is_no_table_of_rows_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(Refused, match=why):
        read_rows(path)


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join(KORTHIKANTI) + "\n", encoding="utf-8")
    with pytest.raises(Refused, match="has no rows"):
        read_rows(path)
    path.write_text(",".join(KORTHIKANTI) + "\n" + "kor22-x" + "," * 10 + "\n", encoding="utf-8")
    assert [row["id"] for row in read_rows(path)] == ["kor22-x"]
