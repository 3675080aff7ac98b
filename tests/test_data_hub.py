"""Hub data sets as they really are: shards and rows that differ in every column but the one that is read."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hub_server import HubServer
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer

from dex.data import Prepared, Source, prepare, read_documents
from dex.data.files import DataFile, Place, rows_of_files
from dex.errors import DexError

DOLMINO = "allenai/dolmino-mix-1124"
README = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/**/*
- config_name: dclm
  data_files:
  - split: train
    path: data/dclm/**/*.json.zst
- config_name: pes2o
  data_files:
  - split: train
    path: data/pes2o/*.json.gz
- config_name: wiki
  data_files:
  - split: train
    path: data/wiki/*.json.gz
- config_name: stackexchange
  data_files:
  - split: train
    path: data/stackexchange/*.json.gz
dataset_info:
  features:
  - name: id
    dtype: string
  - name: text
    dtype: string
  - name: metadata
    struct:
    - name: url
      dtype: string
---
# DOLMino
"""


def texts(name: str, count: int) -> list[str]:
    return [f"{name} {index}: " + "words " * (index * 7 % 23) for index in range(count)]


def differing_rows(name: str, count: int) -> bytes:
    """Rows whose other columns come and go and change their type, as across Dolmino's sources."""
    rows = list[dict[str, Any]]()
    for index, text in enumerate(texts(name, count)):
        row: dict[str, Any] = {"id": index if index % 3 else f"{name}-{index}", "text": text}
        if index % 2:
            row["metadata"] = {"url": "x", "scores": [0.5, 1]} if index % 4 == 1 else {"length": index, "url": None}
        if index % 5 == 0:
            row |= {"metadata": "none", "added": "2024-11-24", "version": index / 2}
        rows.append(row)
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def dolmino(hub: HubServer) -> None:
    files = {"README.md": README.encode()}
    for shard in range(3):
        rows = differing_rows(f"dclm{shard}", 300)
        files[f"data/dclm/{shard:04d}/dclm-{shard:04d}.json.zst"] = zstandard.compress(rows)
    for name in ("pes2o", "wiki", "stackexchange"):
        for shard in range(2):
            files[f"data/{name}/{name}-{shard:04d}.json.gz"] = gzip.compress(differing_rows(f"{name}{shard}", 200))
    hub.add_dataset(DOLMINO, files)


def prepared(cache: Path, *sources: Source, **changes: Any) -> Prepared:
    options: dict[str, Any] = {"block": 64, "tokens": 60_000, "held_out": 0.1, **changes}
    return prepare(sources, tiny_tokenizer(), cache_dir=cache, **options)


def test_every_row_of_a_data_set_like_dolmino_is_read(hub: HubServer) -> None:
    dolmino(hub)
    read = [document.text for document in read_documents(Source(DOLMINO, name="dclm"))]
    assert read == [text for shard in range(3) for text in texts(f"dclm{shard}", 300)]
    assert len(list(read_documents(Source(DOLMINO, name="wiki")))) == 400
    assert len(list(read_documents(Source(DOLMINO, name="default")))) == 2100
    with pytest.raises(DexError, match=r"dclm.*pes2o.*wiki"):
        list(read_documents(Source(DOLMINO, name="flan")))
    with pytest.raises(DexError, match="there is no split 'test'; those there are train"):
        list(read_documents(Source(DOLMINO, name="wiki", split="test")))


def test_a_mixture_of_its_subsets_is_within_one_document_of_the_weights(tmp_path: Path, hub: HubServer) -> None:
    dolmino(hub)
    weights = {"dclm": 47.2, "pes2o": 5.85, "wiki": 7.11, "stackexchange": 2.45}
    result = prepared(tmp_path, *(Source(DOLMINO, name=name, weight=weight) for name, weight in weights.items()))
    reports = result.report["sources"]
    total, longest = sum(report["tokens"] for report in reports), 2 + max(len(text) for text in texts("dclm0", 300))
    for report, weight in zip(reports, weights.values(), strict=True):
        assert abs(report["tokens"] - total * weight / sum(weights.values())) <= longest
    assert len(result.packed) == -(-60_000 // 64)


def test_a_data_set_like_openhermes_is_read_as_chat(tmp_path: Path, hub: HubServer) -> None:
    rows = []
    for index in range(300):
        turns = [{"from": "human", "value": f"question {index}"}, {"from": "gpt", "value": f"answer {index}"}]
        if index % 3 == 0:
            turns = [{"from": "system", "value": "Be kind.", "weight": None}, *turns]
        row: dict[str, Any] = {"custom_instruction": None, "idx": index if index % 2 else str(index), "source": "x"}
        rows.append({**row, "conversations": turns, "topic": {"a": index} if index % 7 == 0 else None})
    hub.add_dataset(
        "teknium/OpenHermes-2.5", {"README.md": b"# x\n", "openhermes2_5.json": json.dumps(rows).encode()}
    )
    hub.add_dataset("own/indented", {"a.json": json.dumps(rows, indent=2).encode()})
    hub.add_dataset("own/lines", {"a.json": "".join(json.dumps(row) + "\n" for row in rows).encode()})
    read = [
        [document.text for document in read_documents(Source(name, format="chat"), tokenizer=tiny_tokenizer())]
        for name in ("teknium/OpenHermes-2.5", "own/indented", "own/lines")
    ]
    assert read[0][1] == "<|user|>question 1<eos><|user|>answer 1<eos>"
    assert len(read[0]) == 300
    assert read[0] == read[1] == read[2]
    result = prepared(tmp_path, Source("teknium/OpenHermes-2.5", format="chat"), tokens=4000)
    assert result.report["sources"][0]["rows_skipped"] == 0


@pytest.mark.parametrize("compress", [bz2.compress, lzma.compress, gzip.compress, zstandard.compress])
def test_compressed_shards_are_read(hub: HubServer, compress: Any) -> None:
    suffix = {bz2: ".bz2", lzma: ".xz", gzip: ".gz"}.get(__import__(compress.__module__), ".zst")
    hub.add_dataset("own/packed", {f"train.jsonl{suffix}": compress(differing_rows("x", 50))})
    assert [document.text for document in read_documents(Source("own/packed"))] == texts("x", 50)


def test_other_formats_are_read_by_the_client(hub: HubServer) -> None:
    rows = "id,text\n" + "".join(f'{index},"{text}"\n' for index, text in enumerate(texts("x", 50)))
    hub.add_dataset("own/table", {"train.csv": rows.encode()})
    assert [document.text for document in read_documents(Source("own/table"))] == texts("x", 50)
    with pytest.raises(DexError, match=r"no column 'body' \(the columns there are id, text;"):
        list(read_documents(Source("own/table", column="body")))


def test_a_broken_array_is_named(hub: HubServer) -> None:
    whole = json.dumps([{"text": text} for text in texts("x", 50)]).encode()
    hub.add_dataset("own/cut", {"train.json": whole[:-30]})
    with pytest.raises(DexError, match=r"train\.json is not JSON or is cut off after row 49"):
        list(read_documents(Source("own/cut")))


# Arrays


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def rows_read(raw: bytes, chunk: int, place: Place = Place()) -> list[tuple[Any, Place]]:  # noqa: B008
    import io

    from dex.data import json_array

    before, json_array.CHUNK = json_array.CHUNK, chunk
    try:
        file = DataFile("a.json", "a.json", "json", lambda: io.BufferedReader(io.BytesIO(raw)))  # type: ignore[arg-type]
        return [(row.value, after) for row, after in rows_of_files([file], ["text"], "file", place)]
    finally:
        json_array.CHUNK = before


@given(
    elements=st.lists(values, min_size=1, max_size=6),
    chunk=st.integers(1, 40),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
    bom=st.booleans(),
)
def test_an_array_is_read_element_by_element(
    elements: list[Any], chunk: int, indent: int | None, ascii_only: bool, bom: bool
) -> None:
    """Whatever the size of the pieces it comes in, and from any row on."""
    raw = json.dumps([{"text": each} for each in elements], indent=indent, ensure_ascii=ascii_only).encode()
    rows = rows_read((b"\xef\xbb\xbf" if bom else b"") + b" " + raw, chunk)
    assert [value for value, _ in rows] == elements
    for index, (_, place) in enumerate(rows):
        assert rows_read(raw, chunk, place) == rows[index + 1 :]
