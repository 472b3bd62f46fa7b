"""`trigrid plan`, `models`, `gpus` and `validate`, as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_cli import HEAVY, LOADED

from trigrid.cli import app
from trigrid.errors import Refused
from trigrid.job import load_job

ROOT = Path(__file__).parents[1]
EXAMPLE = "llama3-405b --gpus 1024 --gpu h100 --seq 8192 --global-batch 512 --tp 8 --pp 8 --virtual 4 --zero 1"
SECTIONS = ("step ", "throughput ", "MFU ", "memory wall ", "grid ", "memory per GPU", "bubble_ratio", "idle_share")


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and standard output of `trigrid LINE`."""
    try:
        app(line.split(), exit_on_error=False, print_error=False)
        code = 0
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    return code, capsys.readouterr().out


def plan(line: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    _, out = run(f"plan {line} --json", capsys)
    found: dict[str, Any] = json.loads(out)
    return found


def refusal(line: str) -> str:
    with pytest.raises(Refused) as refused:
        app(line.split(), exit_on_error=False, print_error=False)
    return str(refused.value)


# What it prints


def test_the_answer_comes_first_and_fits_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    code, out = run(f"plan {EXAMPLE} --tokens 15T --price 2.5", capsys)
    lines = out.splitlines()
    assert code == 0
    assert lines[0].startswith("llama3.1-405b (405.9B parameters) on 1,024 × h100: FITS, ")
    assert [line.split()[0] for line in lines[1:4]] == ["step", "throughput", "MFU"]
    assert lines[4].strip().startswith("15T tokens")
    assert "cost" in lines[4]
    assert all(section in out for section in SECTIONS)
    assert "TP 8 × PP 8 × DP 16 = 1,024 GPUs; TP over NVLink, PP over the leaf, DP over the spine" in out
    assert max(map(len, lines)) <= 100
    assert len(lines) < 70


def test_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(EXAMPLE, capsys)
    assert found["schema"] == "trigrid.plan/1"
    assert found["model"]["parameters"] == 405_853_388_800
    layout = found["layout"]
    named = ("tp", "cp", "pp", "dp", "ep", "zero", "schedule", "virtual_stages", "micro_batch", "global_batch")
    assert [layout[name] for name in named[:6]] == [8, 1, 8, 16, 1, 1]
    assert (layout["schedule"], layout["virtual_stages"], layout["global_batch"]) == ("interleaved", 4, 512)
    assert {*named, "recompute"} <= layout.keys()
    assert len(found["memory"]["stages"]) == 8
    for stage in found["memory"]["stages"]:
        assert stage["total_bytes"] == sum(stage["by_category"].values())
        assert stage["total_bytes"] <= found["memory"]["ceiling_bytes"]
    assert found["fits"] is True
    step = found["time"]["step_s"]
    assert step["low"] < step["best"] < step["high"]
    assert sum(found["time"]["parts_s"].values()) == pytest.approx(step["best"])
    assert {"bubble_ratio", "idle_share"} <= found["time"].keys()
    rates = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu_full_attention", "mfu_causal")
    assert set(rates) <= found["throughput"].keys()
    assert found["throughput"]["tokens_per_s"] == pytest.approx(512 * 8192 / step["best"])
    assert all(warning.keys() == {"code", "message"} for warning in found["warnings"])
    assert found["assumptions"]
    searched = found["search"]
    assert searched["open"] == ["dp", "dp_replicate", "micro_batch", "recompute", "schedule"]
    assert {why["knob"] for why in searched["why"]} <= set(searched["open"])


def test_what_does_not_fit_exits_with_1_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    """P25, P28."""
    code, out = run("plan llama3-70b --gpus 8 --tp 8 --pp 1 --zero 1 --seq 4096 --global-batch 16", capsys)
    assert code == 1
    assert "DOES NOT FIT, by" in out.splitlines()[0]
    assert "it fits with any one of these" in out
    assert max(map(len, out.splitlines())) <= 100


def test_a_size_alone_is_a_model_by_a_stated_rule(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan("--params 300B --gpus 1024 --tp 8 --pp 8 --recompute full --zero 1", capsys)
    assert found["model"]["parameters"] == pytest.approx(300e9, rel=0.03)
    assert found["asked"][0].startswith("a Llama of this size")


def test_a_folder_with_a_config_is_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 1024,
        "vocab_size": 1000,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(f"{tmp_path} --gpus 2 --tp 2 --pp 1 --global-batch 8 --zero 1", capsys)
    assert found["model"]["parameters"] == 2 * 512 * 1000 + 512 + 4 * (3 * 512 * 1024 + 3 * 512 * 512 + 2 * 512)


def test_a_cluster_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NVL72: a TP group of 16 stays inside the NVLink domain."""
    cluster = tmp_path / "nvl72.toml"
    cluster.write_text('gpu = "gb200"\ngpus_per_node = 72\nnic_gbit = 800\nprice = 4.0\n')
    line = "llama3-405b --gpus 144 --tp 16 --pp 1 --dp 9 --zero 3 --global-batch 144 --recompute full"
    _, out = run(f"plan {line} --cluster {cluster}", capsys)
    assert "TP over NVLink" in out
    assert ", cost " in out.splitlines()[4]
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[cluster]\ngpus_per_nodes = 72\n")
    message = refusal(f"plan llama3-8b --gpus 8 --cluster {wrong}")
    assert (
        f"{wrong}:2: cluster.gpus_per_nodes = 72: there is no such key; nearest legal: cluster.gpus_per_node" in message
    )


@pytest.mark.parametrize("example", sorted(ROOT.glob("examples/*.toml")), ids=lambda path: path.stem)
def test_every_example_is_planned_and_fits(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """R85."""
    found = plan(str(example), capsys)
    assert found["fits"] is True
    assert found["layout"]["tp"] == load_job(example).parallel.tp
    assert "search" not in found


def test_a_job_file_can_be_searched_with_its_model_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    job = f"{ROOT}/examples/llama3-405b.toml --tp 8 --pp 16 --zero 1 --schedule interleaved"
    found = plan(f"{job} --search --recompute full --micro-batch 1", capsys)
    assert found["layout"]["virtual_stages"] > 1
    assert found["layout"]["global_batch"] == 2048
    assert (
        found["time"]["step_s"]["best"]
        < plan(str(ROOT / "examples/llama3-405b.toml"), capsys)["time"]["step_s"]["best"]
    )


# mission.md


def test_the_memory_wall_of_mission(capsys: pytest.CaptureFixture[str]) -> None:
    """4,860 GB of a model of 405 B against 640 GB; 16 TB of one of a trillion: two conventions, each by its name."""
    wall = plan(f"{EXAMPLE} --policy two-moments", capsys)["memory_wall"]
    assert wall["state_bytes"] == 12 * 405_853_388_800
    assert wall["state_bytes"] / 1e9 == pytest.approx(4_860, rel=0.003)
    assert wall["deficit_bytes"] == wall["state_bytes"] - 8 * 84_943_715_696
    trillion = (
        "--params 1T --gpus 1024 --tp 8 --pp 16 --zero 1 --recompute full --micro-batch 1 --policy deepspeed-half"
    )
    found = plan(trillion, capsys)
    assert found["memory_wall"]["bytes_per_parameter"] == 16
    assert found["memory_wall"]["state_bytes"] / 1e12 == pytest.approx(2 + 2 + 12, rel=0.03)
    assert "12 bytes per parameter (policy two-moments: weights 2, gradients 2, moments 8)" in run(
        f"plan {EXAMPLE} --policy two-moments", capsys
    )[1].replace("\n               ", " ")


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 96), (1, 40), (2, 26), (3, 12)])
def test_the_zero_example_of_mission(zero: int, gigabytes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """16 GB of weights, 16 of gradients, 64 of optimizer on 8 ranks."""
    line = f"llama3-8b --gpus 8 --tp 1 --pp 1 --zero {zero} --recompute full --micro-batch 1 --policy two-moments"
    (stage,) = plan(f"{line} --global-batch 8", capsys)["memory"]["stages"]
    state = sum(stage["by_category"].get(name, 0) for name in ("weights", "master", "gradients", "optimizer"))
    assert state / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_the_planner_example_of_mission(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights 6.2, optimizer 18.5 and gradients 6.2 GB of a model of 99 B, DP 2; its throughput is another matter."""
    line = "--params 99B --gpus 64 --tp 8 --pp 4 --zero 1 --policy deepspeed-half --micro-batch 1 --schedule 1f1b"
    found = plan(f"{line} --seq 4096 --global-batch 64 --recompute full", capsys)
    assert found["layout"]["dp"] == 2
    sizes = [
        {
            "weights": stage["by_category"]["weights"] / 1e9,
            "gradients": stage["by_category"]["gradients"] / 1e9,
            "optimizer": (stage["by_category"]["master"] + stage["by_category"]["optimizer"]) / 1e9,
        }
        for stage in found["memory"]["stages"]
    ]
    mean = {name: sum(size[name] for size in sizes) / len(sizes) for name in sizes[0]}
    assert mean == pytest.approx({"weights": 6.2, "gradients": 6.2, "optimizer": 18.5}, rel=0.02)
    assert found["throughput"]["tokens_per_s"] > 5 * 3_420


def test_bubble_and_idle_share_of_nearly_equal_stages(capsys: pytest.CaptureFixture[str]) -> None:
    """(p − 1)/m and (p − 1)/(m + p − 1), but for messages and the head."""
    line = "llama3-405b --gpus 48 --tp 8 --pp 6 --dp 1 --virtual 1 --schedule 1f1b --micro-batch 1 --recompute full"
    time = plan(f"{line} --zero 1 --global-batch 15 --seq 8192", capsys)["time"]
    ratio, share = time["bubble_ratio"], time["idle_share"]
    assert ratio == pytest.approx(5 / 15, rel=0.1)
    assert share == pytest.approx(5 / 20, rel=0.1)
    assert share == pytest.approx(ratio / (1 + ratio))


# Single questions


def test_a_figure_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(f"plan {EXAMPLE} --explain memory.weights", capsys)
    assert out.startswith("memory.weights = ")
    assert "  formula  " in out
    assert "policy.weights = 2" in out
    assert "Rajbhandari 2020" in out
    assert "explain = memory.weight: no figure of a plan has this name; nearest legal: memory.weights" in refusal(
        f"plan {EXAMPLE} --explain memory.weight"
    )


def test_the_front_goes_from_fast_to_small(capsys: pytest.CaptureFixture[str]) -> None:
    line = "llama3-8b --gpus 16 --seq 2048 --global-batch 16 --pp 1 --cp 1 --front"
    front = plan(line, capsys)["front"]
    assert len(front) > 2
    assert [one["memory_bytes"] for one in front] == sorted((one["memory_bytes"] for one in front), reverse=True)
    assert [one["step_s"] for one in front] == sorted(one["step_s"] for one in front)
    _, out = run(f"plan {line}", capsys)
    assert out.count("recompute") == len(front)
    assert "for less and less memory" in out


def test_a_front_needs_a_choice() -> None:
    told = refusal(f"plan {ROOT / 'examples' / 'llama3-405b.toml'} --front")
    assert told.startswith("front = true: needs layouts to choose from: give fewer degrees and policies, or --search")


def test_sensitivity_and_recomputation_are_tables(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run(f"plan {EXAMPLE} --sensitivity --recompute-table", capsys)
    assert out.startswith("knob")
    assert "as planned" in out
    assert "recomputation" in out
    assert "full, 100% of the blocks" in out
    found = plan(f"{EXAMPLE} --sensitivity --recompute-table", capsys)
    assert {move["knob"] for move in found["sensitivity"]} >= {
        "tp",
        "pp",
        "zero",
        "micro_batch",
        "recompute",
        "nic_gbit",
    }
    assert found["recompute"][0]["what"] == "none"


def test_a_saved_job_loads_back_and_plans_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "job.toml"
    line = "llama3-8b --gpus 16 --tp 4 --pp 2 --schedule 1f1b --recompute full --zero 1 --global-batch 32 --seq 2048"
    first = plan(f"{line} --save {saved} --quiet", capsys)
    again = plan(str(saved), capsys)
    assert again["layout"] == first["layout"]
    assert again["memory"] == first["memory"]
    assert again["time"]["step_s"] == first["time"]["step_s"]
    code, out = run(f"train {saved} --dry-run --quiet", capsys)
    assert code == 0
    assert "[parallel]" in out
    assert "save = /nowhere/job.toml: cannot be written: No such file" in refusal(
        f"plan {line} --save /nowhere/job.toml"
    )


# What is wrong


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("llama3-8c --gpus 8", "model = llama3-8c: neither a model of the catalogue nor an existing config.json"),
        ("llama3-8c --gpus 8", "nearest legal: llama3-8b"),
        ("lama3-8b.toml", "job = lama3-8b.toml: there is no such file"),
        ("llama3-8b --gpus 8 --gpu h10", "cluster.gpu = h10: no accelerator of the catalogue has this name"),
        ("llama3-8b --gpus 8 --gpu h10", "nearest legal: h100"),
        ("llama3-8b --gpus 8 --tp 3", "--tp: parallel.tp = 3: must divide model.heads = 32"),
        ("llama3-8b --gpus 8 --tp 3", "nearest legal: 2, 4"),
        ("llama3-8b --gpus 8 --tp 16 --pp 1", "gpus = 8: tp · pp · cp · dp = 16 · 1 · 1 · 1 = 16 must not exceed it"),
        ("llama3-8b --gpus 8 --pp 40", "more stages than units: 32 layers"),
        ("llama3-8b --gpus 8 --dp 3 --global-batch 32", "batch.global_batch = 32: global_batch = dp · micro_batch"),
        ("llama3-8b --gpus 8 --dp 3 --global-batch 32", "nearest legal: 30, 33"),
        ("llama3-8b --gpus 8 --virtual 3 --schedule 1f1b", "schedule 1f1b has one stage per rank; nearest legal: 1"),
        ("llama3-8b --gpus 8 --seq 9000", "exceeds model.context = 8192; nearest legal: 8192"),
        ("llama3-8b --gpus 8 --seq -4", "batch.sequence = -4: must be from 1 to 2147483647; nearest legal: 1"),
        ("llama3-8b --gpus 0", "gpus = 0: must be from 1 to 10,000,000; nearest legal: 1"),
        ("llama3-8b --gpus 99999999", "nearest legal: 10000000"),
        ("llama3-8b", "gpus = (not given): --gpus is needed where parallel.tp, parallel.pp, parallel.dp is left open"),
        (
            "--gpus 8",
            "MODEL = (not given): a model of the catalogue, a config.json or a job file is needed, or --params",
        ),
        ("llama3-8b --params 8B --gpus 8", "MODEL = llama3-8b: a model of the catalogue, a config.json or a job file"),
        ("--params big --gpus 8", "params = big: a number is needed, such as 300B, 1.5T or 7e9"),
        ("--params 7 --gpus 8", "params = 7: a size from 100M to 100T is needed; nearest legal: 100M"),
        ("--params=-7B --gpus 8", "params = -7B: must be above 0 and finite"),
        ("llama3-8b --gpus 8 --software megatrom", "software = megatrom: no software preset has this name"),
        ("llama3-8b --gpus 8 --policy two-moment", "nearest legal: two-moments"),
        ("llama3-8b --gpus 8 --tokens many", "tokens = many: a number is needed"),
        ("llama3-8b --gpus 8 --accumulation 4", "batch.accumulation = 4: follows from batch.global_batch"),
        ("llama3-8b --gpus 8 --tensor 2", "tensor = 2: there is no such key"),
        ("llama3-8b --gpus 8 --price -1", "cluster.price = -1.0: must be in [0, inf)"),
        ("llama3-8b --gpus 8 --ep 2", "parallel.ep = 2: the model has no experts; nearest legal: 1"),
    ],
)
def test_mistakes_are_told_with_the_way_out(line: str, message: str) -> None:
    assert message in refusal(f"plan {line}")


def test_a_config_that_is_no_decoder_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "bert", "hidden_size": 768}))
    assert "model_type" in refusal(f"plan {config} --gpus 8")
    config.write_text("{")
    assert "config.json" in refusal(f"plan {config} --gpus 8")


def test_degrees_that_the_batch_cannot_feed_are_refused_with_the_equation() -> None:
    """P26: more data-parallel ranks than sequences, by name, with the numbers and the nearest legal value."""
    told = refusal("plan llama3-8b --gpus 16 --dp 16 --tp 1 --pp 1 --global-batch 8")
    equation = "global_batch = dp · micro_batch · accumulation = 16 · 1 · accumulation must hold"
    assert f"batch.global_batch = 8: {equation}" in told
    assert "nearest legal: 16" in told
    world = "gpus = 8: tp · pp · cp · dp = 1 · 1 · 1 · 16 = 16 must not exceed it; nearest legal: 16"
    assert world in refusal("plan llama3-8b --gpus 8 --dp 16 --tp 1 --pp 1 --cp 1 --global-batch 16")


def test_a_cluster_file_that_is_empty_or_not_there_is_told(tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    line = "plan llama3-8b --gpus 8 --cluster"
    assert f"cluster = {empty}: the file is empty; keys of [cluster] are needed" in refusal(f"{line} {empty}")
    assert f"cluster = {tmp_path}/none.toml: there is no such file" in refusal(f"{line} {tmp_path}/none.toml")


def test_mistakes_exit_with_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trigrid", "plan", "llama3-8b", "--gpus", "8", "--tp", "3"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("trigrid: --tp: parallel.tp = 3")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "line", [f"plan {EXAMPLE}", f"plan {EXAMPLE} --json --sensitivity", "models", "gpus --json", "plan --help"]
)
def test_planning_loads_nothing_heavy(line: str) -> None:
    program = LOADED.format(heavy=HEAVY).replace("finally:", "finally:\n    sys.stderr.write('\\nloaded: ')")
    program = "import os; os._exit = sys_exit = lambda code: (_ for _ in ()).throw(SystemExit(code))\n" + program
    done = subprocess.run([sys.executable, "-c", program, *line.split()], capture_output=True, text=True, timeout=120)
    assert done.stderr.rpartition("loaded: ")[2].split() == []
    assert "Traceback" not in done.stderr
    assert done.stdout


# Catalogues and measurements


def test_models_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run("models", capsys)
    assert "llama3-8b" in out
    assert "Grattafiori et al. 2024" in out
    assert max(map(len, out.splitlines())) <= 100
    _, out = run("models --json", capsys)
    models = {model["name"]: model for model in json.loads(out)["models"]}
    assert models["llama3-8b"]["parameters"] == 8_030_261_248
    assert models["llama3-8b"]["shape"]["layers"] == 32
    assert all(model["source"] for model in models.values())


def test_accelerators_are_listed_with_dense_peaks_and_one_way_bandwidths(capsys: pytest.CaptureFixture[str]) -> None:
    _, out = run("gpus", capsys)
    assert "peaks are dense" in out
    assert max(map(len, out.splitlines())) <= 100
    _, out = run("gpus --json", capsys)
    gpus = {gpu["name"]: gpu for gpu in json.loads(out)["gpus"]}
    assert gpus["h100"]["peak_flops"]["bf16"] == 989e12
    assert gpus["h100"]["nvlink_Bps"] == 450e9
    assert all(gpu["source"] for gpu in gpus.values())


def test_measured_rows_are_planned_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from trigrid.plan.validate import evidence

    rows = evidence()[:6]
    table = tmp_path / "rows.csv"
    header = ",".join(rows[0])
    quoted = [
        ",".join(json.dumps(value, ensure_ascii=False).replace('\\"', '""') for value in row.values()) for row in rows
    ]
    table.write_text("\n".join([header, *quoted]) + "\n")
    code, out = run(f"validate {table} --json --quiet", capsys)
    found = json.loads(out)
    assert code == 0
    assert [row["id"] for row in found["rows"]] == [row["id"] for row in rows]
    keys = {
        "id",
        "used",
        "skipped_because",
        "predicted_step_s",
        "measured_step_s",
        "predicted_memory_bytes",
        "measured_memory_bytes",
        "assumptions",
    }
    assert all(keys <= row.keys() for row in found["rows"])
    assert isinstance(found["summary"], list)
    _, out = run(f"validate {table} --quiet", capsys)
    assert f"of {len(rows)} rows are scored" in out


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "id,hidden\n"])
def test_a_table_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text(text)
    assert str(table) in refusal(f"validate {table}")
    assert "nowhere.csv" in refusal("validate nowhere.csv")
