"""`trigrid plan`, `trigrid models`, `trigrid gpus` and `trigrid validate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from trigrid.cli.app import Json, Overrides, Quiet, app, examples, print_json

if TYPE_CHECKING:
    from trigrid.job.ask import Asked
    from trigrid.job.export import Target
    from trigrid.plan.found import Found
    from trigrid.plan.plan import Plan
    from trigrid.plan.software import Software
    from trigrid.report.console import Console
    from trigrid.spec.job import Job


@app.command(
    help_epilogue=examples(
        "trigrid plan llama3-405b --gpus 1024 --gpu h100 --seq 8192 --global-batch 512",
        "trigrid plan llama3-405b --gpus 1024 --tp 8 --pp 8 --virtual 4 --zero 1",
        "trigrid plan --params 300B --gpus 4096 --tokens 15T --price 2.5",
        "trigrid plan examples/llama3-405b.toml --sensitivity",
        "trigrid plan llama3-70b --gpus 64 --front",
        "trigrid plan job.toml --schedule auto --balance --save balanced.toml",
        "trigrid plan llama3-70b --gpus 64 --save job.toml --export megatron",
    )
)
def plan(
    *arguments: Overrides,
    gpus: Annotated[int | None, Parameter(help="GPUs to use at most.")] = None,
    params: Annotated[str | None, Parameter(help="A model by its size alone, such as 300B, in place of MODEL.")] = None,
    cluster: Annotated[Path | None, Parameter(help="A TOML file with the keys of [cluster].")] = None,
    software: Annotated[str | None, Parameter(help="Who trains: trigrid, megatron, fsdp2, deepspeed, …")] = None,
    policy: Annotated[
        str | None, Parameter(help="Bytes of state per parameter, by name: engine, two-moments, fsdp2, …")
    ] = None,
    expandable_segments: Annotated[
        bool, Parameter(negative="", help="PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: fewer gaps in memory.")
    ] = False,
    tokens: Annotated[str, Parameter(help="Tokens to train on, such as 15T.")] = "1T",
    search: Annotated[
        bool, Parameter(negative="", help="Search a job file's layout, too; flags fix what they give.")
    ] = False,
    explain: Annotated[
        str | None, Parameter(help="Formula, inputs and source of a printed figure: step_s, memory.logits, links.tp, …")
    ] = None,
    sensitivity: Annotated[bool, Parameter(negative="", help="Each knob one notch up and down.")] = False,
    recompute_table: Annotated[
        bool, Parameter(negative="", help="GiB that kinds of recomputation save for each % of the step.")
    ] = False,
    front: Annotated[
        bool, Parameter(negative="", help="The fastest layout for less and less memory, where layouts are searched.")
    ] = False,
    balance: Annotated[
        bool, Parameter(negative="", help="Give stages the layers that make the slowest one fastest.")
    ] = False,
    save: Annotated[Path | None, Parameter(help="Write the planned job to this file.")] = None,
    export: Annotated[
        Literal["megatron", "torchtitan", "deepspeed"] | None,
        Parameter(help="Print the job as arguments of another trainer instead."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Plan a job before it is paid for: whether it fits, how long a step takes, why, and what would be better.

    ARGUMENTS begin with a model of the catalogue, a config.json or a job file; flags such as `--tp 8 --seq 8192` give
    values of a job. Degrees and policies that a model is not given are searched. Exits with 1 where nothing fits.
    """
    from trigrid.job.ask import ask
    from trigrid.plan.figures import memory_wall
    from trigrid.plan.plan import as_json as plan_json
    from trigrid.plan.shape import RULE, read_size
    from trigrid.plan.software import choose_software
    from trigrid.report.console import Console
    from trigrid.report.plan import plan_text
    from trigrid.spec.rules import check_trainable

    console = Console(quiet)
    trained = read_size(tokens, "tokens")
    given = [*arguments]
    target = given.pop(0) if given and not given[0].startswith("--") else None
    asked = ask(target, given, gpus=gpus, params=params, cluster=cluster, search=search)
    if params:
        asked = replace(asked, assumed=(RULE, *asked.assumed))
    trainer = choose_software(asked.job, software, policy, expandable_segments)
    found = _found(asked, trainer)
    planned, lines, answers = _searched(asked, found)
    if balance:
        planned, line, answers["balance"] = _balanced(planned)
        lines = [line, *lines]
    if save:
        _save(planned.job, save)
        following = "" if check_trainable(planned.job) else f"; next:  trigrid train {save} --dry-run"
        console.say(f"{save} is written{following}")
    if export:
        text, notes = _export(planned.job, export)
        for note in notes:
            console.say(note)
        if as_json:
            print_json({"target": export, "text": text, "notes": list(notes)})
        else:
            print(text)
    elif explain or sensitivity or recompute_table or front:
        texts, answers = _asides(planned, asked.gpus, trained, explain, sensitivity, recompute_table)
        if front:
            text, answers["front"] = _front(found, console)
            texts.append(text)
        if as_json:
            print_json(answers)
        else:
            print("\n\n".join(texts))
    elif as_json:
        cost = planned.training(trained)
        training = {"tokens": trained, "seconds": cost.seconds, "energy_kwh": cost.energy_kwh, "cost": cost.cost}
        print_json(
            {
                **plan_json(planned),
                "training": training,
                "memory_wall": memory_wall(planned),
                "asked": list(asked.assumed),
                **answers,
            }
        )
    else:
        print(plan_text(planned, trained, lines))
    if not planned.fits():
        sys.exit(1)


def _found(asked: Asked, software: Software) -> Found:
    """What the search of all that is open finds."""
    from trigrid.errors import Problem, Refused
    from trigrid.plan.auto import named_job
    from trigrid.plan.search import search_layouts

    # A layout is searched with the named schedule of as many stages; then one is made for it.
    job = named_job(asked.job) if asked.job.parallel.schedule == "auto" else asked.job
    found = search_layouts(job, software, open=asked.open, gpus=asked.gpus)
    if found is None:
        reason = f"no layout of {asked.gpus:,} GPUs goes with the global batch and the degrees given"
        raise Refused([Problem("gpus", asked.gpus, reason)])
    return found


def _searched(asked: Asked, found: Found) -> tuple[Plan, list[str], dict[str, object]]:
    """The plan, what a search has to say beside it, and the same as JSON."""
    from trigrid.plan.around import reasons
    from trigrid.plan.auto import auto_job
    from trigrid.plan.changes import changes_that_fit, nearest_batch
    from trigrid.plan.plan import make_plan
    from trigrid.report.search import change_lines, search_json, search_lines

    made = asked.job.parallel.schedule == "auto"
    planned = make_plan(auto_job(found.job) if made else found.job, found.software)
    changes = () if found.ranked else changes_that_fit(found)
    batch = nearest_batch(found)
    if not asked.open:
        lines = [] if found.ranked else change_lines(changes)
        return planned, lines, {"changes_that_fit": search_json(found, (), changes, None)["changes_that_fit"]}
    whys = reasons(found)
    lines = search_lines(found, planned, whys, changes, batch, asked.assumed)
    return planned, lines, {"search": search_json(found, whys, changes, batch)}


def _front(found: Found, console: Console) -> tuple[str, list[dict[str, object]]]:
    """The fastest layouts for less and less memory, as text and as JSON."""
    from trigrid.errors import Problem, Refused
    from trigrid.plan.front import front
    from trigrid.report.search import candidate_json, front_text
    from trigrid.report.units import gib

    if not found.space.open:
        reason = "needs layouts to choose from: give fewer degrees and policies, or --search with a job file"
        raise Refused([Problem("front", "true", reason)])
    told = []
    for candidate in front(found):
        told.append(candidate)
        console.say(f"the fastest within {gib(candidate.bytes)} GiB is known")
    return front_text(found, told), [candidate_json(one) for one in told]


def _balanced(planned: Plan) -> tuple[Plan, str, dict[str, object]]:
    """The plan with the best split of its layers, what that changes in words, and as JSON."""
    from textwrap import indent

    from trigrid.plan.balance import balanced_job
    from trigrid.plan.plan import make_plan
    from trigrid.report.balance import balance_json, balance_text

    split = balanced_job(planned.job, planned.software)
    return make_plan(split.job, planned.software), indent(balance_text(split), "  "), balance_json(split)


def _asides(
    planned: Plan, gpus: int, tokens: float, figure: str | None, notches: bool, recomputation: bool
) -> tuple[list[str], dict[str, object]]:
    """Answers to single questions about a plan, as text and as JSON."""
    from trigrid.errors import Problem, Refused
    from trigrid.plan.around import recompute_table, sensitivity
    from trigrid.plan.explain import explain
    from trigrid.report.search import (
        explanation_text,
        moves_json,
        recompute_json,
        recompute_text,
        sensitivity_text,
    )

    layout = planned.job.parallel
    if (notches or recomputation) and (layout.schedule == "auto" or layout.schedule_file):
        key = "schedule_file" if layout.schedule_file else "schedule"
        reason = "neighbours of a layout are priced with named schedules only"
        legal = () if layout.schedule_file else (planned.facts["schedule"],)
        raise Refused([Problem(f"parallel.{key}", getattr(layout, key), reason, legal)])
    texts: list[str] = []
    answers: dict[str, object] = {}
    if figure:
        found = explain(planned, figure, tokens)
        texts.append(explanation_text(found))
        answers["explanation"] = {**found._asdict(), "inputs": dict(found.inputs)}
    if notches:
        around, moves = sensitivity(planned.job, planned.software, gpus)
        texts.append(sensitivity_text(around, moves))
        answers["sensitivity"] = moves_json(around, moves)
    if recomputation:
        rows = recompute_table(planned.job, planned.software)
        texts.append(recompute_text(rows))
        answers["recompute"] = recompute_json(rows)
    return texts, answers


def _save(job: Job, path: Path) -> None:
    from trigrid.errors import Problem, Refused
    from trigrid.job import dump_job

    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(dump_job(job), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise Refused([Problem("save", path, f"cannot be written: {error.strerror}")]) from None


def _export(job: Job, target: Target) -> tuple[str, tuple[str, ...]]:
    from trigrid.job.export import export_job

    found = export_job(job, target)
    return found.text, found.notes


@app.command(help_epilogue=examples("trigrid models", "trigrid models --json"))
def models(*, as_json: Json = False) -> None:
    """List the models of the catalogue with their shapes and sources."""
    from trigrid.report.catalogue import models_json, models_text

    if as_json:
        print_json(models_json())
    else:
        print(models_text())


@app.command(help_epilogue=examples("trigrid gpus", "trigrid gpus --json"))
def gpus(*, as_json: Json = False) -> None:
    """List the accelerators of the catalogue with dense peaks, one-way bandwidths and sources."""
    from trigrid.report.catalogue import gpus_json, gpus_text

    if as_json:
        print_json(gpus_json())
    else:
        print(gpus_text())


@app.command(help_epilogue=examples("trigrid validate", "trigrid validate rows.csv --json"))
def validate(
    rows: Annotated[Path | None, Parameter(help="A CSV of measured runs; by default those that ship.")] = None,
    *,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Plan measured runs as they are stated, and print how far the plans are from the measurements."""
    from trigrid.plan.validate import evidence, read_rows
    from trigrid.plan.validate import validate as plan_rows
    from trigrid.report.console import Console
    from trigrid.report.validation import validation_json, validation_text

    given: Sequence[dict[str, str]] = evidence() if rows is None else read_rows(rows)
    Console(quiet).say(f"planning {len(given)} measured runs")
    report = plan_rows(given)
    if as_json:
        print_json(validation_json(report))
    else:
        print(validation_text(report))
