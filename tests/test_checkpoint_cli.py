"""`trigrid checkpoint` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.exchanged import SPEC, huggingface_folder
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trigrid.checkpoint.folder import path_of
from trigrid.cli import app
from trigrid.errors import Refused, TrigridError


def call(*words: object) -> int:
    """The exit code of `trigrid WORDS`; what main would turn into one is raised."""
    try:
        app([*map(str, words)], exit_on_error=False, print_error=False)
    except SystemExit as done:
        return int(done.code or 0)
    return 0


def result(capsys: pytest.CaptureFixture[str], *words: object) -> Any:
    """What `trigrid WORDS --json` prints."""
    assert call(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    return huggingface_folder(tmp_path / "theirs")


def test_there_and_back(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Imported into a run's folder, cut anew, exported with its tokenizer; transformers reads all of it."""
    run = tmp_path / "run"
    one = path_of(run, 0)
    made = result(capsys, "checkpoint", "convert", theirs, one)
    assert made["direction"] == "import"
    cut = tmp_path / "cut"
    words = ("--tp", 2, "--pp", 2, "--dp", 2, "--zero", 3, "--global-batch", 2)
    assert result(capsys, "checkpoint", "reshard", run, cut, *words)["world"] == 8
    told = result(capsys, "checkpoint", "inspect", cut)
    assert (told["step"], told["consumed"], told["world"], len(told["files"])) == (0, 0, 8, 8)
    assert told["bytes"] == {"weight": 4 * sum(t.numel() for t in load_file(theirs / "model.safetensors").values())}
    assert told["parameters"]["embedding.weight"] == {
        "shape": [260, 16],
        "kinds": {"weight": {"dtype": "F32", "parts": 4}},
    }
    assert told["layout"]["pp"] == 2
    assert result(capsys, "checkpoint", "verify", cut) == {"path": str(cut), "sound": True, "faults": []}

    back = tmp_path / "back"
    made = result(capsys, "checkpoint", "convert", cut, back, "--dtype", "fp32", "--max-file-gb", 2e-5)
    assert made["direction"] == "export"
    assert len(made["files"]) > 1
    assert made["tokenizer"] == ["tokenizer.json", "tokenizer_config.json"]
    found = {name: t for file in made["files"] for name, t in load_file(back / file).items()}
    expected = load_file(theirs / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(found[name].equal(expected[name]) for name in expected)
    tokenizer = AutoTokenizer.from_pretrained(back)
    assert tokenizer.decode(tokenizer("the naïve cat").input_ids) == "the naïve cat"
    model = AutoModelForCausalLM.from_pretrained(back)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 0


def test_inspect_shows_a_page(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("checkpoint", "convert", theirs, tmp_path / "one", "--quiet")
    assert call("checkpoint", "inspect", tmp_path / "one") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "state       step 0, 0 samples drawn, 0 updates, 0 samples passed over, 0 rewinds"
    (row,) = [line.split() for line in lines if line.startswith("layers.*.q.weight")]
    assert row == ["layers.*.q.weight", "16", "×", "16", "2", "weight", "F32"]


def test_verify_names_what_differs(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one"
    call("checkpoint", "convert", theirs, one, "--quiet")
    file = one / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    (one / "optimizer.pt").write_bytes(b"\x80\x04")
    assert call("checkpoint", "verify", one) == 1
    told = capsys.readouterr().out.splitlines()
    assert told == [
        f"{one / 'optimizer.pt'}: is not among the files of this checkpoint",
        f"{file}: is damaged: its digest is another than the manifest's",
    ]
    assert call("checkpoint", "verify", one, "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"path": str(one), "sound": False, "faults": told}
    for words in (("convert", one, tmp_path / "new"), ("reshard", one, tmp_path / "new")):
        with pytest.raises(TrigridError, match="its digest is another"):
            call("checkpoint", *words)
    (one / "manifest.json").write_text("")
    assert call("checkpoint", "verify", one) == 1
    assert "is damaged: it is no manifest" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_an_export_without_a_tokenizer_says_so(
    theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (theirs / "tokenizer.json").rename(tmp_path / "t.json")
    call("checkpoint", "convert", theirs, tmp_path / "one", "--quiet")
    call("checkpoint", "convert", tmp_path / "one", tmp_path / "back", "--quiet")
    assert capsys.readouterr().err.startswith("warning: no tokenizer is known: the export has none")
    assert not (tmp_path / "back" / "tokenizer.json").exists()
    words = ("convert", tmp_path / "one", tmp_path / "again", "--tokenizer", tmp_path / "t.json", "--quiet")
    call("checkpoint", *words)
    assert capsys.readouterr().err == ""
    assert (tmp_path / "again" / "tokenizer.json").read_bytes() == (tmp_path / "t.json").read_bytes()
    assert json.loads((tmp_path / "again" / "config.json").read_text())["eos_token_id"] == 0


def test_mistakes_are_refused_before_anything_is_made(theirs: Path, tmp_path: Path) -> None:
    one, there = tmp_path / "one", tmp_path / "there"
    call("checkpoint", "convert", theirs, one, "--quiet")
    there.mkdir()
    (tmp_path / "empty").mkdir()
    for words, message in (
        (("inspect", tmp_path / "no"), "PATH = .*no: there is no such folder"),
        (("inspect", tmp_path / "empty"), "is neither a checkpoint of trigrid"),
        (("verify", theirs), "is neither a checkpoint of trigrid"),
        (("convert", tmp_path / "empty", tmp_path / "new"), "is neither a checkpoint of trigrid"),
        (("convert", theirs, there), "DST = .*there: is there already"),
        (("convert", one, there), "DST = .*there: is there already"),
        (("reshard", one, there), "DST = .*there: is there already"),
        (("convert", theirs, tmp_path / "new", "--dtype", "fp32"), "--dtype = fp32: is for an export"),
        (("convert", one, tmp_path / "new", "--max-file-gb", -1), "--max-file-gb = -1.0: must be a number above 0"),
        (("reshard", one, tmp_path / "new", "--tp", 3), "tp"),
    ):
        with pytest.raises(Refused, match=message):
            call("checkpoint", *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "one", "theirs", "there"]


def test_the_shape_of_the_folder_is_the_model(theirs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("checkpoint", "convert", theirs, tmp_path / "one", "--quiet")
    model = result(capsys, "checkpoint", "inspect", tmp_path / "one")["model"]
    assert (model["name"], model["vocab"], model["kv_heads"]) == ("theirs", SPEC.vocab, SPEC.kv_heads)
