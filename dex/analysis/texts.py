"""What `dex analyze` reads: windows of a text, and passages that have an answer in them.

The windows come from documents that no run trains on which holds out `held_out` of them or more, so that what is
measured on a trained model is not what it has learnt by heart. A passage is a haystack with a needle that is asked
for, or, with `span`, the part of the text that holds those words.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dex.analysis.subject import Passage, Settings
from dex.data.calibrate import Calibration, windows_of
from dex.data.held_out import held_out_side
from dex.data.sources import Skipped, Source, identity, pin, read_documents
from dex.errors import DexError
from dex.evaluation.haystack import base_wording, make_haystack, read_filler
from dex.evaluation.token_ids import start
from dex.tokenizer import without_truncation_or_padding

# Haystacks that attention to an answer is measured on: long enough for four needles in three times as much text,
# short enough for the page to show one token by token.
PASSAGES, PASSAGE_LENGTH, NEEDLES = 8, 256, 4


@dataclass(frozen=True)
class Texts:
    """ids: [N, T]. no_passages: why there is none, as a sentence. about: which text it is, for the report."""

    ids: Tensor
    passages: list[Passage]
    no_passages: str | None
    about: dict[str, Any]


def read_texts(settings: Settings, tokenizer: PreTrainedTokenizerBase, context: int, label: str) -> Texts:
    """The texts that the settings ask for, in a model's tokens.

    context: tokens that the model's positions are made for. Raises DexError where the text is too short or the model
    cannot hold it, and for a span that is not in the text.
    """
    if settings.length > context:
        raise DexError(
            f"The windows have {settings.length:,} tokens, and {label} has a context of {context:,}; pass --length "
            f"{context} or less."
        )
    source = pin(Source(settings.data))
    windows = _windows(settings, source, tokenizer)
    about = {
        "source": settings.data,
        "identity": identity(source),
        "fingerprint": windows.fingerprint,
        "sequences": len(windows.input_ids),
        "length": settings.length,
    }
    if settings.span is not None:
        passages = [_passage_with(settings.span, settings, source, tokenizer)]
        return Texts(windows.input_ids, passages, None, {**about, "passages": f"the text around {settings.span!r}"})
    try:
        passages = _haystacks(settings, source, tokenizer, context)
    except DexError as error:  # a tiny context, or a text of nothing but special tokens
        return Texts(windows.input_ids, [], f"No haystacks could be made: {error}", about)
    return Texts(
        windows.input_ids,
        passages,
        None,
        {**about, "passages": f"{PASSAGES} haystacks of {PASSAGE_LENGTH} tokens with {NEEDLES} needles each"},
    )


def _windows(settings: Settings, source: Source, tokenizer: PreTrainedTokenizerBase) -> Calibration:
    """The first windows of the held-out documents, exactly as many as asked for."""
    skipped = Skipped()
    documents = read_documents(source, skipped, tokenizer)
    if settings.held_out > 0:
        documents = held_out_side(documents, settings.held_out)
    windows, seen = windows_of(documents, tokenizer, settings.sequences, settings.length)
    skipped.check(settings.data)
    found = 0 if windows is None else len(windows.input_ids)
    if windows is None or found < settings.sequences:
        side = f"among the documents held out ({settings.held_out:g} of them) " if settings.held_out else ""
        advice = "; or pass --held-out 0, to read what a run may have trained on" if settings.held_out else ""
        raise DexError(
            f"{settings.data} has {seen:,} tokens {side}and {found} windows of {settings.length:,}, fewer than "
            f"--sequences {settings.sequences}; lower --length or --sequences, or give more text with --data{advice}."
        )
    return windows


def _haystacks(settings: Settings, source: Source, tokenizer: PreTrainedTokenizerBase, context: int) -> list[Passage]:
    wording = base_wording(tokenizer)
    filler = read_filler(source, tokenizer, 4 * PASSAGE_LENGTH)
    passages = []
    for index in range(PASSAGES):
        seed = f"analyze-{settings.seed}-{index}"
        depth = 100 * (index + 1) // (PASSAGES + 1)
        hay = make_haystack(filler, wording, tokenizer, PASSAGE_LENGTH, [depth], NEEDLES, seed)
        prompt = [*hay.ids, *hay.questions[0]]
        answer = wording.answer(hay.needles[0].value)
        ids = [*prompt, *answer[:-1]]
        if len(ids) > context:
            raise DexError(f"they have {len(ids)} tokens, and the model has a context of {context}.")
        passages.append(Passage(ids, hay.needles[0].span, list(range(len(prompt) - 1, len(ids)))))
    return passages


# ---- a span that the user names -----------------------------------------------------------------------------


def _passage_with(span: str, settings: Settings, source: Source, tokenizer: PreTrainedTokenizerBase) -> Passage:
    """`length` tokens of the first document that holds the words, with the words in their middle where they can be.

    All tokens behind the words are queries.
    """
    documents = characters = 0
    for document in read_documents(source):
        documents, characters = documents + 1, characters + len(document.text)
        at = document.text.find(span)
        if at >= 0:
            return _around(document.text, at, span, settings, tokenizer)
    raise DexError(
        f"--span {span!r} is not in {settings.data} ({documents:,} documents, {characters:,} characters); give words "
        "exactly as they stand there."
    )


def _around(text: str, at: int, span: str, settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Passage:
    before = start(tokenizer)
    with without_truncation_or_padding(tokenizer):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoding["offset_mapping"]
    first = bisect.bisect_right([end for _, end in offsets], at)  # the token that holds the span's first character
    last = bisect.bisect_left([begin for begin, _ in offsets], at + len(span))  # one past the token of its last one
    room = settings.length - len(before)
    begin = max(0, min(first - (room - (last - first)) // 2, len(offsets) - room))
    ids = [*before, *encoding["input_ids"][begin : begin + room]]
    place = (first - begin + len(before), last - begin + len(before))
    queries = list(range(place[1], len(ids)))
    if not queries:
        why = (
            "it has more tokens than --length" if last - first >= room else "nothing stands behind it in its document"
        )
        raise DexError(f"--span {span!r} cannot be attended to, since {why}; give other words.")
    return Passage(ids, place, queries)
