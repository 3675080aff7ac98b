"""A folder in which the commands of the documentation run, with small stand-ins for what the pages name.

The models of the pages are tiny ones of the same family, and their data sets a few rows: under the pages' own ids
from the loopback Hub, and in folders beside the recipes. A run (runs/dex) and its control are there as well.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import docs_child
import pytest
import zstandard
from docs_pages import ROOT
from hub_server import HubServer
from test_context_qa import rows as rows_of_texts
from test_instruct import ROWS as ROWS_OF_IFEVAL
from test_lm import ROWS as ROWS_OF_LM
from tiny import write_tiny
from tiny_tokenizers import byte_level

from dex import cli
from dex.data import embedded

LINKED = ("recipes", "scripts", "docs", "Makefile", "pyproject.toml")
SIZE: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 4_096}
MODELS = {
    "llama": ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B-Instruct"),
    "qwen2": ("Qwen/Qwen2.5-0.5B",),
    "qwen3": ("Qwen/Qwen3-0.6B-Base",),
}
TOKEN = "hf_" + "docsTests" * 4
DOLMINO = "allenai/dolmino-mix-1124"
OPENHERMES = "teknium/OpenHermes-2.5"
SUBSETS = {"dclm": "json.zst", "pes2o": "json.gz", "wiki": "json.gz", "stackexchange": "json.gz"}
CHAT = [{"role": "user", "content": "What is a list?"}, {"role": "assistant", "content": "A sequence of values."}]


def furnish(folder: Path) -> None:
    """Make what does not need dex: models, texts, and rows of the suites. The Hub serves the models from here."""
    for name in LINKED:
        (folder / name).symlink_to(ROOT / name)
    for family in MODELS:
        _write_model(folder / "models" / family, family)
    for name in ("smollm2-135m-instruct", "runs/demo/base", "runs/base"):
        shutil.copytree(folder / "models" / "llama", folder / name)
    (folder / "r.yaml").write_text((ROOT / "recipes/demo.yaml").read_text().replace("runs/demo", "runs/r"))
    shutil.copy(ROOT / "recipes/studies/controls.yaml", folder / "study.yaml")
    shutil.copy(folder / "models/llama/config.json", folder / "config.json")
    write_texts(folder)
    _write_lines(folder / "rows/lm", **ROWS_OF_LM, lambada_openai=[{"text": "The sun is hot. It is the sun"}])
    _write_lines(folder / "rows/instruct", ifeval=ROWS_OF_IFEVAL[:2])
    _write_lines(folder / "rows/texts", ask=rows_of_texts(2), sum=rows_of_texts(2, question=False))
    _write_lines(folder / "rows", labels=[{"text": f"no {i}", "label": "ab"[i % 2]} for i in range(24)])
    _write_lines(folder, words=[{"text": "The sky is", "word": " blue"}, {"text": "Snow is", "word": " white"}])


def _write_model(folder: Path, family: str) -> None:
    """A tiny model with a tokenizer that has merges, a licence and a card that names it."""
    tokenizer = byte_level("llama-bpe" if family == "llama" else "qwen2")
    ends = {f"{end}_token_id": getattr(tokenizer, f"{end}_token_id") for end in ("bos", "eos", "pad")}
    write_tiny(folder, family, vocab_size=len(tokenizer), **SIZE, **ends)
    tokenizer.save_pretrained(folder)
    licence = "llama3.2" if family == "llama" else "apache-2.0"
    (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n")
    (folder / "LICENSE").write_text(
        "Llama 3.2 Community License Agreement" if family == "llama" else "Apache License"
    )


def shorten_texts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(embedded, "EMBEDDED", dict(embedded.EMBEDDED))
    docs_child.shorten_texts()


def write_texts(folder: Path) -> None:
    """One's own data, as the pages name it."""
    prose = [text[:1_000] for _, text in embedded.texts("pydoc")[:20]]
    (folder / "notes.txt").write_text("\n\n".join([*prose, "here are the words that are the answer ."]))
    (folder / "notes").mkdir()
    for i, text in enumerate(prose):
        (folder / "notes" / f"{i}.txt").write_text(text)
    _write_lines(folder, articles=[{"text": text, "title": str(i)} for i, text in enumerate(prose)])
    _write_lines(folder, chats=[{"messages": CHAT}] * 40)


def serve(hub: HubServer, folder: Path) -> None:
    """The models and data sets of the pages, and an account named `you`."""
    hub.sign_in(TOKEN, "you")
    for family, names in MODELS.items():
        for name in names:
            hub.add_model(name, folder / "models" / family)
    rows = "".join(json.dumps({"text": text[:1_000]}) + "\n" for _, text in embedded.texts("pydoc")[:30]).encode()
    card = "---\nconfigs:\n"
    files = {}
    for name, suffix in SUBSETS.items():
        card += f"- config_name: {name}\n  data_files: data/{name}/*\n"
        packed = zstandard.compress(rows) if suffix.endswith("zst") else gzip.compress(rows)
        files[f"data/{name}/{name}-0000.{suffix}"] = packed
    hub.add_dataset(DOLMINO, {"README.md": f"{card}---\n".encode(), **files})
    turns = [{"from": "human", "value": "What is a list?"}, {"from": "gpt", "value": "A sequence of values."}]
    hub.add_dataset(OPENHERMES, {"openhermes2_5.json": json.dumps([{"conversations": turns}] * 60).encode()})


def dex(*arguments: object) -> tuple[int, str]:
    """`dex ARGUMENTS` in this process: the exit code, and what it printed and said."""
    said, argv = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True), sys.argv
    sys.argv = ["dex", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            cli.main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = argv
        logging.disable(logging.NOTSET)
    return code, said.buffer.getvalue().decode()  # type: ignore[attr-defined]


def own_dex() -> Path:
    """A copy of dex in the current folder, which a page's files are added to."""
    if not Path("dex").exists():
        without = shutil.ignore_patterns("__pycache__")
        for name, place in (("dex", "dex"), ("recipes", "dex/recipes"), ("model_cards", "dex/model_cards")):
            shutil.copytree(ROOT / name, place, ignore=without)
    return Path("dex")


def run_in_child(commands: list[list[str]]) -> None:
    """`dex` commands of the current folder's own dex, in one process."""
    script = str(ROOT / "tests" / "docs_child.py")
    done = subprocess.run([sys.executable, script, json.dumps(commands)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def _write_lines(folder: Path, **rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, own in rows.items():
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in own)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def untrained_splitter(folder: Path) -> Path:
    """nltk's splitter of sentences, trained on nothing."""
    inner = folder / "tokenizers" / "punkt_tab" / "english"
    inner.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (inner / name).write_text("")
    return folder
