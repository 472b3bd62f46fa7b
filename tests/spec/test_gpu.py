"""The catalogue of accelerators: figures against the data sheets, and how names are found."""

from __future__ import annotations

import pytest

from trigrid.errors import Refused
from trigrid.spec.gpu import GIB, gpus, load_gpu


def test_peaks_are_dense_and_bandwidths_one_way() -> None:
    """modelling.md: 989 and not 1,979 for bf16, and NVLink's 900 GB/s count both directions."""
    h100 = load_gpu("h100")
    assert h100.peak_flops["bf16"] == 989e12
    assert h100.peak_flops["fp8"] == 1979e12
    assert h100.nvlink_Bps == 450e9
    assert h100.nic_Bps == 50e9
    assert load_gpu("a100-80g").nvlink_Bps == 300e9


@pytest.mark.parametrize("name", gpus())
def test_every_entry_makes_physical_sense(name: str) -> None:
    gpu = gpus()[name]
    assert len(gpu.source) > 20
    assert 15 * GIB < gpu.hbm_bytes < 300 * GIB
    assert gpu.nic_Bps <= gpu.nvlink_Bps < gpu.hbm_Bps
    assert set(gpu.sustained) <= set(gpu.formats)
    assert all(0.5 < share <= 0.95 for share in gpu.sustained.values())
    assert "fp32" in gpu.formats
    assert 100 < gpu.power_w < 2000
    assert 70 < gpu.sms < 310


def test_a_power_capped_h100_does_not_sustain_what_a_full_one_does() -> None:
    assert load_gpu("h100-96g-500w").sustained["bf16"] < load_gpu("h100").sustained["bf16"]


def test_v100_multiplies_no_bf16() -> None:
    assert "bf16" not in load_gpu("v100-32g").formats


def test_names_are_found_in_any_case_and_by_alias() -> None:
    assert load_gpu("H100-SXM") is load_gpu("h100")
    assert load_gpu("A100") is load_gpu("a100-80g")
    names = [name for gpu in gpus().values() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))
    assert names == [name.lower() for name in names]


@pytest.mark.parametrize(("wrong", "meant"), [("h10", "h100"), ("a100-80", "a100-80g"), ("mi300", "mi300x")])
def test_a_wrong_name_is_refused_with_the_closest(wrong: str, meant: str) -> None:
    with pytest.raises(Refused, match="no accelerator of the catalogue has this name") as refused:
        load_gpu(wrong)
    (problem,) = refused.value.problems
    assert problem.key == "cluster.gpu"
    assert meant in problem.legal


def test_a_name_like_no_other_is_refused_with_all() -> None:
    with pytest.raises(Refused) as refused:
        load_gpu("zzzzzz")
    assert set(refused.value.problems[0].legal) == set(gpus())
