"""`dex analyze`: read a text with one model or two, and write report.html, report.json and the figures.

load → every section → the next model → differences → the folder, whole or not at all
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from dex.adapter import base_outline
from dex.analysis.differences import differences
from dex.analysis.figures import draw_figures
from dex.analysis.kind import introduction, kind_of
from dex.analysis.page import render
from dex.analysis.records import ModelReport, Report
from dex.analysis.room import Work, check_room
from dex.analysis.sections import chosen, run_sections
from dex.analysis.subject import SETTINGS, Settings, Subject
from dex.analysis.texts import Texts, read_texts
from dex.console import say
from dex.data.tokens import tokenizer_identity
from dex.environment import environment
from dex.errors import DexError
from dex.evaluation.evaluated import Evaluated, labels, load_evaluated, names_of
from dex.models import ModelSource, check_dtype, load_tokenizer
from dex.output import refuse_output_over, refuse_to_overwrite, whole_folder, write_json, write_whole
from dex.plots import check_matplotlib

REPORT, PAGE, SCHEMA, FIGURES = "report.json", "report.html", "report.schema.json", "figures"


def analyze(
    models: str | Path | Sequence[str | Path],
    output: str | Path,
    settings: Settings | Mapping[str, Any] | None = None,
    *,
    sections: Sequence[str] | None = None,
    batch_size: int = 1,
    dtype: str = "auto",
    revision: str | None = None,
    figures: bool = True,
    force: bool = False,
) -> Report:
    """Analyse one model, or two side by side, and write the folder `output`.

    sections: names of `dex.analysis.sections.SECTIONS`; None: all. batch_size: rows in one forward pass.
    Raises DexError, in one sentence, for whatever cannot be done; then nothing is written.
    """
    if not isinstance(settings, Settings):
        settings = SETTINGS.block(**(settings or {}))
    models, output = names_of(models), Path(output)
    names, own_labels = chosen(sections), labels(models)
    if len(models) > 2:
        raise DexError(f"{len(models)} models were given; analyse one, or two side by side.")
    refuse_to_overwrite(output, force, SCHEMA)
    check_dtype(dtype)
    refuse_output_over(output, settings.data)
    outlines = [base_outline(model, revision) for model in models]
    for model, outline in zip(models, outlines, strict=True):
        for read in (model, outline[1].id):  # an adapter's base is read too
            refuse_output_over(output, read)
        check_room(model, *outline, dtype, Work(names, settings.length, batch_size))
    if figures:
        check_matplotlib()
    texts = _texts_of(outlines, own_labels, settings)
    reports = []
    for model, label in zip(models, own_labels, strict=True):
        evaluated = load_evaluated(model, label, dtype, batch_size, revision)
        reports.append(_report_of(evaluated, model, settings, texts, names))
        del evaluated
        gc.collect()  # the first model goes before the second comes
    report = Report(
        settings={**settings.model_dump(mode="json"), "sections": names, "batch_size": batch_size},
        text=texts.about,
        models=reports,
        **_compared(reports),
        environment=environment(),
    )
    _write(report, output, figures, force)
    return report


def _report_of(
    evaluated: Evaluated, path: str, settings: Settings, texts: Texts, names: Sequence[str]
) -> ModelReport:
    subject = Subject(evaluated, path, settings, texts.ids, texts.passages)
    kind = kind_of(subject)
    say(f"analysing {evaluated.label}, {kind}")
    found, left_out, seconds = run_sections(subject, names)
    remarks = [remark for findings in found.values() for remark in findings.remarks]
    if texts.no_passages is not None:
        remarks.append(texts.no_passages)
    return ModelReport(
        label=evaluated.label,
        kind=kind,
        identity=evaluated.identity,
        layers=len(subject.layers),
        heads=subject.num_heads,
        overview=[introduction(subject, kind), *remarks],
        sections=found,
        left_out=left_out,
        seconds=seconds,
    )


def _texts_of(
    outlines: Sequence[tuple[PretrainedConfig, ModelSource]], own_labels: Sequence[str], settings: Settings
) -> Texts:
    """What the models read: the same tokens, which all of them can hold. No weights are loaded for it.

    Raises DexError for two models with different tokenizers, and as `read_texts`.
    """
    tokenizers = [load_tokenizer(source) for _, source in outlines]
    if len({tokenizer_identity(tokenizer) for tokenizer in tokenizers}) > 1:
        raise DexError(
            f"{own_labels[1]} has another tokenizer than {own_labels[0]}, so they do not read the same tokens; "
            "analyse each by itself."
        )
    contexts = [int(config.max_position_embeddings) for config, _ in outlines]
    narrowest = min(range(len(contexts)), key=lambda index: contexts[index])
    return read_texts(settings, tokenizers[0], contexts[narrowest], own_labels[narrowest])


def _compared(reports: Sequence[ModelReport]) -> dict[str, Any]:
    if len(reports) < 2:
        return {"differences": [], "not_compared": []}
    made, kept_apart = differences(*reports)
    return {"differences": made, "not_compared": kept_apart}


def _write(report: Report, output: Path, figures: bool, force: bool) -> None:
    with whole_folder(output, force, SCHEMA) as partial:  # dex study has a report.json too
        write_json(partial / REPORT, report.model_dump(mode="json"))
        write_json(partial / SCHEMA, Report.model_json_schema())
        write_whole(partial / PAGE, render(report))
        if figures:
            draw_figures(report, partial / FIGURES)


def describe(report: Report) -> str:
    """What is printed: the overview of each model, and what was left out."""
    parts = []
    for model in report.models:
        lines = [*model.overview, *(f"Left out: {name}: {why}" for name, why in model.left_out.items())]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def summary(report: Report) -> dict[str, Any]:
    """What `--json` prints: the numbers for whole models; the rest is in report.json."""
    return {
        "models": {
            model.label: {
                "kind": model.kind,
                "overview": model.overview,
                "left_out": model.left_out,
                "statistics": {
                    one.name: one.values
                    for found in model.sections.values()
                    for one in found.statistics
                    if one.over == "model"
                },
            }
            for model in report.models
        }
    }
