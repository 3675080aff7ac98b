"""FSDP2 over two gloo processes: a bf16 base with float32 copies, sharded, trains as it does in one process.

accelerate has FSDP on GPUs only, so torch's own fully_shard stands in for it here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from forked import run_in_two
from safetensors.torch import load_file
from tiny import tokens, write_tiny
from torch import nn

from dex.adapter import attach, save_adapter
from dex.data import HeldOutBlock
from dex.evaluation.held_out import held_out_losses
from dex.loss import causal_lm_loss
from dex.models import LoadedModel, load_model
from dex.tuner import DexConfig
from dex.tuner.callback import branch_state, lams
from dex.verbs.fold import fold

STEPS, ROWS = 3, 4


def attached(base_folder: Path) -> tuple[nn.Module, LoadedModel]:
    base = load_model(str(base_folder))
    torch.manual_seed(0)
    config = DexConfig(task_type="CAUSAL_LM", heads=[[0, 2], [1, 3], [0, 1]], schedule="land", anneal_steps=4)
    return attach(base, config), base


def train(model: nn.Module, shares: list[slice], processes: int) -> list[float]:
    """The losses of the updates, over batches of ROWS rows, of which this process takes its shares one by one."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    losses = []
    for step in range(STEPS):
        ids = tokens(ROWS, 24, seed=step)
        parts = [causal_lm_loss(model, ids[rows], ids[rows], num_targets=ROWS * 23) * processes for rows in shares]
        for part in parts:
            part.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(part.item() for part in parts))
    return losses


def share_of(rank: int, processes: int) -> slice:
    return slice(rank * ROWS // processes, (rank + 1) * ROWS // processes)


def figures(model: nn.Module) -> dict[str, Any]:
    """What a run measures of a model on its way and at its end; all processes of a sharded one make the calls."""
    ids = tokens(5, 24, seed=9)
    blocks = [HeldOutBlock(n, row, torch.arange(24) > 0) for n, row in enumerate(ids)]
    losses = [block.loss for block in held_out_losses(model, blocks, batch_size=2)]
    return {"losses": losses, "lams": lams(model), "ratio": branch_state(model, ids[0])["ratio"]}


def worker(rank: int, base_folder: Path, output: Path, processes: int = 2) -> None:
    """One of two processes: shard, train on half of every batch, gather and save."""
    from torch.distributed import all_gather_object, destroy_process_group, init_process_group
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    store = f"file://{output.parent / 'store'}"
    init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    model, base = attached(base_folder)
    for layer in model.get_base_model().model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    losses = train(model, [share_of(rank, processes)], processes)
    measured = figures(model)
    every: list[list[float]] = [[]] * processes
    all_gather_object(every, losses)
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        save_adapter(model, base, output, state=state)
        mean = [sum(step) / processes for step in zip(*every, strict=True)]
        (output.parent / "seen.json").write_text(json.dumps({"training": mean, **measured}))
    destroy_process_group()


def test_a_sharded_bf16_base_with_float32_copies_trains_saves_and_folds_as_in_one_process(tmp_path: Path) -> None:
    base_folder = write_tiny(tmp_path / "base", "llama", dtype=torch.bfloat16)
    model, base = attached(base_folder)
    expected = train(model, [share_of(0, 2), share_of(1, 2)], 1)  # the same products, so the same rounding
    measured = figures(model)
    save_adapter(model, base, tmp_path / "alone")
    run_in_two(worker, base_folder, tmp_path / "sharded", seconds=240)
    seen = json.loads((tmp_path / "seen.json").read_text())
    for name, values in {"training": expected, **measured}.items():
        torch.testing.assert_close(torch.tensor(seen[name]), torch.tensor(values), rtol=1e-4, atol=1e-6)
    ours, theirs = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("sharded", "alone"))
    assert ours.keys() == theirs.keys()
    assert any(name.endswith("dex_lam") for name in ours)
    for name, tensor in theirs.items():
        assert ours[name].dtype == (torch.int64 if name.endswith("dex_step") else torch.float32)
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-6)
    for name in ("sharded", "alone"):
        assert fold(str(tmp_path / name), tmp_path / f"folded-{name}")["passed"]
    folded = [load_file(tmp_path / f"folded-{name}" / "model.safetensors") for name in ("sharded", "alone")]
    for name, tensor in folded[1].items():
        torch.testing.assert_close(folded[0][name], tensor, rtol=2**-7, atol=1e-6)  # one step of bfloat16
