"""What attention loses when its logits are rounded to 8, 6 and 4 bits.

    z_ij = s q_i·k_j         step = max |z| / (2^(bits − 1) − 1)         z_ij ← step · round(z_ij / step)

with one step for all heads of a layer (per tensor) or one for each (per head): `dex.quantised_attention`, from which
everything else follows unchanged. Full precision is the same float32 attention without rounding, also where the model
is bfloat16, so that a change is due to rounding alone. Under each setting

    loss        the mean next-token loss, in nats, of `TOKENS` tokens, the beginnings of the sequences; its change
                from full precision is on the same tokens, with a 95 % bootstrap interval over 5 sequences or more
    needles     the share of `GRID`'s needles that the model's greedy answers name (`dex.evaluation.needle`)

Every sequence goes through the model alone and without padding, so that the maximum is over its own logits.

Source: "Differential Transformer", arXiv:2410.05258, its quantisation of attention logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, product
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

from dex.analysis.left_out import LeftOut
from dex.analysis.records import Curve, Findings, Statistic, Table, number
from dex.analysis.subject import Progress, Subject
from dex.errors import DexError
from dex.evaluation.needle import (
    Asking,
    Grid,
    Item,
    answer_haystack,
    check_context,
    filler_of,
    items_of,
    records_of,
    wording_of,
)
from dex.evaluation.paired import Interval, paired_difference
from dex.loss import token_losses
from dex.quantised_attention import Scope, quantised_logits
from dex.stats import evaluating

BITS = (8, 6, 4)
SCOPES: tuple[Scope, ...] = ("tensor", "head")
# There are seven settings. With 2048 tokens and haystacks of 320, SmolLM2-135M takes 124 s on two cores, of the five
# minutes that a report may take; this is about half.
TOKENS = 1024
SEQUENCES_FOR_AN_INTERVAL = 5
# 4 items, of the settings' seed: a check, since each more costs as much as a hundred tokens of text.
GRID = Grid(lengths=[224], depths=[25, 75], needles=4, queries=2, samples=1, seed=0)
NEW_TOKENS = 10  # " 1,234,567" in a tokenizer of single characters
SMALL_CHANGE = 0.01  # nats

Cell = str | float | int | None


class Setting(NamedTuple):
    bits: int | None  # None: full precision
    per: Scope


FULL = Setting(None, "tensor")


class Measured(NamedTuple):
    """Under one setting. losses: of each sequence, the mean in nats. retrieved: a share, None if not asked."""

    losses: list[float]
    retrieved: float | None


def analyze(subject: Subject, progress: Progress) -> Findings:
    rows = rows_of(subject)
    if not rows:
        raise LeftOut("The text has no sequence of two tokens or more, so there is no loss to compare.")
    items, why_not = _needles(subject)
    settings = [Setting(bits, per) for bits, per in product(BITS, SCOPES)]
    found: dict[Setting, Measured] = {}
    for setting in (FULL, *settings):
        with evaluating(subject.model), quantised_logits(subject.stock, *setting):
            found[setting] = Measured(_losses(subject, rows), _retrieved(subject, items) if items else None)
        progress(len(found), 1 + len(settings))
    weights = [len(row) - 1 for row in rows]
    changes = {setting: change(found[setting].losses, found[FULL].losses, weights) for setting in settings}
    return Findings(
        statistics=[_statistic(setting, value) for setting, value in changes.items()],
        curves=[_curve(changes)],
        tables=[_table(subject, found, changes, weights, why_not)],
        remarks=[_remark(changes)],
    )


def rows_of(subject: Subject, tokens: int = TOKENS) -> list[Tensor]:
    """The beginnings of all of the text's sequences, without their padding: [t] each, `tokens` together at most."""
    each = max(2, tokens // len(subject.ids))
    rows: list[Tensor] = []
    for batch in subject.batches():
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        rows += [ids[real][:each] for ids, real in zip(batch["input_ids"], mask, strict=True)]
    return [row for row in rows if len(row) > 1]  # one token predicts nothing


def change(losses: Sequence[float], full: Sequence[float], weights: Sequence[int]) -> Interval:
    """The mean loss's difference from full precision; of fewer than 5 sequences without an interval.

    losses, full: of each sequence; weights: how many targets each has. Raises NotFinite.
    """
    found = paired_difference(losses, full, weights, range(len(weights)))
    return found if len(weights) >= SEQUENCES_FOR_AN_INTERVAL else Interval(found.mean, None, None)


# ---- under one setting -------------------------------------------------------------------------------------


def _losses(subject: Subject, rows: Sequence[Tensor]) -> list[float]:
    device = subject.stock.device
    return [token_losses(subject.model, row[None].to(device)).double().mean().item() for row in rows]


def _retrieved(subject: Subject, items: Sequence[Item]) -> float:
    """The share of items whose answer is right."""
    asking = Asking(wording_of(subject.evaluated, "base"), NEW_TOKENS, attention=False)
    found = [
        answer
        for _, of_one in groupby(items, key=lambda item: item.name)
        for answer in answer_haystack(list(of_one), subject.evaluated, asking)
    ]
    return sum(record.score for record in records_of(items, found, "base")) / len(items)


def _needles(subject: Subject) -> tuple[list[Item], str | None]:
    """What is asked; nothing, and the reason, where the tokenizer or the context does not allow it."""
    try:
        check_context(subject.evaluated, GRID.lengths, NEW_TOKENS)
        filler, _ = filler_of(subject.settings.data, subject.evaluated, max(GRID.lengths))
        grid = replace(GRID, seed=subject.settings.seed)
        return items_of(grid, filler, wording_of(subject.evaluated, "base"), subject.evaluated), None
    except DexError as error:
        return [], str(error)


# ---- what is reported --------------------------------------------------------------------------------------


def _statistic(setting: Setting, value: Interval) -> Statistic:
    return Statistic(
        name=f"quantised_loss_change_{setting.bits}_per_{setting.per}",
        title=f"Loss with {setting.bits}-bit logits, one step per {setting.per}",
        meaning=f"Mean next-token loss with attention logits of {setting.bits} bits, minus that in full precision.",
        unit="nats",
        over="model",
        values=number(value.mean),
        diverging=True,
    )


def _curve(changes: Mapping[Setting, Interval]) -> Curve:
    bits = sorted(BITS)
    return Curve(
        name="quantised_loss",
        title="Change of loss by the bits of attention logits",
        meaning="Mean next-token loss with attention logits of few bits, minus that in full precision; one step for "
        "all heads of a layer (per tensor), or for each head.",
        x_label="bits",
        y_label="change of loss (nats)",
        x=[float(each) for each in bits],
        lines={f"per {per}": [number(changes[Setting(each, per)].mean) for each in bits] for per in SCOPES},
    )


def _table(
    subject: Subject,
    found: Mapping[Setting, Measured],
    changes: Mapping[Setting, Interval],
    weights: Sequence[int],
    why_not: str | None,
) -> Table:
    def row(setting: Setting, measured: Measured) -> list[Cell]:
        loss = sum(map(mul, measured.losses, weights)) / sum(weights)
        difference = changes.get(setting)  # of full precision, none
        words = ["all, float32", ""] if setting == FULL else [setting.bits, f"per {setting.per}"]
        return [
            *words,
            number(loss),
            difference and number(difference.mean),
            _interval(difference),
            number(measured.retrieved),
        ]

    return Table(
        name="quantised_logits",
        title="Attention logits of few bits",
        meaning=_meaning(subject, weights, why_not),
        columns=["bits", "scope", "loss", "change", "interval", "needles retrieved"],
        rows=[row(*each) for each in found.items()],
    )


def _interval(difference: Interval | None) -> str | None:
    if difference is None or difference.low is None or difference.high is None:
        return None
    return f"{difference.low:+.4f} to {difference.high:+.4f}"


def _meaning(subject: Subject, weights: Sequence[int], why_not: str | None) -> str:
    """What was measured, on what, and what is missing and why."""
    sequences = "1 sequence" if len(weights) == 1 else f"{len(weights)} sequences"
    sentences = [
        "Attention logits are rounded to multiples of one step, whose largest multiple is the largest magnitude in a "
        "sequence, of all heads of a layer (per tensor) or of each head (per head).",
        f"The loss is in nats, over {sum(weights):,} tokens in {sequences}, and its change is from full "
        "precision: float32 attention, whatever the model's dtype.",
    ]
    if len(weights) < SEQUENCES_FOR_AN_INTERVAL:
        sentences.append(f"There is no interval, which takes {SEQUENCES_FOR_AN_INTERVAL} sequences.")
    else:
        sentences.append("The interval is a 95 % bootstrap over sequences.")
    if why_not is None:
        length, count = GRID.lengths[0], len(GRID.depths) * GRID.samples * GRID.queries
        sentences.append(
            f"Needles are {count} questions about numbers hidden in {length} tokens of {subject.settings.data}, "
            "answered greedily: a check that the model still finds them, too few for a measurement."
        )
    else:
        sentences.append(f"No needles were asked: {why_not}")
    return " ".join(sentences)


def _remark(changes: Mapping[Setting, Interval]) -> str:
    """The fewest bits that keep the loss, with one step per tensor and per head."""
    parts = []
    for per in SCOPES:
        kept = [bits for bits in BITS if changes[Setting(bits, per)].mean <= SMALL_CHANGE]
        bits = min(kept) if kept else max(BITS)
        by = f"{changes[Setting(bits, per)].mean:+.4f}"
        parts.append(f"{bits} per {per} ({by})" if kept else f"none per {per} ({bits} bits change it by {by})")
    choices = ", ".join(map(str, BITS[:-1])) + f" and {BITS[-1]}"
    return (
        f"Of {choices} bits for attention logits, the fewest that add at most {SMALL_CHANGE} nats to the loss are "
        f"{' and '.join(parts)}."
    )
