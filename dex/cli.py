"""The command line. Each command is a thin layer over a function in dex/verbs, which `import dex` has too.

Results go to stdout (with --json as one JSON object), messages and progress to stderr. Exit 0; 1 with one sentence
that says what is wrong and what to do; 2 for a command that cannot be read.
"""

from __future__ import annotations

import errno
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dex.errors import DexError
from dex.processes import SharedError, is_first
from dex.quiet import quiet_libraries, show_transfers

app = typer.Typer(
    name="dex",
    help="Retrofit pretrained Llama and Qwen models with differential attention output (Dex), train them briefly, "
    "and fold them back into stock checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Model = Annotated[str, typer.Argument(help="A Hub id, a folder or a .gguf file.", metavar="MODEL")]
Output = Annotated[Path, typer.Option("--output", "-o", help="Where the result is written.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub model.")]
Dtype = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Text = Annotated[str, typer.Option(help="Text: a file, a folder, a Hub data set or 'pydoc'.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything random.")]

LayoutOptions = Annotated[
    list[str] | None,
    typer.Option(help="An option of DIFF V1, such as lambda_mode=fixed (repeatable).", metavar="NAME=VALUE"),
]

INTERRUPTED = 130  # what typer makes of Ctrl-C
UsageError: Any = typer.BadParameter.__base__  # typer exports only this subclass of it
# What no check can foresee in full, and no traceback helps with.
OF_THE_MACHINE = (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)


def _refuse_beside(context: typer.Context, option: str, others: Sequence[str]) -> None:
    """An option that another one makes idle is a mistake, not something to ignore."""
    given = [name for name in others if _was_given(context, name)]
    if given:
        name = given[0].replace("_", "-")
        raise typer.BadParameter(f"has no effect beside {option}; leave one of them out", param_hint=f"--{name}")


def _refuse_without(context: typer.Context, option: str, others: dict[str, str]) -> None:
    """The other way round: an option that is idle because another one is missing."""
    for name, flag in others.items():
        if _was_given(context, name):
            raise typer.BadParameter(
                f"has no effect without {option}; add it or leave this out", param_hint=f"--{flag}"
            )


def _was_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def show(result: dict[str, Any], text: str, as_json: bool) -> None:
    if is_first():
        print(json.dumps(result, ensure_ascii=False) if as_json else text)


@app.callback(invoke_without_command=True)
def start(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from dex import __version__

        print(__version__)
        raise typer.Exit


Criterion = Annotated[str, typer.Option(help="entropy, importance, random, all or none.")]
PerLayerOption = Annotated[str, typer.Option(help="Heads of each layer: a number, or 'half'.")]
Sequences = Annotated[int, typer.Option(help="Calibration sequences.")]
Length = Annotated[int, typer.Option(help="Tokens of a calibration sequence.")]
HeldOut = Annotated[float, typer.Option(help="Share of the documents that is held out, and so not read here.")]


def _per_layer(value: str) -> Any:
    if value == "half":
        return value
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor 'half'", param_hint="--per-layer") from None


@app.command()
def heads(
    model: Model,
    output: Output,
    criterion: Criterion = "entropy",
    per_layer: PerLayerOption = "half",
    data: Text = "pydoc",
    sequences: Sequences = 64,
    length: Length = 512,
    held_out: HeldOut = 0.0,
    seed: Seed = 0,
    revision: Revision = None,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Score the heads of MODEL, choose some of each layer, and write the plan."""
    k = _per_layer(per_layer)
    from dex.data import Source
    from dex.verbs.convert import Choice, write_plan

    choice = Choice(criterion, k, Source(data), sequences, length, seed, held_out)
    plan = write_plan(model, output, choice, revision=revision, dtype=dtype, force=force)
    chosen = "\n".join(f"layer {i:2}  {' '.join(map(str, row)) or '-'}" for i, row in enumerate(plan.heads))
    show({"plan": str(output), **plan.model_dump()}, f"{chosen}\n\nwritten to {output}", as_json)


@app.command()
def convert(
    context: typer.Context,
    model: Model,
    output: Output,
    plan: Annotated[Path | None, typer.Option(help="A head plan; without one, heads are scored and chosen.")] = None,
    criterion: Criterion = "entropy",
    per_layer: PerLayerOption = "half",
    data: Text = "pydoc",
    sequences: Annotated[
        int | None, typer.Option(help="Sequences of text: 64 to score heads, 16 to measure a layout.")
    ] = None,
    length: Length = 512,
    held_out: HeldOut = 0.0,
    schedule: Annotated[str, typer.Option(help="λ(t): paper, land, fixed or off.")] = "paper",
    anneal_steps: Annotated[int | None, typer.Option(help="T_a in optimiser steps; left open if not given.")] = None,
    lam: Annotated[float | None, typer.Option(help="The constant λ of schedule 'fixed'.")] = None,
    w_d_init: Annotated[str, typer.Option(help="kaiming or zeros.")] = "kaiming",
    train_kvo: Annotated[bool, typer.Option(help="Train K, V and O with the branch.")] = True,
    layer: Annotated[list[int] | None, typer.Option(help="A layer to adapt (repeatable); all if not given.")] = None,
    layout: Annotated[str | None, typer.Option(help="Instead of Dex: diff-v2, diff-v1 or diffllama.")] = None,
    layout_heads: Annotated[str | None, typer.Option("--heads", help="Diff heads: doubled or paired.")] = None,
    norm: Annotated[str | None, typer.Option(help="V1's norm: calibrate, anneal or off.")] = None,
    option: LayoutOptions = None,
    seed: Seed = 0,
    revision: Revision = None,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Attach Dex to MODEL and write the untrained adapter folder; or lay MODEL out as a DIFF Transformer."""
    if layout is not None:
        _refuse_beside(context, "--layout", _DEX_OPTIONS)
        given_seed = seed if _was_given(context, "seed") else None
        target = _target(layout, layout_heads, norm, option, given_seed)
        from dex.verbs import lay_out as verb_of_layouts

        record = verb_of_layouts.lay_out(
            model,
            output,
            target,
            text=data,
            sequences=16 if sequences is None else sequences,
            length=length,
            held_out=held_out,
            revision=revision,
            dtype=dtype,
            force=force,
        )
        text = f"{verb_of_layouts.describe(record)}\nwritten to {output}"
        show({"folder": str(output), **record}, text, as_json)
        return
    _refuse_without(context, "--layout", {"layout_heads": "heads", "norm": "norm", "option": "option"})
    k, sequences = _per_layer(per_layer), 64 if sequences is None else sequences
    scoring = ("criterion", "per_layer", "data", "sequences", "length", "held_out")
    if plan is not None:
        _refuse_beside(context, "--plan", scoring)
    if schedule == "off":
        _refuse_beside(context, "--schedule off", ("plan", *scoring))
    from dex.data import Source
    from dex.heads import HeadPlan
    from dex.tuner import DexConfig
    from dex.verbs import convert as verb

    config = DexConfig(
        task_type="CAUSAL_LM",
        schedule=schedule,  # type: ignore[arg-type]
        anneal_steps=anneal_steps,
        lam=lam,
        w_d_init=w_d_init,  # type: ignore[arg-type]
        train_kvo=train_kvo,
        layers_to_transform=layer or None,
    )
    chosen = (
        HeadPlan.load(plan) if plan else verb.Choice(criterion, k, Source(data), sequences, length, seed, held_out)
    )
    made = verb.convert(model, output, config, chosen, revision=revision, dtype=dtype, seed=seed, force=force)
    text = f"adapter written to {output}; its README.md says how to load it"
    show({"adapter": str(output), "plan": made.model_dump() if made else None}, text, as_json)


_DEX_OPTIONS = (
    "plan",
    "criterion",
    "per_layer",
    "schedule",
    "anneal_steps",
    "lam",
    "w_d_init",
    "train_kvo",
    "layer",
)


def _target(layout: str, heads: Any, norm: Any, option: list[str] | None, seed: int | None) -> Any:
    for flag, value, words in (
        ("--heads", heads, ("doubled", "paired")),
        ("--norm", norm, ("calibrate", "anneal", "off")),
    ):
        if value is not None and value not in words:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(words)}", param_hint=flag)
    from dex.layouts.options import parse_options
    from dex.verbs.lay_out import Target

    return Target(layout, heads, norm, seed, parse_options(option or []))


@app.command()
def init(
    output: Output,
    layout: Annotated[str, typer.Option(help="base, diff-v1, diff-v2 or diffllama.")],
    like: Annotated[str, typer.Option(help="The model, or config.json file, whose size it gets.", metavar="MODEL")],
    tokenizer: Annotated[
        str | None, typer.Option(help="The model whose tokenizer it gets, if not that one's.")
    ] = None,
    option: LayoutOptions = None,
    seed: Seed = 0,
    revision: Revision = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write a model with fresh weights, to be trained from scratch beside others of its size."""
    from dex.layouts.options import parse_options
    from dex.verbs import init as verb

    options = parse_options(option or [])
    record = verb.init(
        layout, like, output, options=options, tokenizer=tokenizer, seed=seed, revision=revision, force=force
    )
    show({"folder": str(output), **record}, f"{verb.describe(record)}\nwritten to {output}", as_json)


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value", metavar="[KEY.PATH=VALUE]...")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, do one forward pass, print the plan, write nothing.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Delete the run and start it again.")] = False,
    as_json: Json = False,
) -> None:
    """Run RECIPE; the same command goes on where a run was stopped."""
    from dex.recipe import load_recipe

    loaded = load_recipe(recipe, overrides or [])
    if dry_run:
        from dex.verbs import dry_run as check

        seen, made = check.dry_run(loaded, force=force)
        show({"output": loaded.output, **seen}, check.describe(loaded, seen, made), as_json)
        return
    from dex.verbs import train as verb

    result = verb.train(loaded, force=force)
    show({"output": loaded.output, **result}, verb.describe(loaded, result), as_json)


@app.command()
def plan(
    context: typer.Context,
    subject: Annotated[str, typer.Argument(help="A recipe (.yaml), or a model.", metavar="RECIPE|MODEL")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value, of a recipe", metavar="[KEY.PATH=VALUE]...")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="h200, h100, a100-80g, a100-40g, l40s, rtx-4090, rtx-3090 or cpu; all GPUs.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes of the run, one device each.")] = 1,
    sharding: Annotated[str, typer.Option(help="none or fsdp.")] = "none",
    revision: Revision = None,
    as_json: Json = False,
) -> None:
    """Say what a run of RECIPE, or MODEL by itself, will need, from the model's config alone."""
    if subject.lower().endswith((".yaml", ".yml")):
        _refuse_beside(context, "a recipe", ("revision",))
        from dex.recipe import load_recipe

        loaded = load_recipe(subject, overrides or [])
        from dex.verbs import plan as verb

        made: Any = verb.plan(loaded, device, processes, sharding)  # type: ignore[arg-type]
    else:
        _refuse_beside(context, "a model", ("overrides", "device", "processes", "sharding"))
        from dex.verbs import plan as verb

        made = verb.plan_model(subject, revision)
    show(made.to_dict(), verb.describe(made), as_json)


@app.command()
def fold(
    adapter: Annotated[str, typer.Argument(help="A trained adapter: a folder or a Hub id.")],
    output: Output,
    lambda_scale: Annotated[
        list[float] | None,
        typer.Option(help="Fold with S·λ for λ; several go to OUTPUT/lambda-S each (repeatable).", metavar="S"),
    ] = None,
    text: Annotated[str, typer.Option(help="Text of the certificate: a file, a folder or 'pydoc'.")] = "pydoc",
    into_unquantised: Annotated[
        bool, typer.Option("--into-unquantised", help="Fold what was trained on a quantised base into the whole one.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Fold ADAPTER into a stock checkpoint, and certify that it computes the same."""
    from dex.verbs import fold as verb

    options: dict[str, Any] = {"text": text, "into_unquantised": into_unquantised, "force": force}
    scales: list[Any] = lambda_scale or [None]
    if len(scales) > 1:
        folds = verb.fold_at_scales(adapter, output, scales, **options)
        lines = [f"{name}: {verb.describe(certificate)}" for name, certificate in folds.items()]
        show({"folder": str(output), "folds": folds}, "\n".join([*lines, f"written to {output}"]), as_json)
        return
    certificate = verb.fold(adapter, output, lambda_scale=scales[0], **options)
    show({"folder": str(output), **certificate}, f"{verb.describe(certificate)}\nwritten to {output}", as_json)


@app.command()
def dial(
    adapter: Annotated[str, typer.Argument(help="The folder of a trained adapter.")],
    output: Output,
    recipe: Annotated[
        Path | None, typer.Option(help="The recipe whose held-out part is read; the adapter's own if not given.")
    ] = None,
    scale: Annotated[
        list[float] | None, typer.Option(help="A scale S (repeatable); 0, 0.25, 0.5, 0.75, 1, 1.5, 2 if not given.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Blocks in one forward pass.")] = 4,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Measure the held-out loss of ADAPTER with S·λ in place of λ, against the scale S."""
    from dex.verbs import dial as verb

    scales = scale or verb.SCALES
    made = verb.dial(adapter, output, recipe=recipe, scales=scales, batch_size=batch_size, force=force)
    show({"output": str(output), **made.to_dict()}, f"{made.describe()}\nwritten to {output}", as_json)


@app.command(name="eval")
def evaluate(
    models: Annotated[list[str], typer.Argument(help="Models and adapters.", metavar="MODEL")],
    output: Output,
    suite: Annotated[str, typer.Option(help="perplexity, lm, needle, manyshot, instruct or context-qa.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A setting of the suite (repeatable).", metavar="KEY=VALUE")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="For perplexity: the held-out part of this recipe; --set recipe=… in short.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests in one forward pass.")] = 4,
    revision: Revision = None,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Evaluate each model on the same items; the same command goes on where it was stopped."""
    from dex.suites import suite_of

    chosen = suite_of(suite, [*([f"recipe={recipe}"] if recipe else []), *(settings or [])])
    from dex.verbs import evaluate as verb

    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "revision": revision, "force": force}
    results = verb.evaluate(models, output, chosen, **options)
    text = f"{verb.describe(results)}\nwritten to {output}"
    show({"output": str(output), "models": {r.label: r.summary() for r in results}}, text, as_json)


@app.command()
def analyze(
    context: typer.Context,
    models: Annotated[
        list[str], typer.Argument(help="A model or adapter, or two to put side by side.", metavar="MODEL [MODEL2]")
    ],
    output: Output,
    data: Text = "pydoc",
    sequences: Annotated[int, typer.Option(help="Windows of the text.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    held_out: Annotated[
        float, typer.Option(help="Read only documents that this share holds out; 0 reads all.")
    ] = 0.1,
    span: Annotated[
        str | None, typer.Option(help="Words of the text that stand for the answer; else needles in haystacks.")
    ] = None,
    signs: Annotated[
        str, typer.Option(help="DIFF maps, where negatives matter: raw, absolute, clipped or renormalised.")
    ] = "renormalised",
    first_token: Annotated[
        bool, typer.Option("--first-token/--no-first-token", help="Whether maps count a text's first token.")
    ] = True,
    threshold: Annotated[float, typer.Option(help="Weights below it count as sparse.")] = 1e-3,
    only: Annotated[str | None, typer.Option(help="Sections, separated by commas.", metavar="NAMES")] = None,
    figures: Annotated[bool, typer.Option("--figures/--no-figures", help="PNG files of the main figures.")] = True,
    batch_size: Annotated[int, typer.Option(min=1, help="Windows in one forward pass.")] = 1,
    seed: Seed = 0,
    revision: Revision = None,
    dtype: Dtype = "auto",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Look inside MODEL: heads, λ, attention, outliers; writes report.html, report.json and figures."""
    if span is not None:
        _refuse_beside(context, "--span", ("held_out",))
    sections = [name.strip() for name in only.split(",")] if only is not None else None
    from dex.analysis.subject import SETTINGS
    from dex.verbs import analyze as verb

    settings = SETTINGS.block(
        data=data,
        sequences=sequences,
        length=length,
        held_out=held_out if span is None else 0.0,
        span=span,
        signs=signs,
        count_first_token=first_token,
        threshold=threshold,
        seed=seed,
    )
    options: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "revision": revision, "force": force}
    report = verb.analyze(models, output, settings, sections=sections, figures=figures, **options)
    text = f"{verb.describe(report)}\n\nwritten to {output}; open {output / verb.PAGE}"
    show({"output": str(output), **verb.summary(report)}, text, as_json)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(help="A study (YAML).", metavar="STUDY")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.path=value", metavar="[KEY.PATH=VALUE]...")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Variants, separated by commas; the control is always one.", metavar="NAMES")
    ] = None,
    report: Annotated[bool, typer.Option("--report", help="Make no run; report on those that are done.")] = False,
    as_json: Json = False,
) -> None:
    """Run the variants of STUDY over its seeds, and report their differences; the same command goes on."""
    from dex.studies.study_file import load_study

    loaded = load_study(file, overrides or [])
    if only is not None:
        loaded = loaded.only([name.strip() for name in only.split(",")])
    from dex.verbs import study as verb

    result = verb.study(loaded, report_only=report)
    show(result, verb.describe(result), as_json)


@app.command()
def compare(
    context: typer.Context,
    folders: Annotated[
        list[Path],
        typer.Argument(help="What dex eval -o wrote, all or one model of it, or a run.", metavar="RESULTS"),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A folder for compare.json, compare.md and forest.png.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="The model that the others are compared with; the first if not given.")
    ] = None,
    tasks: Annotated[str | None, typer.Option(help="Compare only these tasks: a,b.")] = None,
    require_no_regression: Annotated[
        bool, typer.Option("--require-no-regression", help="Exit with 1 if a model is significantly worse.")
    ] = False,
    margin: Annotated[
        float | None,
        typer.Option(min=0, help="Exit with 1 unless every interval shows less than this much loss."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Compare evaluated models on the same items: paired differences, intervals, tests."""
    _refuse_without(context, "--require-no-regression", {} if require_no_regression else {"margin": "margin"})
    _refuse_without(context, "--output", {} if output else {"force": "force"})
    from dex.verbs import compare as verb

    names = [name.strip() for name in tasks.split(",")] if tasks is not None else None
    made = verb.compare(folders, against=against, tasks=names, output=output, force=force)
    lost = made.refusal(margin) if require_no_regression else None
    written = f"\nwritten to {output}" if output else ""
    show({**made.to_dict(), "regression": lost}, f"{made.describe()}{written}", as_json)
    if lost is not None:
        print(f"dex: {lost}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="What dex train, fold, convert or init wrote.", metavar="FOLDER")],
    results: Annotated[
        list[Path] | None,
        typer.Option(
            help="What dex eval -o wrote of this model, its base and its controls (repeatable).", metavar="RESULTS"
        ),
    ] = None,
    license: Annotated[
        str | None, typer.Option(help="The licence, as the Hub names it: apache-2.0, other, …")
    ] = None,
    license_name: Annotated[str | None, typer.Option(help="The name of a licence `other`.")] = None,
    license_link: Annotated[str | None, typer.Option(help="Its text: a URL, or a file of FOLDER.")] = None,
    base_model: Annotated[str | None, typer.Option(help="The Hub id of a base that was a local one.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="An ISO 639 code, such as en (repeatable).")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also over a card that was edited by hand.")] = False,
    as_json: Json = False,
) -> None:
    """Write the model card of FOLDER again, with results, and with what no file says: licence, base, language."""
    from dex.verbs import card as verb

    made = verb.write_card(
        folder,
        results=results or (),
        license=license,
        license_name=license_name,
        license_link=license_link,
        base_model=base_model,
        language=language or (),
        force=force,
    )
    show(made, verb.describe(made), as_json)


@app.command()
def push(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(help="A folded model, an adapter or a DIFF model.", metavar="FOLDER")],
    repo: Annotated[str, typer.Argument(help="organisation/name on the Hub.", metavar="REPO")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    revision: Annotated[str | None, typer.Option(help="The branch; made if it is not there.")] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the commit in a pull request.")] = False,
    commit_message: Annotated[str | None, typer.Option(help="The commit's first line.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Download the commit again and compare SHA-256.")] = False,
    require_no_regression: Annotated[
        Path | None,
        typer.Option(help="Refuse a model that is worse than its base by these: dex eval -o.", metavar="RESULTS"),
    ] = None,
    margin: Annotated[
        float | None, typer.Option(min=0, help="Refuse unless every interval shows less than this much loss.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, say what would be uploaded, upload nothing.")
    ] = False,
    with_paths: Annotated[
        bool, typer.Option("--with-paths", help="Publish records that name absolute paths of this machine.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a model that dex did not push, or one of another kind.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Publish FOLDER as REPO, in one commit; the same command goes on where it was stopped."""
    _refuse_without(context, "--require-no-regression", {} if require_no_regression else {"margin": "margin"})
    if dry_run:
        _refuse_beside(context, "--dry-run", ("verify",))
    if commit_message is not None and not commit_message.strip():
        raise typer.BadParameter("is empty; say what the commit is", param_hint="--commit-message")
    if sys.stderr.isatty():
        show_transfers()  # a file can take an hour
    from dex.verbs import push as verb

    pushed = verb.push(
        folder,
        repo,
        private=private,
        revision=revision,
        create_pr=create_pr,
        commit_message=commit_message,
        verify=verify,
        require_no_regression=require_no_regression,
        margin=margin,
        dry_run=dry_run,
        with_paths=with_paths,
        force=force,
    )
    show(pushed.to_dict(), verb.describe(pushed), as_json)


@app.command()
def reproduce(
    folder: Annotated[
        str, typer.Argument(help="A run, its adapter/ or model/, or a folded folder; also one on the Hub.")
    ],
    output: Output,
    margin: Annotated[
        float | None,
        typer.Option(min=0, help="Nats within which runs are the same that cannot be equal to the bit; 0.01."),
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Train, and fold, what the dex.lock of FOLDER describes again, and say whether it came out the same."""
    from dex.verbs import reproduce as verb

    made = verb.reproduce(folder, output, margin=verb.MARGIN if margin is None else margin, force=force)
    show({"output": str(output), **made}, f"{verb.describe(made)}\nwritten to {output}", as_json)
    if (sentence := verb.refusal(made)) is not None:
        print(f"dex: {sentence}", file=sys.stderr)
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Run the whole pipeline on a tiny random model, offline, in under a minute."""
    from dex.verbs import doctor as verb

    checks = verb.doctor()
    show({"checks": checks}, verb.describe(checks), as_json)


recipes_app = typer.Typer(name="recipes", help="The recipes that come with dex.", no_args_is_help=True)
app.add_typer(recipes_app)


@recipes_app.command(name="ls")
def list_recipes(as_json: Json = False) -> None:
    """List them: method, model, tokens, and what each is for."""
    from dex import shipped

    found = shipped.catalogue()
    show(found, shipped.describe(found), as_json)


@recipes_app.command(name="cp")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="A name of `dex recipes ls`.", metavar="NAME")],
    dest: Annotated[Path | None, typer.Argument(help="A file or folder; the current one if not given.")] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Copy the recipe NAME to DEST, as one of your own."""
    from dex import shipped

    made = shipped.copy(name, dest, force=force)
    show({"path": str(made.path), "missing": made.missing}, shipped.describe_copy(made), as_json)


export_app = typer.Typer(name="export", help="Other formats of a model folder.", no_args_is_help=True)
app.add_typer(export_app)


@export_app.command(name="gguf")
def export_gguf(
    folder: Annotated[Path, typer.Argument(help="A model folder, such as dex fold writes.", metavar="FOLDER")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file, which ends in .gguf.")],
    dtype: Annotated[str, typer.Option("--type", help="Type of the matrices: f16, f32 or q8_0.")] = "f16",
    name: Annotated[
        str | None, typer.Option(help="The model's title in the file; the folder's name if not given.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write FOLDER as one GGUF file for llama.cpp, tokenizer and chat template included, and read it back."""
    from dex.verbs import export_gguf as verb

    result = verb.export_gguf(folder, output, dtype=dtype, name=name, force=force)
    show(result, f"{verb.describe(result)}\nwritten to {output}", as_json)


def main() -> None:
    """The console script: one sentence for a DexError, no traceback; with --json, also as one JSON object."""
    quiet_libraries()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # λ on an ASCII terminal
    try:
        code = app(prog_name="dex", standalone_mode=False)
    except SharedError:
        time.sleep(2)  # the first process says why; a launcher stops it as soon as another one ends
        sys.exit(1)
    except DexError as error:
        _fail(str(error))
    except UsageError as error:
        error.show()
        _print_error(error.format_message())
        sys.exit(2)
    except RecursionError:
        _fail(
            "A file that was read is nested too deeply to be what it should be; make it again, or put its copy back."
        )
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        _fail(f"{error.filename or 'A file'}: {error.strerror}.")
    if code == INTERRUPTED:
        _print_error("interrupted")
        print("dex: interrupted; nothing that was there before is lost.", file=sys.stderr)
        sys.exit(1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(sentence: str) -> None:
    _print_error(sentence)
    print(f"dex: {sentence}", file=sys.stderr)
    sys.exit(1)


def _print_error(message: str) -> None:
    if "--json" in sys.argv:
        print(json.dumps({"error": message}, ensure_ascii=False))


if __name__ == "__main__":
    main()
