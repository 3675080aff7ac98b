"""Held-out loss per block, of one or more models on the same blocks.

A block never spans two documents, so every loss belongs to one document and the bootstrap can draw documents. With
several processes each computes a share of the batches, and all of them get all the losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dex.console import Bar
from dex.data import HeldOut, HeldOutBlock
from dex.errors import DexError
from dex.evaluation.paired import Interval, mean_score, perplexity
from dex.evaluation.records import Record, Result, Task, prompt_hash
from dex.loss import token_losses
from dex.processes import gather, is_first, place


@dataclass(frozen=True)
class BlockLoss:
    """One block: the document it is of, its targets and the mean of their losses in nats."""

    document: int
    tokens: int
    loss: float


Blocks = Sequence[HeldOutBlock]
TASK = "held-out"


def held_out_losses(
    model: nn.Module, blocks: Blocks, batch_size: int = 4, what: str = "evaluating"
) -> list[BlockLoss]:
    """The mean loss of every held-out block's targets, in the order of the blocks.

    Blocks of one length go together, so no batch is padded and a loss does not depend on the batch size, nor on the
    number of processes. Processes that have joined all call this with the same blocks.
    """
    was_training = model.training
    model.eval()
    batches = list(batches_of_one_length([len(block.input_ids) for block in blocks], batch_size))
    own, world = place()
    total, done = sum(len(block.input_ids) for block in blocks), 0
    losses: dict[int, BlockLoss] = {}
    with Bar(what, total, "tokens") if is_first() else nullcontext() as bar:
        # In a round each process takes a batch. All make the same number of forward passes, since those of a sharded
        # model wait for each other: who finds none left repeats the last one.
        for start in range(0, len(batches), world):
            together = batches[start : start + world]
            batch = together[min(own, len(together) - 1)]
            losses |= zip(batch, losses_of_batch(model, [blocks[i] for i in batch]), strict=True)
            done += sum(len(blocks[i].input_ids) for each in together for i in each)
            if bar is not None:
                bar.update(done)
    model.train(was_training)
    for each in reversed(gather(losses)):  # of a batch that was repeated, the first process's counts
        losses |= each
    return [losses[i] for i in range(len(blocks))]


def losses_of_batch(model: nn.Module, blocks: Blocks) -> list[BlockLoss]:
    """The losses of blocks of one length, in one forward pass."""
    device = next(model.parameters()).device
    ids = torch.stack([block.input_ids for block in blocks]).to(device)  # [B, n]
    losses = []
    for block, row in zip(blocks, token_losses(model, ids), strict=True):
        of_targets = row[block.targets[1:].to(row.device)]
        losses.append(BlockLoss(block.document, of_targets.numel(), of_targets.double().mean().item()))
    return losses


def batches_of_one_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Indices of sequences of one length, at most `batch_size` together, the longest first."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for _, indices in sorted(by_length.items(), reverse=True):
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def check_context(blocks: Blocks, context: int, model: str) -> None:
    """Raise DexError where a block is longer than the positions of the model."""
    longest = max(len(block.input_ids) for block in blocks)
    if longest > context:
        raise DexError(
            f"The blocks have up to {longest:,} tokens, and {model} has a context of {context:,}; "
            f"set block={context} or lower."
        )


def summarise(losses: Sequence[BlockLoss]) -> tuple[Interval, Interval]:
    """Mean loss per token and perplexity, each with its 95 % interval over documents."""
    # Documents by their names in records: in another order the bootstrap draws otherwise, and one loss would have two
    # intervals, here and in `Result.score`.
    loss = mean_score([b.loss for b in losses], [b.tokens for b in losses], [str(b.document) for b in losses])
    return loss, perplexity(loss)


def records_of(losses: Sequence[BlockLoss], blocks: Blocks) -> list[Record]:
    """The losses as a suite's records: an item is a block, its group the document."""
    seen: Counter[int] = Counter()
    records = []
    for loss, block in zip(losses, blocks, strict=True):
        own = prompt_hash(block.input_ids.tolist(), block.targets.long().tolist())
        name = f"{loss.document}.{seen[loss.document]}"
        seen[loss.document] += 1
        records.append(Record(TASK, name, own, None, loss.loss, str(loss.document), loss.tokens))
    return records


def held_out_result(
    label: str,
    model: dict[str, Any],
    losses: Sequence[BlockLoss],
    blocks: Blocks,
    held_out: HeldOut,
    settings: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
) -> Result:
    """A run's own evaluation, as `dex eval --suite perplexity` writes one."""
    return Result(
        suite="perplexity",
        label=label,
        model=model,
        settings={**(settings or {}), "held_out_fingerprint": held_out.fingerprint},
        tasks={TASK: Task("loss", higher_is_better=False)},
        records=records_of(losses, blocks),
        figures={"held_out": {"fingerprint": held_out.fingerprint, "origins": held_out.origins}},
        environment=environment or {},
    )
