"""What dex.data promises: faults named, blocks equal to a plain cut, nothing held out is trained on."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hub_server import HubServer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from dex.data import (
    IGNORED,
    Document,
    Packed,
    Prepared,
    RunOrder,
    Skipped,
    Source,
    calibration,
    encode_documents,
    is_held_out,
    prepare,
    read_documents,
)
from dex.data.packing import BlockWriter
from dex.data.tokens import Piece, on_all_cores
from dex.errors import DexError

BOS, EOS, PAD = 256, 257, 258


def text_file(folder: Path, name: str, content: str | bytes) -> str:
    """Write a file; of a string, "\\udcff" becomes the byte ff."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode(errors="surrogateescape") if isinstance(content, str) else content)
    return str(path)


def json_file(folder: Path, rows: list[Any], name: str = "data.jsonl") -> str:
    return text_file(folder, name, "".join(json.dumps(row) + "\n" for row in rows))


def parquet_file(folder: Path, columns: dict[str, Any], name: str = "data.parquet") -> str:
    pq.write_table(pa.table(columns), folder / name)
    return str(folder / name)


def rows_of(texts: list[str]) -> list[dict[str, str]]:
    return [{"text": text} for text in texts]


def read(source: str | Source) -> list[tuple[str, str]]:
    source = Source(source) if isinstance(source, str) else source
    return [(document.origin, document.text) for document in read_documents(source)]


def refusal(source: str | Source) -> str:
    with pytest.raises(DexError) as caught:
        read(source)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message
    return message


def words(count: int, start: int = 0) -> list[str]:
    return [f"document number {index}, " + "abc " * (index % 7) for index in range(start, start + count)]


def prepared(cache: Path, *sources: Source, **changes: Any) -> Prepared:
    options: dict[str, Any] = {"block": 16, "tokens": 100_000, "held_out": 0.2, "cache_dir": cache, **changes}
    tokenizer = options.pop("tokenizer", None) or tiny_tokenizer()
    return prepare(sources, tokenizer, **options)


def expected_ids(text: str) -> list[int]:
    return [*tiny_tokenizer()(text)["input_ids"], EOS]


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# Reading


def test_pydoc_documents_are_the_topics_sorted() -> None:
    assert read("pydoc") == [(f"pydoc: {key}", topics[key]) for key in sorted(topics)]


def test_text_files_are_cut_as_asked(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.txt", "one\ntwo\n\n  \nthree\n")
    assert read(path) == [("a.txt", "one\ntwo\n\n  \nthree\n")]
    assert read(Source(path, documents="paragraph")) == [("a.txt line 1", "one\ntwo"), ("a.txt line 5", "three")]
    assert read(Source(path, documents="line")) == [
        ("a.txt line 1", "one"),
        ("a.txt line 2", "two"),
        ("a.txt line 5", "three"),
    ]


@pytest.mark.parametrize("documents", ["file", "paragraph", "line"])
def test_bom_and_crlf_are_normalised_in_text(tmp_path: Path, documents: Any) -> None:
    plain = text_file(tmp_path, "x/a.txt", "über\nzwei\n\ndrei\n")
    windows = text_file(tmp_path, "y/a.txt", b"\xef\xbb\xbf" + "über\r\nzwei\r\n\r\ndrei\r\n".encode())
    assert read(Source(windows, documents=documents)) == read(Source(plain, documents=documents))


def test_bom_and_crlf_are_normalised_in_json_lines(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.jsonl", b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r\n\r\n{"text": "\\ufeffc"}\r\n')
    assert read(path) == [("a.jsonl row 1", "a\nb"), ("a.jsonl row 3", "c")]


def test_a_named_column_is_read(tmp_path: Path) -> None:
    path = json_file(tmp_path, [{"body": "yes", "text": "no"}])
    assert read(Source(path, column="body")) == [("data.jsonl row 1", "yes")]
    path = parquet_file(tmp_path, {"body": pa.array(["yes", "too"]).dictionary_encode(), "text": ["no", "no"]})
    assert read(Source(path, column="body")) == [("data.parquet row 1", "yes"), ("data.parquet row 2", "too")]


def test_a_folder_is_read_sorted_and_recursively(tmp_path: Path) -> None:
    text_file(tmp_path, "b.TXT", "B")
    json_file(tmp_path, rows_of(["C"]), "sub/c.jsonl")
    parquet_file(tmp_path, {"text": ["A"]}, "a.parquet")
    text_file(tmp_path, "readme.md", "not data")
    text_file(tmp_path, ".checkpoints/b.txt", "hidden")
    assert read(str(tmp_path)) == [("a.parquet row 1", "A"), ("b.TXT", "B"), ("sub/c.jsonl row 1", "C")]


def test_reading_is_lazy(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.txt", b"first\n\xff\n")
    assert next(read_documents(Source(path, documents="line"))).text == "first"


def test_a_line_of_40_mb_is_packed(tmp_path: Path) -> None:
    long = "lorem ipsum dolor " * 2_300_000
    path = json_file(tmp_path, rows_of([long, "short"]))
    assert [len(text) for _, text in read(path)] == [len(long), 5]
    result = prepared(tmp_path / "cache", Source(path), tokens=1000, block=100, held_out=0.0)
    assert result.packed.input_ids.reshape(-1).tolist() == expected_ids(long[:2000])[:1000]


# Faults of files


def test_a_missing_path_is_named(tmp_path: Path) -> None:
    for missing in (f"{tmp_path}/none.jsonl", f"{tmp_path}/none", "./none", "none.parquet", "~nobody/x.txt"):
        message = refusal(missing)
        assert "does not exist" in message
        assert Path(missing).name in message


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet"])
def test_an_empty_file_is_named(tmp_path: Path, name: str) -> None:
    assert refusal(text_file(tmp_path, name, "")).endswith(f"{name} is empty.")


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    assert "a.txt: empty" in refusal(text_file(tmp_path, "a.txt", "\ufeff \n"))
    assert "b.jsonl: empty file" in refusal(text_file(tmp_path, "b.jsonl", "\n\n"))
    assert "data.parquet: empty file" in refusal(parquet_file(tmp_path, {"text": pa.array([], pa.string())}))


def test_an_unknown_extension_names_the_supported_ones(tmp_path: Path) -> None:
    message = refusal(text_file(tmp_path, "a.csv", "text\nx\n"))
    assert all(part in message for part in ("a.csv", ".txt", ".jsonl", ".parquet"))


def test_a_folder_without_supported_files_is_refused(tmp_path: Path) -> None:
    text_file(tmp_path, "readme.md", "x")
    message = refusal(str(tmp_path))
    assert all(part in message for part in (str(tmp_path), ".txt", ".jsonl", ".parquet"))


def test_a_wrong_column_names_the_columns_there_are(tmp_path: Path) -> None:
    for path in (
        json_file(tmp_path, [{"id": 1, "content": "x"}]),
        parquet_file(tmp_path, {"id": [1], "content": ["x"]}),
    ):
        message = refusal(path)
        assert all(part in message for part in (Path(path).name, "'text'", "id, content"))
        assert "'body'" in refusal(Source(path, column="body"))


def test_undecodable_bytes_are_named_by_file_and_byte(tmp_path: Path) -> None:
    good = "grüße\n".encode()
    for documents in ("file", "paragraph", "line"):
        path = text_file(tmp_path, "a.txt", b"\xef\xbb\xbf" + good + b"ab\xffcd\n")
        message = refusal(Source(path, documents=documents))
        assert "a.txt" in message
        assert f"byte {3 + len(good) + 2} " in message
    first = b'{"text": "x"}\n'
    message = refusal(text_file(tmp_path, "a.jsonl", first + b'{"text": "\xe9"}\n'))
    assert f"a.jsonl row 2: not UTF-8 (byte {len(first) + 10} of the file)" in message
    assert "byte 0 " in refusal(text_file(tmp_path, "utf16.txt", "text".encode("utf-16")))
    utf16 = '{"text": "x"}\n'.encode("utf-16")
    assert "row 1: not UTF-8 (byte 0 of the file)" in refusal(text_file(tmp_path, "utf16.jsonl", utf16))


def test_undecodable_bytes_in_parquet_are_named_by_row(tmp_path: Path) -> None:
    broken = pa.array([b"ok", b"a\xff"], pa.binary()).view(pa.string())
    message = refusal(parquet_file(tmp_path, {"text": broken}))
    assert "data.parquet row 2" in message
    assert "'text'" in message


def test_unreadable_parquet_is_one_sentence(tmp_path: Path) -> None:
    assert "bad.parquet cannot be read as parquet" in refusal(text_file(tmp_path, "bad.parquet", b"garbage" * 9))
    whole = Path(parquet_file(tmp_path, {"text": words(2000)})).read_bytes()
    damaged = whole[:100] + bytes(200) + whole[300:]
    assert "cut.parquet cannot be read as parquet" in refusal(text_file(tmp_path, "cut.parquet", damaged))


UNUSABLE = [
    ("{not json}", "not JSON"),
    ("[" * 100_000, "not JSON"),
    ('["text"]', "not a JSON object"),
    ('{"text": 7}', "not text"),
    ('{"text": ["a"]}', "not text"),
    ('{"text": null}', "null"),
    ('{"text": ""}', "empty"),
    ('{"text": "\\ufeff \\n"}', "empty"),
    ('{"text": "a\\ud800b"}', "lone surrogate"),
    ('{"text": "caf\udce9"}', "not UTF-8"),
    ('{"other": "x"}', "no column 'text'"),
]


@pytest.mark.parametrize(("line", "reason"), UNUSABLE)
def test_a_few_unusable_rows_are_skipped_and_counted(tmp_path: Path, line: str, reason: str) -> None:
    lines = [json.dumps({"text": text}) for text in words(39)]
    path = text_file(tmp_path, "data.jsonl", "\n".join([*lines[:16], line, line, *lines[16:]]))
    skipped = Skipped()
    documents = list(read_documents(Source(path), skipped))
    assert [document.text for document in documents] == words(39)
    assert documents[16].origin == "data.jsonl row 19"
    assert (skipped.rows, skipped.count) == (41, 2)
    count, first = skipped.reasons[reason]
    assert count == 2
    assert first.startswith(f"data.jsonl row 17: {reason}")


@pytest.mark.parametrize(("line", "reason"), UNUSABLE)
def test_over_5_percent_unusable_rows_stop_and_name_the_first(tmp_path: Path, line: str, reason: str) -> None:
    lines = [json.dumps({"text": text}) for text in words(36)]
    message = refusal(text_file(tmp_path, "data.jsonl", "\n".join([*lines, line, line])))
    assert "2 of 38 rows" in message
    assert f"data.jsonl row 37: {reason}" in message


def test_null_and_non_text_rows_of_parquet_are_counted(tmp_path: Path) -> None:
    skipped = Skipped()
    path = parquet_file(tmp_path, {"text": [*words(30), None, *words(9), "  "]})
    assert len(list(read_documents(Source(path), skipped))) == 39
    assert skipped.summary()["reasons"] == {
        "null": {"rows": 1, "first": "data.parquet row 31: null"},
        "empty": {"rows": 1, "first": "data.parquet row 41: empty"},
    }
    assert "not text (it holds int)" in refusal(parquet_file(tmp_path, {"text": [1, 2]}))


def test_an_endless_stream_of_faults_stops_early(tmp_path: Path) -> None:
    path = json_file(tmp_path, [{"text": None}] * 5000)
    assert "1000 of 1000 rows" in refusal(path)


@pytest.mark.parametrize(
    "change",
    [{"name": "x"}, {"revision": "x"}, {"split": "test"}, {"weight": 0.0}, {"weight": float("nan")}, {"source": ""}],
)
def test_settings_that_would_do_nothing_are_refused(change: dict[str, Any]) -> None:
    message = refusal(Source(**{"source": "pydoc", **change}))
    assert next(iter(change)).removesuffix("ource") in message
    assert "column" in refusal(Source("pydoc", column="text"))


# Tokens


def one_document(text: str, tokenizer: Any) -> list[int]:
    (_, pieces), *rest = encode_documents([Document(text, "x")], tokenizer)
    assert not rest
    return np.concatenate([piece.ids for piece in pieces]).tolist()


@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_and_one_eos(adds_bos: bool) -> None:
    tokenizer = tiny_tokenizer(adds_bos)
    body = tiny_tokenizer()("hey")["input_ids"]
    start = [BOS] if adds_bos else []
    assert one_document("hey", tokenizer) == [*start, *body, EOS]
    assert one_document("hey<eos>", tokenizer) == [*start, *body, EOS]
    assert one_document("<bos>hey", tokenizer) == [BOS, *body, EOS]
    assert one_document("<bos><bos>hey", tokenizer) == [BOS, *body, EOS]


def test_a_tokenizer_that_adds_eos_itself_gets_no_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", EOS)]
    )
    assert one_document("hey", tokenizer) == expected_ids("hey")
    monkeypatch.setattr("dex.data.tokens.PIECE", 8192)
    assert one_document("hey " * 5000, tokenizer) == expected_ids("hey " * 5000)


def test_a_tokenizer_without_eos_is_refused(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DexError, match="no EOS token"):
        prepared(tmp_path, Source("pydoc"), tokenizer=tokenizer)


def test_pad_token_does_not_matter(tmp_path: Path) -> None:
    results = []
    source = Source(json_file(tmp_path, rows_of(words(50))))
    for pad in ("<pad>", "<eos>", None):
        tokenizer = tiny_tokenizer()
        tokenizer.pad_token = pad
        result = prepared(tmp_path / str(pad), source, tokenizer=tokenizer)
        results.append([item["labels"].tolist() for item in result.packed])
    assert results[0] == results[1] == results[2]
    assert any(EOS in labels for labels in results[0])


def test_truncation_and_padding_neither_act_nor_change(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 4
    backend = tokenizer.backend_tokenizer
    backend.enable_truncation(max_length=4, stride=1)
    backend.enable_padding(length=50, pad_id=PAD, pad_token="<pad>")
    before = backend.to_str()
    assert one_document("longer than four", tokenizer) == expected_ids("longer than four")
    assert backend.to_str() == before
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ["ab  cd \n e" * 1500, "x" * 8193, "é " * 4096, " " * 9000 + "end", "ab<eos> " * 2048]
)
def test_a_long_text_has_the_same_tokens_in_pieces(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("dex.data.tokens.PIECE", 8192)
    tokenizer = tiny_tokenizer(adds_bos=True)
    assert one_document(text, tokenizer) == [*tokenizer(text)["input_ids"], EOS]


def test_encoding_uses_all_cores_and_leaves_the_setting_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for before in ("false", "true", None):
        if before is None:
            monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        else:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
        with on_all_cores():
            assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
        assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_tokenizers_read_the_setting_at_every_call() -> None:
    """In a process that begins with it off, as dex.cli's do: threads appear with the first call that may use them."""
    code = (
        "import os, sys; os.environ['TOKENIZERS_PARALLELISM'] = 'false'; os.environ['RAYON_NUM_THREADS'] = '3'\n"
        "sys.path.insert(0, 'tests'); from tiny import tiny_tokenizer; from dex.data.tokens import on_all_cores\n"
        "tokenizer, threads = tiny_tokenizer(), lambda: len(os.listdir('/proc/self/task'))\n"
        "before = threads(); tokenizer(['a b'] * 99); off = threads()\n"
        "with on_all_cores(): tokenizer(['a b'] * 99)\n"
        "print(off - before, threads() - off)"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["0", "3"]


# Packing


texts = st.lists(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(str.strip), min_size=1, max_size=12
)


@settings(max_examples=50, deadline=None)
@given(texts=texts, block=st.integers(2, 30), budget=st.integers(1, 300))
def test_blocks_are_the_documents_put_together_and_cut(texts: list[str], block: int, budget: int) -> None:
    clean = [text.removeprefix("\ufeff").replace("\r\n", "\n") for text in texts]
    assume(all(text.strip() for text in clean))
    stream, positions, starts = [], [], []
    for text in clean:
        ids = expected_ids(text)
        stream += ids
        positions += range(len(ids))
        starts += [True] + [False] * (len(ids) - 1)
    cuts = [slice(start, start + block) for start in range(0, len(stream) // block * block, block)]
    cuts = [cut for cut in cuts if not all(starts[cut][1:])][: -(-budget // block)]  # those that have a target
    with tempfile.TemporaryDirectory() as folder:
        source = Source(json_file(Path(folder), rows_of(texts)))
        if not cuts:
            reason = rf"have {len(stream)} tokens.*block of {block};|blocks of {block} tokens has a target"
            with pytest.raises(DexError, match=reason):
                prepared(Path(folder) / "cache", source, block=block, tokens=budget, held_out=0.0)
            return
        packed = prepared(Path(folder) / "cache", source, block=block, tokens=budget, held_out=0.0).packed
        assert len(packed) == len(cuts)
        for cut, item in zip(cuts, packed, strict=True):
            assert item["input_ids"].tolist() == stream[cut]
            expected = []
            for place, position in enumerate(positions[cut]):
                expected.append(0 if position == 0 or place == 0 else expected[-1] + 1)
            assert item["position_ids"].tolist() == expected
            no_context = [start or place == 0 for place, start in enumerate(starts[cut])]
            labels = [IGNORED if none else token for none, token in zip(no_context, stream[cut], strict=True)]
            assert item["labels"].tolist() == labels
            assert {values.dtype for values in item.values()} == {torch.int64}


def test_every_token_of_every_document_appears_once_in_order(tmp_path: Path) -> None:
    result = prepared(tmp_path / "c", Source(json_file(tmp_path, rows_of(words(300)))), block=7, held_out=0.2)
    stream = [token for text in words(300) if not is_held_out(text, 0.2) for token in expected_ids(text)]
    assert result.packed.input_ids.reshape(-1).tolist() == stream[: len(stream) // 7 * 7]
    assert result.report["packed"]["tokens_left_over"] == len(stream) % 7


def test_blocks_longer_than_the_write_buffer(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.txt", "ab " * 60_000)
    packed = prepared(tmp_path / "c", Source(path), block=70_001, held_out=0.0).packed
    assert packed.input_ids.reshape(-1).tolist() == expected_ids("ab " * 60_000)[: 2 * 70_001]


def test_labels_count_exactly_the_targets_of_the_models_loss(tmp_path: Path) -> None:
    packed = prepared(tmp_path / "c", Source(json_file(tmp_path, rows_of(words(40)))), block=32).packed
    batch = torch.utils.data.default_collate([packed[0], packed[1]])
    model = tiny_model("llama")
    with torch.no_grad():
        output = model(**batch, use_cache=False)
    losses = []
    for row in range(2):
        for place in range(1, 32):
            if batch["labels"][row, place] != IGNORED:
                target = batch["input_ids"][row, place]
                losses.append(-output.logits[row, place - 1].log_softmax(-1)[target])
    assert len(losses) == int((batch["labels"] != IGNORED).sum())
    torch.testing.assert_close(output.loss, torch.stack(losses).mean())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3"])
def test_a_document_does_not_see_the_one_before_it(tmp_path: Path, family: str, attention: str) -> None:
    """Case 22: position ids that restart, no attention mask, use_cache=False; also for several rows at once."""
    logits = []
    for first in ("first text", "other text"):
        source = Source(json_file(tmp_path, rows_of([first, "the second one", "third", "and a fourth one"])))
        packed = prepared(tmp_path / "c", source, block=24, held_out=0.0).packed
        batch = torch.utils.data.default_collate([packed[0], packed[1]])
        del batch["labels"]
        model = tiny_model(family)
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits.append((model(**batch, use_cache=False).logits, model(input_ids=batch["input_ids"][:1, 11:])))
    (packed_logits, alone), (changed_logits, _) = logits
    assert not torch.equal(packed_logits[0, :11], changed_logits[0, :11])
    assert torch.equal(packed_logits[0, 11:], changed_logits[0, 11:])
    assert torch.equal(packed_logits[1], changed_logits[1])
    torch.testing.assert_close(packed_logits[0, 11:], alone.logits[0], atol=1e-4, rtol=1e-4)


def packed_documents(folder: Path, documents: list[list[int]], block: int, blocks: int = 1000) -> Packed:
    writer = BlockWriter(folder, block, blocks)
    for ids in documents:
        writer.add(Piece(np.asarray(ids, dtype=np.uint32), np.ones(len(ids), dtype=bool)), True)
    meta = writer.close()
    return Packed(folder, block, meta["blocks"], meta["fingerprint"])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), lengths=st.lists(st.integers(1, 90), min_size=2, max_size=12), block=st.integers(8, 200))
def test_a_changed_document_changes_no_other_documents_logits(
    data: st.DataObject, lengths: list[int], block: int
) -> None:
    """Bit for bit, in every block; and a block begins anew."""
    lengths += [block]  # one whole block at least
    changed = data.draw(st.integers(0, len(lengths) - 1))
    documents = [[(7 * i + 3 * place) % 256 for place in range(length)] for i, length in enumerate(lengths)]
    others = [[(id + 1) % 256 for id in ids] if i == changed else ids for i, ids in enumerate(documents)]
    owner = np.repeat(np.arange(len(lengths)), lengths)
    model = tiny_model("llama")
    model.set_attn_implementation("sdpa")
    with tempfile.TemporaryDirectory() as a, tempfile.TemporaryDirectory() as b, torch.no_grad():
        first, second = packed_documents(Path(a), documents, block), packed_documents(Path(b), others, block)
        kept = [
            start
            for start in range(0, len(owner) - block + 1, block)
            if (owner[start + 1 : start + block] == owner[start : start + block - 1]).any()
        ]
        assert len(first) == len(second) == len(kept)
        for start, x, y in zip(kept, first, second, strict=True):
            logits, changed_logits = (
                model(
                    input_ids=item["input_ids"][None], position_ids=item["position_ids"][None], use_cache=False
                ).logits
                for item in (x, y)
            )
            same = torch.from_numpy(owner[start : start + block] != changed)
            assert torch.equal(logits[0, same], changed_logits[0, same])
            assert same.all() or not torch.equal(logits, changed_logits)


@pytest.mark.parametrize("block", [2, 1024, 32768])
def test_positions_and_labels_at_any_block_length(tmp_path: Path, block: int) -> None:
    """Against a count token by token; documents of one token, of several blocks, and that end with a block."""
    rng = np.random.default_rng(block)
    lengths = [1, 2, block - 1, block, 1, 1, block + 1, 3 * block, *rng.integers(1, 2 * block, 6).tolist()]
    documents = [rng.integers(0, 256, length).tolist() for length in lengths]
    stream = [(id, place) for ids in documents for place, id in enumerate(ids)]
    expected = []
    for start in range(0, len(stream) - block + 1, block):
        ids, positions, labels = [], [], []
        for index, (id, place) in enumerate(stream[start : start + block]):
            new = index == 0 or place == 0
            ids.append(id)
            positions.append(0 if new else positions[-1] + 1)
            labels.append(IGNORED if new else id)
        if any(label != IGNORED for label in labels):
            expected.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    items = [
        {name: values.tolist() for name, values in item.items()}
        for item in packed_documents(tmp_path, documents, block)
    ]
    assert items == expected


def test_packed_pickles_without_its_data(tmp_path: Path) -> None:
    packed = prepared(tmp_path, Source("pydoc"), tokens=50_000).packed
    data = pickle.dumps(packed)
    assert len(data) < 2000
    assert torch.equal(pickle.loads(data)[3]["input_ids"], packed[3]["input_ids"])


# Mixtures and budget


def test_the_budget_is_exact_in_blocks_and_reads_no_further(tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    result = prepared(
        tmp_path, Source("pydoc"), tokens=1601, block=16, on_progress=lambda *step: progress.append(step)
    )
    assert len(result.packed) == 101
    assert progress[-1] == (1616, 1616)
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)


def test_a_mixture_keeps_its_proportions_and_starts_again(tmp_path: Path) -> None:
    small = json_file(tmp_path, rows_of([f"a{index}" for index in range(10)]), "small.jsonl")
    large = json_file(tmp_path, rows_of(words(1000)), "large.jsonl")
    sources = Source(small, weight=1.0), Source(large, weight=3.0)
    result = prepared(tmp_path / "c", *sources, tokens=8000, held_out=0.0)
    first, second = result.report["sources"]
    assert first["tokens"] / 8000 == pytest.approx(0.25, abs=0.01)
    assert first["passes"] == first["documents"] // 10 + 1
    assert second["passes"] == 1
    assert len(result.packed) == 500


def test_a_single_source_stops_at_its_end(tmp_path: Path) -> None:
    result = prepared(tmp_path / "c", Source(json_file(tmp_path, rows_of(words(50)))), tokens=10**9)
    assert result.report["sources"][0]["passes"] == 1
    assert len(result.packed) < 200


def test_too_little_data_for_a_block_says_the_counts(tmp_path: Path) -> None:
    path = json_file(tmp_path, rows_of(["abc", "de"]))
    with pytest.raises(DexError, match=r"data.jsonl: the 2 training documents have 7 tokens.* block of 8;"):
        prepared(tmp_path / "c", Source(path), block=8, held_out=0.0)


@pytest.mark.parametrize(
    "change",
    [{"block": 1}, {"tokens": 0}, {"held_out": 1.0}, {"held_out": -0.1}, {"held_out_tokens": 0}],
)
def test_settings_out_of_range_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(DexError, match=f"^{next(iter(change))} must be"):
        prepared(tmp_path / "c", Source("pydoc"), **change)
    assert not (tmp_path / "c").exists()


# The order of a run


def test_run_order_is_a_function_of_seed_and_index(tmp_path: Path) -> None:
    packed = prepared(tmp_path, Source("pydoc"), tokens=16 * 10).packed
    order = RunOrder(packed, batches=9, batch_blocks=3, seed=5)
    indices = [order.block_index(index) for index in range(len(order))]
    assert len(order) == 27
    assert sorted(indices[:10]) == sorted(indices[10:20]) == list(range(10))
    assert indices[:10] != indices[10:20]
    assert [RunOrder(packed, 9, 3, seed=5).block_index(i) for i in reversed(range(27))] == indices[::-1]
    assert [RunOrder(packed, 12, 3, seed=5).block_index(i) for i in range(27)] == indices
    assert [RunOrder(packed, 9, 3, seed=6).block_index(i) for i in range(27)] != indices
    assert all(torch.equal(order[i]["input_ids"], packed[indices[i]]["input_ids"]) for i in range(27))
    with pytest.raises(IndexError):
        order[27]


# Held out


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    text = words(200)
    path = json_file(tmp_path, rows_of(text + text[::-1]))
    result = prepared(tmp_path / "c", Source(path), held_out=0.3, tokens=10**6)
    stream = result.packed.input_ids.reshape(-1).tolist()
    trained, start = set(), 0
    for place, token in enumerate(stream):
        if token == EOS:
            trained.add(tuple(stream[start : place + 1]))
            start = place + 1
    kept = [tuple(result.held_out.document(index).tolist()) for index in range(len(result.held_out))]
    assert len(set(kept)) == len(kept) > 30  # a text that comes twice is held out once
    assert not trained & set(kept)
    assert set(kept) == {tuple(expected_ids(each)) for each in text if is_held_out(each, 0.3)}


def test_the_split_is_about_its_share_and_stateless() -> None:
    text = words(3000)
    share = sum(is_held_out(each, 0.1) for each in text) / len(text)
    assert 0.08 < share < 0.12
    assert [is_held_out(each, 0.1) for each in text] == [is_held_out(each, 0.1) for each in text]
    assert all(is_held_out(each, 0.2) for each in text if is_held_out(each, 0.1))


@pytest.mark.parametrize("cap", [1, 150, 700, 2500])
def test_held_out_is_the_first_by_hash_whatever_the_budget_and_order(tmp_path: Path, cap: int) -> None:
    text = [f"{index} " + "x" * (index * 37 % 300) for index in range(200)]
    apart = sorted((each for each in text if is_held_out(each, 0.3)), key=lambda each: sha256(each.encode()).digest())
    within = [n for n in range(len(apart) + 1) if sum(len(expected_ids(each)) for each in apart[:n]) <= cap]
    kept = apart[: max(1, within[-1])]
    for order, budget in ((text, 100), (text[::-1], 10**6), (text[70:] + text[:70], 3000)):
        source = Source(json_file(tmp_path, rows_of(order)))
        held_out = prepared(tmp_path / "c", source, tokens=budget, held_out=0.3, held_out_tokens=cap).held_out
        assert [held_out.document(index).tolist() for index in range(len(held_out))] == [
            expected_ids(each) for each in kept
        ]


def test_held_out_blocks_never_span_documents(tmp_path: Path) -> None:
    result = prepared(tmp_path / "c", Source(json_file(tmp_path, rows_of(words(200)))), block=10)
    held_out = result.held_out
    blocks = held_out.blocks()
    for index in range(len(held_out)):
        ids = held_out.document(index).tolist()
        cut = [ids[start : start + 10] for start in range(0, len(ids), 10)]
        assert [block.input_ids.tolist() for block in blocks if block.document == index] == [
            part for part in cut if len(part) > 1
        ]
        row = int(held_out.origins[index].removeprefix("data.jsonl row "))
        assert ids == expected_ids(words(200)[row - 1])


def test_held_out_cap_takes_whole_documents_by_hash(tmp_path: Path) -> None:
    held_out = prepared(tmp_path / "c", Source(json_file(tmp_path, rows_of(words(300))))).held_out
    lengths = [len(held_out.document(index)) for index in range(len(held_out))]
    for cap in (1, lengths[0], sum(lengths[:5]), sum(lengths[:5]) + 1, 10**6):
        documents = {block.document for block in held_out.blocks(max_tokens=cap)}
        within = [n for n in range(len(lengths) + 1) if sum(lengths[:n]) <= cap]
        assert documents == set(range(max(1, within[-1])))
    assert [int(origin.split()[-1]) for origin in held_out.origins] != sorted(
        int(origin.split()[-1]) for origin in held_out.origins
    )


def test_an_empty_side_says_what_to_do(tmp_path: Path) -> None:
    path = text_file(tmp_path, "a.txt", "one document only, of more than a block\n\nand a paragraph")
    low, high = 0.001, 0.999
    with pytest.raises(DexError, match=r"a.txt: none of the 1 documents.*documents: paragraph"):
        prepared(tmp_path / "c", Source(path), held_out=low)
    with pytest.raises(DexError, match=r"a.txt: all 1 documents.*documents: paragraph"):
        prepared(tmp_path / "c", Source(path), held_out=high)
    with pytest.raises(DexError, match=r"a.txt has no document left to train on"):
        prepared(tmp_path / "c", Source(path), Source("pydoc"), held_out=high)


def test_nothing_is_held_out_when_none_is_asked_for(tmp_path: Path) -> None:
    assert len(prepared(tmp_path, Source("pydoc"), tokens=100, held_out=0.0).held_out) == 0


# The cache


class Counting:
    """A tokenizer that counts its calls."""

    def __init__(self) -> None:
        self.tokenizer, self.calls = tiny_tokenizer(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return self.tokenizer(*arguments, **options)


def test_a_second_call_reads_the_cache_back(tmp_path: Path) -> None:
    tokenizer = Counting()
    first = prepared(tmp_path, Source("pydoc"), tokenizer=tokenizer, tokens=2000)
    calls = tokenizer.calls
    second = prepared(tmp_path, Source("pydoc"), tokenizer=tokenizer, tokens=2000)
    assert calls > 0
    assert tokenizer.calls == calls
    assert (first.reused, second.reused) == (False, True)
    assert first.report == second.report
    assert first.packed.fingerprint == second.packed.fingerprint
    tokenizer.backend_tokenizer.enable_truncation(8)
    assert prepared(tmp_path, Source("pydoc"), tokenizer=tokenizer, tokens=2000).reused


def test_everything_that_decides_the_result_makes_another_key(tmp_path: Path) -> None:
    path = json_file(tmp_path, [{"text": text, "body": text} for text in words(200)])
    base = prepared(tmp_path / "c", Source(path), tokens=500)
    vocabulary = tiny_tokenizer()
    vocabulary.add_tokens(["abc"])
    others = [
        prepared(tmp_path / "c", Source(path), tokens=600),
        prepared(tmp_path / "c", Source(path), tokens=500, block=17),
        prepared(tmp_path / "c", Source(path), tokens=500, held_out=0.3),
        prepared(tmp_path / "c", Source(path), tokens=500, held_out_tokens=99),
        prepared(tmp_path / "c", Source(path, column="body"), tokens=500),
        prepared(tmp_path / "c", Source(path), tokens=500, tokenizer=tiny_tokenizer(adds_bos=True)),
        prepared(tmp_path / "c", Source(path), tokens=500, tokenizer=vocabulary),
    ]
    stamp = os.stat(path)
    json_file(tmp_path, [{"text": text, "body": text} for text in words(200, start=1000)])
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    others.append(prepared(tmp_path / "c", Source(path), tokens=500))
    assert len({result.folder for result in [base, *others]}) == 9
    assert not any(result.reused for result in others)


def test_the_same_data_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    results = []
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        path = json_file(tmp_path / name, rows_of(words(100)))
        results.append(prepared(tmp_path / name / "c", Source(path)))
    assert results[0].folder.name == results[1].folder.name
    assert results[0].packed.fingerprint == results[1].packed.fingerprint
    assert results[0].held_out.fingerprint == results[1].held_out.fingerprint


@pytest.mark.parametrize(
    "damage", ["input_ids.bin", "flags.bin", "held_out.bin", "held_out_targets.bin", "held_out.json", "meta.json"]
)
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: str) -> None:
    source, cache = Source(json_file(tmp_path, rows_of(words(100)))), tmp_path / "c"
    first = prepared(cache, source)
    file = first.folder / damage
    file.write_bytes(file.read_bytes()[:-3])
    again = prepared(cache, source)
    assert not again.reused
    assert again.packed.fingerprint == first.packed.fingerprint
    assert prepared(cache, source).reused


def test_a_failed_preparation_leaves_nothing(tmp_path: Path) -> None:
    def stop(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, Source("pydoc"), on_progress=stop)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    assert prepared(tmp_path, Source("pydoc"), tokens=2000).reused is False


KILLED = """
import os, signal, sys
from pathlib import Path
from dex.data import Source, prepare

class Bytes:
    bos_token_id, eos_token_id = None, 257

    def get_vocab(self):
        return {}

    def __call__(self, texts, **_):
        return {"input_ids": [list(text.encode()) for text in texts]}

def kill(done, total):
    if done > 100_000:
        os.kill(os.getpid(), signal.SIGKILL)

progress = kill if sys.argv[2:] else None
result = prepare([Source("pydoc")], Bytes(), 16, 200_000, 0.2, Path(sys.argv[1]), on_progress=progress)
print(result.reused)
"""


def test_a_killed_preparation_is_not_mistaken_for_a_whole_one(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    killed = subprocess.run([*command, "kill"], cwd=Path(__file__).parents[1])
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in tmp_path.iterdir() if path.is_dir()] == [".partial"]
    again = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert again.stdout == "False\n"
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert len(Packed(folder, 16, 12_500, "").input_ids) == 12_500


def test_an_unwritable_cache_is_one_sentence(tmp_path: Path) -> None:
    text_file(tmp_path, "file", "x")
    with pytest.raises(DexError, match="file could not be written"):
        prepared(tmp_path / "file", Source("pydoc"), tokens=100)


@pytest.mark.usefixtures("no_network")
def test_local_sources_need_no_network(tmp_path: Path) -> None:
    path = json_file(tmp_path, rows_of(words(100)))
    assert len(prepared(tmp_path / "c", Source("pydoc"), Source(path), tokens=2000).packed) == 125


# Calibration


def test_calibration_windows_lie_within_documents(tmp_path: Path) -> None:
    text = [letter * 50 for letter in "abcdef"]
    source = Source(json_file(tmp_path, rows_of(["short", *text])))
    input_ids, fingerprint = calibration(source, tiny_tokenizer(), sequences=5, length=20)
    assert input_ids.shape == (5, 20)
    assert input_ids.dtype == torch.int64
    windows = [window for each in text for window in (expected_ids(each)[:20], expected_ids(each)[20:40])]
    assert input_ids.tolist() == windows[:5]
    assert fingerprint == calibration(source, tiny_tokenizer(), 5, 20).fingerprint
    assert fingerprint != calibration(source, tiny_tokenizer(), 4, 20).fingerprint


def test_calibration_falls_back_to_packed_windows_and_returns_what_there_is(tmp_path: Path) -> None:
    source = Source(json_file(tmp_path, rows_of(words(10))))
    stream = [token for text in words(10) for token in expected_ids(text)]
    input_ids, _ = calibration(source, tiny_tokenizer(), sequences=1000, length=60)
    assert input_ids.reshape(-1).tolist() == stream[: len(stream) // 60 * 60]
    with pytest.raises(DexError, match=rf"data.jsonl has {len(stream)} tokens.*window of 5000"):
        calibration(source, tiny_tokenizer(), sequences=1, length=5000)


def test_calibration_leaves_held_out_documents_out(tmp_path: Path) -> None:
    source = Source(json_file(tmp_path, rows_of(words(60))))
    stream = [token for text in words(60) if not is_held_out(text, 0.5) for token in expected_ids(text)]
    input_ids, _ = calibration(source, tiny_tokenizer(), sequences=1000, length=100, held_out=0.5)
    assert input_ids.reshape(-1).tolist() == stream[: len(stream) // 100 * 100]


# The Hub


def hub_rows(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts).encode()


def test_a_hub_data_set_is_streamed_at_its_commit(tmp_path: Path, hub: HubServer) -> None:
    old = {"train.jsonl": hub_rows(["old"] * 3), "test.jsonl": hub_rows(["t"])}
    commit = hub.add_dataset("own/text", {"train.jsonl": hub_rows(words(200))}, revisions={"v1": old})
    assert read("own/text") == [(f"own/text row {n}", text) for n, text in enumerate(words(200), 1)]
    assert [text for _, text in read(Source("own/text", revision="v1"))] == ["old"] * 3
    assert [text for _, text in read(Source("own/text", revision="v1", split="test"))] == ["t"]
    result = prepared(tmp_path, Source("own/text"), tokens=500)
    assert result.report["sources"][0]["revision"] == commit
    with hub.unreachable():  # a pinned commit that is prepared already needs no network
        assert prepared(tmp_path, Source("own/text", revision=commit), tokens=500).reused
    hub.add_dataset("own/text", {"train.jsonl": hub_rows(words(200, start=500))})
    assert not prepared(tmp_path, Source("own/text"), tokens=500).reused


def test_streaming_reads_only_what_the_budget_needs(tmp_path: Path, hub: HubServer) -> None:
    shards = {f"data/train-{n:05d}-of-00003.jsonl": hub_rows(words(400, 400 * n)) for n in range(3)}
    hub.add_dataset("own/shards", shards)
    prepared(tmp_path, Source("own/shards"), tokens=2000)
    fetched = [path for path in hub.requests if path.startswith("GET") and "train-0" in path]
    assert fetched
    assert not any("train-00002" in path for path in fetched)


def test_a_dropped_connection_loses_no_row(hub: HubServer) -> None:
    hub.add_dataset("own/text", {"train.jsonl": hub_rows(words(3000))})
    hub.drop("train.jsonl", times=1, after_bytes=50_000)
    assert [text for _, text in read("own/text")] == words(3000)


def test_faults_of_hub_data_sets_are_one_sentence(hub: HubServer) -> None:
    hub.add_dataset("own/text", {"train.jsonl": hub_rows(words(3))})
    hub.add_dataset("own/private", {"train.jsonl": hub_rows(words(3))}, private=True)
    hub.add_dataset("own/broken", {"train.jsonl": hub_rows(words(3)) + b"{"})
    hub.add_dataset("own/none", {"train.bin": b"x"})
    assert "neither a local path nor a data set on the Hub" in refusal("own/missing")
    assert "neither a local path nor a data set on the Hub" in refusal("own/private")
    assert "no revision 'v9'" in refusal(Source("own/text", revision="v9"))
    assert "'" + "0" * 40 + "'" in refusal(Source("own/text", revision="0" * 40))
    assert all(part in refusal(Source("own/text", split="dev")) for part in ("dev", "train"))
    assert all(part in refusal(Source("own/text", name="en")) for part in ("en", "default"))
    assert all(part in refusal(Source("own/text", column="body")) for part in ("'body'", "text, id"))
    assert "own/text row 1: not text" in refusal(Source("own/text", column="id"))
    assert "own/broken row 4: not JSON" in refusal("own/broken")
    assert "own/none" in refusal("own/none")
    with hub.unreachable():
        assert "could not be read from the Hub" in refusal("own/text")
