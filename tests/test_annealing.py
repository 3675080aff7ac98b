"""t counts the optimiser's steps by itself, in every loop that people use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import get_peft_model
from tiny import tiny_model, tiny_tokenizer, tokens
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import dex
from dex.tuner import dex_outputs
from dex.tuner.callback import BranchRatios, lams


class Rows(Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(1, 24, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def attach(**options: Any) -> Any:
    torch.manual_seed(0)
    return get_peft_model(tiny_model("llama"), dex.DexConfig(task_type="CAUSAL_LM", **options))


def counted(model: Any) -> set[int]:
    return {layer.dex_step["default"].item() for layer in dex_outputs(model)}


def trainer(model: Any, folder: Path, steps: int, accumulation: int = 1, **options: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        learning_rate=1e-3,
        **options,
    )
    return Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[dex.DexCallback()])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer_advances_t_once_per_update(tmp_path: Path, accumulation: int) -> None:
    model = attach(anneal_steps=4)
    trainer(model, tmp_path, 3, accumulation, save_strategy="no").train()
    assert counted(model) == {3}


def test_trainer_resume_goes_on_with_the_right_t_and_the_same_weights(tmp_path: Path) -> None:
    whole = attach(anneal_steps=4)
    trainer(whole, tmp_path / "whole", 4, save_strategy="no").train()
    trainer(attach(anneal_steps=4), tmp_path / "parts", 4, save_steps=2).train()
    resumed = attach(anneal_steps=4)
    again = trainer(resumed, tmp_path / "parts", 4, save_strategy="no")
    again.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert counted(resumed) == {4}
    expected = dict(whole.named_parameters())
    for name, parameter in resumed.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_callback_sets_half_of_the_run_where_the_annealing_length_is_open(tmp_path: Path) -> None:
    model = attach()
    trainer(model, tmp_path, 6, save_strategy="no").train()
    assert model.peft_config["default"].anneal_steps == 3


def test_callback_logs_lambda_and_the_branch_ratio_of_every_layer(tmp_path: Path) -> None:
    model = attach(schedule="land", anneal_steps=2)
    run = trainer(model, tmp_path, 4, save_strategy="no")
    run.train()
    logged = [entry for entry in run.state.log_history if "loss" in entry]
    assert [len(entry["lam"]) for entry in logged] == [3] * 4
    assert logged[-1]["lam"] == pytest.approx(lams(model))
    # The first step's forward pass had λ(0) = 0; from the second on the branch is there.
    assert logged[0]["branch_ratio"] == [0.0] * 3
    assert all(ratio > 0.01 for ratio in logged[-1]["branch_ratio"])


def test_branch_ratios_leave_no_hook_behind() -> None:
    model = attach(anneal_steps=4)
    with BranchRatios(model):
        pass
    assert all(not layer._forward_pre_hooks for layer in dex_outputs(model))


def test_accelerate_with_accumulation_advances_t_once_per_update() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = attach(anneal_steps=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    for step in range(6):
        with accelerator.accumulate(model):
            ids = tokens(seed=step)
            accelerator.backward(model(input_ids=ids, labels=ids).loss)
            optimizer.step()
            optimizer.zero_grad()
    assert counted(model) == {3}


def test_two_optimisers_that_share_an_adapter_count_once() -> None:
    model = attach(anneal_steps=4)
    trained = [p for p in model.parameters() if p.requires_grad]
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    matrices, rest = (torch.optim.AdamW([p for p in trained if (p.ndim == 2) is flat]) for flat in (True, False))
    matrices.step()
    rest.step()
    assert counted(model) == {1}


def test_a_step_that_a_gradient_scaler_skips_does_not_count() -> None:
    model = attach(anneal_steps=4)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    for found_inf, expected in ((1.0, 0), (0.0, 1)):
        optimizer.found_inf = torch.tensor(found_inf)  # as torch.amp.GradScaler does for a fused optimiser
        optimizer.step()
        assert counted(model) == {expected}


def test_the_callback_serves_a_model_that_transformers_loaded(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, dex.DexConfig(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "adapter")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".dex_" in name)
    trainer(model, tmp_path, 4, save_strategy="no").train()
    assert counted(model) == {4}
    assert model.peft_config["default"].anneal_steps == 2


def test_an_optimiser_of_something_else_advances_nothing() -> None:
    model = attach(anneal_steps=4)
    other = torch.nn.Parameter(torch.ones(1))
    other.grad = torch.ones(1)
    torch.optim.SGD([other], lr=0.1).step()
    assert counted(model) == {0}


def test_trl_sft_trainer_takes_the_config_as_its_peft_config(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset as Table

    rows = Table.from_dict({"text": ["The quick brown fox jumps over the lazy dog."] * 8})
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        max_length=64,
    )
    run = trl.SFTTrainer(
        model=tiny_model("llama"),
        args=arguments,
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
        peft_config=dex.DexConfig(task_type="CAUSAL_LM"),
        callbacks=[dex.DexCallback()],
    )
    run.train()
    assert counted(run.model) == {3}
    assert any("lam" in entry for entry in run.state.log_history)
