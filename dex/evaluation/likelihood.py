"""The log-likelihood of continuations: how probable the model finds each in its context, and whether it is greedy.

Continuations of one context share a row, so that the context is computed once:

    token       c0 c1 c2 | a0 a1 | b0        of the continuations a = a0 a1 a2 and b = b0 b1
    position     0  1  2 |  3  4 |  3
    b0 sees     c0 c1 c2   and itself

What predicts a0 and b0 is c2; the last token of a continuation is predicted and never read, so a continuation of one
token takes no room. Rows go together in batches, sorted by length. Logits exist for a few positions at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dex.errors import DexError, NotFinite
from dex.evaluation.answers import Answers, answer_all
from dex.evaluation.records import prompt_hash
from dex.loss import BUFFER_ELEMENTS, check_head, head_computes

# A row that branches needs a mask of its own, [length, length], and its branches see each other as zeros: beyond
# these lengths that costs more than the context that is computed again.
LONGEST_BRANCHED_ROW = 8192
BRANCHES_BESIDE_SHORT_CONTEXT = 512


class Request(NamedTuple):
    """Token ids: what the model is given, at least one, and what is to follow, at least one."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]


class Likelihood(NamedTuple):
    """ln p(continuation | context), and whether each of its tokens is the most probable one."""

    log_likelihood: float
    is_greedy: bool


def log_likelihoods(
    model: nn.Module,
    requests: Sequence[Request],
    max_length: int,
    batch_size: int,
    answers: Answers,
    what: str,
) -> list[Likelihood]:
    """The likelihood of every request, in their order; no value depends on the batch size or number of processes.

    max_length: tokens that the model reads at most; of longer requests the beginning of the context is left out.
    batch_size: contexts in one forward pass. Raises DexError for a request that cannot be scored.
    """
    read = [as_read(request, max_length) for request in requests]
    branching = takes_branches(model)
    found = answer_all(
        [f"likelihood-{prompt_hash(*request)}" for request in read],
        batches(read, batch_size, branching),
        lambda batch: likelihoods_of_batch(model, [read[i] for i in batch], branching),
        answers,
        what,
        [len(request.context) + len(request.continuation) for request in read],
        "tokens",
    )
    return [Likelihood(*each) for each in found]


def as_read(request: Request, max_length: int) -> Request:
    """What the model reads of it: the last `max_length` tokens, besides the one that it only predicts.

    Raises DexError where nothing of the context would be left, and for a continuation without tokens.
    """
    if not request.continuation:
        raise DexError("A continuation that was to be scored has no tokens; an answer in the data is empty.")
    room = max_length + 1 - len(request.continuation)
    if room < 1:
        raise DexError(
            f"A continuation of {len(request.continuation):,} tokens does not fit this model, which holds "
            f"{max_length:,}; evaluate a model of a longer context, or leave this task out."
        )
    return Request(request.context[-room:], request.continuation)


def takes_branches(model: nn.Module) -> bool:
    """Does its attention take any mask? Flash and flex attention do not: there a row holds one continuation."""
    config: Any = model.config
    kinds = set(getattr(config, "layer_types", None) or ())
    return config._attn_implementation in ("sdpa", "eager") and kinds <= {"full_attention", "sliding_attention"}


@dataclass
class Row:
    """A context and which requests continue it, by their index."""

    context: tuple[int, ...]
    members: list[int] = field(default_factory=list)
    branches: int = 0  # continuations of more than one token
    tail: int = 0  # their tokens that are read

    def __len__(self) -> int:
        return len(self.context) + self.tail

    def takes(self, tokens: int, branching: bool) -> bool:
        """Is there room for a continuation of which `tokens` are read?"""
        if tokens == 0 or self.branches == 0:
            return True
        room = max(len(self.context), BRANCHES_BESIDE_SHORT_CONTEXT)
        return branching and self.tail + tokens <= room and len(self) + tokens <= LONGEST_BRANCHED_ROW

    def add(self, index: int, tokens: int) -> None:
        self.members.append(index)
        self.branches += tokens > 0
        self.tail += tokens


def rows_of(requests: Sequence[Request], branching: bool) -> list[Row]:
    """One row a context where that is possible; more where its continuations find no room in one."""
    rows: dict[tuple[int, ...], list[Row]] = {}
    for index, (context, continuation) in enumerate(requests):
        own, tokens = rows.setdefault(context, []), len(continuation) - 1
        if not own or not own[-1].takes(tokens, branching):
            own.append(Row(context))
        own[-1].add(index, tokens)
    return [row for own in rows.values() for row in own]


def batches(requests: Sequence[Request], batch_size: int, branching: bool) -> list[list[int]]:
    """Indices of the requests that are computed together: those of `batch_size` rows, the longest rows first."""
    rows = sorted(rows_of(requests, branching), key=len, reverse=True)
    starts = range(0, len(rows), batch_size)
    return [[index for row in rows[start : start + batch_size] for index in row.members] for start in starts]


def likelihoods_of_batch(model: nn.Module, requests: Sequence[Request], branching: bool) -> list[Likelihood]:
    """Those of a few requests, in one forward pass."""
    rows = rows_of(requests, branching)
    laid = lay_rows(rows, requests, next(model.parameters()).device)
    check_head(model)

    def compute(hidden: Tensor, weight: Tensor) -> Tensor:
        return _of_targets(hidden[laid.predicts], weight, laid.targets)

    with torch.no_grad(), head_computes(model, compute):
        scored = model(input_ids=laid.ids, use_cache=False, **_inputs(model, laid, rows)).logits  # [n, 2]
    if scored[:, 0].isnan().any():
        raise NotFinite("The model's logits are not numbers; try another dtype, such as float32.")
    parts = scored.double().cpu().split([len(requests[i].continuation) for i in laid.order])
    found = dict(zip(laid.order, parts, strict=True))
    each = (found[i] for i in range(len(requests)))
    return [Likelihood(part[:, 0].sum().item(), bool(part[:, 1].all())) for part in each]


class LaidRows(NamedTuple):
    """Rows as tensors of [B, T], filled up on the right; n is the number of targets, request after request."""

    ids: Tensor
    positions: Tensor
    branch: Tensor  # 0 in the context, 1, 2, … in the continuations, −1 beyond the row
    order: list[int]  # the requests, in the order of the targets
    predicts: tuple[Tensor, Tensor]  # row and place of what predicts each target, [n] each
    targets: Tensor  # [n]


def lay_rows(rows: Sequence[Row], requests: Sequence[Request], device: torch.device) -> LaidRows:
    shape = (len(rows), max(map(len, rows)))
    ids, positions, branch = (torch.full(shape, fill) for fill in (0, 0, -1))
    order: list[int] = []
    in_row: list[int] = []
    place: list[int] = []
    targets: list[int] = []
    for b, row in enumerate(rows):
        length = len(row.context)
        ids[b, :length] = torch.tensor(row.context)
        positions[b, :length], branch[b, :length] = torch.arange(length), 0
        end = length
        for number, index in enumerate(row.members, start=1):
            continuation = requests[index].continuation
            own = slice(end, end + len(continuation) - 1)
            ids[b, own] = torch.tensor(continuation[:-1], dtype=torch.int64)
            positions[b, own], branch[b, own] = torch.arange(length, length + len(continuation) - 1), number
            order.append(index)
            in_row += [b] * len(continuation)
            place += [length - 1, *range(own.start, own.stop)]
            targets += continuation
            end = own.stop
    predicts = torch.tensor(in_row, device=device), torch.tensor(place, device=device)
    return LaidRows(
        ids.to(device), positions.to(device), branch.to(device), order, predicts, torch.tensor(targets, device=device)
    )


def _inputs(model: nn.Module, laid: LaidRows, rows: Sequence[Row]) -> dict[str, Any]:
    """Mask and positions of the forward pass; none where every row is one plain sequence, which is faster."""
    if all(row.branches <= 1 for row in rows):
        return {}
    config: Any = model.config
    mask = branch_mask(laid)
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return {"attention_mask": _as_taken(mask, model), "position_ids": laid.positions}
    distance = laid.positions[:, None, :, None] - laid.positions[:, None, None, :]
    masks = {"full_attention": mask, "sliding_attention": mask & (distance < config.sliding_window)}
    return {
        "attention_mask": {kind: _as_taken(mask, model) for kind, mask in masks.items()},
        "position_ids": laid.positions,
    }


def branch_mask(laid: LaidRows) -> Tensor:
    """What each token sees, [B, 1, T, T]: the context up to itself, and its own branch up to itself.

    What lies beyond the row sees the first token too: a softmax over nothing would be NaN.
    """
    of_query, of_key = laid.branch[:, None, :, None], laid.branch[:, None, None, :]
    not_after = laid.positions[:, None, None, :] <= laid.positions[:, None, :, None]
    return ((of_key == 0) | (of_key == of_query)) & not_after


def _as_taken(mask: Tensor, model: nn.Module) -> Tensor:
    """The mask as the attention wants it: eager attention adds it."""
    config, dtype = model.config, next(model.parameters()).dtype
    if config._attn_implementation != "eager":  # type: ignore[union-attr]
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def _of_targets(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """ln p of each target and 1 where it is the most probable token, [n, 2] in float32; hidden: [n, d]."""
    chunk = max(1, BUFFER_ELEMENTS // weight.shape[0])
    precision = torch.promote_types(weight.dtype, torch.float32)
    scored = torch.empty(len(targets), 2, dtype=precision, device=hidden.device)
    for h, target, out in zip(hidden.split(chunk), targets.split(chunk), scored.split(chunk), strict=True):
        logits = torch.mm(h, weight.t()).to(precision)  # [chunk, V]
        out[:, 0] = logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(1)
        out[:, 1] = logits.argmax(1) == target
    return scored
