"""Write a model folder as one GGUF file, for llama.cpp and what is built on it, and read it back.

The weights stream from the folder's safetensors into the file. The file takes its name only after transformers has
read it back, and every tensor and the greedy tokens were compared.
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

from dex.cards.front_matter import glean_front_matter
from dex.console import say
from dex.errors import DexError
from dex.json_object import read_json
from dex.models import ANY, ModelSource, load_config, load_model, load_tokenizer
from dex.output import refuse_to_overwrite_file, whole_file
from dex.settings import shown


def export_gguf(
    folder: str | Path, output: str | Path, *, dtype: str = "f16", name: str | None = None, force: bool = False
) -> dict[str, Any]:
    """Write the model in `folder` to the file `output`; returns what was written and what was compared.

    `dtype`: f32, f16 or q8_0 for the matrices; norms and biases are f32. `name`: the title in the file; the folder's
    if not given. Raises DexError, and leaves no file, for a model or tokenizer that llama.cpp would run as another
    one, for numbers that the type cannot hold, and if what is read back is not what was written.
    """
    folder, output = Path(folder), Path(output)
    _refuse_arguments(folder, output, dtype, force)
    from dex.gguf.check import check_file, expect  # gguf may be missing, which was said
    from dex.gguf.file import Contents, write_file
    from dex.gguf.metadata import refuse_what_gguf_cannot_hold
    from dex.gguf.tensors import plan_tensors, refuse_values
    from dex.gguf.tokenizer import read_vocabulary

    if (folder / "config.json").exists():
        read_json(folder / "config.json")  # one that cannot be read is said here
    config = load_config(str(folder), families=ANY)
    refuse_what_gguf_cannot_hold(config, str(folder))
    plan = plan_tensors(config, dtype, str(folder))
    tokenizer = load_tokenizer(ModelSource(str(folder)))
    vocabulary = read_vocabulary(tokenizer, config, _ends_of_text(folder), str(folder))
    contents = Contents(config, dtype, name or folder.resolve().name, glean_front_matter(folder), plan, vocabulary)
    _refuse_without_room(output, contents.nbytes)
    loaded = load_model(str(folder), dtype="float32")
    refuse_values(loaded.model, plan)
    say("greedy tokens of the folder's model")
    expected = expect(loaded, plan)
    del loaded
    with whole_file(output, force) as partial:
        write_file(partial, folder, contents)
        say("reading the file back")
        checked = check_file(partial, folder, config, plan, expected)
        size = partial.stat().st_size
    return {
        "file": str(output),
        "type": dtype,
        "bytes": size,
        "architecture": config.model_type,
        "tokenizer": {"model": vocabulary.model, "pre": vocabulary.pre},
        "notes": list(vocabulary.notes),
        "checked": checked,
    }


def _refuse_arguments(folder: Path, output: Path, dtype: str, force: bool) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise DexError("dex export gguf needs the package gguf: `pip install gguf`.")
    from dex.gguf.types import TYPES

    if dtype not in TYPES:
        raise DexError(f"--type {dtype} is not known; choose one of {', '.join(TYPES)}.")
    if output.suffix != ".gguf":
        raise DexError(
            f"{output} does not end in .gguf, by which llama.cpp's tools and dex know such a file; add it."
        )
    if folder.suffix == ".gguf" and folder.is_file():
        raise DexError(f"{folder} is a GGUF file already; give the folder of a model.")
    if not folder.is_dir():
        raise DexError(f"{folder} is no folder; give the folder of a model, such as dex fold writes.")
    if (folder / "adapter_config.json").is_file():
        raise DexError(
            f"{folder} is an adapter; fold it first (`dex fold {folder} -o FOLDER`) and export that folder."
        )
    refuse_to_overwrite_file(output, force)


def _ends_of_text(folder: Path) -> list[int]:
    """The end-of-text tokens of generation_config.json, which models have beside their tokenizer's."""
    file = folder / "generation_config.json"
    given = read_json(file).get("eos_token_id") if file.exists() else None
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if odd := [end for end in ends if isinstance(end, bool) or not isinstance(end, int)]:
        raise DexError(f"{file} has the eos_token_id {shown(odd[0])}, no id of a token; mend it, or remove it.")
    return ends


def _refuse_without_room(output: Path, needed: int) -> None:
    place = next(parent for parent in output.absolute().parents if parent.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise DexError(
            f"{output} will take {needed / 2**30:.1f} GiB, and {place} has {free / 2**30:.1f}; make room, or choose "
            "a smaller --type."
        )


def describe(result: dict[str, Any]) -> str:
    """The lines that are printed."""
    checked, tokenizer = result["checked"], result["tokenizer"]
    asked, same = checked["prompts"], checked["prompts_with_the_folders_tokens"]
    lines = [
        f"{result['architecture']}, {result['type']}, {result['bytes'] / 2**20:.1f} MiB, "
        f"tokenizer {tokenizer['model']} ({tokenizer['pre']})",
        f"read back by {checked['read_back_by']}: all {checked['tensors_equal']} tensors are the folder's in "
        f"{result['type']}, and what they say is the same",
        f"{same} of {asked} prompts go on for {checked['new_tokens']} tokens as they do with the folder itself",
    ]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])
