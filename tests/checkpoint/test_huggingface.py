"""Import, export and resharding: every number arrives, on any way, and no process holds the model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.jobs import frozen, named, small_job
from helpers.saved import filled_and_saved
from models.transformers_reference import Reference
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trigrid.check.pool import Pool
from trigrid.checkpoint.folder import path_of
from trigrid.checkpoint.from_huggingface import SINGLE, import_folder
from trigrid.checkpoint.manifest import Damaged, State, digest, digest_of, read_manifest, write_manifest
from trigrid.checkpoint.reading import BoxReader, faults_of, open_sound
from trigrid.checkpoint.reshard import reshard
from trigrid.checkpoint.to_huggingface import export_folder
from trigrid.checkpoint.writing import FileWriter
from trigrid.errors import Refused, RunFailed
from trigrid.models.generate import LanguageModel, Sampling, generate
from trigrid.spec.job import Job
from trigrid.spec.layout import Layout
from trigrid.spec.model import ModelSpec, RopeScaling
from trigrid.spec.to_huggingface import config_of_model

SMALL = ModelSpec(
    name="small", hidden=24, layers=4, heads=4, kv_heads=2, head_dim=10, ffn=32, vocab=29, context=64, norm_eps=1e-6
)
GPT = replace(SMALL, block="gpt", kv_heads=4, head_dim=6)
SCALING = RopeScaling(factor=4.0, original_context=16)
SHAPES = {
    "llama": replace(SMALL, rope_scaling=SCALING, rope_theta=5e4),
    "qwen2 tied": replace(SMALL, qkv_bias=True, tied=True),
    "qwen3": replace(SMALL, qk_norm=True),
    "qwen3 tied": replace(SMALL, qk_norm=True, tied=True),
    "gpt2 tied": replace(GPT, tied=True),
    "gpt2": GPT,
}
LAYOUTS = {
    "one": [],
    "tp2 pp2 dp2": ["--tp", "2", "--pp", "2", "--dp", "2", "--global-batch", "4"],
    "tp4 zero3": ["--tp", "4", "--dp", "3", "--zero", "3", "--global-batch", "3"],
}
PIECE_BYTES = 200
"""So small that tensors are read in several pieces."""


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def silent(phase: str, done: int, total: int) -> None:
    assert 0 <= done <= total, phase


def reference_of(spec: ModelSpec, folder: Path) -> Reference:
    """A model of transformers with large random weights, saved to `folder`."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of_model(spec, "float32", 0)), encoding="utf-8")
    config = AutoConfig.from_pretrained(folder)
    config.initializer_range = 0.3
    return Reference.make(config, "fp32", folder)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Of all files of weights in a folder of transformers'."""
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def weights_of(reader: BoxReader) -> dict[str, Tensor]:
    return {name: reader.whole(name) for name in reader.manifest.tensors}


@pytest.mark.parametrize("spec", SHAPES.values(), ids=list(SHAPES))
def test_there_and_back_is_the_same_model(spec: ModelSpec, tmp_path: Path) -> None:
    """The same numbers bit for bit, the same logits to 1e-5, the same greedy text."""
    reference = reference_of(spec, tmp_path / "theirs")
    assert import_folder(tmp_path / "theirs", tmp_path / "ours", silent, PIECE_BYTES).model == replace(
        spec, name="theirs"
    )
    reader = open_sound(tmp_path / "ours")
    weights = weights_of(reader)
    assert equal(weights, reference.values())
    assert reader.manifest.state == State()

    done = export_folder(reader, tmp_path / "back", silent, dtype="fp32", shard_bytes=6_000, piece_bytes=PIECE_BYTES)
    assert len(done.files) > 1
    assert equal(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "theirs"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    assert equal(dict(model.state_dict()), dict(reference.model.state_dict()))

    ours = LanguageModel(spec, weights)
    tokens = torch.randint(spec.vocab, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(tokens).logits
    found = ours.logits(tokens)
    assert float(theirs.std()) > 0.1
    assert torch.linalg.vector_norm(found - theirs) <= 1e-5 * torch.linalg.vector_norm(theirs)
    torch.testing.assert_close(ours.logits(tokens, last=True), found[:, -1:])

    text = generate(ours, tokens[0].tolist(), Sampling(temperature=0))
    # Without one, transformers would mask the tokens that it takes for padding.
    mask = torch.ones_like(tokens[:1])
    greedy = model.generate(
        tokens[:1], max_new_tokens=24, do_sample=False, attention_mask=mask, eos_token_id=None, pad_token_id=0
    )
    assert [next(text) for _ in range(24)] == greedy[0, 20:].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", ["qwen3 tied", "gpt2"])
def test_a_checkpoint_of_any_layout_is_exported_alike(shape: str, layout: str, tmp_path: Path) -> None:
    reference_of(SHAPES[shape], tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "one", silent)
    job = reshard(open_sound(tmp_path / "one"), tmp_path / "cut", LAYOUTS[layout], silent, PIECE_BYTES)
    reader = open_sound(tmp_path / "cut")
    # A tied weight is written by the first stage alone, but each rank has something else as well.
    assert len(reader.manifest.files) == job.parallel.world
    assert equal(weights_of(reader), weights_of(open_sound(tmp_path / "one")))
    export_folder(reader, tmp_path / "back", silent, dtype="fp32", piece_bytes=PIECE_BYTES)
    assert equal(tensors_in(tmp_path / "back"), tensors_in(tmp_path / "theirs"))


def test_resharded_files_are_those_that_ranks_write(pool: Pool, tmp_path: Path) -> None:
    """Byte by byte, with moments, a tied weight, frozen ones, and replicas that share the work."""

    def job(layout: Layout) -> Job:
        return frozen(small_job(layout, precision="bf16", tied=True))

    before, after = job(named("tp2pp1dp2", zero=1)), job(named("tp1pp2dp4", zero=3, dp_replicate=2))
    for step, made in enumerate((before, after)):
        assert not any(pool.run(filled_and_saved, made.parallel.world, made, tmp_path, step))
    overrides = ["--tp", "1", "--pp", "2", "--dp", "4", "--zero", "3", "--micro-batch", "1"]
    cut = tmp_path / "cut"
    reshard(open_sound(path_of(tmp_path, 0)), cut, [*overrides, "--parallel.dp_replicate", "2"], silent, PIECE_BYTES)
    ours, theirs = read_manifest(cut), read_manifest(path_of(tmp_path, 1))
    assert len(ours.files) == 8
    assert ours.files == theirs.files
    assert {name: p.kinds.keys() for name, p in ours.tensors.items()} == {
        name: p.kinds.keys() for name, p in theirs.tensors.items()
    }
    assert (cut / "job.toml").read_text() == (path_of(tmp_path, 1) / "job.toml").read_text()


def test_a_disk_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_of(SMALL, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours", silent)
    reader = open_sound(tmp_path / "ours")

    def full(self: FileWriter, values: Tensor) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileWriter, "write", full)
    for write in (
        lambda: import_folder(tmp_path / "theirs", tmp_path / "new", silent),
        lambda: export_folder(reader, tmp_path / "new", silent),
    ):
        with pytest.raises(RunFailed, match=r"new: cannot be written: No space left on device"):
            write()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(Refused, match=r"DST = .*new: 0.00 GB are needed, and 0.00 GB are free"):
        export_folder(reader, tmp_path / "new", silent)


def test_files_stay_bounded(tmp_path: Path) -> None:
    reference_of(SMALL, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours", silent, file_bytes=10_000)
    manifest = open_sound(tmp_path / "ours").manifest
    assert len(manifest.files) > 4
    assert max(file.bytes for file in manifest.files) < 12_000


@pytest.mark.parametrize(("run", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_an_export_has_the_format_of_the_run(run: str, dtype: torch.dtype, tmp_path: Path) -> None:
    reference_of(SMALL, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours", silent)
    job = tmp_path / "ours" / "job.toml"
    text = job.read_text().replace('precision = "bf16"', f'precision = "{run}"')
    manifest = read_manifest(tmp_path / "ours")
    job.write_text(text)
    write_manifest(tmp_path / "ours", replace(manifest, job=digest(text.encode())))
    done = export_folder(open_sound(tmp_path / "ours"), tmp_path / "back", silent)
    assert done.dtype == run
    assert done.files == ("model.safetensors",)
    theirs = {name: tensor.to(dtype) for name, tensor in tensors_in(tmp_path / "theirs").items()}
    assert equal(tensors_in(tmp_path / "back"), theirs)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "back").dtype == dtype


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NORM = "model.layers.1.input_layernorm.weight"
WRONG: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "missing": (lambda t: t.pop(NORM), f"{NORM} = (not given): is missing; config.json asks for [24]"),
    "extra": (lambda t: t.update(more=torch.ones(3)), "more = [3]: the model of config.json has no such tensor"),
    "shape": (lambda t: t.update({NORM: torch.ones(23)}), f"{NORM} = [23]: config.json asks for [24]"),
    "format": (
        lambda t: t.update({NORM: torch.ones(24, dtype=torch.int8)}),
        f"{NORM} = I8: this number format is not read; nearest legal: F64, F32, BF16, F16",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_tensors_are_refused_by_name(wrong: str, tmp_path: Path) -> None:
    change, message = WRONG[wrong]
    reference_of(SMALL, tmp_path / "theirs")
    edit(tmp_path / "theirs", change)
    with pytest.raises(Refused) as refused:
        import_folder(tmp_path / "theirs", tmp_path / "ours", silent)
    assert message in str(refused.value)
    assert len(refused.value.problems) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


def test_a_tied_head_may_be_there_if_it_is_the_embedding(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    reference_of(replace(SMALL, tied=True), folder)
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    import_folder(folder, tmp_path / "ours", silent, PIECE_BYTES)
    edit(folder, lambda t: t["lm_head.weight"][28].add_(1))
    with pytest.raises(Refused, match=r"lm_head.weight = rows 28 to 29: tie_word_embeddings is true"):
        import_folder(folder, tmp_path / "other", silent, 2 * 24 * 8)
    edit(folder, lambda t: t.update({"lm_head.weight": torch.ones(2, 2)}))
    with pytest.raises(Refused, match=r"lm_head.weight = \[2, 2\]: the model of config.json has no such tensor"):
        import_folder(folder, tmp_path / "other", silent)


def test_an_older_gpt2_file_is_read(tmp_path: Path) -> None:
    """Names without the first word, and masks that are no parameters, as in the first published ones."""
    reference = reference_of(SHAPES["gpt2 tied"], tmp_path / "theirs")

    def older(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)

    edit(tmp_path / "theirs", older)
    import_folder(tmp_path / "theirs", tmp_path / "ours", silent)
    assert equal(weights_of(open_sound(tmp_path / "ours")), reference.values())


def sharded(folder: Path) -> dict[str, Any]:
    """Save the folder's model in two files; returns the index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = list(tensors)
    weight_map = {}
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    return {"metadata": {}, "weight_map": weight_map}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../outside.safetensors", "must be the plain name of a .safetensors file beside the index"),
        ("/etc/passwd", "must be the plain name"),
        ("pytorch_model.bin", "must be the plain name"),
        ("gone.safetensors", "there is no such file"),
        (3, "must be the plain name"),
    ],
)
def test_an_index_cannot_lead_elsewhere(name: object, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    reference_of(SMALL, folder)
    index = sharded(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    import_folder(folder, tmp_path / "sound", silent)
    (tmp_path / "outside.safetensors").write_bytes((folder / "a.safetensors").read_bytes())
    index["weight_map"][NORM] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=message) as refused:
        import_folder(folder, tmp_path / "ours", silent)
    assert refused.value.problems[0].key == f"weight_map.{NORM}"
    assert not (tmp_path / "ours").exists()


def test_broken_files_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    reference_of(SMALL, folder)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for broken in (content[:-1], content[:20], b"", content + b"x"):
        file.write_bytes(broken)
        with pytest.raises(Damaged, match=r"theirs/model.safetensors: cannot be read"):
            import_folder(folder, tmp_path / "ours", silent)
    file.write_bytes(content)
    index = sharded(folder)
    for text, message in (("{", "is no index"), ("[]", "is no index"), ('{"weight_map": 3}', "is no index")):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(Damaged, match=message):
            import_folder(folder, tmp_path / "ours", silent)
    index["weight_map"][NORM] = {"a": "b", "b": "a"}[index["weight_map"][NORM][0]] + ".safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Refused, match=r"safetensors: model.safetensors.index.json says that it holds"):
        import_folder(folder, tmp_path / "ours", silent)


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    reference_of(SMALL, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(Refused, match=r"pytorch_model.bin: is a pickle, which can run code"):
        import_folder(folder, tmp_path / "ours", silent)


def test_what_another_layout_cannot_change(tmp_path: Path) -> None:
    reference_of(SMALL, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours", silent)
    reader = open_sound(tmp_path / "ours")
    for overrides, key in (
        (["--lr", "1"], "optimizer"),
        (["--model.vocab", "30"], "model"),
    ):
        with pytest.raises(Refused) as refused:
            reshard(reader, tmp_path / "new", overrides, silent)
        assert [problem.key for problem in refused.value.problems] == [key]
    with pytest.raises(Refused, match=r"DST = .*ours: is there already"):
        reshard(reader, tmp_path / "ours", [], silent)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours", "theirs"]


def test_a_file_unlike_its_manifest_is_named(tmp_path: Path) -> None:
    reference_of(SMALL, tmp_path / "theirs")
    import_folder(tmp_path / "theirs", tmp_path / "ours", silent)
    manifest = read_manifest(tmp_path / "ours")
    path = tmp_path / "ours" / manifest.files[0].name
    tensors = load_file(path)
    entry = "weight/final_norm.weight@0"
    for changed, message in (
        ({**tensors, entry: torch.ones(23)}, r"F32 \[23\], and the manifest says F32 \[24\]"),
        ({**tensors, entry: torch.ones(24, dtype=torch.float64)}, "is F64"),
        ({name: t for name, t in tensors.items() if name != entry}, f"lacks {entry}"),
    ):
        save_file(changed, path)
        file = replace(manifest.files[0], bytes=path.stat().st_size, digest=digest_of(path))
        write_manifest(tmp_path / "ours", replace(manifest, files=(file,)))
        with pytest.raises(Damaged, match=message):
            open_sound(tmp_path / "ours")
        assert len(faults_of(tmp_path / "ours")[1]) == 1


MEASURED = """\
import sys
from pathlib import Path
from trigrid.checkpoint.from_huggingface import import_folder
from trigrid.checkpoint.reading import open_sound
from trigrid.checkpoint.reshard import reshard
from trigrid.checkpoint.to_huggingface import export_folder
import torch
torch.set_num_threads(1)
def resident():
    # Without pages of mapped files, which the system takes back as it likes, and keeps as long as it likes.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon:")))
before, peak = resident(), 0
def progress(*_):
    global peak
    peak = max(peak, resident())
folder = Path(sys.argv[1])
CUT = ["--tp", "2", "--dp", "2", "--global-batch", "2"]
steps = {
    "import": lambda: import_folder(folder / "theirs", folder / "ours", progress, 1 << 20),
    "reshard": lambda: reshard(open_sound(folder / "ours"), folder / "cut", CUT, progress, 1 << 20),
    "export": lambda: export_folder(open_sound(folder / "cut"), folder / "back", progress, dtype="fp32"),
}
for name, step in steps.items():
    step()
    print(name, peak - before)
    peak = 0
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_no_process_holds_the_model(tmp_path: Path) -> None:
    """73 million parameters, 290 MB; at its highest the process has grown by less than a quarter of that."""
    spec = replace(SMALL, hidden=512, layers=18, heads=8, kv_heads=8, head_dim=64, ffn=1536, vocab=8000, qk_norm=True)
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of_model(spec, "float32", 0)), encoding="utf-8")
    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    save_file({name: torch.full(t.shape, i / 7) for i, (name, t) in enumerate(shapes.items())}, folder / SINGLE)
    size = (folder / SINGLE).stat().st_size
    assert size > 270e6
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    grown = {name: int(grown) for name, grown in map(str.split, done.stdout.splitlines())}
    print(grown, size)
    assert max(grown.values()) < size / 4, grown
    with safe_open(folder / SINGLE, "pt") as theirs, safe_open(tmp_path / "back" / SINGLE, "pt") as back:
        assert sorted(theirs.keys()) == sorted(back.keys())
        assert all(theirs.get_tensor(name).equal(back.get_tensor(name)) for name in theirs.keys())  # noqa: SIM118
