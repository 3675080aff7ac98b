"""dex/analysis/example.py: the masses against explicit maps, and tokens as they are shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_maps import eager_maps, subject_of
from tiny import tiny_tokenizer, tokens
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dex.analysis import example
from dex.analysis.example import analyze, readable
from dex.analysis.left_out import LeftOut
from dex.analysis.records import Example, Findings
from dex.analysis.subject import Passage, Subject
from dex.attention_maps import LayerMaps
from dex.errors import NotFinite

PASSAGE = Passage(tokens(1, 44, 3)[0].tolist(), (5, 11), [30, 33, 42, 43])


def analyzed(subject: Subject) -> Findings:
    return analyze(subject, lambda done, of: None)


def shown(subject: Subject) -> Example:
    found = analyzed(subject).example
    assert found is not None
    return found


def close(found: Any, expected: torch.Tensor, rtol: float = 1e-5) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, atol=1e-6, rtol=rtol)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2-sliding", "attached", "diff-v1", "diff-v2", "diff-v2-sliding", "diffllama"]
)
def test_masses_are_the_mean_of_the_queries_rows_of_explicit_maps(kind: str) -> None:
    subject = subject_of(kind, passages=[PASSAGE, Passage([1, 2], (0, 1), [1])])
    found = shown(subject)
    expected = [of.map[:, PASSAGE.queries].mean(1) for of in eager_maps(subject.model, PASSAGE.ids)]
    close(found.masses, torch.stack(expected), rtol=6e-4)  # they are rounded to four digits
    assert (found.start, found.span, found.queries, len(found.tokens)) == (0, PASSAGE.span, PASSAGE.queries, 44)


def test_many_queries_are_taken_a_block_at_a_time() -> None:
    passage = Passage(tokens(1, 200, 1)[0].tolist(), (3, 9), list(range(20, 200)))
    subject = subject_of("diff-v2", passages=[passage])
    expected = [of.map[:, passage.queries].mean(1) for of in eager_maps(subject.model, passage.ids)]
    torch.testing.assert_close(
        example.query_masses(subject, passage, lambda *_: None), torch.stack(expected), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(("place", "length"), [((3, 9), 400), ((250, 260), 400), ((395, 399), 400), ((20, 380), 400)])
def test_of_a_long_passage_the_part_around_the_answer_is_shown(
    place: tuple[int, int], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "SHOWN", 50)
    passage = Passage(tokens(1, length, 1)[0].tolist(), place, list(range(place[1], length)))
    subject = subject_of("llama", passages=[passage])
    found = shown(subject)
    assert (len(found.tokens), len(found.masses[0][0])) == (50, 50)
    whole = readable(passage.ids, subject.evaluated.tokenizer)
    assert found.tokens[slice(*found.span)] == whole[slice(*place)][:50]
    begin = found.start
    assert begin == place[0] - found.span[0]
    assert found.queries == [query - begin for query in passage.queries if query < begin + 50]
    assert f"tokens {begin} to {begin + 49} of 400" in found.meaning
    masses = example.query_masses(subject, passage, lambda *_: None)
    close(found.masses, masses[..., begin : begin + 50], rtol=5.1e-4)


@pytest.mark.parametrize("kind", ["llama", "diff-v1"])
@pytest.mark.parametrize("place", [(250, 260), (20, 380)])
def test_the_sums_beside_a_part_are_those_of_the_whole_text(
    kind: str, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "SHOWN", 50)
    passage = Passage(tokens(1, 400, 1)[0].tolist(), place, [390, 399])
    subject = subject_of(kind, passages=[passage])
    found = shown(subject)
    rows = torch.stack([of.map[:, passage.queries].mean(1) for of in eager_maps(subject.model, passage.ids)])
    assert found.start > 0
    close(found.on_first, rows[..., 0])
    close(found.on_answer, rows[..., slice(*place)].sum(-1))
    close(found.on_all, rows.sum(-1))


def test_small_masses_keep_their_digits() -> None:
    """Attention spread evenly over 3,000 tokens gives each of them 1/3000, which four decimals would change."""
    subject = subject_of("llama", passages=[Passage(tokens(1, 3000, 1)[0].tolist(), (5, 9), [2999])])
    with torch.no_grad():
        subject.layers[0].self_attn.q_proj.weight.zero_()
    assert set(torch.tensor(shown(subject).masses[0], dtype=torch.float64).unique().tolist()) == {3.333e-4}


def test_only_the_rows_of_the_queries_are_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    formed: list[tuple[int, ...]] = []
    blocks = LayerMaps.blocks

    def spied(self: LayerMaps, *args: Any) -> Any:
        for block in blocks(self, *args):
            formed.append(tuple(block.map.shape))
            yield block

    monkeypatch.setattr(LayerMaps, "blocks", spied)
    shown(subject_of("llama", passages=[PASSAGE]))
    assert formed == [(1, 4, 4, 44)] * 3


def test_the_remark_names_the_head_that_gives_the_answer_most() -> None:
    subject = subject_of("diff-v1", passages=[PASSAGE])
    on_answer = torch.stack(
        [
            of.map[:, PASSAGE.queries, slice(*PASSAGE.span)].sum(-1).mean(-1)
            for of in eager_maps(subject.model, PASSAGE.ids)
        ]
    )
    layer_idx, head = divmod(int(on_answer.argmax()), 4)
    even = sum(6 / (query + 1) for query in PASSAGE.queries) / 4
    assert analyzed(subject).remarks == [
        f"In the example, head {head} of layer {layer_idx} gives the answer the largest mass of all heads, "
        f"{on_answer.max():.3f}; spread evenly over the tokens before, it would be {even:.3f}."
    ]


def test_without_a_passage_it_is_left_out() -> None:
    with pytest.raises(LeftOut, match="no text with an answer"):
        analyzed(subject_of("llama"))


def test_maps_that_are_no_numbers_are_refused() -> None:
    subject = subject_of("llama", passages=[PASSAGE])
    with torch.no_grad():
        subject.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(NotFinite):
        analyzed(subject)


# ---- tokens ------------------------------------------------------------------------------------------------


def test_the_tokens_joined_give_back_the_text_with_its_line_breaks_visible() -> None:
    tokenizer, text = tiny_tokenizer(), "The number  is 42.\n\nWhich?\tThis: <eos> ,"
    ids = tokenizer(text)["input_ids"]
    assert "".join(readable(ids, tokenizer)) == text.replace("\n", "⏎")
    assert readable(ids, tokenizer)[18:20] == ["⏎", "⏎"]
    assert readable([256, 258], tokenizer) == ["<bos>", "<pad>"]


def test_bytes_that_are_no_character_alone_are_shown_as_bytes() -> None:
    tokenizer = tiny_tokenizer()
    assert readable(tokenizer("a€")["input_ids"], tokenizer) == ["a", "<0xE2>", "<0x82>", "<0xAC>"]
    assert readable([300], tokenizer) == ["<300>"]  # of a vocabulary that is larger than the tokenizer's


def test_tokens_of_sentencepiece_keep_their_spaces_and_bytes() -> None:
    vocab = {token: index for index, token in enumerate(["<unk>", "▁the", "▁", "cat", "<0x0A>", "<0xE2>", "▁▁x"])}
    model = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>")
    assert readable(range(7), tokenizer) == ["<unk>", " the", " ", "cat", "⏎", "<0xE2>", "  x"]
