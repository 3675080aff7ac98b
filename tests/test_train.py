"""`dex train`: a run is exact, resumes exactly, and loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Dex, run_dex
from safetensors.torch import load_file
from tiny import write_tiny

from dex.errors import DexError
from dex.models import load_model
from dex.recipe import Recipe, parse_recipe
from dex.verbs.train import train

TEXT = "The {} item of the list is long enough to be cut into blocks, and it has number {}. "


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))


def write_data(folder: Path, documents: int = 60) -> Path:
    file = folder / "data.jsonl"
    rows = (
        {"text": TEXT.format(word, n) * (1 + n % 4)} for n, word in enumerate(["first", "next"] * (documents // 2))
    )
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def recipe(folder: Path, name: str = "run", family: str = "llama", **changes: Any) -> Recipe:
    base = folder / family
    if not base.exists():
        write_tiny(base, family)
        write_data(folder)
    text = f"""
model: {{id: {base}}}
method: {{heads: {{sequences: 2, length: 48}}}}
data: {{train: [{{source: {folder / "data.jsonl"}}}], block: 32, held_out: 0.2}}
run: {{tokens: 1_024, batch_tokens: 128, micro_batch: 2, lr: 1.0e-3, save_every: 256, keep_last: 9}}
output: {folder / name}
"""
    return parse_recipe(text, "test.yaml", [f"{key}={value}" for key, value in changes.items()])


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Where one run of `recipe` was made, and a copy of all that was there when it was finished."""
    folder = tmp_path_factory.mktemp("trained_once")
    with pytest.MonkeyPatch.context() as own:
        own.setenv("DEX_CACHE", str(folder / "at" / "cache"))
        (folder / "at").mkdir()
        train(recipe(folder / "at"))
    shutil.copytree(folder / "at", folder / "copy")
    return folder / "at", folder / "copy"


@pytest.fixture
def finished(trained_once: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where `recipe` was run and finished just now: training for every test that damages it takes minutes.

    It is one folder for all of them, put back each time, since a run and its base know each other by their paths.
    """
    folder, copy = trained_once
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.setenv("DEX_CACHE", str(folder / "cache"))
    return folder


def result_of(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    return result


def adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "adapter" / "adapter_model.safetensors")


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_a_run_writes_its_recipe_plan_log_adapter_and_result(tmp_path: Path) -> None:
    result = train(recipe(tmp_path))
    run = tmp_path / "run"
    names = {path.name for path in run.iterdir()}
    assert names == {
        "recipe.yaml",
        "inputs.json",
        "environment.json",
        "heads.json",
        "log.jsonl",
        "checkpoints",
        "adapter",
        "dex.lock",
        "held_out",
        "result.json",
    }
    assert json.loads((run / "result.json").read_text()) == result
    assert result["steps"] == 8
    steps = [entry for entry in log(run) if "loss" in entry]
    assert [entry["step"] for entry in steps] == list(range(1, 9))
    assert [entry["tokens"] for entry in steps] == [128 * step for step in range(1, 9)]
    assert len(log(run)[0]["lam"]) == 3
    assert result["branch"]["inert"] == (result["branch"]["mean_ratio"] < 1e-3)
    saved = adapter(run)
    assert {tensor.item() for name, tensor in saved.items() if name.endswith("dex_step")} == {8}
    assert (run / "adapter" / "chat_template.jinja").exists()


def test_frozen_tensors_are_bit_identical_and_the_trained_set_is_the_declared_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model in the run's own memory, before and after."""
    from dex import trainer as module

    seen: dict[str, Any] = {}

    class Observed(module.DexTrainer):
        def run(self) -> None:
            seen["before"] = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            super().run()
            seen["after"] = dict(self.model.named_parameters())

    monkeypatch.setattr("dex.verbs.train.DexTrainer", Observed)
    train(recipe(tmp_path, family="qwen2"))
    moved = {name for name, p in seen["after"].items() if not torch.equal(p, seen["before"][name])}
    assert moved == {name for name in seen["after"] if ".dex_" in name}
    kinds = {".".join(name.split(".")[-2:]) for name in adapter(tmp_path / "run")}
    copies = {f"{p}.dex_{part}" for p in ("k_proj", "v_proj") for part in ("weight", "bias", "step")}
    assert kinds == copies | {f"o_proj.dex_{part}" for part in ("weight", "step", "w_d", "lam")}


def test_the_control_trains_k_v_o_and_has_no_branch(tmp_path: Path) -> None:
    text = recipe(tmp_path).to_yaml()
    head, tail = text.split("method:")
    control = parse_recipe(head + "method: {name: attention}\ndata:" + tail.split("data:")[1], "control.yaml")
    result = train(control)
    assert result["branch"] is None
    assert not any("w_d" in name or "lam" in name for name in adapter(tmp_path / "run"))
    assert not (tmp_path / "run" / "heads.json").exists()


def test_n_plus_n_steps_with_a_resume_equal_2n_steps_bit_for_bit(finished: Path) -> None:
    whole, parts = finished / "whole", finished / "run"
    shutil.copytree(parts, whole)
    keep_only_checkpoint(parts, 4)
    train(recipe(finished))
    expected, resumed = adapter(whole), adapter(parts)
    assert expected.keys() == resumed.keys()
    for name, tensor in expected.items():
        assert torch.equal(resumed[name], tensor), name
    for ours, theirs in zip(log(parts), log(whole), strict=True):
        for key in theirs.keys() - {"tokens_per_second"}:
            assert ours[key] == theirs[key]
    optimisers = [torch.load(run / "checkpoints" / "checkpoint-8" / "optimizer.pt") for run in (whole, parts)]
    for a, b in zip(optimisers[0]["state"].values(), optimisers[1]["state"].values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("step", [2, 3])
def test_a_resume_in_a_later_epoch_and_at_the_end_of_one_is_exact(tmp_path: Path, step: int) -> None:
    """The data is smaller than the run, which goes over it several times."""
    small = {"run.save_every": 128}
    recipe(tmp_path)
    rows = (tmp_path / "data.jsonl").read_text().splitlines()[:6]
    (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    whole = train(recipe(tmp_path, **small))
    assert whole["data"]["packed"]["blocks"] < 32
    expected = adapter(tmp_path / "run")
    keep_only_checkpoint(tmp_path / "run", step)
    train(recipe(tmp_path, **small))
    resumed = adapter(tmp_path / "run")
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())


def test_a_run_killed_after_its_last_step_is_finished_by_the_same_command(finished: Path) -> None:
    result = result_of(finished / "run")
    expected = adapter(finished / "run")
    keep_only_checkpoint(finished / "run", 8)
    again = train(recipe(finished))
    assert again["held_out_loss"] == result["held_out_loss"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(finished / "run").items())


def test_a_run_that_cannot_start_writes_nothing(tmp_path: Path) -> None:
    for change in ({"model.id": tmp_path / "none"}, {"data.train.0.source": tmp_path / "none.txt"}):
        with pytest.raises(DexError):
            train(recipe(tmp_path, **change))
        assert not (tmp_path / "run").exists()
    train(recipe(tmp_path))


def keep_only_checkpoint(run: Path, step: int, result: str = "adapter") -> None:
    """Put the run back to the moment after it saved a checkpoint."""
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name != f"checkpoint-{step}":
            shutil.rmtree(checkpoint)
    shutil.rmtree(run / result)
    (run / "result.json").unlink()


@pytest.mark.parametrize("gradient_checkpointing", ["true", "false"])
def test_accumulation_gives_the_loss_and_update_of_one_large_batch(
    tmp_path: Path, gradient_checkpointing: str
) -> None:
    """Blocks have 16 to 31 targets: a mean of the blocks' means would give another loss."""
    changes = {"run.tokens": 256, "run.save_every": 256, "run.gradient_checkpointing": gradient_checkpointing}
    runs = {size: recipe(tmp_path, f"run{size}", **changes, **{"run.micro_batch": size}) for size in (1, 4)}
    lone = "".join(json.dumps({"text": chr(97 + n % 26) + "\n" * (n // 26)}) + "\n" for n in range(60))
    (tmp_path / "data.jsonl").write_text((tmp_path / "data.jsonl").read_text() + lone)
    for one in runs.values():
        train(one)
    one, four = adapter(tmp_path / "run1"), adapter(tmp_path / "run4")
    for name, tensor in one.items():
        torch.testing.assert_close(four[name], tensor, rtol=1e-4, atol=1e-5)
    losses = [[entry["loss"] for entry in log(tmp_path / f"run{size}") if "loss" in entry] for size in (1, 4)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.pt"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(finished: Path, file: str) -> None:
    expected = adapter(finished / "run")
    keep_only_checkpoint(finished / "run", 6)
    shutil.copytree(
        finished / "run" / "checkpoints" / "checkpoint-6", finished / "run" / "checkpoints" / "checkpoint-7"
    )
    damaged = finished / "run" / "checkpoints" / "checkpoint-7" / file
    damaged.write_bytes(damaged.read_bytes()[:-50])
    with pytest.raises(DexError, match="checkpoint-7 is damaged"):
        train(recipe(finished))
    shutil.rmtree(damaged.parent)
    train(recipe(finished))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(finished / "run").items())


@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "adapter_model.safetensors"])
def test_a_checkpoint_that_lacks_a_file_is_refused_not_gone_on_from(finished: Path, file: str) -> None:
    keep_only_checkpoint(finished / "run", 6)
    (finished / "run" / "checkpoints" / "checkpoint-6" / file).unlink()
    with pytest.raises(DexError, match=f"checkpoint-6 is damaged .it has no {file}"):
        train(recipe(finished))


def test_a_finished_run_without_its_adapter_makes_it_again(finished: Path) -> None:
    expected = adapter(finished / "run")
    (finished / "run" / "checkpoints" / "checkpoint-old").mkdir()
    shutil.rmtree(finished / "run" / "adapter")
    train(recipe(finished))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(finished / "run").items())


def test_a_damaged_log_does_not_stop_a_resume(finished: Path) -> None:
    keep_only_checkpoint(finished / "run", 4)
    with (finished / "run" / "log.jsonl").open("ab") as file:
        file.write(b'3\n{"a": 1}\n\xff\xfe\n{"step": 2, "lo')
    train(recipe(finished))
    assert [entry["step"] for entry in log(finished / "run") if "loss" in entry] == list(range(1, 9))


def test_a_second_process_does_not_enter_a_run_that_is_used(tmp_path: Path) -> None:
    from dex.run_data import cache_dir
    from dex.run_folder import used_alone

    with (
        used_alone(tmp_path / "run", cache_dir()),
        pytest.raises(DexError, match="Another dex is using"),
    ):
        train(recipe(tmp_path))


def test_an_output_below_a_file_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(DexError, match="is a file and not a folder"):
        train(recipe(tmp_path, "file/run"))


def test_a_damaged_result_is_named(finished: Path) -> None:
    (finished / "run" / "result.json").write_text("{")
    with pytest.raises(DexError, match=r"result\.json is damaged"):
        train(recipe(finished))


def test_a_resume_with_other_data_is_refused(finished: Path) -> None:
    keep_only_checkpoint(finished / "run", 4)
    (finished / "data.jsonl").write_text((finished / "data.jsonl").read_text().replace("item", "thing"))
    with pytest.raises(DexError, match=r"began with data\.held_out"):
        train(recipe(finished))
    assert (finished / "run" / "checkpoints" / "checkpoint-4").exists()


def test_force_deletes_nothing_before_everything_fits_and_only_what_a_run_wrote(finished: Path) -> None:
    (finished / "run" / "notes.txt").write_text("mine")
    with pytest.raises(DexError):
        train(recipe(finished, **{"model.id": finished / "none"}), force=True)
    assert (finished / "run" / "result.json").exists()
    train(recipe(finished, **{"run.seed": 5}), force=True)
    assert (finished / "run" / "notes.txt").read_text() == "mine"
    assert "seed: 5" in (finished / "run" / "recipe.yaml").read_text()


def test_how_often_a_run_saves_and_logs_may_change_when_it_goes_on(finished: Path) -> None:
    first = result_of(finished / "run")
    changes = {"run.save_every": 384, "run.log_every": 256, "run.keep_last": 3, "run.micro_batch": 1}
    assert train(recipe(finished, **changes)) == first
    keep_only_checkpoint(finished / "run", 4)
    train(recipe(finished, **changes))
    names = sorted(path.name for path in (finished / "run" / "checkpoints").iterdir())
    assert names == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert [entry["step"] for entry in log(finished / "run") if "loss" in entry] == [1, 2, 3, 4, 6, 8]


def test_an_inert_branch_is_said_in_log_result_and_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(recipe(tmp_path, **{"run.lr": 1e-6}))
    assert result["branch"]["inert"] is True
    assert "ended inert" in capsys.readouterr().err
    assert log(tmp_path / "run")[-1]["branch"]["inert"] is True
    assert "ended **inert**" in (tmp_path / "run" / "adapter" / "README.md").read_text()


def test_a_live_branch_is_not_called_inert(tmp_path: Path) -> None:
    result = train(recipe(tmp_path, **{"method.schedule": "land"}))
    assert result["branch"]["inert"] is False
    assert "inert" not in (tmp_path / "run" / "adapter" / "README.md").read_text()


def test_a_finished_run_is_not_trained_again(finished: Path) -> None:
    first = result_of(finished / "run")
    written = (finished / "run" / "result.json").stat().st_mtime_ns
    assert train(recipe(finished)) == first
    assert (finished / "run" / "result.json").stat().st_mtime_ns == written


def test_another_recipe_in_the_same_folder_is_refused_naming_the_key(finished: Path) -> None:
    with pytest.raises(DexError, match=r"run\.lr=0\.001, but this recipe has 0\.002"):
        train(recipe(finished, **{"run.lr": 0.002}))
    train(recipe(finished, **{"run.lr": 0.002}), force=True)


def test_a_folder_that_is_no_run_is_neither_used_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(DexError, match="not a run"):
            train(recipe(tmp_path), force=force)
    assert (tmp_path / "run" / "thesis.txt").read_text() == "mine"


def test_a_plan_for_another_model_is_refused(finished: Path) -> None:
    other = write_tiny(finished / "other", "llama", seed=9)
    plan = {"model.id": other, "method.heads": "{plan: " + str(finished / "run" / "heads.json") + "}"}
    with pytest.raises(DexError, match="fingerprint"):
        train(recipe(finished, "run2", **plan))


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dex import trainer as module

    calls = []

    def breaks_at_the_fifth(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        loss = original(*args, **kwargs)
        return loss * float("nan") if len(calls) == 9 else loss

    original = module.causal_lm_loss
    monkeypatch.setattr(module, "causal_lm_loss", breaks_at_the_fifth)
    with pytest.raises(DexError, match="loss of step 5 is nan"):
        train(recipe(tmp_path))
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-4").exists()


def test_a_gradient_that_is_not_finite_names_the_blocks_of_its_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dex.trainer import DexTrainer, Trainer

    norms = iter([1.0, 1.0, float("inf")])
    monkeypatch.setattr(Trainer, "_get_grad_norm", lambda *args, **kwargs: next(norms))
    seen: list[DexTrainer] = []
    run = DexTrainer.run
    monkeypatch.setattr(DexTrainer, "run", lambda self: (seen.append(self), run(self)))
    with pytest.raises(
        DexError, match=r"gradient of step 3 has the norm inf, over the blocks ([\d, ]+) of"
    ) as caught:
        train(recipe(tmp_path))
    blocks = [seen[0].order.block_index(item) for item in range(8, 12)]
    assert f"over the blocks {', '.join(map(str, blocks))} of {seen[0].order.packed.folder};" in str(caught.value)
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-2").exists()


def test_learning_rates_of_w_d_and_lambda_are_scaled(tmp_path: Path) -> None:
    scale = {"method.lr_scale.w_d": 10, "method.lr_scale.lam": 3, "run.tokens": 256, "run.save_every": 256}
    train(recipe(tmp_path, **scale))
    state = torch.load(tmp_path / "run" / "checkpoints" / "checkpoint-2" / "optimizer.pt")
    assert [group["initial_lr"] for group in state["param_groups"]] == pytest.approx([1e-3, 1e-2, 3e-3])


def start(folder: Path, **changes: Any) -> Dex:
    (folder / "recipe.yaml").write_text(recipe(folder, **changes).to_yaml())
    return Dex("train", folder / "recipe.yaml")


def wait_for(condition: Any, process: Dex, seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)


LONG = {"run.tokens": 51_200, "run.save_every": 128}


@pytest.mark.parametrize("moment", ["training", "saving"])
def test_a_killed_run_goes_on_from_its_newest_whole_checkpoint(tmp_path: Path, moment: str) -> None:
    process = start(tmp_path, **LONG)
    checkpoints = tmp_path / "run" / "checkpoints"
    wait_for(lambda: (checkpoints / "checkpoint-3").exists(), process)
    if moment == "saving":
        wait_for(lambda: any(checkpoints.glob(".saving/*/*")), process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for checkpoint in checkpoints.glob("checkpoint-*"):
        assert load_file(checkpoint / "adapter_model.safetensors")
        assert (checkpoint / "trainer_state.json").exists()
    newest = max(int(path.name.split("-")[1]) for path in checkpoints.glob("checkpoint-*"))
    process = start(tmp_path, **LONG)
    wait_for(lambda: (checkpoints / f"checkpoint-{newest + 2}").exists(), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert f"going on from {checkpoints}/checkpoint-{newest}" in said
    assert process.returncode == 1
    assert "run the same command to go on" in said
    assert "Traceback" not in said
    steps = [entry["step"] for entry in log(tmp_path / "run")]
    assert steps == list(range(1, len(steps) + 1))


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, **{**LONG, "run.save_every": 51_200})
    wait_for(lambda: (tmp_path / "run" / "log.jsonl").exists(), process)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "Interrupted after step" in said
    assert "Traceback" not in said
    assert len(list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))) == 1


FULL = 200 * 1024  # bytes of a file, too few for a checkpoint's optimiser: the limit stands for a full disk


def test_a_full_disk_is_one_sentence_and_earlier_checkpoints_stay(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe(tmp_path, **{"run.save_every": 256}).to_yaml())
    done = run_dex("train", tmp_path / "recipe.yaml", largest_file=FULL)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert "there is no earlier checkpoint. Make room and run the same command to go on" in done.stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))
    again = run_dex("train", tmp_path / "recipe.yaml")
    assert again.returncode == 0, again.stderr


def test_a_disk_that_fills_up_later_leaves_the_earlier_checkpoint_to_go_on_from(finished: Path) -> None:
    expected = adapter(finished / "run")
    keep_only_checkpoint(finished / "run", 4)
    checkpoint = finished / "run" / "checkpoints" / "checkpoint-4"
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    (finished / "recipe.yaml").write_text(recipe(finished).to_yaml())
    done = run_dex("train", finished / "recipe.yaml", largest_file=FULL)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert f"{checkpoint} is whole. Make room and run the same command to go on" in done.stderr
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before
    train(recipe(finished))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(finished / "run").items())


def test_a_log_that_cannot_be_written_stops_the_run_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from dex.watch import Watch

    write = Watch.write

    def full(self: Watch, entry: dict[str, Any]) -> None:
        with pytest.MonkeyPatch.context() as disk:
            if entry["step"] == 5:
                disk.setattr(Path, "open", fails)
            write(self, entry)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Watch, "write", full)
    with pytest.raises(DexError, match=r"log\.jsonl could not be written: No space left on device; the checkpoints"):
        train(recipe(tmp_path))
    assert (tmp_path / "run" / "checkpoints" / "checkpoint-4").exists()


def test_a_run_that_is_told_to_stop_in_the_middle_of_an_update_saves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dex.trainer import DexTrainer

    whole = train(recipe(tmp_path, "whole", **{"run.micro_batch": 1}))
    compute, calls = DexTrainer.compute_loss, []

    def told_to_stop(self: DexTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 10:  # of 4 a step: in the middle of the third
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # a scheduler's and a launcher's
        return compute(self, *args, **kwargs)

    monkeypatch.setattr(DexTrainer, "compute_loss", told_to_stop)
    stopped = train(recipe(tmp_path, **{"run.micro_batch": 1}))
    assert (stopped["stopped"], stopped["step"], len(calls)) == ("terminated", 2, 10)
    monkeypatch.undo()
    monkeypatch.setenv("DEX_CACHE", str(tmp_path / "cache"))
    assert train(recipe(tmp_path, **{"run.micro_batch": 1}))["held_out_loss"] == whole["held_out_loss"]
    expected = adapter(tmp_path / "whole")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(tmp_path / "run").items())


def test_a_run_goes_on_with_the_commits_that_it_began_with(tmp_path: Path, hub: Any) -> None:
    write_tiny(tmp_path / "hubbase", "llama")
    rows = (recipe(tmp_path), (tmp_path / "data.jsonl").read_bytes())[1]
    began = hub.add_model("org/base", tmp_path / "hubbase")
    hub.add_dataset("org/text", {"data.jsonl": rows})
    one = recipe(tmp_path, **{"model.id": "org/base", "data.train.0.source": "org/text"})
    result = train(one)
    keep_only_checkpoint(tmp_path / "run", 4)
    write_tiny(tmp_path / "moved", "llama", seed=3)
    hub.add_model("org/base", tmp_path / "moved")
    hub.add_dataset("org/text", {"data.jsonl": rows + b'{"text": "one more row"}\n'})
    again = train(one)
    assert again["held_out_loss"] == result["held_out_loss"]
    assert again["model"]["commit"] == began


def test_sigterm_saves_a_checkpoint_and_exits_0_with_the_command_to_go_on(tmp_path: Path) -> None:
    process = start(tmp_path, **{**LONG, "run.save_every": 51_200})
    run = tmp_path / "run"
    wait_for(lambda: (run / "log.jsonl").exists(), process)
    process.send_signal(signal.SIGTERM)
    out, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    assert f"go on with: dex train {run / 'recipe.yaml'}" in out
    (checkpoint,) = (run / "checkpoints").glob("checkpoint-*")
    steps = [entry["step"] for entry in log(run)]
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint.name == f"checkpoint-{steps[-1]}"
    assert not (run / "result.json").exists()


def test_a_limit_of_hours_stops_the_run_with_a_checkpoint_at_the_first_step_after_it(finished: Path) -> None:
    stopped = train(recipe(finished, "parts", **{"run.hours": 1e-6}))
    run = finished / "parts"
    assert (stopped["finished"], stopped["stopped"], stopped["step"]) == (False, "out of time", 1)
    assert stopped["go_on"] == f"dex train {run / 'recipe.yaml'}"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["checkpoint-1"]
    assert [train(recipe(finished, "parts", **{"run.hours": 1e-6}))["step"] for _ in range(2)] == [2, 3]
    done = train(recipe(finished, "parts"))
    assert done["steps"] == 8
    expected, resumed = adapter(finished / "run"), adapter(run)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in expected.items())
    assert [entry["step"] for entry in log(run) if "loss" in entry] == list(range(1, 9))


def test_the_last_checkpoints_are_kept_and_what_a_kill_left_is_cleared(tmp_path: Path) -> None:
    train(recipe(tmp_path, **{"run.keep_last": 2}))
    checkpoints = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint-6", "checkpoint-8"]
    keep_only_checkpoint(tmp_path / "run", 6)
    for leftover in (".saving/checkpoint-7", ".checkpoint-7.partial", ".checkpoint-4.deleted"):
        (checkpoints / leftover).mkdir(parents=True)
    train(recipe(tmp_path, **{"run.keep_last": 1}))
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint-8"]


def test_bfloat16_weights_train_in_float32_so_that_small_steps_are_not_lost(tmp_path: Path) -> None:
    """20 steps at 1e-5: bfloat16 would round most of them away."""
    write_tiny(tmp_path / "bf16", "llama", dtype=torch.bfloat16)
    changes = {"model.id": tmp_path / "bf16", "model.dtype": "bfloat16", "run.lr": 1e-5, "run.tokens": 2_560}
    train(recipe(tmp_path, **changes, **{"run.warmup": 0, "run.decay": "constant"}))
    before = load_model(str(tmp_path / "bf16")).model.state_dict()
    for name, tensor in adapter(tmp_path / "run").items():
        if name.endswith("dex_weight"):
            base = before[name.removeprefix("base_model.model.").replace("dex_weight", "weight")]
            assert tensor.dtype == torch.float32
            moved = (tensor - base.float()).abs()
            assert (moved > 0).float().mean() > 0.99
            assert 1e-5 < moved.median() < 3e-4


def test_a_run_reports_to_the_trackers_it_names_and_records_what_it_ran_with(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe(tmp_path, **{"run.track": "[tensorboard]"}))
    events = EventAccumulator(str(tmp_path / "run" / "trackers"))
    events.Reload()
    drawn = [event.value for event in events.Scalars("train/loss")]
    assert drawn == pytest.approx([entry["loss"] for entry in log(tmp_path / "run") if "loss" in entry], rel=1e-6)
    assert {"train/lam_mean", "train/branch_ratio_mean"} <= set(events.Tags()["scalars"])
    (started,) = json.loads((tmp_path / "run" / "environment.json").read_text())["starts"]
    assert started["packages"]["torch"] == torch.__version__
    assert started["processes"] == 1


def test_a_tracker_that_is_not_installed_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(DexError, match="wandb, which is not installed: `pip install wandb`"):
        train(recipe(tmp_path, **{"run.track": "[wandb]"}))
    assert not (tmp_path / "run").exists()


def test_a_dry_run_goes_as_far_as_the_first_loss_and_writes_nothing(tmp_path: Path) -> None:
    from dex.verbs.dry_run import describe, dry_run

    one = recipe(tmp_path)
    seen, made = dry_run(one)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists()
    result = train(one)
    assert seen["trained_parameters"] == result["trained_parameters"]
    assert seen["plan"]["trainable"] == result["trained_parameters"]
    assert 8 < seen["loss_of_one_block"] < 16
    assert "would train" in describe(one, seen, made)
    with pytest.raises(DexError, match=r"columns there are text"):
        dry_run(recipe(tmp_path, "run2", **{"data.train.0.column": "txt"}))


def test_frozen_weights_keep_no_activation_for_gradients_that_nobody_wants(tmp_path: Path) -> None:
    """A frozen projection's input is kept by nobody: only what K, V and O, and the way back to them, need."""
    from dex.verbs.train import load_base

    one = recipe(tmp_path)
    model = one.method.subject(one, load_base(one), None).model
    kept: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.add(tensor.data_ptr())
        return tensor

    inputs: dict[str, torch.Tensor] = {}  # held, so that their memory is not given to another tensor
    for name, module in model.named_modules():
        if name.endswith(("down_proj", "o_proj")):
            module.register_forward_pre_hook(lambda _, args, name=name: inputs.update({name: args[0].detach()}))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(input_ids=torch.randint(0, 256, (1, 16)), use_cache=False).logits
    assert out.requires_grad
    for name, tensor in inputs.items():  # silu(gate) * up, the input of a frozen one, is kept in its factors only
        assert (tensor.data_ptr() in kept) == name.endswith("o_proj"), name


def test_what_a_run_began_with_has_to_be_there_when_it_goes_on(finished: Path) -> None:
    run, config = finished / "run", finished / "llama" / "config.json"
    keep_only_checkpoint(run, 4)
    kept, plan = config.read_text(), (run / "heads.json").read_text()
    config.write_text(kept.replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    assert config.read_text() != kept
    with pytest.raises(DexError, match=r"began with model\.content"):
        train(recipe(finished))
    config.write_text(kept)
    heads = json.loads(plan)
    heads["heads"][0] = [(head + 1) % 4 for head in heads["heads"][0]]
    (run / "heads.json").write_text(json.dumps(heads))
    with pytest.raises(DexError, match="began with heads"):
        train(recipe(finished))
    (run / "heads.json").write_text(plan)
    inputs = (run / "inputs.json").read_text()
    (run / "inputs.json").write_text(inputs[:40])
    with pytest.raises(DexError, match=r"inputs\.json is damaged, so the run cannot go on exactly; put it back"):
        train(recipe(finished))
    (run / "inputs.json").write_text(inputs)
    assert train(recipe(finished))["steps"] == 8


def test_a_folder_that_a_kill_left_at_the_first_moment_is_used_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".recipe.yaml.partial").write_text("model: {id")
    assert train(recipe(tmp_path))["steps"] == 8


def test_a_finished_run_whose_weights_are_cut_off_makes_them_again(finished: Path) -> None:
    weights = finished / "run" / "adapter" / "adapter_model.safetensors"
    expected = adapter(finished / "run")
    kept = weights.read_bytes()
    weights.unlink()  # `expected` is mapped from it
    weights.write_bytes(kept[:-100])
    train(recipe(finished))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in adapter(finished / "run").items())


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    ruined = {"run.lr": 1e300, "run.warmup": 0, "run.tokens": 128, "run.save_every": 128}
    with pytest.raises(DexError, match="weights after step 1 are not finite, and are not saved; there is no earlier"):
        train(recipe(tmp_path, **ruined, method="{name: full}"))
    assert not list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))


@pytest.mark.parametrize("content", [b"", b"PK", b"{}"])
def test_a_damaged_random_state_is_named_as_such(finished: Path, content: bytes) -> None:
    keep_only_checkpoint(finished / "run", 6)
    (finished / "run" / "checkpoints" / "checkpoint-6" / "rng_state.pth").write_bytes(content)
    with pytest.raises(DexError, match=r"checkpoint-6 is damaged \(rng_state\.pth"):
        train(recipe(finished))
