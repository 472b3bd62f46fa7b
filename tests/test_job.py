"""Reading jobs: sources and their precedence, strictness, errors with places, worlds, models, and writing back."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import decoder
from trigrid.errors import Refused
from trigrid.job import dump_job, load_job
from trigrid.spec.job import Batch, Data, Job, Optimizer, Run
from trigrid.spec.layout import AXES, Layout
from trigrid.spec.model import ModelSpec, RopeScaling
from trigrid.spec.models import load_model
from trigrid.spec.rules import check

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-3d.toml"
Env = Mapping[str, str]
NO_ENV: Env = {}
JOB = """\
[model]
name = "own"
hidden = 64
layers = 4
heads = 8
kv_heads = 4
head_dim = 8
ffn = 128
vocab = 512
context = 64

[batch]
global_batch = 48
sequence = 32
micro_batch = 1

[parallel]
tp = 2
zero = 2

[run]
steps = 10
"""


def write(folder: Path, text: str) -> str:
    (folder / "job.toml").write_text(text, encoding="utf-8")
    return str(folder / "job.toml")


def load(folder: Path, text: str = JOB, *arguments: str, world: int | None = None, env: Env = NO_ENV) -> Job:
    return load_job(write(folder, text), arguments, world, env)


def refusal(folder: Path, text: str = JOB, *arguments: str, world: int | None = None, env: Env = NO_ENV) -> list[str]:
    """The messages of the refusal, with the folder cut off their places."""
    with pytest.raises(Refused) as refused:
        load(folder, text, *arguments, world=world, env=env)
    return [str(p).replace(f"{folder}/", "") for p in refused.value.problems]


# ---------------------------------------------------------------------------------------------- sources


def test_file(tmp_path: Path) -> None:
    job = load(tmp_path)
    assert job == Job(
        model=ModelSpec(
            name="own", hidden=64, layers=4, heads=8, kv_heads=4, head_dim=8, ffn=128, vocab=512, context=64
        ),
        batch=Batch(global_batch=48, sequence=32, micro_batch=1),
        run=Run(steps=10),
        parallel=Layout(tp=2, zero=2),
    )


def test_flags_replace_the_environment_and_that_the_file(tmp_path: Path) -> None:
    env = {"TRIGRID_PARALLEL__TP": "4", "TRIGRID_RUN__STEPS": "20", "PATH": "ignored"}
    job = load(tmp_path, JOB, "--steps=30", env=env)
    assert (job.parallel.tp, job.parallel.zero, job.run.steps) == (4, 2, 30)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        (["--parallel.tp", "4"], "parallel.tp", 4),
        (["--parallel.tp=4"], "parallel.tp", 4),
        (["--tp", "4"], "parallel.tp", 4),
        (["--tp=1", "--tp=4"], "parallel.tp", 4),
        (["--pp", "2"], "parallel.pp", 2),
        (["--dp", "3"], "parallel.dp", 3),
        (["--zero", "1"], "parallel.zero", 1),
        (["--steps", "7"], "run.steps", 7),
        (["--lr", "1"], "optimizer.lr", 1.0),
        (["--precision", "fp32"], "run.precision", "fp32"),
        (["--parallel.sequence-parallel", "false"], "parallel.sequence_parallel", False),
        (["--parallel", "{tp = 4, zero = 0}"], "parallel.zero", 0),
        (["--pp", "2", "--parallel.stage_layers", "[3, 1]"], "parallel.stage_layers", (3, 1)),
        (["--data.corpus", '["a", "b=c"]'], "data.corpus", ("a", "b=c")),
        (["--run.out=a=b"], "run.out", "a=b"),
        (["--run.out", "2026-01-01"], "run.out", "2026-01-01"),
        (["--run.out", "17"], "run.out", "17"),
        (["--run.out", '"17"'], "run.out", "17"),
        (["--run.out", "a\nb = 1"], "run.out", "a\nb = 1"),
        (["--model.rope_scaling.factor", "8"], "model.rope_scaling", RopeScaling(factor=8.0)),
    ],
)
def test_flags(tmp_path: Path, arguments: list[str], key: str, value: object) -> None:
    table, field = key.split(".")
    found = getattr(getattr(load(tmp_path, JOB, *arguments), table), field)
    assert (found, type(found)) == (value, type(value))


def test_environment_names(tmp_path: Path) -> None:
    env = {
        "TRIGRID_MODEL__ROPE_SCALING__FACTOR": "2.5",
        "TRIGRID_RUN": '{device = "cpu"}',
        "TRIGRID_PARALLEL": "{pp = 4}",
        "TRIGRID_PARALLEL__PP": "2",
    }
    job = load(tmp_path, env=env)
    assert (job.model.rope_scaling, job.run.device) == (RopeScaling(factor=2.5), "cpu")
    assert job.parallel.pp == 2, "the variable of one value stands above that of its table"


def test_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIGRID_RUN__STEPS", "21")
    assert load_job(write(tmp_path, JOB)).run.steps == 21


# ---------------------------------------------------------------------------------------------- strictness


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--tp=2.0", "--tp: parallel.tp = 2.0: a whole number is needed"),
        ("--tp=2.5", "--tp: parallel.tp = 2.5: a whole number is needed"),
        ('--tp="2"', "--tp: parallel.tp = 2: a whole number is needed"),
        ("--tp=true", "--tp: parallel.tp = true: a whole number is needed"),
        ("--tp=two", "--tp: parallel.tp = two: a whole number is needed"),
        ("--tp=[2]", "--tp: parallel.tp = [2]: a whole number is needed"),
        ("--tp={a = 1}", "--tp: parallel.tp = { }: a single value is needed"),
        ("--tp=2026-01-01", "--tp: parallel.tp = 2026-01-01: a single value is needed"),
        ("--tp=0xffffffffffffffffff", "--tp: parallel.tp = 0xffffffffffffffffff: not a 64-bit number"),
        (f"--seed={2**63}", "--seed: run.seed = 0x8000000000000000: not a 64-bit number"),
        (
            f"--seed={-(2**63)}",
            f"--seed: run.seed = {-(2**63)}: must be from 0 to {2**63 - 1}; nearest legal: 0",
        ),
        ("--zero=true", "--zero: parallel.zero = true: no such choice; nearest legal: 0, 1, 2, 3"),
        ("--zero=1.0", "--zero: parallel.zero = 1.0: no such choice; nearest legal: 0, 1, 2, 3"),
        ("--zero=4", "--zero: parallel.zero = 4: no such choice; nearest legal: 0, 1, 2, 3"),
        ("--device=gpu", "--device: run.device = gpu: no such choice; nearest legal: auto, cpu, cuda"),
        ("--lr=true", "--lr: optimizer.lr = true: a number is needed"),
        ('--lr="1"', "--lr: optimizer.lr = 1: a number is needed"),
        ("--model.tied=1", "--model.tied: model.tied = 1: true or false is needed"),
        ("--model.tied=True", "--model.tied: model.tied = True: true or false is needed"),
        ("--data.corpus=stdlib", "--data.corpus: data.corpus = stdlib: an array is needed"),
        ("--data.corpus=[1]", "--data.corpus: data.corpus = [1]: a string is needed"),
        ("--data.corpus=[[1]]", "--data.corpus: data.corpus = ['[ ]']: an array of single values is needed"),
        (
            '--parallel.order=["dp", "ep"]',
            "--parallel.order: parallel.order = ['dp', 'ep']: Input should be 'dp', 'pp', 'cp' or 'tp'; "
            "nearest legal: dp, pp, cp, tp",
        ),
        ("--batch=3", "--batch: batch = 3: a table is needed"),
        ("--model.rope_scaling={}", "--model.rope_scaling: model.rope_scaling.factor = (not given): needed"),
        ("--run.out=\udcff", "--run.out: run.out = \udcff: not valid text"),
        ("--tp", "--tp: tp = (not given): the flag needs a value"),
        ("tp=2", "command line: argument = tp=2: --key value or --key=value is expected"),
    ],
)
def test_only_the_right_type(tmp_path: Path, flag: str, message: str) -> None:
    assert refusal(tmp_path, JOB, flag) == [message]


def test_strings_of_the_file_stay_strings(tmp_path: Path) -> None:
    assert refusal(tmp_path, JOB.replace("steps = 10", "steps = 10\nout = 17")) == [
        "job.toml:23: run.out = 17: a string is needed"
    ]


def test_a_flag_before_a_flag_has_no_value(tmp_path: Path) -> None:
    assert refusal(tmp_path, JOB, "--run.out", "--tp=2") == ["--run.out: run.out = (not given): the flag needs a value"]


# ---------------------------------------------------------------------------------------------- errors and places


def test_every_problem_at_once_with_its_place(tmp_path: Path) -> None:
    text = JOB.replace("tp = 2", "tp = 3\nschedul = 'gpipe'") + "\n[clustr]\ngpus_per_node = 8\n"
    assert refusal(tmp_path, text, "--sequence=64", env={"TRIGRID_BATCH__GLOBAL_BATH": "3"}) == [
        "job.toml:19: parallel.schedul = gpipe: there is no such key; nearest legal: parallel.schedule",
        "job.toml:25: clustr = { }: there is no such key; nearest legal: cluster",
        "TRIGRID_BATCH__GLOBAL_BATH: batch.global_bath = 3: there is no such key; nearest legal: batch.global_batch",
        "--sequence: sequence = 64: there is no such key; nearest legal: batch.sequence",
        "job.toml:18: parallel.tp = 3: must divide model.heads = 8; must divide model.ffn = 128; must divide "
        "model.kv_heads = 4 or be a multiple of it; must divide batch.sequence = 32 under "
        "parallel.sequence_parallel; nearest legal: 2, 4",
    ]


def test_types_and_missing_keys_at_once(tmp_path: Path) -> None:
    text = JOB.replace("sequence = 32\n", "").replace("steps = 10", "seed = 1.5").replace("layers = 4", "layers = '4'")
    assert refusal(tmp_path, text) == [
        "job.toml:4: model.layers = 4: a whole number is needed",
        "job.toml:12: batch.sequence = (not given): needed",
        "job.toml:20: run.steps = (not given): needed",
        "job.toml:21: run.seed = 1.5: a whole number is needed",
    ]


def test_a_refused_value_is_not_also_called_missing(tmp_path: Path) -> None:
    assert refusal(tmp_path, JOB.replace("steps = 10", "steps = 2026-01-01")) == [
        "job.toml:22: run.steps = 2026-01-01: a single value is needed"
    ]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("run = {steps = 10}\nparallel = {tp = 3}\n", 2),
        ("run.steps = 10\nparallel . 'tp' = 3\n", 2),
        ("[run]\nsteps = 10\nout = '''\ntp = 7\n'''\n[ parallel ]\n\n  tp=3\n", 8),
        ('[parallel] # tp = 3 follows\n# tp = 3\n"tp" = 3\n[run]\nsteps = 10\n', 3),
        ('[parallel]\norder = [\n"dp", "pp", "cp",\n"tp"\n]\ntp = 3\n[run]\nsteps = 10\n', 6),
        ("[run]\nsteps = 10\nout = '\u2028'\n[parallel]\r\ntp = 3\n", 5),
    ],
)
def test_lines_however_the_key_is_written(tmp_path: Path, text: str, line: int) -> None:
    shape, _, _ = JOB.partition("[parallel]")
    (message,) = refusal(tmp_path, text + shape)
    assert message.startswith(f"job.toml:{line}: parallel.tp = 3: must divide")


def test_a_value_of_nobody_is_placed_at_its_table(tmp_path: Path) -> None:
    (message,) = refusal(tmp_path, JOB.replace("micro_batch = 1", "micro_batch = 5"), "--dp=2")
    assert message.startswith("job.toml:13: batch.global_batch = 48: global_batch = dp · micro_batch · microbatches")
    (message,) = refusal(tmp_path, JOB, "--optimizer.warmup_steps=10")
    assert message.startswith("--optimizer.warmup_steps: optimizer.warmup_steps = 10: must be below")


def test_files_that_hold_no_job(tmp_path: Path) -> None:
    write(tmp_path, JOB)
    with pytest.raises(Refused, match=r"jb\.toml: there is no such file; nearest legal: .*/job\.toml"):
        load_job(tmp_path / "jb.toml", env={})
    with pytest.raises(Refused, match=r"is a folder, not a file; nearest legal: .*/job\.toml"):
        load_job(tmp_path, env={})
    empty = ["job = job.toml: the file is empty; a job needs at least [model], [batch] and [run]"]
    assert refusal(tmp_path, "") == empty
    assert refusal(tmp_path, "# nothing\n") == empty
    assert refusal(tmp_path, "[run]\nsteps = = 2\n") == [
        "job.toml:2: job = job.toml: not TOML: Invalid value (at line 2, column 9)"
    ]
    assert refusal(tmp_path, "[run]\nsteps = [\n")[0].startswith("job.toml:3: job = job.toml: not TOML: ")
    assert refusal(tmp_path, f"a = {'[' * 9999}")[0].startswith("job = job.toml: not TOML: ")
    assert refusal(tmp_path, f"a = {'9' * 9999}")[0].startswith("job = job.toml: not TOML: ")
    (tmp_path / "job.toml").write_bytes(b"a = '\xff'")
    with pytest.raises(Refused, match=r"not TOML: 'utf-8' codec can't decode"):
        load_job(tmp_path / "job.toml", env={})


def test_deep_and_long_values_are_refused_in_words(tmp_path: Path) -> None:
    deep = ".".join(["a"] * 3000)
    text = f"a = 0x{'f' * 9999}\n[parallel]\ntp.{deep} = 1\n[run]\nout.{deep} = 1\n"
    messages = refusal(tmp_path, text, "--parallel.order", f"[{'[' * 50}{']' * 50}]")
    assert [m[:80] for m in messages[:3]] == [
        "job.toml:1: a = 0xffffffffffffffffff…: there is no such key",
        "job.toml:3: parallel.tp = { }: a single value is needed",
        "job.toml:5: run.out = { }: a single value is needed",
    ]


def test_byte_order_mark(tmp_path: Path) -> None:
    assert load(tmp_path, "\ufeff" + JOB).run.steps == 10


# ---------------------------------------------------------------------------------------------- world


def test_dp_follows_from_the_world(tmp_path: Path) -> None:
    assert load(tmp_path).parallel.dp == 1
    assert load(tmp_path, world=12).parallel.dp == 6
    assert load(tmp_path, JOB, "--pp=2", "--dp=3", world=12).parallel.dp == 3


def test_worlds_that_do_not_fit(tmp_path: Path) -> None:
    assert refusal(tmp_path, JOB, "--pp=2", world=6) == [
        "world = 6: world = tp · pp · cp · dp = 2 · 2 · 1 · dp must hold for a whole dp; nearest legal: 4, 8"
    ]
    assert refusal(tmp_path, JOB, "--pp=2", world=2) == [
        "world = 2: world = tp · pp · cp · dp = 2 · 2 · 1 · dp must hold for a whole dp; nearest legal: 4"
    ]
    assert refusal(tmp_path, JOB, "--dp=3", world=8) == [
        "--dp: parallel.dp = 3: world = tp · pp · cp · dp = 2 · 1 · 1 · 3 = 6, but there are 8 ranks; nearest legal: 4"
    ]
    assert refusal(tmp_path, JOB, "--dp=3", world=7) == [
        "world = 7: world = tp · pp · cp · dp = 2 · 1 · 1 · 3 = 6 must hold; nearest legal: 6"
    ]
    assert refusal(tmp_path, JOB, world=0) == [
        "world = 0: world = tp · pp · cp · dp = 2 · 1 · 1 · dp must hold for a whole dp; nearest legal: 2"
    ]


def test_an_unknown_dp_breaks_no_other_rule(tmp_path: Path) -> None:
    for arguments in (["--parallel.dp_replicate=3"], ["--batch.global_batch=49"]):
        messages = refusal(tmp_path, JOB, *arguments, world=7)
        assert [m.partition(":")[0] for m in messages] == ["world = 7"]
    messages = refusal(tmp_path, JOB, "--parallel.dp_replicate=0", world=7)
    assert [m.partition(":")[0] for m in messages] == ["world = 7", "--parallel.dp_replicate"]


def test_bad_degrees_are_told_before_the_world(tmp_path: Path) -> None:
    (message,) = refusal(tmp_path, JOB, "--tp=0", world=8)
    assert message.startswith("--tp: parallel.tp = 0: must be from 1 to")


# ---------------------------------------------------------------------------------------------- models

REST = "[batch]\nglobal_batch = 4\nsequence = 32\n[run]\nsteps = 10\n"


def test_model_of_the_catalogue(tmp_path: Path) -> None:
    base = load_model("llama3-8b")
    assert load(tmp_path, f"model.name = 'llama3-8b'\n{REST}").model == base
    text = "[model]\nname = 'llama3-8b'\nlayers = 2\nrope_scaling.factor = 4"
    scaling = replace(base.rope_scaling, factor=4.0) if base.rope_scaling else RopeScaling(factor=4.0)
    assert load(tmp_path, f"{text}\n{REST}").model == replace(base, layers=2, rope_scaling=scaling)
    assert load(tmp_path, JOB, "--model", "{tied = true}").model.tied


def test_models_nobody_knows(tmp_path: Path) -> None:
    (message,) = refusal(tmp_path, f"model.name = 'llama3-8bb'\n{REST}")
    assert message.startswith("job.toml:1: model.name = llama3-8bb: ")
    assert "llama3-8b" in message.partition("nearest legal: ")[2]
    assert "also needs" not in message
    (message,) = refusal(tmp_path, f"[model]\nname = 'mine'\nhidden = 64\n{REST}")
    needed = "layers, heads, kv_heads, head_dim, ffn, vocab, context"
    assert f"; a model of your own also needs {needed}; nearest legal" in message
    assert refusal(tmp_path, REST) == [
        "job.toml: model.name = (not given): a name of the catalogue or model.config is needed; "
        f"a model of your own also needs name, hidden, {needed}"
    ]
    assert refusal(tmp_path, f"[model]\nname = 3\nhidden = 'x'\n{REST}") == [
        "job.toml:2: model.name = 3: a name of the catalogue or model.config is needed; "
        f"a model of your own also needs {needed}",
        "job.toml:2: model.name = 3: a string is needed",
        "job.toml:3: model.hidden = x: a whole number is needed",
    ]


def test_a_complete_table_stands_alone(tmp_path: Path) -> None:
    job = load(tmp_path, JOB.replace('"own"', '"llama3-8b"'))
    assert job.model.rope_theta == ModelSpec.rope_theta != load_model("llama3-8b").rope_theta


def test_model_of_a_configuration_beside_the_job(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 512,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
    }
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = f"[model]\nconfig = 'hf/config.json'\nffn = 256\n{REST}"
    model = load(tmp_path, text).model
    assert (model.hidden, model.layers, model.ffn, model.norm_eps) == (64, 4, 256, 1e-6)

    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}), encoding="utf-8")
    (message,) = refusal(tmp_path, text)
    assert message.startswith("hf/config.json: model.config: hidden_act = gelu: ")
    (message,) = refusal(tmp_path, text.replace("hf/", "gone/"))
    assert message.startswith("gone/config.json: model.config: ")
    assert refusal(tmp_path, text.replace("'hf/config.json'", "3")) == [
        "job.toml:2: model.config = 3: a string is needed"
    ]


# ---------------------------------------------------------------------------------------------- example


def test_the_example_is_what_it_says() -> None:
    job = load_job(EXAMPLE, world=8, env={})
    assert (job.parallel.tp, job.parallel.pp, job.parallel.dp, job.parallel.zero) == (2, 2, 2, 1)
    assert job.batch.microbatches(job.parallel) == 4
    assert decoder(job.model).count == 3_147_456


def test_the_command_in_the_example_works() -> None:
    (command,) = [line for line in EXAMPLE.read_text(encoding="utf-8").splitlines() if "trigrid train" in line]
    arguments = command.partition(EXAMPLE.name)[2].split()
    assert load_job(EXAMPLE, arguments, world=8, env={}).parallel.dp == 4


# ---------------------------------------------------------------------------------------------- writing back

small, text_ = st.integers(1, 64), st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
positive = st.floats(1e-30, 1e30)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs that keep every rule."""
    tp, pp, dp, micro = (draw(st.sampled_from([1, 2, 4])) for _ in range(4))
    kv_heads = tp * draw(st.integers(1, 3))
    layers = draw(st.integers(pp, 12))
    sequence = tp * draw(small)
    steps = draw(small)
    scaling = st.builds(
        RopeScaling,
        factor=st.floats(1.0, 1e9),
        low_freq_factor=st.floats(0.1, 1.0),
        high_freq_factor=st.floats(1.5, 9.0),
        original_context=small,
    )
    model = ModelSpec(
        name=draw(st.one_of(text_, st.just("llama3-8b"))),
        hidden=draw(small),
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=2 * draw(small),
        ffn=tp * draw(small),
        vocab=draw(small),
        context=sequence + draw(small),
        tied=draw(st.booleans()),
        norm_eps=draw(positive),
        rope_theta=draw(positive),
        rope_scaling=draw(st.none() | scaling),
    )
    parallel = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        dp_replicate=draw(st.sampled_from([1, dp])),
        zero=draw(st.sampled_from([0, 1, 2, 3])),
        schedule=draw(st.sampled_from(["1f1b", "gpipe"])),
        recompute=draw(st.sampled_from(["none", "full"])),
        sequence_parallel=draw(st.booleans()),
        stage_layers=draw(st.sampled_from([(), (1,) * (pp - 1) + (layers - pp + 1,)])),
        order=tuple(draw(st.permutations(AXES))),
    )
    return Job(
        model=model,
        batch=Batch(global_batch=dp * micro * draw(small), sequence=sequence, micro_batch=micro),
        run=Run(steps=steps, seed=draw(st.integers(0, 2**63 - 1)), out=draw(text_)),
        parallel=parallel,
        optimizer=Optimizer(lr=draw(positive), warmup_steps=steps - 1, beta1=draw(st.floats(0, 1, exclude_max=True))),
        data=Data(corpus=tuple(draw(st.lists(text_, min_size=1, max_size=3))), cache=draw(st.just("") | text_)),
    )


@settings(max_examples=60, deadline=None)
@given(job=jobs())
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, job: Job) -> None:
    assert check(job) == []
    text = dump_job(job)
    assert load(tmp_path_factory.getbasetemp(), text) == job
    assert dump_job(load(tmp_path_factory.getbasetemp(), text, world=job.parallel.world)) == text


# ---------------------------------------------------------------------------------------------- junk

KEYS = [
    *AXES,
    "model",
    "name",
    "config",
    "hidden",
    "rope_scaling",
    "factor",
    "parallel",
    "zero",
    "order",
    "run",
    "steps",
]
scalars: st.SearchStrategy[Any] = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(st.characters(codec="utf-8"), max_size=6), st.datetimes()
)
names = st.sampled_from(KEYS) | st.text(st.characters(codec="utf-8"), max_size=4)
junk = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)


def attempt(path: str, arguments: list[str], env: dict[str, str], world: int | None = None) -> None:
    """A job that keeps the rules, or a refusal that can be printed; anything else fails the test."""
    outcome: Job | str
    try:
        outcome = load_job(path, arguments, world, env)
    except Refused as refused:
        outcome = str(refused)
    assert check(outcome) == [] if isinstance(outcome, Job) else outcome


def leaves(table: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in table.items():
        yield from leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else (prefix + name,)


@settings(max_examples=80, deadline=None)
@given(text=st.text(st.characters(codec="utf-8")) | st.text("[]{}=.,'\"\n#abt123", max_size=40))
def test_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    attempt(write(tmp_path_factory.getbasetemp(), text), [], {})


@settings(max_examples=80, deadline=None)
@given(table=st.dictionaries(names, junk, min_size=1, max_size=5), world=st.none() | st.integers(-2, 99))
def test_any_table(tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any], world: int | None) -> None:
    attempt(write(tmp_path_factory.getbasetemp(), tomli_w.dumps(table)), [], {}, world)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_sound_job_with_one_value_of_junk(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write(tmp_path_factory.getbasetemp(), JOB)
    every = list(leaves(tomllib.loads(dump_job(load_job(path, env={})))))
    key, value = data.draw(st.sampled_from(every)), data.draw(junk)
    text = tomli_w.dumps({"v": value}).strip().removeprefix("v = ")
    attempt(path, [f"--{key}={text}"], {})
    attempt(path, [], {"TRIGRID_" + key.replace(".", "__").upper(): text})


@settings(max_examples=80, deadline=None)
@given(
    arguments=st.lists(st.text(max_size=9) | st.sampled_from(["--tp", "--model.config", "--run.out", "2"]), max_size=4),
    env=st.dictionaries(st.text(max_size=5).map("TRIGRID_".__add__), st.text(max_size=9), max_size=2),
)
def test_any_arguments(tmp_path_factory: pytest.TempPathFactory, arguments: list[str], env: dict[str, str]) -> None:
    attempt(write(tmp_path_factory.getbasetemp(), JOB), arguments, env)
