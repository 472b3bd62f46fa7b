"""`trigrid generate` as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.exchanged import SPEC, huggingface_folder
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from trigrid.checkpoint.folder import path_of
from trigrid.checkpoint.from_huggingface import import_folder
from trigrid.checkpoint.reading import open_sound
from trigrid.checkpoint.text import GrowingText, load_model
from trigrid.cli import app
from trigrid.data.prepare import Prepared, save
from trigrid.data.tokenizer import load_tokenizer
from trigrid.errors import Refused
from trigrid.models.generate import LanguageModel, Sampling, generate

PROMPT = "the cat"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with one checkpoint, whose data.json names the tokenizer."""
    folder = tmp_path_factory.mktemp("run")
    theirs = huggingface_folder(folder / "theirs")
    import_folder(theirs, path_of(folder, 0), lambda *_: None)
    tokenizer = folder / "words.json"
    (theirs / "tokenizer.json").rename(tokenizer)
    save(Prepared(train=(), validation=(), tokenizer=tokenizer, hash="", cached=True), folder / "data.json")
    return folder


def call(*words: object) -> None:
    with pytest.raises(SystemExit) as done:
        app([*map(str, words)], exit_on_error=False, print_error=False)
    assert not done.value.code


def told(capsys: pytest.CaptureFixture[str], run: Path, *words: object) -> dict[str, object]:
    call("generate", run, "--prompt", PROMPT, *words, "--json", "--quiet")
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_greedy_text_is_that_of_transformers(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, run, "--temperature", 0, "--tokens", 20)
    tokenizer = Tokenizer.from_file(str(run / "words.json"))
    ids = torch.tensor([tokenizer.encode(PROMPT).ids])
    model = AutoModelForCausalLM.from_pretrained(run / "theirs", dtype=torch.float32)
    greedy = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    new = [token for token in greedy[0, ids.shape[1] :].tolist() if token != 0]
    assert found["tokens"] == new
    assert len(new) > 3
    assert found["ended"] == (len(new) < 20)
    assert found["text"] == tokenizer.decode(ids[0].tolist() + new)[len(PROMPT) :]

    call("generate", run, "--prompt", PROMPT, "--temperature", 0, "--tokens", 20, "--quiet")
    assert capsys.readouterr().out == f"{PROMPT}{found['text']}\n"


def test_a_seed_decides_the_draws(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, same, other = (told(capsys, run, "--tokens", 12, "--seed", seed)["tokens"] for seed in (1, 1, 2))
    assert one == same != other
    greedy = told(capsys, run, "--tokens", 12, "--temperature", 0)["tokens"]
    assert told(capsys, run, "--tokens", 12, "--top-k", 1)["tokens"] == greedy
    assert told(capsys, run, "--tokens", 12, "--temperature", 1e-6)["tokens"] == greedy


def test_what_the_model_does_not_see_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("generate", run, "--prompt", "x y " * 40, "--tokens", 1, "--quiet")
    assert "warning: the prompt has 160 tokens, of which the model sees the last 32" in capsys.readouterr().err
    call("generate", run, "--prompt", "x", "--tokens", 40, "--quiet")
    assert "warning: after 32 tokens the model sees the last 32 alone" in capsys.readouterr().err
    call("generate", run, "--prompt", "", "--tokens", 2, "--quiet")
    assert capsys.readouterr().err == ""


def test_of_a_long_text_the_end_counts(run: Path) -> None:
    model = load_model(open_sound(path_of(run, 0)), torch.device("cpu"), lambda *_: None)
    text = torch.randint(SPEC.vocab, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    drawn, seen = generate(model, text, Sampling(temperature=0)), list(text)
    for _ in range(3):
        token = next(drawn)
        assert token == int(model.logits(torch.tensor([seen[-SPEC.context :]]))[0, -1].argmax())
        seen.append(token)


def test_draws_follow_the_probabilities() -> None:
    """Of 4 tokens, at temperature 0.5 and among the best 3: within 4 standard deviations of the softmax."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])

    class Fixed(LanguageModel):
        def __init__(self) -> None:
            self.spec = SPEC

        def logits(self, tokens_BS: torch.Tensor, last: bool = False) -> torch.Tensor:
            return logits.view(1, 1, 4)

    draws = 4000
    drawn = generate(Fixed(), [0], Sampling(temperature=0.5, top_k=3, seed=3))
    counts = torch.bincount(torch.tensor([next(drawn) for _ in range(draws)]), minlength=4).double()
    probs = torch.tensor([0.0, 1.0, -torch.inf, 0.5]).double().div(0.5).softmax(-1)
    assert counts[2] == 0
    assert ((counts - draws * probs).abs() <= 4 * (draws * probs * (1 - probs)).sqrt()).all()


def test_a_character_is_shown_when_it_is_whole(run: Path) -> None:
    tokenizer = load_tokenizer(run / "words.json", 1)
    prompt, new = (tokenizer.encode_batch([text])[0].tolist() for text in ("na", "日本 ï"))
    growing = GrowingText(tokenizer, prompt)
    pieces = [growing.add(token) for token in new[:-1]]
    assert "".join(pieces) == "日本 "
    assert "" in pieces
    assert growing.end() == "\ufffd"


def test_mistakes(run: Path, tmp_path: Path) -> None:
    import_folder(run / "theirs", tmp_path / "alone", lambda *_: None)
    words = huggingface_folder(tmp_path / "larger", replace(SPEC, vocab=262)) / "tokenizer.json"
    for arguments, message in (
        ((run, "--tokens", 0), "--tokens = 0: must be at least 1"),
        ((run, "--temperature", -1), "--temperature = -1.0: must be a number from 0 on"),
        ((run, "--top-k", -1), "--top-k = -1: must be at least 0"),
        ((tmp_path, "--tokens", 1), "is neither a checkpoint of trigrid"),
        ((tmp_path / "alone", "--tokens", 1), r"--tokenizer = \(not given\): needed: .* does not say which tokenizer"),
        ((run, "--tokenizer", tmp_path / "no.json"), "no.json: no such file"),
        ((run, "--tokenizer", words), "has token ids up to 261"),
    ):
        with pytest.raises(Refused, match=message):
            app(["generate", "--prompt", PROMPT, *map(str, arguments)], exit_on_error=False, print_error=False)
