"""Held-out loss per block, of one or more models on the same blocks.

A block never spans two documents, so every loss belongs to one document and the bootstrap can draw documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dex.console import Bar
from dex.data import HeldOut
from dex.evaluate.paired import Interval, mean_loss, paired_difference, perplexity
from dex.loss import token_losses


@dataclass(frozen=True)
class BlockLoss:
    """One block: the document it is of, its targets and the mean of their losses in nats."""

    document: int
    tokens: int
    loss: float


Blocks = Sequence[tuple[int, Tensor]]  # (document, input_ids [≤ block])


def held_out_losses(
    model: nn.Module, blocks: Blocks, batch_size: int = 4, what: str = "evaluating"
) -> list[BlockLoss]:
    """The loss of every held-out block, in the order of the blocks.

    Blocks of one length go together, so no batch is padded and a loss does not depend on the batch size.
    """
    was_training = model.training
    model.eval()
    losses: list[BlockLoss | None] = [None] * len(blocks)
    total, done = sum(len(ids) for _, ids in blocks), 0
    device = next(model.parameters()).device
    with Bar(what, total, "tokens") as bar:
        for batch in _batches_of_one_length([len(ids) for _, ids in blocks], batch_size):
            ids = torch.stack([blocks[i][1] for i in batch]).to(device)  # [B, block]
            for i, row in zip(batch, token_losses(model, ids), strict=True):
                losses[i] = BlockLoss(blocks[i][0], row.numel(), row.double().mean().item())
            done += ids.numel()
            bar.update(done)
    model.train(was_training)
    return [loss for loss in losses if loss is not None]


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
    documents = sorted({document for document, _ in blocks})
    return {
        "suite": "perplexity",
        "against": reference,
        "interval": "95 % percentile bootstrap over documents, 10 000 draws, seed 0",
        "held_out": {
            "fingerprint": held_out.fingerprint,
            "documents": len(documents),
            "blocks": len(blocks),
            "targets": sum(len(ids) - 1 for _, ids in blocks),
            "origins": [held_out.origins[document] for document in documents],
        },
        "models": models,
    }
