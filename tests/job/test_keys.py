"""Every key is explained once, and every reader of the explanation has it."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import get_type_hints

from trigrid.job.keys import INPUT_ONLY, field_docs, job_keys, key_names, key_types, table_of
from trigrid.job.reference import reference
from trigrid.job.schema import job_schema
from trigrid.job.spellings import SPELLINGS, meaning_elsewhere
from trigrid.spec.job import Data, Job

KEYS = {key.dotted: key for key in job_keys()}


def test_every_field_has_one_sentence() -> None:
    tables = [Job]
    for table in tables:
        assert list(field_docs(table)) == [field.name for field in fields(table)]
        tables += [inner for hint in get_type_hints(table).values() if (inner := table_of(hint))]
    assert len(tables) == 13
    assert all(is_dataclass(table) for table in {*tables, *INPUT_ONLY})
    for key in KEYS.values():
        assert re.fullmatch(r"[^\n|]*[^\n|.]\.", key.meaning), key
        assert not re.search(r"[a-z]{3}\. [A-Z]", key.meaning), f"more than a sentence: {key}"


def test_a_docstring_is_read_from_under_its_field() -> None:
    assert field_docs(Data)["document_attention"] == "Tokens attend only within their own document."
    assert "\n" not in field_docs(Data)["corpus"]


def test_the_list_of_keys_is_that_of_the_reader() -> None:
    assert set(KEYS) == set(key_names(key_types()))


def test_the_tables_name_every_key() -> None:
    sections = dict(re.findall(r"^### \[(\w+)\]\n(.*?)(?=^### |\Z)", reference(), re.M | re.S))
    told = {f"{name}.{key}" for name, text in sections.items() for key in re.findall(r"^\| `([\w.]+)` \|", text, re.M)}
    assert told | sections.keys() == KEYS.keys()


def test_values_and_defaults_in_words() -> None:
    for row in (
        "| `zero` | `0`, `1`, `2`, `3` | `1` |",
        "| `stage_layers` | array of whole numbers from 0 | `[]` |",
        '| `trackers` | array of `"tensorboard"`, `"wandb"`, `"mlflow"`, `"prometheus"` | `["tensorboard"]` |',
        "| `prometheus_port` | whole number from 1 to 65535 | `9464` |",
        "| `weights` | array of numbers above 0 | `[]` |",
        "| `beta1` | number from 0, below 1 | `0.9` |",
        "| `validation_fraction` | number from 0 to 0.5 | `0.02` |",
        "| `rope_scaling` | table | none |",
        "| `steps` | whole number from 1 |  |",
    ):
        assert row in reference(), row


# ---------------------------------------------------------------------------------------------- other tools


def test_what_other_tools_say_leads_to_keys_that_exist() -> None:
    rows = [(tool, name, ours) for tool, names in SPELLINGS.items() for name, ours in names.items()]
    assert len(rows) >= 60
    for tool, name, ours in rows:
        assert ours.partition(":")[0] in KEYS, (tool, name)
        assert name not in KEYS, f"{name} is a key of ours"
        assert re.fullmatch(r"[a-z0-9_.]+", name)


def test_other_tools_names_are_found_however_they_are_written() -> None:
    for tool, names in SPELLINGS.items():
        for name, ours in names.items():
            for written in (name, name.replace("_", "-")):
                said = meaning_elsewhere(tuple(written.split(".")))
                assert said is not None
                assert said.endswith(f" name for {ours}")
                assert f"{tool}'s" in said


def test_a_name_of_several_tools_names_them_all() -> None:
    assert (
        meaning_elsewhere(("batch", "global_batch_size"))
        == "torchtitan's and Megatron-LM's name for batch.global_batch"
    )


def test_what_nobody_says_is_not_explained() -> None:
    for key in (("mode",), ("parallel", "stage"), ("training", "steps_"), ("fish",), ("warm_up",)):
        assert meaning_elsewhere(key) is None, key


# ---------------------------------------------------------------------------------------------- schema


def test_the_schema_explains_every_key() -> None:
    schema = job_schema()
    for dotted, key in KEYS.items():
        place = schema
        for name in key.key:
            place = place["properties"][name]
            meaning = place["description"]
            if "$ref" in place:
                place = schema["$defs"][place["$ref"].removeprefix("#/$defs/")]
        assert meaning == key.meaning, dotted
