"""What `trigrid init` writes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from trigrid.errors import Refused
from trigrid.job import job_from_text
from trigrid.job.keys import job_keys
from trigrid.job.starter import starter
from trigrid.spec.models import load_model
from trigrid.spec.rules import check_trainable

OVERRIDES = [
    [],
    ["--tp", "2", "--pp=2", "--zero", "3"],
    ["--dp", "3"],
    ["--global-batch", "12"],
    ["--micro-batch", "3"],
    ["--global-batch", "12", "--accumulation", "3"],
    ["--lr", "1", "--steps", "5", "--optimizer.warmup_steps=4", "--optimizer.clip_norm", "0"],
    ["--data.corpus", '["stdlib", "a \\"b\\".txt"]', "--data.weights", "[1, 2.5]", "--data.cache", "a\nb"],
    ["--run.trackers", "[]", "--recompute", "full", "--parallel.order", '["pp", "dp", "cp", "tp"]'],
    ["--model.rope_scaling.factor", "8", "--model.tied", "true"],
    ["--model.layers", "2", "--model.vocab", "1000"],
    ["--model.name", "llama3-8b", "--tp", "8"],
    ["--model.name", "llama3.1-8b", "--model.layers", "2", "--model.rope_scaling.factor", "4", "--seq=2048"],
]


def uncommented(text: str) -> str:
    return re.sub(r"^#(?=\w)", "", text, flags=re.M)


@pytest.mark.parametrize("overrides", OVERRIDES, ids=" ".join)
def test_it_loads_to_what_was_asked_for(overrides: list[str]) -> None:
    text = starter(overrides, {})
    job = job_from_text(text)
    assert job_from_text(text, overrides) == job
    assert job_from_text(uncommented(text)) == job


def test_it_begins_with_a_job_that_trains_on_one_process() -> None:
    job = job_from_text(starter([], {}))
    assert (job.parallel.world, job.data.corpus, job.run.steps) == (1, ("stdlib",), 50)
    assert check_trainable(job) == []


@pytest.mark.parametrize("overrides", [OVERRIDES[1], OVERRIDES[6], OVERRIDES[7], OVERRIDES[9]], ids=" ".join)
def test_overrides_replace_nothing_but_what_they_name(overrides: list[str]) -> None:
    assert job_from_text(starter(overrides, {})) == job_from_text(starter([], {}), overrides)


def test_every_key_is_in_it_and_explained() -> None:
    text = starter([], {})
    prose = " ".join(line.removeprefix("# ") for line in text.splitlines())
    for key in job_keys():
        name = ".".join(key.key[1:])
        assert key.meaning in prose, key
        assert re.search(rf"^(#?{name} = |# {name}: |\[{key.dotted}\]$)", text, re.M), key


def test_only_what_is_asked_for_or_needed_is_not_a_comment() -> None:
    parsed = tomllib.loads(starter(["--pp", "1", "--run.seed=7"], {"TRIGRID_RUN__DEVICE": "cpu"}))
    assert parsed["parallel"] == {"pp": 1}
    assert parsed["run"] == {"steps": 50, "seed": 7, "precision": "fp32", "device": "cpu"}
    assert parsed["batch"] == {"global_batch": 16, "sequence": 128, "micro_batch": 4}
    assert parsed["cluster"] == parsed["data"] == {}


def test_a_name_of_the_catalogue_stands_for_the_shape() -> None:
    text = starter(["--model.name", "llama3-8b", "--tp", "8"], {})
    assert tomllib.loads(text)["model"] == {"name": "llama3-8b"}
    assert "hidden" not in text
    assert job_from_text(text).model == load_model("llama3-8b")


def test_a_configuration_stands_for_the_shape(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,'
        '"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 2048,'
        '"rms_norm_eps": 1e-6}'
    )
    text = starter(["--model.config", "config.json"], {}, tmp_path)
    assert tomllib.loads(text)["model"] == {"config": "config.json"}
    assert job_from_text(text, folder=tmp_path).model.hidden == 64


def test_mistakes_are_told_as_for_any_job() -> None:
    for overrides, message in (
        (["--tp", "4"], "--tp: parallel.tp = 4: must divide model.heads = 6; nearest legal: 2"),
        (["--seq=512"], "--seq: batch.sequence = 512: exceeds model.context = 256; nearest legal: 256"),
        (["--model.context=64"], "trigrid init: batch.sequence = 128: exceeds model.context = 64; nearest legal: 64"),
        (["--fish=1"], "--fish: fish = 1: there is no such key"),
    ):
        with pytest.raises(Refused) as refused:
            starter(overrides, {})
        assert str(refused.value) == message
    with pytest.raises(Refused, match=r"model\.name = llama3-8bb: no model of the catalogue has this name"):
        starter(["--model.name", "llama3-8bb"], {})
