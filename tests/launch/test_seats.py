"""Where ranks really are: their order, what is refused, what is told."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from helpers.jobs import small_job

from trigrid.errors import Refused, RunFailed
from trigrid.grid import Grid
from trigrid.launch.place import Place
from trigrid.launch.seats import Seat, arrange, cautions, faults, picture, seat_of
from trigrid.report.console import Console
from trigrid.spec.cluster import Cluster
from trigrid.spec.job import Faults
from trigrid.spec.layout import Layout
from trigrid.train import attempt
from trigrid.train.attempt import gather
from trigrid.train.meeting import take_seats

LEAVES = {"a": ("spine", "leaf1"), "b": ("spine", "leaf2"), "c": ("spine", "leaf1"), "d": ("spine", "leaf2")}


def seats(hosts: str, device: str = "cpu", known: bool = False) -> list[Seat]:
    """A seat for each letter, the host of that rank."""
    return [Seat(rank, host, LEAVES[host] if known else (), device) for rank, host in enumerate(hosts)]


def grid(tp: int = 1, pp: int = 1, dp: int = 1, gpus_per_node: int = 8) -> Grid:
    return Grid(Layout(tp=tp, pp=pp, dp=dp), Cluster(gpus_per_node=gpus_per_node, nodes_per_leaf=1))


def order(hosts: str, known: bool = False) -> list[int]:
    return [seat.rank for seat in arrange(seats(hosts, known=known)).seats]


def test_ranks_of_a_node_follow_each_other() -> None:
    """R45: srun's cyclic distribution; the first rank stays the first."""
    assert order("abab") == [0, 2, 1, 3]
    assert order("baba") == [0, 2, 1, 3]
    assert order("aabb") == [0, 1, 2, 3]


def test_nodes_of_a_leaf_follow_each_other_from_the_first_ranks_on() -> None:
    assert order("abcd", known=True) == [0, 2, 1, 3]
    assert order("bacd", known=True) == [0, 3, 1, 2]
    far = [Seat(0, "x", ("top", "s2", "l4"), "cpu"), Seat(1, "y", ("top", "s1", "l1"), "cpu")]
    far += [Seat(2, "z", ("top", "s2", "l3"), "cpu"), Seat(3, "w", ("top", "s2", "l4"), "cpu")]
    assert [seat.host for seat in arrange(far).seats] == ["x", "w", "z", "y"]


def test_a_file_of_switches_stands_in_for_those_that_are_told() -> None:
    switches = {"a": ("s",), "b": ("t",), "c": ("s",)}
    assert [seat.rank for seat in arrange(seats("abc"), switches).seats] == [0, 2, 1]
    with pytest.raises(Refused, match="lacks b, c"):
        arrange(seats("abc"), {"a": ("s",)})


def test_a_seat_as_slurm_tells_it() -> None:
    env = {"SLURMD_NODENAME": "n1", "SLURM_TOPOLOGY_ADDR": "spine.leaf1.n1"}
    env["SLURM_TOPOLOGY_ADDR_PATTERN"] = "switch.switch.node"
    assert seat_of(env, 3, "cpu", "") == Seat(3, "n1", ("spine", "leaf1"), "cpu")
    env |= {"SLURM_TOPOLOGY_ADDR": "n1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}
    assert seat_of(env, 3, "cpu", "").switches == ()


def test_tensor_parallelism_between_nodes_is_refused_where_the_job_has_it_inside() -> None:
    """R45: three and one; the divisors of tp that fill every node are the way out."""
    (fault,) = faults(arrange(seats("aaab")), grid(tp=4))
    assert (fault.key, fault.value, fault.legal) == ("parallel.tp", 4, (1,))
    assert "on a, b, since nodes have 3 ranks (a), 1 ranks (b)" in fault.reason
    (fault,) = faults(arrange(seats("aabbccdd")), grid(tp=4, dp=2))
    assert fault.legal == (1, 2)
    assert faults(arrange(seats("aabbccdd")), grid(tp=2, dp=4)) == []
    # The job itself has told that, and a warning with it.
    assert faults(arrange(seats("aabbccdd")), grid(tp=4, dp=2, gpus_per_node=2)) == []


def test_missing_and_mixed_gpus_are_told_for_every_node() -> None:
    broken = [
        Seat(2 * i + j, f"n{i}", (), "H100", "this node has 1 CUDA devices" * (i > 0))
        for i in range(12)
        for j in (0, 1)
    ]
    told = faults(arrange(broken), grid(dp=24))
    assert [problem.value for problem in told] == [*(f"n{i}" for i in range(1, 9)), 11]
    mixed = [*seats("aab", device="H100"), Seat(3, "b", (), "cpu")]
    (fault,) = faults(arrange(mixed), grid(dp=4))
    assert str(fault).startswith("node = b: other nodes have CUDA devices, and this one shows none")
    slow = [*seats("aa", device="H100"), *(Seat(rank, "b", (), "A100") for rank in (2, 3))]
    assert faults(arrange(slow), grid(dp=4)) == []
    (caution,) = cautions(arrange(slow), grid(dp=4))
    assert "H100 on a; A100 on b" in caution.reason


def test_cautions() -> None:
    assert cautions(arrange(seats("aabb")), grid(pp=2, dp=2)) == []
    (uneven,) = cautions(arrange(seats("aab")), grid(dp=3))
    assert "are uneven: they have 2 ranks (a), 1 ranks (b)" in uneven.reason
    (crossing,) = cautions(arrange(seats("aabb")), grid(pp=4))
    assert (crossing.key, crossing.legal) == ("cluster.gpus_per_node", (2,))
    (leaves,) = cautions(arrange(seats("aabb", known=True)), grid(pp=4))
    assert "stages across leaves (a to b)" in leaves.reason


def test_the_map() -> None:
    told = picture(arrange(seats("abab", known=True)), grid(tp=2, dp=2), "srun")
    assert told.splitlines() == [
        "4 ranks on 2 nodes, in the order of their switches:",
        "  spine.leaf1  a  ranks 0–1  dp 0  tp 0–1  (srun's 0, 2)",
        "  spine.leaf2  b  ranks 2–3  dp 1  tp 0–1  (srun's 1, 3)",
        "  tp inside nodes, dp across leaves",
    ]


def test_the_map_of_the_documents() -> None:
    """docs/launch.md: the demo under srun's cyclic distribution over two nodes of a leaf."""
    told = [Seat(rank, f"node{1 + rank % 2 * 2}", ("spine", "leaf1"), "cpu") for rank in range(8)]
    page = (Path(__file__).parents[2] / "docs" / "launch.md").read_text(encoding="utf-8")
    assert f"```text\n{picture(arrange(told), grid(tp=2, pp=2, dp=2), 'srun')}\n```\n" in page


def test_the_map_of_many_nodes_is_small_and_quickly_made() -> None:
    """16,384 ranks, counted round the nodes by their launcher."""
    nodes, world = 2048, 16_384
    many = [Seat(r, f"gpu{r % nodes}", ("spine", f"leaf{r % nodes // 32}"), "H100") for r in range(world)]
    layout = Grid(Layout(tp=8, pp=16, dp=128), Cluster())
    begun_s = time.process_time()
    seating = arrange(many)
    assert faults(seating, layout) == cautions(seating, layout) == []
    lines = picture(seating, layout, "srun").splitlines()
    print(f"{time.process_time() - begun_s:.1f} CPU-s")
    assert len(lines) == 12
    assert lines[1].startswith("  spine.leaf0   gpu0     ranks 0–7  dp 0  pp 0  tp 0–7  (srun's 0, 2048, ")
    assert lines[9] == "  … 2,039 nodes more"
    assert lines[-1] == "  tp inside nodes, pp between nodes, dp across leaves"


def meet(store: dist.Store, hosts: str, layout: Layout, **cluster: int) -> list[int]:
    """The rank of the grid of each of the launcher's, which all meet in this process."""
    job = replace(small_job(layout), cluster=Cluster(**cluster))

    def sit(seat: Seat) -> int:
        place = Place(seat.rank, len(hosts), 0, 1, "", 0, "srun")
        return take_seats(store, place, seat, job, Console(quiet=True)).place.rank

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(sit, seats(hosts)))


def test_ranks_get_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert meet(dist.HashStore(), "abab", Layout(tp=2, dp=2)) == [0, 2, 1, 3]
    # What torch and the messages of this process read: one of those two that are counted anew.
    assert os.environ["RANK"] in ("1", "2")


def test_one_message_for_all_where_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "TOLD_S", 0.1)
    ended = {}

    def settle(rank: int) -> None:
        job, place = small_job(Layout(tp=2)), Place(rank, 2, 0, 1, "", 0, "srun")
        try:
            take_seats(store, place, seats("ab")[rank], job, Console(quiet=True))
        except (Refused, SystemExit) as error:
            ended[rank] = error

    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(settle, range(2)))
    assert "parallel.tp = 2" in str(ended[0])
    assert isinstance(ended[1], SystemExit)
    assert ended[1].code == 1


def test_who_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """R90. Who has come ends, and leaves it to the first one to say why."""
    monkeypatch.setattr(attempt, "TOLD_S", 0.1)
    job = replace(small_job(Layout(dp=4)), faults=Faults(start_s=0.5))
    store = dist.HashStore()
    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(gather, store, 2, 4, "", 10.0, print)
        with pytest.raises(RunFailed, match=r"2 of 4 ranks have not come within 0\.45 s .*: 1, 3; they"):
            take_seats(store, Place(0, 4, 0, 1, "", 0, "srun"), seats("a")[0], job, Console(quiet=True))
        with pytest.raises(SystemExit, match="1"):
            other.result(10)
