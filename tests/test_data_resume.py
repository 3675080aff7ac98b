"""What preparing promises when it is stopped: the same command goes on, and the result is the same, byte for byte."""

from __future__ import annotations

import errno
import functools
import gzip
import io
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from forked import start
from hub_server import HubServer
from tiny import tiny_tokenizer

from dex.data import Prepared, Source, prepare
from dex.data.files import BrokenOff, DataFile, Place, rows_of_files
from dex.data.state import STATE
from dex.errors import DexError

Stop = Callable[[int, int], None]


def words(count: int, start: int = 0) -> list[str]:
    return [f"document number {index}, " + "abc " * (index % 97) for index in range(start, start + count)]


def lines(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text, "id": index}) + "\n" for index, text in enumerate(texts)).encode()


def local_source(folder: Path) -> Source:
    """Files of every kind, with faults among the rows."""
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(words(900)) + b"{\n\n\xff\n" + lines(words(300, 900)))
    pq.write_table(pa.table({"text": words(700, 2000)}), folder / "b.parquet", row_group_size=100)
    (folder / "c.txt").write_text("\n\n".join(words(500, 4000)))
    (folder / "d.jsonl").write_bytes(b"\n")
    return Source(str(folder), documents="paragraph")


def hub_source(hub: HubServer) -> Source:
    buffer = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": words(700, 6000)}), buffer, row_group_size=100)
    array = json.dumps([{"text": text} for text in words(500, 8000)], indent=1).encode()
    files = {
        "data/a.jsonl": lines(words(700)),
        "data/b.json.gz": gzip.compress(lines(words(700, 2000))),
        "data/c.json.zst": zstandard.compress(lines(words(700, 4000))),
        "data/d.json": array,
    }
    hub.add_dataset("own/json", files)
    hub.add_dataset("own/parquet", {"a.parquet": bytes(buffer.getvalue()), "b.parquet": bytes(buffer.getvalue())})
    return Source("own/json")


def prepared(cache: Path, *sources: Source, stop: Stop | None = None, **changes: Any) -> Prepared:
    options: dict[str, Any] = {"block": 16, "tokens": 300_000, "held_out": 0.1, "save_every": 20_000, **changes}
    return prepare(sources, tiny_tokenizer(), cache_dir=cache, held_out_tokens=5000, on_progress=stop, **options)


def everything(result: Prepared) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in result.folder.iterdir()}


def stop_after(tokens: int, error: type[BaseException] = KeyboardInterrupt) -> Stop:
    def stop(done: int, _total: int) -> None:
        if done > tokens:
            raise error

    return stop


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries of the clients and of ours, without waiting."""
    from huggingface_hub import hf_file_system

    backoff = functools.partial(hf_file_system.http_backoff, max_retries=1, base_wait_time=0)
    monkeypatch.setattr(hf_file_system, "http_backoff", backoff)
    monkeypatch.setattr("datasets.config.STREAMING_READ_RETRY_INTERVAL", 0)
    monkeypatch.setattr("datasets.config.STREAMING_READ_MAX_RETRIES", 2)
    monkeypatch.setattr("dex.data.hub.RETRY_SECONDS", 0.0)
    monkeypatch.setattr("dex.data.hub.RETRIES", 2)


@pytest.fixture(params=["local", "hub", "hub-parquet", "mixture"])
def sources(request: pytest.FixtureRequest, tmp_path: Path, hub: HubServer) -> list[Source]:
    local, remote = local_source(tmp_path / "files"), hub_source(hub)
    return {
        "local": [local],
        "hub": [remote],
        "hub-parquet": [Source("own/parquet")],
        "mixture": [local, Source("own/json", weight=2.0), Source("own/parquet", weight=0.5)],
    }[request.param]


def test_wherever_it_was_stopped_the_result_is_the_same(
    tmp_path: Path, sources: list[Source], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = everything(prepared(tmp_path / "whole", *sources))
    assert STATE not in whole
    for after in (25_000, 90_000, 91_000, 200_000):
        with pytest.raises(KeyboardInterrupt):
            prepared(tmp_path / "parts", *sources, stop=stop_after(after))
    capsys.readouterr()
    result = prepared(tmp_path / "parts", *sources)
    assert "going on with preparing data after 1" in capsys.readouterr().err
    assert everything(result) == whole
    assert [path.name for path in (tmp_path / "parts").iterdir() if path.is_dir()] == [result.folder.name]


def test_a_resumed_stream_reads_the_finished_shards_no_more(tmp_path: Path, hub: HubServer) -> None:
    source = hub_source(hub)
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path, source, stop=stop_after(250_000))
    hub.requests.clear()
    prepared(tmp_path, source)
    assert not any(path.startswith("GET") and path.endswith("a.jsonl") for path in hub.requests)


def test_a_passing_loss_of_the_connection_changes_nothing(
    tmp_path: Path, sources: list[Source], hub: HubServer, impatient: None
) -> None:
    whole = everything(prepared(tmp_path / "whole", *sources))
    for path in ("a.jsonl", "b.json.gz", "c.json.zst", "d.json", ".parquet"):
        hub.drop(path, times=3, after_bytes=3000)
    assert everything(prepared(tmp_path / "dropped", *sources)) == whole
    assert any(fault.times == 0 for fault in hub.faults) or all(each.source[0] == "/" for each in sources)


def test_a_connection_that_is_gone_for_good_is_one_sentence_and_the_same_command_goes_on(
    tmp_path: Path, hub: HubServer, impatient: None
) -> None:
    source = hub_source(hub)
    whole = everything(prepared(tmp_path / "whole", source))
    hub.drop("c.json.zst")
    with pytest.raises(DexError, match=r"own/json broke off after row 14\d\d: .*the same command goes on") as caught:
        prepared(tmp_path / "c", source, save_every=10**9)
    assert "\n" not in str(caught.value)
    hub.faults.clear()
    hub.requests.clear()
    assert everything(prepared(tmp_path / "c", source, save_every=10**9)) == whole
    assert not any(path.startswith("GET") and path.endswith("a.jsonl") for path in hub.requests)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize(("name", "shard"), [("own/json", "c.json.zst"), ("own/parquet", "b.parquet")])
def test_a_shard_that_is_refused_half_way_is_the_same_sentence_until_it_is_granted(
    tmp_path: Path,
    hub: HubServer,
    impatient: None,
    capsys: pytest.CaptureFixture[str],
    name: str,
    shard: str,
    status: int,
) -> None:
    hub_source(hub)
    source = Source(name)
    whole = everything(prepared(tmp_path / "whole", source))
    hub.fail(shard, status)
    pattern = rf"{name} broke off after row \d+: .*{shard} could not be read: .*{status} .*the same command goes on"
    first = _sentence(tmp_path / "c", source, save_every=10**9)
    assert re.match(pattern, first)
    assert "\n" not in first
    assert _sentence(tmp_path / "c", source, save_every=10**9) == first
    hub.faults.clear()
    capsys.readouterr()
    assert everything(prepared(tmp_path / "c", source, save_every=10**9)) == whole
    assert "going on with preparing data after" in capsys.readouterr().err


def _sentence(cache: Path, source: Source, **changes: Any) -> str:
    with pytest.raises(DexError) as caught:
        prepared(cache, source, **changes)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["lines", "parquet"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, os.strerror(errno.EIO)), ConnectionError("Gone\nfor good")])
def test_a_read_that_fails_breaks_off_whatever_the_format(tmp_path: Path, kind: Any, error: OSError) -> None:
    class Failing(io.BytesIO):
        """Its end, where a parquet file says what is in it, can be read."""

        def read(self, size: int | None = -1) -> bytes:
            return super().read(size) if self.tell() > 10_000 else self.fail()

        def fail(self) -> bytes:
            raise error

        def __next__(self) -> bytes:
            return self.fail()

    raw = lines(words(700))
    if kind == "parquet":
        pq.write_table(pa.table({"text": words(700)}), tmp_path / "a", row_group_size=100)
        raw = (tmp_path / "a").read_bytes()
    file = DataFile("a", "a", kind, lambda: Failing(raw))
    with pytest.raises(BrokenOff, match=r"^a could not be read: (Input/output error|Gone)\.$"):
        list(rows_of_files([file], ["text"], "file", Place()))


@pytest.mark.parametrize("kind", ["local", "hub"])
def test_a_killed_process_goes_on_to_the_same_bytes(tmp_path: Path, hub: HubServer, kind: str) -> None:
    source = local_source(tmp_path / "files") if kind == "local" else hub_source(hub)
    whole = everything(prepared(tmp_path / "whole", source, save_every=5_000))
    cache, killed = tmp_path / "c", 0
    asked = ([Source(source.source)], tiny_tokenizer(), 16, 300_000, 0.1, cache)
    chance = random.Random(kind)
    for _ in range(6):
        before = _stamp(cache)
        process = start(prepare, *asked, held_out_tokens=5000, save_every=5_000)
        deadline = time.monotonic() + 60
        while _stamp(cache) == before and process.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.002)  # until it has saved a state of its own
        time.sleep(chance.uniform(0.0, 0.15))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
        if killed == 2:
            break
    assert killed == 2
    assert everything(prepared(cache, source, save_every=5_000)) == whole


def _stamp(cache: Path) -> list[int]:
    stamps = []
    for state in cache.glob(f".*.partial/{STATE}"):
        try:
            stamps.append(state.stat().st_mtime_ns)
        except FileNotFoundError:
            continue
    return stamps


# States that cannot be used


def stopped(tmp_path: Path, source: Source) -> Path:
    with pytest.raises(KeyboardInterrupt):
        prepared(tmp_path / "c", source, stop=stop_after(100_000))
    (folder,) = (tmp_path / "c").glob(".*.partial")
    return folder


def _cut_state(folder: Path) -> None:
    state = folder / STATE
    state.write_bytes(state.read_bytes()[:-100])


def _cut_blocks(folder: Path) -> None:
    (folder / "input_ids.bin").write_bytes(b"")


def _other_versions(folder: Path) -> None:
    from dex.data.state import load_state, save_state

    save_state(folder, {**load_state(folder), "versions": {"tokenizers": "0.0"}})


def _other_settings(folder: Path) -> None:
    from dex.data.state import load_state, save_state

    state = load_state(folder)
    save_state(folder, {**state, "inputs": {**state["inputs"], "block": 17}})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_cut_state, "it is damaged"),
        (_cut_blocks, "input_ids.bin is shorter"),
        (_other_versions, "another version of tokenizers"),
        (_other_settings, "other settings"),
    ],
)
def test_a_state_that_cannot_be_used_is_said_and_left(
    tmp_path: Path, damage: Callable[[Path], None], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = local_source(tmp_path / "files")
    whole = everything(prepared(tmp_path / "whole", source))
    damage(stopped(tmp_path, source))
    capsys.readouterr()
    assert everything(prepared(tmp_path / "c", source)) == whole
    said = capsys.readouterr().err
    assert reason in said
    assert "starting again" in said


def test_a_full_disk_is_one_sentence_and_the_earlier_state_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = local_source(tmp_path / "files")
    whole = everything(prepared(tmp_path / "whole", source))
    folder = stopped(tmp_path, source)
    before = (folder / STATE).read_bytes()
    with monkeypatch.context() as full:

        def no_room(file: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr("dex.data.state.os.fsync", no_room)
        with pytest.raises(DexError, match="No space left on device; what was prepared is kept: make room"):
            prepared(tmp_path / "c", source)
    assert (folder / STATE).read_bytes() == before
    assert everything(prepared(tmp_path / "c", source)) == whole


# Faults that stay


def _unusable_rows(folder: Path) -> Source:
    (folder / "a.jsonl").write_bytes(lines(words(900)) + b"{\n" * 100)
    return Source(str(folder))


def _undecodable_text(folder: Path) -> Source:
    (folder / "a.txt").write_bytes("\n\n".join(words(900)).encode() + b"\n\n\xff\n")
    return Source(str(folder), documents="paragraph")


def _damaged_parquet(folder: Path) -> Source:
    path = folder / "a.parquet"
    pq.write_table(pa.table({"text": words(900)}), path, row_group_size=110)
    start = pq.ParquetFile(path).metadata.row_group(7).column(0).data_page_offset
    raw = path.read_bytes()
    path.write_bytes(raw[:start] + bytes(50) + raw[start + 50 :])
    return Source(str(folder))


def _undecodable_parquet(folder: Path) -> Source:
    texts = [text.encode() for text in words(900)]
    broken = pa.array([*texts[:800], b"\xff", *texts[800:]], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": broken}), folder / "a.parquet", row_group_size=110)
    return Source(str(folder))


def _too_little(folder: Path) -> Source:
    (folder / "a.jsonl").write_bytes(lines(words(900)))
    return Source(str(folder))


STAYING: list[tuple[Callable[[Path], Source], str, int]] = [
    (_unusable_rows, "100 of 1000 rows cannot be used", 16),
    (_undecodable_text, r"line 1801: byte \d+ of the file is not UTF-8", 16),
    (_damaged_parquet, r"cannot be read as parquet \(after row 770\)", 16),
    (_undecodable_parquet, "row 801: byte 0 of 'text' is not UTF-8", 16),
    (_too_little, "too few for one block", 10**6),
]


@pytest.mark.parametrize(("make", "reason", "block"), STAYING)
def test_what_is_wrong_for_good_is_said_in_the_same_words_whatever_was_saved(
    tmp_path: Path, make: Callable[[Path], Source], reason: str, block: int
) -> None:
    (tmp_path / "files").mkdir()
    source = make(tmp_path / "files")
    first = _sentence(tmp_path / "without", source, save_every=10**9, block=block)
    assert re.search(reason, first)
    for save_every in (50_000, 5_000, 5_000):  # more and more is done before
        assert _sentence(tmp_path / "with", source, save_every=save_every, block=block) == first
        assert list((tmp_path / "with").glob(f".*.partial/{STATE}"))


def test_a_failure_without_a_state_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    assert _sentence(tmp_path / "c", _unusable_rows(tmp_path / "files"), save_every=10**9)
    assert not [each for each in (tmp_path / "c").iterdir() if each.is_dir()]


def test_other_data_does_not_go_on_from_a_state(tmp_path: Path) -> None:
    source = local_source(tmp_path / "files")
    stopped(tmp_path, source)
    (tmp_path / "files" / "a.jsonl").write_bytes(lines(words(1200, 50_000)))
    whole = everything(prepared(tmp_path / "whole", source))
    assert everything(prepared(tmp_path / "c", source)) == whole
