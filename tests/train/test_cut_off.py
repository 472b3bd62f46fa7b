"""Which node the network does not reach, by what the ranks say."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from trigrid.engine.activity import Waiting
from trigrid.train.stall import Report, cut_off, reaches, verdict

HOSTS = tuple(f"node{rank // 2}" for rank in range(8))


def reports(lost: Sequence[int], silent: Sequence[int] = ()) -> dict[int, Report]:
    """Of eight ranks that all wait for each other; the first of each node has tried to reach the first one's."""
    waiting = Waiting("all_reduce", "world", tuple(range(8)))
    return {
        rank: Report(rank, "step 9", None, waiting, 7.0, (), 1.0, rank in lost)
        for rank in range(8)
        if rank not in silent
    }


@pytest.mark.parametrize(
    ("lost", "silent", "named"),
    [
        ((), (), []),
        ((4,), (), ["node2"]),
        ((2, 6), (), ["node1", "node3"]),
        # The first rank's own node, which nobody else reaches.
        ((2, 4, 6), (), ["node0"]),
        # It is dead, and its silence says so: that it is not reached says nothing of the others.
        ((2, 4, 6), (0, 1), []),
    ],
)
def test_the_node_that_others_do_not_reach_is_named(
    lost: tuple[int, ...], silent: tuple[int, ...], named: list[str]
) -> None:
    """R90: all ranks live, and wait for each other."""
    assert cut_off(reports(lost, silent), HOSTS) == named
    lines = verdict(reports(lost, silent), 8, HOSTS).splitlines()
    assert lines[0].startswith("cut off: ") == bool(named)
    if named == ["node2"]:
        assert lines[0].startswith("cut off: node2, ranks 4-5: the node is not reached over the network by the others")
    if silent:
        assert lines[0].startswith("missing: ranks 0-1 (node0): no word from them")


def test_on_one_machine_no_node_is_told() -> None:
    assert "node" not in verdict(reports((), (3,)), 8)


def test_an_address_is_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert reaches("127.0.0.1", port, 1.0)
    assert not reaches("127.0.0.1", port, 1.0)
