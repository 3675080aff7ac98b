"""The same recipe in several processes makes the same updates, writes one log, and stops as one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Dex
from safetensors.torch import load_file
from test_train import keep_only_checkpoint, log, recipe

from dex.errors import DexError
from dex.methods import METHODS
from dex.processes import SharedError, join
from dex.trainer import refuse_batches_that_do_not_divide, refuse_sharding_of
from dex.verbs.train import train


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def launched(folder: Path, processes: int, **changes: Any) -> subprocess.Popen[str]:
    """`dex train` under torchrun, on loopback."""
    name = f"run{processes}"
    (folder / f"{name}.yaml").write_text(recipe(folder, name, **{"run.micro_batch": 1, **changes}).to_yaml())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launcher, "-m", "dex.cli", "train", str(folder / f"{name}.yaml")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def forked(folder: Path, processes: int, **changes: Any) -> list[Dex]:
    """`dex train` in processes that find each other as those of torchrun do, without its imports for each of them."""
    name = f"run{processes}"
    (folder / f"{name}.yaml").write_text(recipe(folder, name, **{"run.micro_batch": 1, **changes}).to_yaml())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    same = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [{**same, "RANK": rank, "LOCAL_RANK": rank} for rank in range(processes)]
    return [Dex("train", folder / f"{name}.yaml", **{key: str(own[key]) for key in own}) for own in each]


def all_finished(ranks: list[Dex], seconds: float = 240) -> tuple[int, str]:
    """The largest exit code, and what all of them said."""
    try:
        said = ["".join(rank.communicate(seconds)) for rank in ranks]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
    return max(rank.wait() for rank in ranks), "".join(said)


def finished(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str]:
    try:
        out, said = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out + said


def losses(run: Path, key: str = "loss") -> list[Any]:
    return [entry[key] for entry in log(run) if "loss" in entry]


def test_one_two_and_four_processes_make_the_same_updates_and_load_each_others_checkpoints(tmp_path: Path) -> None:
    alone = train(recipe(tmp_path, "run1", **{"run.micro_batch": 1}))
    for processes in (2, 4):
        code, said = finished(launched(tmp_path, 2)) if processes == 2 else all_finished(forked(tmp_path, 4))
        assert code == 0, said
        run = tmp_path / f"run{processes}"
        assert losses(run) == pytest.approx(losses(tmp_path / "run1"), abs=1e-5)
        assert losses(run, "learning_rate") == losses(tmp_path / "run1", "learning_rate")
        assert losses(run, "grad_norm") == pytest.approx(losses(tmp_path / "run1", "grad_norm"), rel=1e-4)
        for ours, theirs in zip(losses(run, "lam"), losses(tmp_path / "run1", "lam"), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)
        assert [entry["step"] for entry in log(run) if "loss" in entry] == list(range(1, 9))  # one log
        assert said.count("held-out part: ") == 1  # one voice
        result = json.loads((run / "result.json").read_text())
        assert result["environment"]["processes"] == processes
        assert result["held_out_loss"]["mean"] == pytest.approx(alone["held_out_loss"]["mean"], abs=1e-5)
        assert_same_adapter(run, tmp_path / "run1")
    resume_what_two_processes_saved_in_one(tmp_path)


def resume_what_two_processes_saved_in_one(folder: Path) -> None:
    keep_only_checkpoint(folder / "run2", 4)
    train(recipe(folder, "run2", **{"run.micro_batch": 1}))
    assert losses(folder / "run2") == pytest.approx(losses(folder / "run1"), abs=1e-5)
    assert_same_adapter(folder / "run2", folder / "run1")


def assert_same_adapter(run: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (run, other))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def test_what_stops_one_process_stops_all_at_the_same_step_and_is_said_once(tmp_path: Path) -> None:
    code, said = all_finished(forked(tmp_path, 2, **{"run.lr": 1e30, "run.clip": "null"}))
    assert code != 0
    assert said.count("dex: The ") == 1, said
    assert "the run stopped before the update" in said
    shutil.rmtree(tmp_path / "run2", ignore_errors=True)
    process = launched(tmp_path, 2, **{"run.tokens": 51_200, "run.save_every": 51_200, "run.log_every": 128})
    run = tmp_path / "run2"
    until = time.monotonic() + 120
    while not (run / "log.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.1)
    os.kill(second_worker(process.pid), signal.SIGTERM)
    code, said = finished(process)
    assert code == 0, said
    assert said.count(f"go on with: dex train {run / 'recipe.yaml'}") == 2 - 1, said
    assert len(list((run / "checkpoints").glob("checkpoint-*"))) == 1


def second_worker(launcher: int) -> int:
    """The process of rank 1."""
    children = subprocess.run(["pgrep", "-P", str(launcher)], capture_output=True, text=True, check=True)
    for pid in map(int, children.stdout.split()):
        if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            return pid
    raise AssertionError("there is no rank 1")


def test_processes_that_do_not_divide_the_update_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(DexError, match=r"run\.micro_batch 2 in 3 processes does not divide the 4 blocks"):
        refuse_batches_that_do_not_divide(recipe(tmp_path))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED"])
def test_sharding_that_accelerate_would_silently_leave_out_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(DexError, match=f"asks for {kind}.*here is one process"):
        train(recipe(tmp_path))
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(SharedError, match="here is no GPU"):
        join()


@pytest.mark.parametrize(
    ("kind", "method", "dtype", "sentence"),
    [
        ("FSDP", "galore", "float32", "method.name galore cannot be spread by FSDP"),
        ("DEEPSPEED", "full", "float32", "method.name full cannot be spread by DEEPSPEED"),
        ("DEEPSPEED", "dex", "bfloat16", "DeepSpeed casts everything to one dtype"),
    ],
)
def test_methods_that_sharding_would_change_are_refused(
    kind: str, method: str, dtype: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_sharding_of(METHODS[method](), dtype)
    monkeypatch.setenv(f"ACCELERATE_USE_{kind}", "true")
    with pytest.raises(DexError, match=sentence):
        refuse_sharding_of(METHODS[method](), dtype)


def test_several_gpus_and_one_process_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    with pytest.raises(DexError, match=r"8 GPUs and one process; start one process a GPU \(torchrun"):
        train(recipe(tmp_path))
    assert not (tmp_path / "run").exists()
