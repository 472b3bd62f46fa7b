"""What `trigrid doctor` looks at, and how it judges."""

from __future__ import annotations

import io
import json
import socket
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
from helpers.runs import run, write_job

from trigrid.check.calibrate_meter import Meter
from trigrid.check.doctor_gpus import FIELDS, judge_gpus, judge_nvlink, read_gpus, read_nvlink
from trigrid.check.doctor_host import look_at_disk
from trigrid.check.doctor_judge import Judge, Taken, judge_skew
from trigrid.check.doctor_network import (
    PAIR_BYTES,
    Round,
    Sent,
    Skew,
    busbw,
    meeting,
    meetings,
    offset,
    pairs_of,
    rounds_of,
)
from trigrid.grid import Grid
from trigrid.launch.seats import Seat, Seating
from trigrid.plan.machine import make_machine
from trigrid.plan.network import Network
from trigrid.report.doctor import Examination, Finding, as_json, differing, merged, print_table, verdict_text
from trigrid.spec.cluster import Cluster
from trigrid.spec.gpu import load_gpu
from trigrid.spec.layout import Layout

SIZE = 2**28
CUBE = Grid(Layout(tp=2, pp=2, dp=2), Cluster(gpus_per_node=2))
SEATING = Seating(tuple(Seat(rank, f"node{rank // 2}", (), "NVIDIA H100") for rank in range(8)))
NETWORK = Network(make_machine(load_gpu("h100"), gpus_per_node=2))
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """8 ranks, 1 GB, 10 ms: algbw 100 GB/s; busbw 175 of an all-reduce, 87.5 of its halves, 100 of a message."""
    assert busbw("all_reduce", 10**9, 8, 0.01) == pytest.approx(175e9)
    assert busbw("all_gather", 10**9, 8, 0.01) == busbw("reduce_scatter", 10**9, 8, 0.01) == pytest.approx(87.5e9)
    assert busbw("message", 10**9, 2, 0.01) == pytest.approx(100e9)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_everybody_meets_everybody_once(count: int) -> None:
    rounds = [meeting(range(count), number) for number in range(meetings(count))]
    met = Counter(tuple(sorted(pair)) for pairs in rounds for pair in pairs)
    assert met == Counter(combinations(range(count), 2))
    for pairs in rounds:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len({*busy})


def test_nodes_meet_by_their_first_ranks_or_by_rails() -> None:
    nodes = [[0, 1], [2, 3], [4, 5]]
    near, *far = rounds_of(nodes)
    assert pairs_of(nodes, near, rails=True) == [(0, 1), (2, 3), (4, 5)]
    assert far == [Round(True, number) for number in range(3)]
    firsts = [pair for meet in far for pair in pairs_of(nodes, meet, rails=False)]
    assert {frozenset(pair) for pair in firsts} == {frozenset(pair) for pair in ((0, 2), (0, 4), (2, 4))}
    rails = [pair for meet in far for pair in pairs_of(nodes, meet, rails=True)]
    assert {a % 2 for a, _ in rails} == {0, 1}
    assert all(a % 2 == b % 2 for a, b in rails)
    assert rounds_of([[0]]) == []


def test_a_link_between_nodes_is_not_slow_beside_one_inside() -> None:
    """Stages of which some are on one node, and nothing is known of the network."""
    four = Grid(Layout(pp=4), Cluster(gpus_per_node=2))
    seating = Seating(tuple(Seat(rank, f"node{rank // 2}", (), "NVIDIA H100") for rank in range(4)))
    seconds = {0: {1: SIZE / 300e9}, 1: {2: SIZE / 40e9}, 2: {3: SIZE / 300e9}, 3: {}}
    given = [Taken({}, seconds[rank], [], 0, 7e14) for rank in range(4)]
    found = {finding.what: finding for finding in Judge(four, seating, "cuda", None).judge(given)}
    assert found["pp message"].verdict == "told"


def seconds_of(kind: str, size: int, rate: float) -> float:
    """Of two ranks."""
    return size / rate * {"all_reduce": 1.0, "message": 1.0}.get(kind, 0.5)


def taken(slow_node: int = -1, slow_gpu: int = -1, dead_axis: str = "") -> list[Taken]:
    """Eight GPUs on four nodes: 300 GB/s inside, 40 GB/s between, a tenth of that at the NIC of `slow_node`."""
    found = []
    for rank in range(8):
        axes = {
            (axis, kind): seconds_of(kind, SIZE, (30e9 if axis == dead_axis else rate))
            for axis, rate in (("tp", 300e9), ("zero", 40e9))
            for kind in KINDS
        }
        sent = [
            Sent(rank, other, PAIR_BYTES["cuda"] / (300e9 if near else 4e9 if hit else 40e9), not near)
            for other in range(rank + 1, 8)
            if (near := other // 2 == rank // 2) or other % 2 == rank % 2
            for hit in [slow_node in (rank // 2, other // 2)]
        ]
        next_stage = {rank + 2: SIZE / 40e9} if CUBE.coord(rank).pp == 0 else {}
        found.append(Taken(axes, next_stage, sent, 4, 3e14 if rank == slow_gpu else 7e14))
    return found


def judged(given: list[Taken], network: Network | None = NETWORK) -> dict[str, Finding]:
    return {finding.what: finding for finding in Judge(CUBE, SEATING, "cuda", network, 7.4e14).judge(given)}


def test_a_sound_cluster_is_sound() -> None:
    found = judged(taken())
    assert {finding.verdict for finding in found.values()} == {"sound"}
    assert set(found) == {
        "matrix products",
        *(f"tp {kind} of 2, inside nodes" for kind in KINDS),
        *(f"zero {kind} of 2, between nodes" for kind in KINDS),
        *("pp message", "messages inside nodes", "messages between nodes"),
    }
    reduce = found["tp all_reduce of 2, inside nodes"]
    assert reduce.value == pytest.approx(300e9)
    # What the planner prices, latency and all.
    assert reduce.usual == pytest.approx(SIZE / NETWORK.reduce_s(SIZE, (2, 2, 1, 1)), rel=1e-9)  # type: ignore[arg-type]


@pytest.mark.parametrize("network", [NETWORK, None], ids=["planned", "median"])
def test_a_slow_nic_is_named_by_all_its_messages(network: Network | None) -> None:
    """R93: which link is slow?"""
    messages = judged(taken(slow_node=2), network)["messages between nodes"]
    assert messages.verdict == "wrong"
    assert messages.where == ("node2",)
    assert messages.advice.startswith("rank 4 (node2): look at the NIC") or "rank 5 (node2)" in messages.advice
    assert messages.value == pytest.approx(4e9)


def test_a_slow_gpu_is_named() -> None:
    """R93: which rank is slow?"""
    products = judged(taken(slow_gpu=5))["matrix products"]
    assert (products.verdict, products.where) == ("wrong", ("node2",))
    assert "rank 5 (node2)" in products.measured


def test_an_axis_far_below_its_plan_is_wrong_though_all_groups_are_alike() -> None:
    found = judged(taken(dead_axis="tp"))
    assert found["tp all_gather of 2, inside nodes"].verdict == "wrong"
    assert found["zero all_gather of 2, between nodes"].verdict == "sound"


def test_the_offset_of_a_clock_is_ntps() -> None:
    """RFC 5905: an hour ahead; 30 ms there, 10 ms back, 5 ms in between."""
    ahead, error = offset(100.0, 3700.030, 3700.035, 100.045)
    assert ahead == pytest.approx(3600.01)
    assert error == pytest.approx(0.02)
    assert abs(ahead - 3600.0) <= error
    assert judge_skew([Skew("a", 0.2, 0.01), Skew("b", -0.3, 0.01)]).verdict == "sound"
    wrong = judge_skew([Skew("a", 0.2, 0.01), Skew("b", -0.9, 0.01)])
    assert (wrong.verdict, wrong.where) == ("wrong", ("b",))
    # Not known well enough to say.
    assert judge_skew([Skew("b", 0.9, 0.8)]).verdict == "sound"
    assert judge_skew([]).verdict == "not here"


NVLINK = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def test_a_link_that_is_down_is_wrong() -> None:
    links = read_nvlink(NVLINK)
    assert links == {0: [26.562, 26.562], 1: [26.562, None]}
    sound, wrong = judge_nvlink(links, "a")
    assert (sound.verdict, sound.measured) == ("sound", "2 links, 53 GB/s")
    assert (wrong.verdict, wrong.what, wrong.measured) == ("wrong", "GPU 1 NVLink", "1 links, 27 GB/s")
    (none,) = judge_nvlink(read_nvlink("GPU 0: NVIDIA L4 (UUID: GPU-0)\n"), "a")
    assert none.verdict == "not here"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({}, []),
        ({"clocks.sm": "900"}, ["GPU 0 clock"]),
        ({"clocks.sm": "345", "clocks_throttle_reasons.gpu_idle": "Active", "pcie.link.gen.current": "1"}, []),
        ({"clocks_throttle_reasons.hw_slowdown": "Active"}, ["GPU 0 clock"]),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, ["GPU 0 memory errors"]),
        ({"pcie.link.width.current": "8"}, ["GPU 0 PCIe width"]),
        ({"ecc.errors.uncorrected.volatile.total": "[N/A]"}, []),
    ],
)
def test_gpus_that_are_held_back(change: dict[str, str], wrong: list[str]) -> None:
    no = "Not Active"
    values = ("0", "NVIDIA H100", "570.1", "1830", "1980", "61", no, no, no, "0", "5", "5", "16", "16")
    line = dict(zip(FIELDS.split(","), values, strict=True)) | change
    (gpu,) = read_gpus(", ".join(line.values()) + "\n")
    assert [f.what for f in judge_gpus([gpu], "a") if f.verdict == "wrong"] == wrong


def test_nodes_that_differ_are_told_and_equal_findings_are_one() -> None:
    torch, python = differing(
        [("a", {"torch": "2.13.0", "python": "3.11"}), ("b", {"torch": "2.12", "python": "3.11"})]
    )
    assert (torch.verdict, torch.measured) == ("wrong", "2.13.0 on a, 2.12 on b")
    assert (python.verdict, python.measured) == ("told", "3.11")
    same = [Finding(what="x", verdict="sound", where=(host,)) for host in "abc"]
    assert merged(same, 3) == [Finding(what="x", verdict="sound")]
    assert merged(same[:2], 3) == [Finding(what="x", verdict="sound", where=("a", "b"))]


def test_what_is_wrong_comes_with_what_to_do() -> None:
    wrong = Finding(what="disk", verdict="wrong", measured="1 B/s", expected="2", advice="buy one", where=("b",))
    found = Examination(8, ("a", "b"), (wrong, Finding(what="NVLink", verdict="not here")), ("half was measured",), 9.6)
    page = io.StringIO()
    print_table(found, page, 100)
    text = page.getvalue()
    assert "8 ranks on 2 nodes, 10 s" in text
    assert "WRONG" in text
    assert "→ disk (b): buy one" in text
    assert "half was measured" in text
    assert verdict_text(found) == "1 wrong: disk; 1 checks have nothing here to look at"
    assert as_json(found)["sound"] is False


def test_a_folder_that_takes_nothing_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    (finding, *_) = look_at_disk(Path("/proc/1"), "a", 1, None)
    assert (finding.verdict, finding.where) == ("wrong", ("a",))
    (finding,) = look_at_disk(tmp_path / "not" / "yet", "a", 1, None)
    assert finding.verdict == "told"
    assert finding.value is not None
    assert finding.value > 0
    assert list(tmp_path.iterdir()) == [file]


def test_a_rank_measures_for_itself_and_all_for_the_slowest() -> None:
    import torch

    meter = Meter(torch.device("cpu"), None, lambda *_: None)
    calls = []
    assert meter.own(lambda: calls.append(1), 0.01) > 0
    assert calls


def test_on_this_machine(tmp_path: Path) -> None:
    """Ranks of a job are started here; every axis of its grid is measured, and what is not here is said not to be."""
    job = write_job(tmp_path)
    code, out, err = run("doctor", job, "--pp", 2, "--json", "--seconds", 4)
    found = json.loads(out)
    assert code == (0 if found["sound"] else 1), err
    assert (found["world"], len(found["hosts"]), found["schema"]) == (2, 1, "trigrid.doctor/1")
    by_name = {finding["what"]: finding for finding in found["findings"]}
    assert by_name["GPU"]["verdict"] == by_name["messages between nodes"]["verdict"] == "not here"
    for name in ("matrix products", "pp message", "messages inside nodes"):
        assert by_name[name]["value"] > 0
    assert by_name[f"disk of {tmp_path / 'runs'}"]["value"] > 0
    # It left nothing behind.
    assert not (tmp_path / "runs").exists()


def test_a_rank_may_be_as_late_as_in_training(tmp_path: Path) -> None:
    """Of two ranks one does not come, and is named when the job's time is over."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    first = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    code, out, err = run("doctor", write_job(tmp_path), "--dp", 2, "--faults.start_s", 5, **first)
    assert (code, out) == (1, "")
    assert "1 of 2 ranks have not come within 4.5 s (of faults.start_s): 1; they have not started" in err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (("--seconds", "0"), "--seconds = 0.0: must be above 0"),
        (("no-such.toml",), "no-such.toml"),
    ],
)
def test_mistakes_are_refused(flags: tuple[str, ...], complaint: str) -> None:
    code, out, err = run("doctor", *flags)
    assert (code, out) == (2, "")
    assert complaint in err
