"""What chat data promises: the loss is on assistant turns and what ends them, whatever the template."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from dex.data import IGNORED, Prepared, Skipped, Source, calibration, encode_documents, prepare, read_documents
from dex.data.chat import ChatTemplate, Rendered
from dex.errors import DexError

BOS, EOS = 256, 257
# ChatML's shape, in the tiny tokenizer's special tokens
KEEPS = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}"
)
STRIPS = KEEPS.replace("m['content']", "m['content'] | trim")
WITH_BOS = "{{ bos_token }}" + KEEPS
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m['role'] }}<|user|>\n\n{{ m['content'] | trim }}<eos>"
    "{% endfor %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'].strip() }}<eos>"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
# Qwen3's: reasoning of earlier turns goes, and the last turn gets an empty one
THINKS = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' and '</think>' in c %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ c }}<eos>\n{% endfor %}"
)
TOOLS = (
    "{% for m in messages %}<|user|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}CALL {{ call.function.name }}{% endfor %}<eos>\n{% endfor %}"
)


def tokenizer_with(template: str | None, adds_bos: bool = False) -> Any:
    tokenizer = tiny_tokenizer(adds_bos)
    tokenizer.chat_template = template
    return tokenizer


def say(role: str, content: Any, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def chat_file(folder: Path, conversations: list[Any], column: str = "messages", name: str = "chat.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps({column: each}) + "\n" for each in conversations))
    return str(path)


def encoded(path: str, tokenizer: Any, **options: Any) -> list[tuple[list[int], list[bool]]]:
    documents = read_documents(Source(path, format="chat", **options), tokenizer=tokenizer)
    return [
        ([i for piece in pieces for i in piece.ids.tolist()], [t for piece in pieces for t in piece.targets.tolist()])
        for _, pieces in ((document, list(pieces)) for document, pieces in encode_documents(documents, tokenizer))
    ]


def fault(value: Any, template: str = KEEPS) -> str:
    result = ChatTemplate(tokenizer_with(template), "x").render(value)
    assert not isinstance(result, Rendered)
    return f"{result.reason} ({result.detail})"


def prepared(folder: Path, *sources: Source, template: str | None = KEEPS, **changes: Any) -> Prepared:
    options: dict[str, Any] = {"block": 32, "tokens": 100_000, "held_out": 0.0, "cache_dir": folder / "c", **changes}
    return prepare(sources, options.pop("tokenizer", None) or tokenizer_with(template), **options)


def target_text(template: str, conversation: list[Any]) -> str:
    """What the targets of a conversation spell."""
    tokenizer = tokenizer_with(template)
    with tempfile.TemporaryDirectory() as folder:
        ((ids, targets),) = encoded(chat_file(Path(folder), [conversation]), tokenizer)
    return tokenizer.decode([i for i, target in zip(ids, targets, strict=True) if target])


# Targets


contents = st.text(st.characters(codec="utf-8", exclude_characters="\ue000\ue001\ufeff\r<"), max_size=12)
turns = st.tuples(st.sampled_from(["system", "user", "assistant"]), contents)


@settings(max_examples=150, deadline=None)
@given(conversation=st.lists(turns, min_size=1, max_size=5), strips=st.booleans(), bos=st.booleans())
def test_targets_are_the_assistant_turns_and_what_ends_them(
    conversation: list[tuple[str, str]], strips: bool, bos: bool
) -> None:
    """Against ids and targets put together turn by turn: a token is a byte here."""
    ids, targets = ([BOS], [False]) if bos else ([], [])
    for role, content in conversation:
        body = content.strip() if strips else content
        kept = body.strip()
        head, tail = body[: len(body) - len(body.lstrip())], body[len(body.rstrip()) :]
        trained = role == "assistant" and bool(kept)
        parts = [(f"{role}\n" + (head if kept else body), False), (kept, trained), (tail if kept else "", False)]
        ids.append(259)
        targets.append(False)
        for text, target in parts:
            part = tiny_tokenizer()(text)["input_ids"] if text else []
            ids += part
            targets += [target] * len(part)
        newline = tiny_tokenizer()("\n")["input_ids"]
        ids += [EOS, *newline]
        targets += [trained, False]
    ids, targets = [*ids, EOS], [*targets, False]
    template = ("{{ bos_token }}" if bos else "") + (STRIPS if strips else KEEPS)
    with tempfile.TemporaryDirectory() as folder:
        path = chat_file(Path(folder), [[say(role, content) for role, content in conversation]])
        if not any(targets):
            with pytest.raises(DexError, match="no assistant turn"):
                encoded(path, tokenizer_with(template))
            return
        assert encoded(path, tokenizer_with(template)) == [(ids, targets)]


ASKED = [say("system", "Be brief."), say("user", "2+2?"), say("assistant", " Four. \n"), say("user", "3?")]
ANSWERED = [*ASKED, say("assistant", "Drei ✓")]


@pytest.mark.parametrize("template", [KEEPS, STRIPS, WITH_BOS, LLAMA3, THINKS, TOOLS])
def test_every_template_trains_the_same_words(template: str) -> None:
    assert target_text(template, ANSWERED) == "Four.<eos>Drei ✓<eos>"


def test_a_template_that_puts_a_space_before_the_answer() -> None:
    assert target_text(INST, ANSWERED[1:]) == "Four.<eos>Drei ✓<eos>"


def test_a_token_that_carries_the_space_before_an_answer_is_a_target(tmp_path: Path) -> None:
    """As SentencePiece's and GPT-2's do, with offsets that begin at the space."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁[INST]", "▁Hi", "▁[/INST]", "▁Hello", "▁there"]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = INST.replace("<eos>", "{{ eos_token }}")
    ((ids, targets),) = encoded(
        chat_file(tmp_path, [[say("user", "Hi"), say("assistant", "Hello there")]]), tokenizer
    )
    assert tokenizer.convert_ids_to_tokens([i for i, t in zip(ids, targets, strict=True) if t]) == [
        "▁Hello",
        "▁there",
        "</s>",
    ]


def test_share_gpt_is_the_same_conversation(tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    shared = [{"from": names[turn["role"]], "value": turn["content"], "weight": None} for turn in ANSWERED]
    plain = encoded(chat_file(tmp_path, [ANSWERED]), tokenizer_with(KEEPS))
    assert encoded(chat_file(tmp_path, [shared], "conversations", "b.jsonl"), tokenizer_with(KEEPS)) == plain
    both = tmp_path / "both.jsonl"
    both.write_text(json.dumps({"conversations": [], "messages": ANSWERED, "text": "no"}) + "\n")
    assert encoded(str(both), tokenizer_with(KEEPS)) == plain
    assert encoded(chat_file(tmp_path, [shared], "talk", "c.jsonl"), tokenizer_with(KEEPS), column="talk") == plain


def test_parquet_conversations_are_read(tmp_path: Path) -> None:
    rows = [[{**turn, "name": None} for turn in ANSWERED]] * 2
    pq.write_table(pa.table({"id": [1, 2], "messages": rows}), tmp_path / "a.parquet")
    plain = encoded(chat_file(tmp_path, [ANSWERED]), tokenizer_with(KEEPS))
    assert encoded(str(tmp_path / "a.parquet"), tokenizer_with(KEEPS)) == plain * 2


@pytest.mark.parametrize("adds_bos", [False, True])
def test_one_bos_and_one_eos(tmp_path: Path, adds_bos: bool) -> None:
    path = chat_file(tmp_path, [ANSWERED])
    ((ids, targets),) = encoded(path, tokenizer_with(LLAMA3, adds_bos))
    assert (ids.count(BOS), ids[0], ids[-1], ids[-2]) == (1, BOS, EOS, tiny_tokenizer()("✓")["input_ids"][-1])
    assert targets[-1]  # the template's own EOS ends the last turn; none is added
    ((ids, targets),) = encoded(path, tokenizer_with("{{ bos_token }}" + LLAMA3, adds_bos))
    assert ids.count(BOS) == 1
    assert len(ids) == len(targets)


def test_bom_and_crlf_are_normalised(tmp_path: Path) -> None:
    unclean = [say("user", "\ufeffa\r\nb"), say("assistant", "c\r\nd")]
    assert encoded(chat_file(tmp_path, [unclean]), tokenizer_with(KEEPS)) == encoded(
        chat_file(tmp_path, [[say("user", "a\nb"), say("assistant", "c\nd")]], name="b.jsonl"), tokenizer_with(KEEPS)
    )


def test_a_call_of_a_tool_without_words_is_no_target_and_not_none() -> None:
    call = say("assistant", None, tool_calls=[{"type": "function", "function": {"name": "add", "arguments": {}}}])
    conversation = [say("user", "2+2?"), call, say("tool", "4"), say("assistant", "Four.")]
    assert target_text(TOOLS, conversation) == "Four.<eos>"
    rendered = ChatTemplate(tokenizer_with(TOOLS), "x").render(conversation)
    assert isinstance(rendered, Rendered)
    assert "CALL add" in rendered.text
    assert "None" not in rendered.text


def test_content_in_parts_is_joined() -> None:
    assert target_text(KEEPS, [say("assistant", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]) == (
        "ab<eos>"
    )


def test_a_long_conversation_has_the_same_tokens_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = [
        say("user", "word " * 900),
        say("assistant", "éa b " * 1000),
        say("user", "x"),
        say("assistant", "y"),
    ]
    path = chat_file(tmp_path, [conversation])
    whole = encoded(path, tokenizer_with(WITH_BOS))
    monkeypatch.setattr("dex.data.tokens.PIECE", 5000)
    assert encoded(path, tokenizer_with(WITH_BOS)) == whole


# Faults


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "null"),
        ([], "empty conversation"),
        ("hello", "not a conversation (it holds str"),
        ({"role": "user"}, "not a conversation (it holds dict"),
        (["hello"], "not a turn (turn 1: it holds str"),
        ([say("user", "a"), say("narrator", "b")], "unknown role (turn 2: 'narrator')"),
        ([{"from": "martian", "value": "b"}], "unknown role (turn 1: 'martian')"),
        ([{"content": "b"}], "unknown role (turn 1: None)"),
        ([say("user", None)], "a turn without content (turn 1)"),
        ([say("assistant", None)], "a turn without content (turn 1)"),
        ([say("user", 7)], "content is not text (turn 1: it holds int)"),
        ([say("user", "a\ud800")], "lone surrogate (turn 1: at character 1)"),
        ([say("user", "a\ue000"), say("assistant", "b")], "private-use character (turn 1: U+E000"),
        ([say("user", "a"), say("assistant", "b\ue001")], "private-use character (turn 2: U+E001"),
        ([say("user", "a")], "no assistant turn"),
        ([say("user", "a"), say("assistant", " \n")], "no assistant turn"),
    ],
)
def test_what_is_no_conversation_is_a_fault(value: Any, reason: str) -> None:
    assert fault(value).startswith(reason)


def test_a_template_that_refuses_or_changes_a_turn_is_a_fault() -> None:
    assert fault([say("system", "x"), say("assistant", "y")], INST).startswith(
        "the chat template refuses it (only user and assistant)"
    )
    shouts = KEEPS.replace("m['content']", "m['content'] | length")
    assert fault([say("assistant", "abc")], shouts).startswith("the chat template changes an assistant turn")
    assert fault([say("assistant", "<think>a</think>b"), say("user", "x")], THINKS).startswith(
        "the chat template changes an assistant turn"
    )


def test_faults_are_counted_and_over_5_percent_stop(tmp_path: Path) -> None:
    good = [say("user", "a"), say("assistant", "b")]
    skipped = Skipped()
    path = chat_file(tmp_path, [*[good] * 30, [], *[good] * 30])
    assert len(list(read_documents(Source(path, format="chat"), skipped, tokenizer_with(KEEPS)))) == 60
    assert skipped.reasons["empty conversation"] == (1, "chat.jsonl row 31: empty conversation")
    with pytest.raises(DexError, match=r"2 of 22 rows.*chat\.jsonl row 21: empty conversation"):
        prepared(tmp_path, Source(chat_file(tmp_path, [*[good] * 20, [], []]), format="chat"))


def test_a_wrong_column_names_the_columns_there_are(tmp_path: Path) -> None:
    for source in (
        Source(chat_file(tmp_path, [ANSWERED], "talk"), format="chat"),
        Source(chat_file(tmp_path, [ANSWERED], "talk"), format="chat", column="chat"),
    ):
        wanted = "'chat'" if source.column else "'messages' or 'conversations'"
        with pytest.raises(DexError, match=rf"no column {wanted} \(the columns there are talk"):
            prepared(tmp_path, source)


def test_no_chat_template_says_what_to_set(tmp_path: Path) -> None:
    source = Source(chat_file(tmp_path, [ANSWERED]), format="chat")
    with pytest.raises(DexError, match=r"chat\.jsonl is chat data.* set model\.chat_template") as caught:
        prepared(tmp_path, source, template=None)
    assert "\n" not in str(caught.value)
    assert len(prepared(tmp_path, Source("pydoc"), template=None, tokens=100).packed) == 4


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for change in ({"format": "talk"}, {"too_long": "cut"}, {"format": "chat"}):
        with pytest.raises(DexError, match=next(iter(change))):
            prepared(tmp_path, Source("pydoc", **change))


# Packed


def conversations(count: int, words: int = 3) -> list[Any]:
    return [
        [say("user", f"question {i} " + "why " * (i % 9)), say("assistant", f"answer {i} " + "so " * (i % words))]
        for i in range(count)
    ]


def test_labels_are_the_targets_and_pad_does_not_hide_eos(tmp_path: Path) -> None:
    source = Source(chat_file(tmp_path, conversations(40)), format="chat")
    expected = [pair for each in encoded(source.source, tokenizer_with(KEEPS)) for pair in zip(*each, strict=True)]
    for pad in ("<pad>", "<eos>", None):
        tokenizer = tokenizer_with(KEEPS)
        tokenizer.pad_token = pad
        packed = prepared(tmp_path / str(pad), source, tokenizer=tokenizer, block=128).packed
        labels = [label for item in packed for label in item["labels"].tolist()]
        wanted = [i if target else IGNORED for i, target in expected]
        assert [label for i, label in enumerate(labels) if i % 128] == [
            label for i, label in enumerate(wanted[: len(labels)]) if i % 128
        ]
        assert labels[::128] == [IGNORED] * len(packed)
        assert EOS in labels


def test_a_block_without_a_target_is_left_out_and_counted(tmp_path: Path) -> None:
    long = [say("user", "why " * 100), say("assistant", "because")]
    result = prepared(tmp_path, Source(chat_file(tmp_path, [long] * 5), format="chat"), block=64)
    documents = encoded(chat_file(tmp_path, [long] * 5), tokenizer_with(KEEPS))
    stream = [pair for each in documents for pair in zip(*each, strict=True)]
    blocks = [stream[start : start + 64] for start in range(0, len(stream) - 63, 64)]
    kept = [block for block in blocks if any(target for _, target in block[1:])]
    assert 0 < len(kept) < len(blocks)
    assert result.packed.input_ids.tolist() == [[i for i, _ in block] for block in kept]
    assert result.report["packed"]["blocks_without_targets"] == len(blocks) - len(kept)
    assert all((item["labels"] != IGNORED).any() for item in result.packed)
    few = prepared(tmp_path, Source(chat_file(tmp_path, [long] * 5), format="chat"), block=64, tokens=65)
    assert len(few.packed) == 2  # the budget counts blocks that train


def test_text_and_chat_mix_in_one_run(tmp_path: Path) -> None:
    chat = Source(chat_file(tmp_path, conversations(300)), format="chat", weight=3.0)
    result = prepared(tmp_path, Source("pydoc"), chat, tokens=400_000)
    text, talk = result.report["sources"]
    assert talk["tokens"] / (text["tokens"] + talk["tokens"]) == pytest.approx(0.75, abs=0.1)
    labels = torch.stack([item["labels"] for item in result.packed])
    assert 0.2 < (labels != IGNORED).float().mean() < 0.8


def test_the_chat_template_and_the_settings_are_in_the_key(tmp_path: Path) -> None:
    path = chat_file(tmp_path, conversations(60))
    chat = Source(path, format="chat")
    results = [
        prepared(tmp_path, chat, block=99),
        prepared(tmp_path, chat, block=99, template=STRIPS),
        prepared(tmp_path, Source(path, format="chat", too_long="drop"), block=99),
        prepared(tmp_path, Source(path, format="chat", too_long="truncate"), block=99),
    ]
    assert len({result.folder for result in results}) == 4
    assert prepared(tmp_path, chat, block=99).reused
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "a b c d e f g h i j k l m n o p q r s t u v w x y z"}\n' * 9)
    assert not prepared(tmp_path, Source(str(text))).reused
    assert prepared(tmp_path, Source(str(text)), template=STRIPS).reused  # it decides nothing there


# Too long


def test_too_long_documents_are_split_truncated_or_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["x" * 10, "y" * 100, "z" * 31, "w" * 32]  # 11, 101, 32 and 33 tokens
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts * 10))
    counts = {}
    for policy in ("split", "truncate", "drop"):
        result = prepared(tmp_path, Source(str(path), too_long=policy), block=32)  # type: ignore[arg-type]
        stream = bytes(i % 256 for i in result.packed.input_ids.reshape(-1).tolist())
        kept = {"split": [11, 101, 32, 33], "truncate": [11, 32, 32, 32], "drop": [11, 32]}[policy]
        assert len(stream) == sum(kept) * 10 // 32 * 32
        (report,) = result.report["sources"]
        counts[policy] = (report["too_long"], report["rows_skipped"], report["documents"])
    assert counts == {
        "split": ({"truncated": 0, "dropped": 0}, 0, 40),
        "truncate": ({"truncated": 20, "dropped": 0}, 0, 40),
        "drop": ({"truncated": 0, "dropped": 20}, 0, 20),
    }
    with pytest.raises(DexError, match="40 documents are longer than a block of 8 and left out"):
        prepared(tmp_path, Source(str(path), too_long="drop"), block=8)


def test_a_conversation_truncated_to_no_target_is_a_fault(tmp_path: Path) -> None:
    long = [say("user", "why " * 100), say("assistant", "because")]
    short = [say("user", "a"), say("assistant", "b")]
    source = Source(chat_file(tmp_path, [*[short] * 30, long, *[short] * 9]), format="chat", too_long="truncate")
    (report,) = prepared(tmp_path, source, block=64).report["sources"]
    assert report["reasons"] == {
        "no target in the first block": {"rows": 1, "first": "chat.jsonl row 31: no target in the first block"}
    }
    assert (report["documents"], report["too_long"]) == (39, {"truncated": 1, "dropped": 0})


# Held out, calibration, training


def test_held_out_conversations_keep_their_targets(tmp_path: Path) -> None:
    path = chat_file(tmp_path, conversations(200))
    held_out = prepared(tmp_path, Source(path, format="chat"), held_out=0.3).held_out
    by_ids = {tuple(ids): targets for ids, targets in encoded(path, tokenizer_with(KEEPS))}
    blocks = held_out.blocks()
    for index in range(len(held_out)):
        ids = held_out.document(index).tolist()
        expected = by_ids[tuple(ids)]
        assert held_out.targets(index).tolist() == expected
        cut = [[False, *expected[start + 1 : start + 32]] for start in range(0, len(ids), 32)]
        assert [block.targets.tolist() for block in blocks if block.document == index] == [t for t in cut if any(t)]
    assert all(len(block.input_ids) == len(block.targets) for block in blocks)


def test_the_held_out_loss_is_of_targets_alone(tmp_path: Path) -> None:
    from dex.evaluation.held_out import held_out_losses

    path = chat_file(tmp_path, conversations(60))
    blocks = prepared(tmp_path, Source(path, format="chat"), held_out=0.3).held_out.blocks()
    model = tiny_model("llama")
    for block, loss in zip(blocks, held_out_losses(model, blocks), strict=True):
        labels = torch.where(block.targets, block.input_ids, IGNORED)
        expected = model(input_ids=block.input_ids[None], labels=labels[None]).loss.item()
        assert (loss.document, loss.tokens) == (block.document, int(block.targets.sum()))
        assert loss.loss == pytest.approx(expected, rel=1e-4)


def test_calibration_reads_conversations(tmp_path: Path) -> None:
    source = Source(chat_file(tmp_path, conversations(20)), format="chat")
    stream = [i for ids, _ in encoded(source.source, tokenizer_with(KEEPS)) for i in ids]
    windows = calibration(source, tokenizer_with(KEEPS), 1000, 100).input_ids
    assert windows.reshape(-1).tolist() == stream[: len(stream) // 100 * 100]


def test_a_line_of_40_mb_is_packed(tmp_path: Path) -> None:
    conversation = [say("user", "lorem ipsum " * 9), say("assistant", "dolor sit " * 4_000_000)]
    source = Source(chat_file(tmp_path, [conversation]), format="chat", too_long="truncate")
    with pytest.raises(DexError, match="no target in the first block"):
        prepared(tmp_path, source)
    packed = prepared(tmp_path, Source(source.source, format="chat"), tokens=320).packed
    text = tiny_tokenizer().decode(packed.input_ids.reshape(-1).tolist())
    assert len(packed) == 10
    assert "sit dolor sit dolor" in text
    assert (packed[9]["labels"] != IGNORED).sum() == 31
