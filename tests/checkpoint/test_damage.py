"""Checkpoints that are damaged, foreign or malicious are refused by the name of what is wrong, and run nothing."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.jobs import named, small_job
from helpers.saved import engine_of, fill, save_now
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.checkpoint.folder import path_of
from trigrid.checkpoint.manifest import Damaged, State, digest, read_manifest
from trigrid.checkpoint.restore import verify


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    engine = engine_of(small_job(named("dp1")), 0)
    fill(engine)
    assert save_now(engine, run_dir, State(3)) == []
    return path_of(run_dir, 3)


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / sound.name))


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the body of the manifest, with a digest that fits, as somebody would who means harm."""
    path = folder / "manifest.json"
    body = json.loads(path.read_bytes())["body"]
    change(body)
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    path.write_text(json.dumps({"digest": digest(canonical), "body": body}))


FILE = "rank-00000.safetensors"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, to: int) -> None:
    path.write_bytes(path.read_bytes()[:to])


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped byte": (lambda f: flip(f / FILE, -9), f"{FILE}: is damaged: its digest is another than the manifest's"),
    "truncated": (lambda f: cut(f / FILE, 5000), f"{FILE}: has 5,000 bytes, and"),
    "missing shard": (lambda f: (f / FILE).unlink(), f"{FILE}: is missing"),
    "empty manifest": (lambda f: (f / "manifest.json").write_text(""), "manifest.json: is damaged: it is no manifest"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json: is missing, so that this is no complete"),
    "half a manifest": (lambda f: cut(f / "manifest.json", 400), "manifest.json: is damaged: it is no manifest"),
    "flipped manifest": (lambda f: flip(f / "manifest.json", 200), "manifest.json: is damaged"),
    "another job": (lambda f: (f / "job.toml").write_text("[model]"), "job.toml: is damaged: its digest is another"),
    "no job": (lambda f: (f / "job.toml").unlink(), "job.toml: cannot be read: No such file"),
    "a later format": (
        lambda f: rewrite(f, lambda body: body.update(format="trigrid checkpoint 9")),
        "has format 'trigrid checkpoint 9', and this version of trigrid reads 'trigrid checkpoint 1'",
    ),
    "no number": (
        lambda f: (f / "manifest.json").write_text('{"digest": "", "body": {"format": NaN}}'),
        "manifest.json: is damaged: it is no manifest",
    ),
    "a wrong type": (lambda f: rewrite(f, lambda body: body["state"].update(step="3")), "state.step: Input should be"),
    "out of the folder": (
        lambda f: rewrite(f, lambda body: body["files"][0].update(name="../../etc/rank.safetensors")),
        "the file name '../../etc/rank.safetensors' is none that trigrid writes",
    ),
    "an absolute path": (
        lambda f: rewrite(f, lambda body: body["files"][0].update(name="/etc/passwd")),
        "the file name '/etc/passwd' is none that trigrid writes",
    ),
    "a part outside": (
        lambda f: rewrite(
            f, lambda body: body["tensors"]["final_norm.weight"]["kinds"]["weight"]["parts"][0][1].__setitem__(0, 5)
        ),
        "final_norm.weight: part (5,), (32,) of file 0 is not inside (32,)",
    ),
    "a part missing": (
        lambda f: rewrite(f, lambda body: body["tensors"]["head.weight"]["kinds"]["mean"].update(parts=[])),
        "head.weight: parts of mean have 0 elements together, and it has 1,952",
    ),
    "a file that is not there": (
        lambda f: rewrite(
            f, lambda body: body["tensors"]["head.weight"]["kinds"]["mean"]["parts"][0].__setitem__(0, 7)
        ),
        "head.weight: part (0, 0), (61, 32) of file 7 is not inside (61, 32)",
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(folder: Path, what: str) -> None:
    """R73: incomplete or corrupt, whatever of it."""
    damage, words = DAMAGE[what]
    damage(folder)
    _, faults = verify(folder)
    assert len(faults) == 1, faults
    assert faults[0].startswith(str(folder))
    assert words in faults[0]


class Bomb:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "weights.pt", FILE, "manifest.json", "job.toml"])
def test_a_pickle_is_refused_and_never_run(folder: Path, tmp_path: Path, name: str) -> None:
    """DCP's own files are pickles: planted beside or in place of ours they are refused by name."""
    mark = tmp_path / "it was run"
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    _, faults = verify(folder)
    assert any(str(folder / name) in fault for fault in faults), faults
    assert not mark.exists()


def test_a_sound_one_is_sound(sound: Path) -> None:
    manifest, faults = verify(sound)
    assert not faults
    assert manifest is not None
    assert manifest.state == State(3)


@settings(deadline=None, max_examples=200)
@given(at=st.integers(0, 2000), bit=st.integers(0, 7))
def test_any_flipped_bit_of_a_manifest_is_seen(sound: Path, at: int, bit: int) -> None:
    path = sound / "manifest.json"
    content = path.read_bytes()
    changed = bytearray(content)
    changed[at % len(content)] ^= 1 << bit
    folder = sound.parent / "flipped"
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(changed)
    try:
        found = read_manifest(folder)
    except Damaged:
        return
    assert found == read_manifest(sound), "only between its parts, where JSON may have space"
