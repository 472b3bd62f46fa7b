"""Reading jobs: sources and their precedence, places, worlds, the batch, models, and writing back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.job_files import JOB, load, refusal, write
from hypothesis import given, settings
from hypothesis import strategies as st

from trigrid.blueprint import decoder
from trigrid.job import dump_job, load_job
from trigrid.spec.job import Batch, Data, Job, Optimizer, Run
from trigrid.spec.layout import AXES, Layout
from trigrid.spec.model import ModelSpec, RopeScaling
from trigrid.spec.models import load_model
from trigrid.spec.rules import check

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-3d.toml"


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
        (["--schedule", "gpipe"], "parallel.schedule", "gpipe"),
        (["--recompute=full"], "parallel.recompute", "full"),
        (["--pp", "2", "--recompute", "full,none"], "parallel.recompute", ("full", "none")),
        (["--run.trackers", "mlflow, wandb"], "run.trackers", ("mlflow", "wandb")),
        (["--global-batch", "24"], "batch.global_batch", 24),
        (["--micro-batch", "3"], "batch.micro_batch", 3),
        (["--seq", "64"], "batch.sequence", 64),
        (["--data.weights", "[1]"], "data.weights", (1.0,)),
        (["--run.trackers", "[]"], "run.trackers", ()),
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


# ---------------------------------------------------------------------------------------------- places


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
    (message,) = refusal(tmp_path, JOB.replace("global_batch = 48\n", ""), "--accumulation=2147483647", "--dp=2")
    assert message.startswith("job.toml:12: batch.global_batch = 4294967294: must be from 1 to")


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


def test_an_unknown_dp_breaks_no_other_rule(tmp_path: Path) -> None:
    for arguments in (["--parallel.dp_replicate=3"], ["--batch.global_batch=49"]):
        messages = refusal(tmp_path, JOB, *arguments, world=7)
        assert [m.partition(":")[0] for m in messages] == ["world = 7"]
    messages = refusal(tmp_path, JOB, "--parallel.dp_replicate=0", world=7)
    assert [m.partition(":")[0] for m in messages] == ["world = 7", "--parallel.dp_replicate"]


# ---------------------------------------------------------------------------------------------- the batch


@pytest.mark.parametrize(
    ("batch", "arguments", "world", "numbers"),
    [
        ("global_batch = 48", [], None, (48, 1, 1, 48)),
        ("global_batch = 48", ["--dp=4", "--micro-batch=3"], None, (48, 4, 3, 4)),
        ("global_batch = 48", ["--accumulation=4"], None, (48, 12, 1, 4)),
        ("global_batch = 48", ["--accumulation=4"], 4, (48, 2, 6, 4)),
        ("accumulation = 5", [], None, (5, 1, 1, 5)),
        ("accumulation = 5", ["--dp=4"], None, (20, 4, 1, 5)),
        ("accumulation = 5\nmicro_batch = 2", [], 8, (40, 4, 2, 5)),
        ("global_batch = 48\nmicro_batch = 3\naccumulation = 4", [], 8, (48, 4, 3, 4)),
        ("global_batch = 48\naccumulation = 5", ["--accumulation=6"], None, (48, 8, 1, 6)),
    ],
)
def test_the_batch_follows_from_what_is_given(
    tmp_path: Path, batch: str, arguments: list[str], world: int | None, numbers: tuple[int, ...]
) -> None:
    job = load(
        tmp_path,
        JOB.replace("global_batch = 48\n", f"{batch}\n").replace("micro_batch = 1\n", ""),
        *arguments,
        world=world,
    )
    found = (job.batch.global_batch, job.parallel.dp, job.batch.micro_batch, job.batch.microbatches(job.parallel))
    assert found == numbers
    assert load(tmp_path, dump_job(job)) == job


def test_the_environment_gives_accumulation_too(tmp_path: Path) -> None:
    env = {"TRIGRID_BATCH__ACCUMULATION": "3"}
    assert load(tmp_path, JOB.replace("global_batch = 48\n", ""), env=env).batch.global_batch == 3


def test_a_batch_that_cannot_be_breaks_no_other_rule(tmp_path: Path) -> None:
    text = JOB.replace("global_batch = 48\n", "")
    for arguments in (["--parallel.dp_replicate=2"], ["--dp=4", "--micro-batch=3"]):
        messages = refusal(tmp_path, text, *arguments)
        assert [m.partition(" (")[0] for m in messages] == ["job.toml:12: batch.global_batch ="]


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
        recompute=draw(st.sampled_from(["none", "selective", ("full",) * pp])),
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
