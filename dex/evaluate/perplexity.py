"""Held-out loss per block, of one or more models on the same blocks.

A block never spans two documents, so every loss belongs to one document and the bootstrap can draw documents. With
several processes each computes a share of the batches, and all of them get all the losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from dex.console import Bar
from dex.data import HeldOut, HeldOutBlock
from dex.evaluate.paired import Interval, mean_loss, paired_difference, perplexity
from dex.loss import token_losses
from dex.processes import gather, is_first, rank


@dataclass(frozen=True)
class BlockLoss:
    """One block: the document it is of, its targets and the mean of their losses in nats."""

    document: int
    tokens: int
    loss: float


Blocks = Sequence[HeldOutBlock]


def held_out_losses(
    model: nn.Module, blocks: Blocks, batch_size: int = 4, what: str = "evaluating"
) -> list[BlockLoss]:
    """The mean loss of every held-out block's targets, in the order of the blocks.

    Blocks of one length go together, so no batch is padded and a loss does not depend on the batch size, nor on the
    number of processes. Processes that have joined all call this with the same blocks.
    """
    was_training = model.training
    model.eval()
    batches = list(_batches_of_one_length([len(block.input_ids) for block in blocks], batch_size))
    ranks = gather(rank())  # this one alone, where a launcher has started several that have not joined
    own, world = ranks.index(rank()), len(ranks)
    total, done = sum(len(block.input_ids) for block in blocks), 0
    losses: dict[int, BlockLoss] = {}
    with Bar(what, total, "tokens") if is_first() else nullcontext() as bar:
        # In a round each process takes a batch. All make the same number of forward passes, since those of a sharded
        # model wait for each other: who finds none left repeats the last one.
        for start in range(0, len(batches), world):
            together = batches[start : start + world]
            batch = together[min(own, len(together) - 1)]
            losses |= zip(batch, _losses_of_batch(model, [blocks[i] for i in batch]), strict=True)
            done += sum(len(blocks[i].input_ids) for each in together for i in each)
            if bar is not None:
                bar.update(done)
    model.train(was_training)
    for each in reversed(gather(losses)):  # of a batch that was repeated, the first process's counts
        losses |= each
    return [losses[i] for i in range(len(blocks))]


def _losses_of_batch(model: nn.Module, blocks: Blocks) -> list[BlockLoss]:
    device = next(model.parameters()).device
    ids = torch.stack([block.input_ids for block in blocks]).to(device)  # [B, n]
    losses = []
    for block, row in zip(blocks, token_losses(model, ids), strict=True):
        of_targets = row[block.targets[1:].to(row.device)]
        losses.append(BlockLoss(block.document, of_targets.numel(), of_targets.double().mean().item()))
    return losses


def _batches_of_one_length(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for _, indices in sorted(by_length.items(), reverse=True):  # the longest first: no surprise at the end
        for start in range(0, len(indices), batch_size):
            yield indices[start : start + batch_size]


def summarise(losses: Sequence[BlockLoss]) -> tuple[Interval, Interval]:
    """Mean loss per token and perplexity, each with its 95 % interval over documents."""
    loss = mean_loss([b.loss for b in losses], [b.tokens for b in losses], [b.document for b in losses])
    return loss, perplexity(loss)


def difference(a: Sequence[BlockLoss], b: Sequence[BlockLoss]) -> Interval:
    """Mean loss of `a` − mean loss of `b` on the same blocks, with its 95 % interval over documents."""
    return paired_difference([x.loss for x in a], [x.loss for x in b], [x.tokens for x in a], [x.document for x in a])


def losses_of(result: dict[str, Any], name: str) -> list[BlockLoss]:
    """The block losses of a model in a result that was written before."""
    return [BlockLoss(**block) for block in result["models"][name]["blocks"]]


def report(
    named: dict[str, list[BlockLoss]], held_out: HeldOut, blocks: Blocks, against: str | None = None
) -> dict[str, Any]:
    """The result of `dex eval --suite perplexity`, as it is written to its file."""
    reference = against or next(iter(named))
    models = {}
    for name, losses in named.items():
        loss, ppl = summarise(losses)
        models[name] = {
            "loss": loss._asdict(),
            "perplexity": ppl._asdict(),
            "difference": None if name == reference else difference(losses, named[reference])._asdict(),
            "blocks": [asdict(block) for block in losses],
        }
    documents = sorted({block.document for block in blocks})
    return {
        "suite": "perplexity",
        "against": reference,
        "interval": "95 % percentile bootstrap over documents, 10 000 draws, seed 0",
        "held_out": {
            "fingerprint": held_out.fingerprint,
            "documents": len(documents),
            "blocks": len(blocks),
            "targets": sum(int(block.targets.sum()) for block in blocks),
            "origins": [held_out.origins[document] for document in documents],
        },
        "models": models,
    }
