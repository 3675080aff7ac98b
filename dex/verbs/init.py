"""`dex init`: a model with fresh weights in any layout, sized like another, to train from scratch beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from dex import __version__
from dex.cards import write_card
from dex.errors import DexError
from dex.layouts.fresh import fresh, num_parameters
from dex.models import ModelSource, load_outline, load_tokenizer, read_config_file, refuse_quantised, save_model
from dex.output import refuse_output_over, refuse_to_overwrite, whole_folder, write_json

LAYOUTS = ("base", "diff-v1", "diff-v2", "diffllama")
MADE_HERE = "layout.json"


def init(
    layout: str,
    like: str | Path,
    output: str | Path,
    *,
    options: dict[str, Any] | None = None,
    tokenizer: str | Path | None = None,
    seed: int = 0,
    revision: str | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Write the folder of a fresh model; returns what layout.json holds.

    like: a model, or a config.json file; the tokenizer is that of the model, or of `tokenizer`.
    options: those of DIFF V1's configuration. Raises DexError where the layout does not fit the model.
    """
    like, output = str(like), Path(output)
    if layout not in LAYOUTS:
        raise DexError(f"{layout!r} is not a layout; there are: {', '.join(LAYOUTS)}.")
    if options and layout != "diff-v1":
        raise DexError(f"--option is for diff-v1; {layout} has no options.")
    refuse_output_over(output, like)
    refuse_to_overwrite(output, force, MADE_HERE)
    config, source = _like(like, revision)
    words = _tokenizer_like(source, None if tokenizer is None else str(tokenizer))
    if len(words) > config.vocab_size:
        raise DexError(f"The tokenizer has {len(words):,} tokens, and vocab_size of {like} is {config.vocab_size:,}.")
    model = fresh(layout, config, seed, options or {})
    record = {
        "layout": layout,
        "options": options or {},
        "seed": seed,
        "dtype": "float32",
        "like": source.to_dict(),
        "parameters": model.num_parameters(),
        "parameters_wanted": num_parameters(config),
        "dex_version": __version__,
    }
    with whole_folder(output, force, MADE_HERE) as partial:
        save_model(model, words, partial)
        write_json(partial / MADE_HERE, record)
        write_card(partial, source)
    return record


def describe(record: dict[str, Any]) -> str:
    """The line that is printed."""
    wanted, parameters = record["parameters_wanted"], record["parameters"]
    return (
        f"{record['layout']}: {parameters:,} parameters, fresh weights "
        f"({parameters / wanted - 1.0:+.2%} against the {wanted:,} of the model it is like)"
    )


def _like(like: str, revision: str | None) -> tuple[PretrainedConfig, ModelSource]:
    if not _is_config_file(like):
        config, source = load_outline(like, revision)
        refuse_quantised(config)
        return config, source
    if revision is not None:
        raise DexError(f"{like} is a file and has no revisions; leave out --revision.")
    return read_config_file(Path(like)), ModelSource(like)


def _tokenizer_like(source: ModelSource, tokenizer: str | None) -> PreTrainedTokenizerBase:
    if tokenizer is not None:
        return load_tokenizer(ModelSource(tokenizer))
    if not _is_config_file(source.id):
        return load_tokenizer(source)
    folder = Path(source.id).absolute().parent
    if not (folder / "tokenizer_config.json").is_file():
        raise DexError(f"{source.id} has no tokenizer beside it; name a model that has one with --tokenizer.")
    return load_tokenizer(ModelSource(str(folder)))


def _is_config_file(like: str) -> bool:
    return like.endswith(".json") and Path(like).is_file()
