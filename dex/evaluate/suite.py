"""`dex eval`: load each model, run a suite on the same items, write one result file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dex.adapter import is_adapter, load_adapter
from dex.errors import DexError
from dex.evaluate.perplexity import held_out_losses, report
from dex.models import ANY, device, load_model, use_chat_template
from dex.output import refuse_to_overwrite, whole_folder, write_json
from dex.recipe import Data
from dex.run_data import held_out_blocks, prepare_data

RESULT = "perplexity.json"


def evaluate(
    models: list[str],
    output: Path,
    data: Data,
    *,
    tokens: int = 1,
    against: str | None = None,
    batch_size: int = 4,
    dtype: str = "auto",
    force: bool = False,
    chat_template: str | None = None,
) -> dict[str, Any]:
    """Held-out loss of models and adapters on the same blocks; writes `perplexity.json` into the output folder.

    `tokens` is the budget of the run whose held-out part this is: how far a Hub data set was read depends on it.
    `against` is the model that the others are compared with, by default the first. `chat_template` is a .jinja file
    that chat data is rendered with, in place of each tokenizer's own. Raises DexError where two models
    do not cut the text into the same tokens, and so cannot have the same blocks.
    """
    refuse_to_overwrite(output, force, RESULT)
    if len(set(models)) < len(models):
        raise DexError("A model is named twice; each is evaluated once.")
    if against is not None and against not in models:
        raise DexError(f"--against {against} is not one of the models to evaluate: {', '.join(models)}.")
    named, prepared = {}, None
    for name in models:
        model, base = load_adapter(name, dtype) if is_adapter(name) else _plain(name, dtype)
        if chat_template is not None:
            use_chat_template(base.tokenizer, Path(chat_template))
        own = prepare_data(data, base.tokenizer, tokens)
        if prepared is not None and own.held_out.fingerprint != prepared.held_out.fingerprint:
            raise DexError(f"{name} and {models[0]} cut the text into different tokens; losses are not comparable.")
        prepared = own
        blocks = held_out_blocks(data, prepared)
        named[name] = held_out_losses(model.to(device()), blocks, batch_size, name)
        del model, base
    assert prepared is not None
    result = report(named, prepared.held_out, blocks, against)
    with whole_folder(output, force, RESULT) as partial:
        write_json(partial / RESULT, result)
    return result


def _plain(name: str, dtype: str) -> tuple[Any, Any]:
    base = load_model(name, None, dtype, families=ANY)
    return base.model, base


def describe(result: dict[str, Any]) -> str:
    """The table that is printed."""
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for column in ("held-out loss [95 %]", "perplexity [95 %]", f"difference from {result['against']} [95 %]"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, figures in result["models"].items():
        difference = figures["difference"]
        table.add_row(
            name,
            interval(figures["loss"]),
            interval(figures["perplexity"], 2),
            interval(difference, 4, sign=True) if difference else "",
        )
    console = Console(width=160)
    with console.capture() as captured:
        console.print(table)
    held_out = result["held_out"]
    return (
        captured.get()
        + f"{held_out['targets']:,} targets in {held_out['blocks']} blocks of {held_out['documents']} documents"
    )


def interval(value: dict[str, float | None], digits: int = 4, sign: bool = False) -> str:
    plus = "+" if sign else ""
    mean = f"{value['mean']:{plus}.{digits}f}"
    if value["low"] is None:
        return f"{mean} [one document: no interval]"
    return f"{mean} [{value['low']:{plus}.{digits}f}, {value['high']:{plus}.{digits}f}]"
