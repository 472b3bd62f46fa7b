"""States of the planner's page, good and bad."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from trigrid.job.keys import choices, job_keys, table_of
from trigrid.spec.models import catalogue

KEYS = {key.dotted: key for key in job_keys() if len(key.key) > 1 and not table_of(key.type)}
DIALS = (
    *(f"parallel.{name}" for name in ("tp", "pp", "cp", "ep", "dp_replicate", "zero", "gather", "reduce", "schedule")),
    *(f"parallel.{name}" for name in ("virtual_stages", "recompute", "sequence_parallel", "regather", "loss_chunks")),
    *("batch.sequence", "batch.global_batch", "batch.micro_batch", "cluster.gpu", "cluster.gpus_per_node"),
    *("run.precision", "parallel.prefetch"),
)
SINGLE = st.one_of(
    st.integers(),
    st.booleans(),
    st.text(max_size=8),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0, -1, 2**31, 2**63, 2**70, 1e308, "", "auto", "/etc/passwd"]),
)
ANYTHING = st.one_of(SINGLE, st.lists(SINGLE, max_size=4))
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])
SIZES = st.sampled_from([32, 64, 70, 512, 1024, 2048, 4096])


def likely(key: str) -> st.SearchStrategy[Any]:
    """Values of a dial that are often legal."""
    hint = KEYS[key].type
    if legal := choices(hint):
        return st.sampled_from(legal)
    if hint is bool:
        return st.booleans()
    if key == "cluster.gpu":
        return st.sampled_from(["h100", "a100-80g", "b200"])
    return SIZES if key in ("batch.sequence", "batch.global_batch") else POWERS


VALUES = st.lists(st.sampled_from(DIALS), max_size=8, unique=True).flatmap(
    lambda keys: st.fixed_dictionaries({key: likely(key) for key in keys})
)
MODELS = st.one_of(
    st.sampled_from(sorted(catalogue())).map(lambda name: {"model": name}),
    st.sampled_from(["300B", "7e9", "1T"]).map(lambda size: {"params": size}),
)
GPUS = st.sampled_from([1, 8, 64, 100, 1024, 16_384])
STATES = st.builds(
    lambda model, gpus, values, grown: {**model, "gpus": gpus, "values": values, "expandable_segments": grown},
    MODELS,
    GPUS,
    VALUES,
    st.booleans(),
)
"""Of sound types."""
WILD = st.builds(
    lambda state, values, more: {**state, "values": {**state["values"], **values}, **more},
    STATES,
    st.dictionaries(st.sampled_from([*KEYS, "parallel", "x.y", "parallel.tp.x", ""]), ANYTHING, max_size=3),
    st.fixed_dictionaries(
        {},
        optional={
            "gpus": ANYTHING,
            "policy": st.sampled_from(["two-moments", "nope", 3]),
            "software": st.sampled_from(["megatron", "fsdp2", "nope", None]),
            "tokens": st.sampled_from(["15T", "0", "x", 3]),
            "locked": st.lists(st.sampled_from(["parallel.tp", "batch.micro_batch", "x", 3]), max_size=2),
            "config": st.dictionaries(st.text(max_size=4), ANYTHING, max_size=3),
        },
    ),
)
"""Of which most make no sense."""
