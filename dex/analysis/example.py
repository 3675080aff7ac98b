"""Who attends to the answer: one text, token by token.

    mass_j = 1/n Σ_{i ∈ queries} map_ij            n queries behind the answer; signed for a DIFF layout

    B batch, here 1   T tokens   n queries   H heads   D head_dim        maps [1, H, n, T]   masses [L, H, T]

Of a passage longer than 320 tokens a part is shown; the sums beside it are of whole rows.
Only the rows of the queries are formed: O(n·T) a head, and a block of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from dex.analysis.left_out import LeftOut
from dex.analysis.records import NEWLINE, Example, Findings, numbers
from dex.analysis.subject import Passage, Progress, Subject
from dex.attention_maps import LayerMaps, for_each_layer
from dex.errors import NotFinite

SHOWN = 320  # tokens at most: the masses of 32 × 32 heads are 0.9 MB of the page then, which has to stay under 5
DIGITS = 4  # of a mass. Not decimals: at 10,000 tokens a head that looks everywhere alike gives each of them 0.0001
UNDECODED = "\ufffd"  # what decoding gives for a part of a character
BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}  # of byte-level tokenizers


def analyze(subject: Subject, progress: Progress) -> Findings:
    """The first passage. Raises LeftOut where there is none; NotFinite where its maps are no numbers."""
    if not subject.passages:
        raise LeftOut("There is no text with an answer in it to show token by token.")
    passage = subject.passages[0]
    masses = query_masses(subject, passage, progress)
    shown = shown_part(passage)
    example = Example(
        title="Who attends to the answer",
        meaning=_meaning(passage, shown, subject.signed),
        start=shown.start,
        tokens=readable(passage.ids[shown], subject.evaluated.tokenizer),
        span=(passage.span[0] - shown.start, min(passage.span[1], shown.stop) - shown.start),
        queries=[query - shown.start for query in passage.queries if query < shown.stop],
        masses=[
            [[float(f"{mass:.{DIGITS}g}") for mass in of_head] for of_head in of_layer]
            for of_layer in masses[..., shown].tolist()
        ],
        on_answer=numbers(masses[..., slice(*passage.span)].sum(-1)),
        on_first=numbers(masses[..., 0]),
        on_all=numbers(masses.sum(-1)),
    )
    return Findings(example=example, remarks=[_remark(masses, passage)])


def shown_part(passage: Passage) -> slice:
    """The whole passage, or of a longer one than `SHOWN` tokens the part with the answer in its middle."""
    start, stop = passage.span
    begin = max(0, min((start + stop - SHOWN) // 2, len(passage.ids) - SHOWN, start))
    return slice(begin, min(begin + SHOWN, len(passage.ids)))


def _meaning(passage: Passage, shown: slice, signed: bool) -> str:
    n, T = len(passage.queries), len(passage.ids)
    asked = "the token that asks" if n == 1 else f"the {n} tokens that ask"
    part = "" if shown == slice(0, T) else f" Shown are tokens {shown.start} to {shown.stop - 1} of {T}."
    negative = "; negative where the second map outweighs the first" if signed else ""
    mean = " on average" if n > 1 else ""
    where = f"goes to each token{mean}, from {asked} about the answer{negative}"
    return f"How much of each head's attention {where}.{part}"


def query_masses(subject: Subject, passage: Passage, progress: Progress) -> Tensor:
    """The mean over the passage's queries of their rows of the maps, [L, H, T] float64."""
    masses = torch.zeros(len(subject.layers), subject.num_heads, len(passage.ids), dtype=torch.float64)

    def take(maps: LayerMaps, _: Tensor) -> None:
        for part in maps.parts(passage.queries):
            for block in part.blocks():
                masses[maps.layer_idx] += block.map[0].double().sum(1).cpu() / len(passage.queries)

    batch = {"input_ids": torch.tensor([passage.ids])}
    for_each_layer(subject.model, [batch], take, lambda done: progress(done, 1))
    if not masses.isfinite().all():
        raise NotFinite("The attention maps are not numbers; try another dtype, such as float32.")
    return masses


# ---- tokens ------------------------------------------------------------------------------------------------


def readable(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The text of every token with its spaces; line breaks as ⏎, bytes of a part of a character as <0xE2>."""
    return [_text_of(token, tokenizer).replace("\n", NEWLINE) for token in ids]


def _text_of(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    own = tokenizer.convert_ids_to_tokens([token])[0]
    if own is None:  # an id of the model's padded vocabulary
        return f"<{token}>"
    if own.startswith("▁"):  # SentencePiece: decoding one token alone would drop its space
        return str(own.replace("▁", " "))
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    if UNDECODED not in text or own == UNDECODED:
        return text
    if all(character in BYTE_OF for character in own) and not own.startswith("<0x"):
        return "".join(f"<0x{BYTE_OF[character]:02X}>" for character in own)
    return str(own)


# ---- in words ----------------------------------------------------------------------------------------------


def _remark(masses: Tensor, passage: Passage) -> str:
    on_answer = masses[..., slice(*passage.span)].sum(-1)  # [L, H]
    layer_idx, head = divmod(int(on_answer.argmax()), on_answer.shape[1])
    length = passage.span[1] - passage.span[0]
    even = sum(length / (query + 1) for query in passage.queries) / len(passage.queries)
    return (
        f"In the example, head {head} of layer {layer_idx} gives the answer the largest mass of all heads, "
        f"{on_answer[layer_idx, head]:.3f}; spread evenly over the tokens before, it would be {even:.3f}."
    )
